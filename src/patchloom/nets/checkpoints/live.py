"""Encoders that a Python call is given as a module, in place of a run or a file of weights.

A `LiveEncoder` is a text, ``module:NAME``, that also has the module: it passes through every function that takes the
place of an encoder, and the openers return its copy. Nothing is written for it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, check_servable, options_in_weights, outline, spec_of_stock
from patchloom.nets.checkpoints.format import EncoderCard, check_statistics
from patchloom.nets.encode import grid_size, heads_by_stage, input_channels, patch_positions
from patchloom.nets.swin import Encoder, blocks_of, is_hierarchical, stages_of
from patchloom.patches.positions import sincos_2d

# timm's names of models that have the class of a module, if it was built without a name
_BASES = {"VisionTransformer": "vit_base_patch16_224"}


class LiveEncoder(str):
    """Encoder of a Python call, with the text ``module:NAME`` in place of a path.

    Attributes:
        module: the encoder as it was given.
        card: its card, whose name is that of the model or class.
    """

    module: Encoder
    card: EncoderCard

    @classmethod
    def of(cls, module: nn.Module, mean: Any = None, std: Any = None) -> LiveEncoder:
        """Wrap a VisionTransformer, Eva or SwinTransformer of timm.

        Args:
            module: the encoder.
            mean, std: statistics per channel in [0, 1] units that normalise its images; None: those of its weights, if
                its ``pretrained_cfg`` has them.

        Raises:
            PatchloomError: the module is no such encoder, its statistics are unknown, or its untrained twin, the
                control of every result, cannot be built.
        """
        if not isinstance(module, Encoder):
            raise PatchloomError(
                f"a module in place of a run has to be a VisionTransformer, Eva or SwinTransformer of timm, and "
                f"{type(module).__name__} is none: give its encoder, such as task.encoder"
            )
        about: dict[str, Any] = getattr(module, "pretrained_cfg", None) or {}
        name = about.get("architecture") or type(module).__name__
        check_servable(module, name)
        spec, note = _spec_of(module, about), ""
        if mean is None and std is None and not spec.options:  # of other sizes there are no published weights
            mean, std = about.get("mean"), about.get("std")
            note = f"Images are normalised as the module's pretrained_cfg says: mean {mean}, std {std}."
        card = EncoderCard(spec, *_statistics(module, mean, std), task="", name=name, note=note)
        made = cls(f"module:{name}")
        made.module, made.card = module, card
        return made

    def load(self) -> tuple[Encoder, EncoderCard]:
        """Return a copy of the module in eval mode, and its card."""
        return deepcopy(self.module).eval(), self.card


def has_no_folder(source: object) -> bool:
    """Return whether the place of an encoder is a module or ``timm:NAME``, which have no folder."""
    return isinstance(source, LiveEncoder) or str(source).startswith("timm:")


def _statistics(module: Encoder, mean: Any, std: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation per channel as plain numbers, validated; nothing is guessed."""
    if (mean is None) != (std is None):
        raise PatchloomError("mean and std belong together: give both, with a number per channel")
    channels = input_channels(module)
    if mean is None:
        raise PatchloomError(
            "the mean and standard deviation of the module's images are unknown: give mean=(...) and std=(...), in "
            "[0, 1] units"
        )
    given = [one.flatten().tolist() if isinstance(one, Tensor) else list(map(float, one)) for one in (mean, std)]
    try:
        found = check_statistics(*given)
    except ValueError as problem:
        raise PatchloomError(f"{problem}: give mean=(...) and std=(...) with a number per channel") from problem
    if len(found[0]) != channels:
        raise PatchloomError(f"mean and std have {len(found[0])} numbers, and the module takes {channels} channels")
    return found


def _spec_of(module: Encoder, about: dict[str, Any]) -> EncoderSpec:
    """Return how to build an encoder with the sizes of ``module``."""
    name = about.get("architecture") or _BASES.get(type(module).__name__)
    weights, heads = module.state_dict(), heads_by_stage(module)
    if is_hierarchical(module):
        stages = stages_of(module)
        options = {"embed_dim": module.embed_dim, "depths": [len(stage.blocks) for stage in stages]}
        options |= {"num_heads": heads, "window_size": max(blocks_of(stages[0])[0].window_size)}
    else:
        options = options_in_weights(weights, heads[0])
    stock = spec_of_stock(module, str(name))
    table = None if is_hierarchical(module) else patch_positions(module)
    if table is not None and table.shape[-1] % 4 == 0:
        fixed = torch.equal(table.detach().cpu(), sincos_2d(table.shape[-1], grid_size(module)))
        stock = replace(stock, positions="sincos" if fixed else "learned")
    plain = {key: tuple(one.shape) for key, one in weights.items() if not key.startswith("head.")}
    for chosen in ({}, options):  # a stock model needs no options
        try:
            spec = replace(stock, options=chosen)
            twin = outline(spec)
        except (PatchloomError, TypeError, AssertionError, ValueError, RuntimeError):
            continue
        shapes = {key: tuple(one.shape) for key, one in twin.state_dict().items()}
        if shapes == plain and heads_by_stage(twin) == heads:
            return spec
    raise PatchloomError(
        f"{type(module).__name__} cannot be built anew from its sizes, and its untrained twin is the control of every "
        "result: save it with save_encoder and its EncoderSpec (docs/how-to/own-loop.md), and give the file"
    )
