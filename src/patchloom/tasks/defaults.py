"""Decoders, heads and teachers of the tasks, with their resolution of ``auto``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.fit import load_pretrained
from patchloom.nets.decoders import MAEDecoder
from patchloom.nets.encode import attention_heads
from patchloom.nets.geometry import Geometry
from patchloom.nets.heads import InstanceHead, mlp
from patchloom.nets.swin import refuse_hierarchical
from patchloom.nets.teacher import FrozenTeacher
from patchloom.options.refusals import GAUSSIAN, MAE_DECODER, PAPERS, SMALL, decoder_of
from patchloom.options.tasks import Loss, Representation, Size
from patchloom.patches.positions import sincos_2d
from patchloom.questions.agreement import AgreementLoss
from patchloom.tasks.task import Task


def decoder_sizes(
    task: Task, width: Size, depth: Size, heads: Size, usual: tuple[int, int, int], depth_option: str = "decoder_depth"
) -> tuple[int, int, int]:
    """Return width, depth and heads of a decoder; see `decoder_of`."""
    wide, deep, many = decoder_of(task.geometry, (width, depth, heads), usual)
    small = task.geometry.width < SMALL
    as_wide = "as wide as the encoder, which is below ViT-S" if small else PAPERS
    task.resolve_auto("decoder_width", width, wide, as_wide)
    task.resolve_auto(depth_option, depth, deep, "at most 2, for an encoder below ViT-S" if small else PAPERS)
    task.resolve_auto("decoder_heads", heads, many, "32 wide each, for an encoder below ViT-S" if small else PAPERS)
    return wide, deep, many


def patch_decoder(
    task: Task,
    width: Size,
    depth: Size,
    heads: Size,
    depth_option: str = "decoder_depth",
    usual: tuple[int, int, int] = MAE_DECODER,
    answers: int | None = None,
    has_masked: bool = True,
    visible_asked: int = 0,
) -> MAEDecoder:
    """Build a decoder that predicts ``answers`` numbers per patch; by default the pixels of the masked patches."""
    d, blocks, attending = decoder_sizes(task, width, depth, heads, usual, depth_option)
    g = task.geometry
    numbers = g.patch_dim if answers is None else answers
    return MAEDecoder(g.width, numbers, sincos_2d(d, g.grid), blocks, attending, g.prefix, has_masked, visible_asked)


def agreement_heads(
    task: Task,
    width: Size,
    out: Size = "auto",
    layers: tuple[int, int] = (3, 2),
    norm: Literal["layer", "batch"] = "layer",
    loss: Loss = "byol",
) -> tuple[nn.Sequential, nn.Sequential | None]:
    """Build the projection and prediction heads of `Agreement`; ``auto`` is the papers' width 4096 and 256 outputs.

    For an encoder narrower than ViT-S, which the papers do not train, auto is four times its width, with as many
    outputs as its width. sigreg and visreg have no prediction head, and a projection of width 2048 with 64 or 256
    outputs. Its norm is that of the task: a batch norm would leave the bias of the encoder's last norm without gradient
    if no other question has one.
    """
    d, free = task.geometry.width, loss in GAUSSIAN
    why = "in proportion to an encoder below ViT-S" if d < SMALL else "the papers'"
    usual = (2048, 64 if loss == "sigreg" else 256) if free else (4096, 256)
    outputs = min(d, usual[1]) if free else d
    wide = task.resolve_auto("head_width", width, 4 * d if d < SMALL else usual[0], why)
    leaves = task.resolve_auto("head_out", out, outputs if d < SMALL else usual[1], why)
    enters = zip((d, leaves), layers, strict=True)
    first, second = (mlp((enter, *(wide,) * (n - 1), leaves), norm) for enter, n in enters)
    return first, None if free else second


def build_instance_head(task: Task, class_token: Representation, blocks: Size) -> InstanceHead | None:
    """Build the class attention of ``class_token`` cait; None for others."""
    if class_token != "cait":
        return None
    depth = task.resolve_auto("attention_blocks", blocks, 2, PAPERS)
    return InstanceHead(task.geometry.width, attention_heads(task.encoder), depth)


def build_agreement_loss(
    task: Task,
    loss: Loss,
    temperature: float | Literal["auto"],
    gaussian_weight: float | Literal["auto"],
    directions: Size,
    temperature_option: str = "temperature",
) -> AgreementLoss:
    """Resolve the options of the loss of `Agreement` that only some losses have.

    ``temperature_option`` is the name of one of these in the task.
    """
    if loss == "infonce":
        return AgreementLoss(loss, task.resolve_auto(temperature_option, temperature, 0.2, PAPERS))
    if loss == "byol":
        return AgreementLoss(loss)
    small = task.geometry.width < SMALL
    weights = {"sigreg": (0.05, 0.05), "visreg": (0.9, 0.6)}[loss]  # VISReg: ViT-B, and ViT-S on few images
    usual = 256 if small else {"sigreg": 1024, "visreg": 4096}[loss]
    why = "LeJEPA's example for few images" if small else PAPERS
    weight = task.resolve_auto("gaussian_weight", gaussian_weight, weights[small], PAPERS)
    many = task.resolve_auto("directions", directions, usual, why)
    return AgreementLoss(loss, gaussian_weight=weight, directions=many)


def frozen_teacher(geometry: Geometry, source: str | None, model: str | None = None) -> FrozenTeacher:
    """Load the encoder at ``source`` as a teacher of features on the grid of ``geometry``."""
    assert source is not None  # refused before
    # fork: initial weights are drawn, which must not change the run's draws; CPU: real weights also in a sketch on meta
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        vit, card = load_pretrained(source, model, "--task.features_model")
    plain = refuse_hierarchical(vit, "a teacher of features", "give another --task.features_of")
    if len(card.mean) != geometry.channels:
        raise PatchloomError(
            f"the teacher {source} is for images of {len(card.mean)} channels, and these have {geometry.channels}: "
            f"give --channels {len(card.mean)}, or another teacher"
        )
    return FrozenTeacher(plain, card.mean, card.std, geometry.grid)


# The papers' 0.996 averages over about 250 of hundreds of thousands of updates. In a run of hundreds of updates the
# teacher would stay the random network that it begins as, so it averages over a hundredth of the training there.
MOMENTUM, _MEMORY = 0.996, 0.01
AGREEMENT_UPDATES = 1_000, "the student has to follow its teacher for a while"


def momentum_for(updates: int) -> tuple[float, str]:
    """Return a teacher's momentum at the start of a training of ``updates`` updates, with the reason."""
    usual = 1 - 1 / (_MEMORY * updates)
    if usual >= MOMENTUM:
        return MOMENTUM, PAPERS
    return round(max(0.0, usual), 4), f"the teacher averages over a hundredth of {updates:,} updates"


def teacher_momentum(task: Task, momentum: float | Literal["auto"], loss: Loss = "byol") -> float:
    """Return the momentum of a task's teacher; "auto", if the run has not resolved it, is that of long trainings."""
    if loss in GAUSSIAN:
        return MOMENTUM
    return task.resolve_auto("momentum", momentum, MOMENTUM, PAPERS)
