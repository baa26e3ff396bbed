"""The optimiser: AdamW with the usual groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_FREE = ("pos_embed", "reg_token", "relative_position_bias_table")


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: with weight decay, and without (biases, norms, tokens, positions).

    Tokens and positions are recognised by their shape: all their dimensions but the last are 1, or by what their name
    ends in: ``pos_embed``, or that of a Swin's table of relative position biases.
    """
    decayed, free = [], []
    for name, weight in net.named_parameters():
        if weight.requires_grad:
            vector = weight.numel() == weight.shape[-1] or name.endswith(_FREE)
            (free if vector else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    net: nn.Module, weight_decay: float, device: str, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """Build AdamW, fused where the device has it, by default with MAE's betas. The loop sets the rate."""
    fused = device in ("cpu", "cuda")
    return torch.optim.AdamW(parameter_groups(net, weight_decay), lr=0.0, betas=betas, fused=fused)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, scale: float = 1.0) -> Tensor:
    """Divide the gradient by ``scale``, then shorten it to the norm ``max_norm`` if it is longer (0: never).

    Returns:
        The norm between the two, a scalar.
    """
    weights = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    gradients = [one.grad for one in weights]
    if scale != 1:
        torch._foreach_mul_(gradients, 1 / scale)
    norm = nn.utils.clip_grad_norm_(weights, max_norm) if max_norm else nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
