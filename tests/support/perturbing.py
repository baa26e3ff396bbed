"""Networks with other than their initial weights, in which zeros would hide mistakes."""

from typing import TypeVar

import torch
from torch import nn

Net = TypeVar("Net", bound=nn.Module)


@torch.no_grad()
def perturbed(net: Net, by: float = 0.05) -> Net:
    """Add normal numbers times ``by`` to all weights of a network, and return it."""
    for weight in net.parameters():
        weight.add_(torch.randn_like(weight) * by)
    return net
