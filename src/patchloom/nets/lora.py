"""Low-rank updates of an encoder's linear layers (LoRA, Hu et al. 2022), as parametrisations of their weights.

A linear layer keeps its class and its place; only its attribute ``weight`` is computed, as W + s·B·A. Fused attention
and native kernels read that attribute, and would pass over a module that wraps the layer. A trained encoder is written
merged: its weights have timm's names, and no adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from patchloom.errors import PatchloomError
from patchloom.options.pretrain import Target

_INSIDE = ".parametrizations."
_ORIGINAL = f"{_INSIDE}weight.original"
_PARTS = ("up", "down", "scale")


class LowRank(nn.Module):
    """Parametrisation of a weight [out in]: W + scale · up · down, equal to W at the start.

    Args:
        weight: the weight W.
        rank: rank of the update.

    Attributes:
        up: [out rank], zero at the start.
        down: [rank in], initialised as a linear layer, as in LoRA's program.
        scale: 2, LoRA's usual ratio of alpha and rank; a buffer, so that a checkpoint can be merged without settings.
    """

    scale: Tensor

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        out, width = weight.shape
        self.up = nn.Parameter(weight.new_zeros(out, rank))
        self.down = nn.Parameter(nn.init.kaiming_uniform_(weight.new_empty(rank, width), a=math.sqrt(5)))
        self.register_buffer("scale", weight.new_tensor(2.0))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the effective weight [out in], in the precision of ``weight``."""
        # under autocast the update would be rounded, unlike the merged one
        with torch.autocast(weight.device.type, enabled=False):
            return _effective(weight, self.up, self.down, self.scale)


def _effective(weight: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    return weight + scale * (up @ down)


def add_adapters(blocks: Iterable[nn.Module], rank: int, target: Target = "both") -> None:
    """Add low-rank updates to the linear layers inside an encoder's ``blocks``, in place.

    Args:
        blocks: transformer blocks.
        rank: rank of the updates; at most the smaller side of a weight is used.
        target: layers of the attention, of the MLP, or both.
    """
    parts = {"both": ("attn", "mlp"), "attention": ("attn",), "mlp": ("mlp",)}[target]
    layers = [
        layer
        for block in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and name.partition(".")[0] in parts
    ]
    if not layers:
        raise PatchloomError(f"--adapt lora finds no linear layers of {target} in this encoder: use --adapt blocks")
    for layer in layers:
        update = LowRank(layer.weight.detach(), min(rank, *layer.weight.shape))
        parametrize.register_parametrization(layer, "weight", update, unsafe=True)  # the shape is known to be right


def has_adapters(net: nn.Module) -> bool:
    """Return whether a net has low-rank updates."""
    return any(isinstance(module, LowRank) for module in net.modules())


def adapter_parameters(net: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a net's low-rank updates."""
    return (one for module in net.modules() if isinstance(module, LowRank) for one in module.parameters())


def merged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a ``state_dict`` with low-rank updates added to their weights, under the plain names."""
    if not any(name.endswith(_ORIGINAL) for name in tensors):
        return dict(tensors)
    found = {}
    for name, value in tensors.items():
        if name.endswith(_ORIGINAL):
            layer = name.removesuffix(_ORIGINAL)
            up, down, scale = (tensors[f"{layer}{_INSIDE}weight.0.{part}"] for part in _PARTS)
            found[f"{layer}.weight"] = _effective(value, up, down, scale)
        elif _INSIDE not in name:
            found[name] = value
    return found


def effective_parameters(net: nn.Module) -> dict[str, Tensor]:
    """Return a net's parameters, detached, with its low-rank updates added and under plain names."""
    scales = ((name, one) for name, one in net.named_buffers() if name.endswith(f"{_INSIDE}weight.0.scale"))
    return merged({name: one.detach() for name, one in [*net.named_parameters(), *scales]})


def plain_buffers(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a net's buffers without those of its low-rank updates."""
    return ((name, one) for name, one in net.named_buffers() if _INSIDE not in name)
