"""RandAugment of single views, in pre-training and in fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MAX_MAGNITUDE = 10
# timm's RandAugment of the papers (rand-m9-mstd0.5-inc1): two operations, each with probability 0.5, in 0 ... 10; and
# torchvision's bins, which span the same strengths
_OPERATIONS, _PROBABILITY, _BINS = 2, 0.5, 31


class RandAugment:
    """Two random operations on a view, each with probability 0.5 (Cubuk et al. 2020, with DeiT's draws).

    Colour operations change all channels of a view alike. A view of other than 1 or 3 channels is to them a stack of
    grey pictures, so those of saturation leave it as it is, and contrast is that of each channel.

    Args:
        magnitude: strength of the operations, in 0 ... `MAX_MAGNITUDE`.
        std: standard deviation of the strength, which is drawn for each operation.
        fill: per channel, in [0, 1] units, what comes in from outside the view.
    """

    def __init__(self, magnitude: float, std: float, fill: Sequence[float]) -> None:
        self.magnitude, self.std, self.fill = magnitude, std, tuple(fill)

    def __call__(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        """A view [c h w], uint8 or float in [0, 1], changed by what ``rng`` draws; shape and dtype stay."""
        from torchvision.transforms import v2  # it takes a while, and most runs have no use for it

        colored = len(view) in (1, 3)  # to torchvision, any other number of channels is a batch of grey images
        unit = 255 if view.dtype == torch.uint8 else 1
        fill = [unit * value for value in (self.fill if colored else (float(np.mean(self.fill)),))]
        with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's global stream
            torch.default_generator.manual_seed(int(rng.integers(2**63)))  # and a GPU's stays as it is
            for _ in range(_OPERATIONS):
                magnitude = np.clip(rng.normal(self.magnitude, self.std), 0, MAX_MAGNITUDE)
                if rng.random() < _PROBABILITY:
                    step = round(float(magnitude) / MAX_MAGNITUDE * (_BINS - 1))
                    augment = v2.RandAugment(1, step, _BINS, v2.InterpolationMode.BILINEAR, fill)
                    view = augment(view) if colored else augment(view[:, None])[:, 0]
        return view
