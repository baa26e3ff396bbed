"""Optimisers, and the groups of parameters that they treat differently: weight decay, and learning rates by layer."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from timm.optim import Lars, param_groups_layer_decay
from torch import Tensor, nn

from patchloom.nets.encode import layer_patterns
from patchloom.nets.swin import Encoder

Optimizer = Literal["adamw", "sgd", "lars"]
_FREE = ("pos_embed", "reg_token", "rope.freqs", "relative_position_bias_table")


def build_optimizer(
    groups: list[dict[str, Any]],
    kind: Optimizer,
    device: str,
    *,
    lr: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    momentum: float = 0.9,
) -> torch.optim.Optimizer:
    """Build an optimiser: AdamW (fused if the device supports it), SGD, or LARS as in MAE's code.

    Args:
        groups: parameter groups with ``weight_decay`` each; for LARS with ``always_adapt``, too.
        kind: optimiser.
        device: kind of device.
        lr: learning rate; a training sets it before each update.
        betas: betas of AdamW.
        momentum: momentum of SGD and LARS.
    """
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=device in ("cpu", "cuda"))
    return (torch.optim.SGD if kind == "sgd" else Lars)(groups, lr=lr, momentum=momentum)


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into two groups: with weight decay, and without (biases, norms, tokens, positions).

    Biases, norms and tokens are recognised by their shape (all dimensions but the last are 1), and positions by the
    end of their name.
    """
    decayed, free = list[nn.Parameter](), list[nn.Parameter]()
    for name, weight in net.named_parameters():
        if weight.requires_grad:
            (free if is_free(name, weight) else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def is_free(name: str, weight: Tensor) -> bool:
    """Return whether a parameter has no weight decay."""
    return weight.ndim == 0 or weight.numel() == weight.shape[-1] or name.endswith(_FREE)


def layer_groups(
    net: nn.Module, encoder_at: str, free: Collection[str], weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups of a net on an encoder with layer-wise learning-rate decay (``lr_scale``).

    As in facebookresearch/mae (util/lr_decay.py): patch embedding, tokens and positions are the lowest layer, each
    block is a layer, and everything else, including the encoder's final norm, is the top layer with scale 1. A layer's
    scale is ``layer_decay`` to the power of its distance from the top. Parameters named ``free`` have no weight decay.
    """
    stem, blocks = layer_patterns(cast(Encoder, net.get_submodule(encoder_at)))
    begin = rf"^{encoder_at}\."
    matcher = {"stem": f"{begin}{stem}", "blocks": [(f"{begin}{one}", order) for one, order in blocks]}
    named: Any = SimpleNamespace(named_parameters=net.named_parameters, group_matcher=lambda coarse: matcher)
    return param_groups_layer_decay(named, weight_decay, free, layer_decay=layer_decay)
