"""The optimiser: AdamW with the usual groups."""

import torch
from torch import nn


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: with weight decay, and without (biases, norms, tokens, positions).

    Tokens and positions are told by their shape: all their dimensions but the last are 1, or their name ends in
    ``pos_embed``.
    """
    decayed, free = [], []
    for name, weight in net.named_parameters():
        if weight.requires_grad:
            vector = weight.numel() == weight.shape[-1] or name.endswith(("pos_embed", "reg_token"))
            (free if vector else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(net: nn.Module, weight_decay: float, device: str) -> torch.optim.AdamW:
    """AdamW with betas (0.9, 0.95) as in the five papers, fused where the device has it. The loop sets the rate."""
    fused = device in ("cpu", "cuda")
    return torch.optim.AdamW(parameter_groups(net, weight_decay), lr=0.0, betas=(0.9, 0.95), fused=fused)
