"""Decoders, heads and teachers of the tasks: resolution of ``auto`` and validation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.fit import load_pretrained
from patchloom.nets.decoders import MAEDecoder
from patchloom.nets.encode import attention_heads, has_class_token, has_rotations, patch_positions
from patchloom.nets.geometry import Geometry
from patchloom.nets.heads import InstanceHead, mlp
from patchloom.nets.swin import Encoder, refuse_hierarchical
from patchloom.nets.teacher import FrozenTeacher
from patchloom.options.tasks import Loss, Representation, Size
from patchloom.patches.positions import sincos_2d
from patchloom.questions.agreement import GAUSSIAN, AgreementLoss
from patchloom.tasks.task import PAPERS, Task

_SMALL = 384  # the papers train no encoder narrower than ViT-S


def decoder_sizes(
    task: Task, width: Size, depth: Size, heads: Size, usual: tuple[int, int, int], depth_option: str = "decoder_depth"
) -> tuple[int, int, int]:
    """Return width, depth and heads of a decoder; ``auto`` becomes the paper's sizes ``usual``.

    For an encoder narrower than ViT-S (384), which the papers do not train, auto becomes the encoder's width, at most
    two blocks, and heads 32 wide, because a decoder should cost less than its encoder.
    """
    d = task.geometry.width
    small = d < _SMALL
    as_wide = "as wide as the encoder, which is below ViT-S" if small else PAPERS
    shallow = "at most 2, for an encoder below ViT-S" if small else PAPERS
    each = "32 wide each, for an encoder below ViT-S" if small else PAPERS
    wide = task.resolve_auto("decoder_width", width, d if small else usual[0], as_wide)
    deep = task.resolve_auto(depth_option, depth, min(2, usual[1]) if small else usual[1], shallow)
    many = task.resolve_auto("decoder_heads", heads, max(1, wide // 32) if small else usual[2], each)
    if deep > 1000:
        raise PatchloomError(f"--task.{depth_option} must be 1000 or less, not {deep}")
    if min(wide, many) < 1 or deep < 0 or wide % many or wide % 4:
        raise PatchloomError(
            f"a decoder cannot be {wide} wide and {deep} blocks deep with {many} heads: choose a width that is a "
            "multiple of 4 and of the heads"
        )
    return wide, deep, many


def check_decoder_depth(blocks: int, option: str = "decoder_depth") -> None:
    """Raise an error if a decoder of masked patches alone has no block."""
    if not blocks:
        raise PatchloomError(
            "without a block in the decoder, masked patches are guessed from their place alone and the encoder learns "
            f"nothing from them: give --task.{option} 1 or more"
        )


def patch_decoder(
    task: Task,
    width: Size,
    depth: Size,
    heads: Size,
    depth_option: str = "decoder_depth",
    usual: tuple[int, int, int] = (512, 8, 16),
    answers: int | None = None,
    has_masked: bool = True,
    visible_asked: int = 0,
) -> MAEDecoder:
    """Build a decoder that predicts ``answers`` numbers per patch; by default the pixels of the masked patches."""
    d, blocks, attending = decoder_sizes(task, width, depth, heads, usual, depth_option)
    if not visible_asked:
        check_decoder_depth(blocks, depth_option)
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
    why = "in proportion to an encoder below ViT-S" if d < _SMALL else "the papers'"
    usual = (2048, 64 if loss == "sigreg" else 256) if free else (4096, 256)
    outputs = min(d, usual[1]) if free else d
    wide = task.resolve_auto("head_width", width, 4 * d if d < _SMALL else usual[0], why)
    leaves = task.resolve_auto("head_out", out, outputs if d < _SMALL else usual[1], why)
    if min(wide, leaves) < 1:
        raise PatchloomError(f"heads cannot be {wide} wide with {leaves} outputs: both must be 1 or more")
    enters = zip((d, leaves), layers, strict=True)
    first, second = (mlp((enter, *(wide,) * (n - 1), leaves), norm) for enter, n in enters)
    return first, None if free else second


def build_instance_head(task: Task, class_token: Representation, blocks: Size) -> InstanceHead | None:
    """Build the class attention of ``class_token`` cait; check that the encoder has the token that vit needs."""
    if class_token != "cait":
        refuse_unused("only --task.class_token cait has class attention", attention_blocks=blocks)
        if class_token == "vit" and not has_class_token(task.encoder):
            raise PatchloomError("--task.class_token vit needs an encoder with one: give --model.class_token true")
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
    """Resolve and check the options of the loss of `Agreement` that only some losses have.

    ``temperature_option`` is the name of one of these in the task.
    """
    settings: dict[str, Any] = {}
    if loss == "infonce":
        settings["temperature"] = task.resolve_auto(temperature_option, temperature, 0.2, PAPERS)
    else:
        refuse_unused(f"{loss} has no temperature", **{temperature_option: temperature})
    if loss not in GAUSSIAN:
        refuse_unused(f"{loss} does not test for a Gaussian", gaussian_weight=gaussian_weight, directions=directions)
        return AgreementLoss(loss, **settings)
    small = task.geometry.width < _SMALL
    weights = {"sigreg": (0.05, 0.05), "visreg": (0.9, 0.6)}[loss]  # VISReg: ViT-B, and ViT-S on few images
    usual = 256 if small else {"sigreg": 1024, "visreg": 4096}[loss]
    why = "LeJEPA's example for few images" if small else PAPERS
    weight = task.resolve_auto("gaussian_weight", gaussian_weight, weights[small], PAPERS)
    many = task.resolve_auto("directions", directions, usual, why)
    return AgreementLoss(loss, gaussian_weight=weight, directions=many)


def frozen_teacher(geometry: Geometry, source: str | None, model: str | None = None) -> FrozenTeacher:
    """Load the encoder at ``source`` as a teacher of features on the grid of ``geometry``."""
    if source is None:
        raise PatchloomError(
            "the task needs a teacher of features: give --task.features_of timm:NAME, the folder of a run, or a "
            ".safetensors file"
        )
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


def refuse_positions(task: str, encoder: Encoder, otherwise: str = "") -> None:
    """Raise an error if an encoder has position embeddings, which ``task`` withholds, so none would be trained.

    ``otherwise`` ends the message.
    """
    if patch_positions(encoder) is not None:
        none = "rotary, without embeddings" if has_rotations(encoder) else "none"
        raise PatchloomError(
            f"{task} withholds every position, so the encoder must have none: use --positions {none}"
            f"{f',{otherwise}' if otherwise else ''}"
        )


def check_smoothing(sigma: float, sigma_end: float) -> None:
    """Raise an error if σ of position smoothing is larger at the end of the training than at the start."""
    if not 0 <= sigma_end <= sigma:
        raise PatchloomError(
            f"--task.sigma_end must be 0 to --task.sigma, which is {sigma:g}, not {sigma_end:g}: give both the "
            "same value for a constant σ"
        )


def refuse_unused(why: str, **options: Any) -> None:
    """Raise an error for options without effect; ``options`` holds their values, "auto" if not given."""
    for option, value in options.items():
        if value != "auto":
            raise PatchloomError(f"--task.{option} has no effect here, because {why}: leave it out")


def check_normalizable(geometry: Geometry, each_channel: bool = False) -> None:
    """Raise an error if a patch, or with ``each_channel`` a channel of it, is a single number."""
    if geometry.p == (1, 1) and (each_channel or geometry.channels == 1):
        raise PatchloomError("within patches of one pixel there is nothing to normalise: use larger patches")


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
        refuse_unused(f"{loss} has no teacher", momentum=momentum)
        return MOMENTUM
    return task.resolve_auto("momentum", momentum, MOMENTUM, PAPERS)
