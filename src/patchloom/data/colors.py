"""Colour jitter: drawn per image on the CPU, applied to a whole batch at once on any device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_CHANCE, _GREY = 0.8, 0.2
_MAX_CHANGE = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
_LUMA = (0.2989, 0.587, 0.114)  # torchvision's
# a draw: whether to jitter, whether to take the colours away, the four factors, and their order
DRAW = 2 + 2 * len(_MAX_CHANGE)


def draw_colors(rng: np.random.Generator) -> Tensor:
    """Draw the colour jitter of one image: float32 [`DRAW`], for `plan_colors`.

    Brightness, contrast and saturation change by up to 0.4, 0.4 and 0.2, and hue by up to 0.1 of the circle, in random
    order, with probability 0.8; the image becomes grey with 0.2 (ExtreMA, as MoCo v3).
    """
    jitter, grey = rng.random() < _CHANCE, rng.random() < _GREY
    factors = [rng.uniform(-limit, limit) + (name != "hue") for name, limit in _MAX_CHANGE.items()]
    return torch.tensor([jitter, grey, *factors, *rng.permutation(len(_MAX_CHANGE))], dtype=torch.float32)


class ColorPlan(NamedTuple):
    """The colour changes of a batch, in order, each with the images to which it applies.

    It is made on the CPU, where the draws are, so that applying it on a GPU never waits for a value of a tensor.

    Attributes:
        rows: int64 [r], images (indices in the batch), those of the first change first.
        factors: float32 [r], strength of the change for each of them.
        changes: name of each change, and its number of rows.
    """

    rows: Tensor
    factors: Tensor
    changes: tuple[tuple[str, int], ...]

    def to(self, device: torch.device | str) -> ColorPlan:
        """The same on a device, copied asynchronously."""
        rows, factors = (one.to(device, non_blocking=True) for one in (self.rows, self.factors))
        return ColorPlan(rows, factors, self.changes)

    def first(self, images: int) -> ColorPlan:
        """The plan for the first ``images`` images of the batch."""
        counts, chosen = [count for _, count in self.changes], self.rows < images
        left = (int(part.sum()) for part in chosen.split(counts))
        changes = tuple((name, count) for (name, _), count in zip(self.changes, left, strict=True))
        return ColorPlan(self.rows[chosen], self.factors[chosen], changes)


def plan_colors(draws: Tensor, channels: int) -> ColorPlan:
    """The plan for draws [b `DRAW`] and images with ``channels`` channels.

    Images without 3 channels get brightness and contrast changes only, per channel.
    """
    jitter, grey, factors, order = draws.split([1, 1, len(_MAX_CHANGE), len(_MAX_CHANGE)], dim=1)
    names = [*_MAX_CHANGE][: len(_MAX_CHANGE) if channels == 3 else 2]
    parts = []
    for turn in order.T:
        for number, name in enumerate(names):
            rows = ((jitter[:, 0] > 0) & (turn == number)).nonzero()[:, 0]
            parts.append((name, rows, factors[rows, number]))
    if channels == 3:
        rows = (grey[:, 0] > 0).nonzero()[:, 0]
        parts.append(("grey", rows, torch.zeros(len(rows))))
    parts = [part for part in parts if len(part[1])]
    changes = tuple((name, len(rows)) for name, rows, _ in parts)
    none = torch.empty(0)
    return ColorPlan(
        torch.cat([none.long(), *(rows for _, rows, _ in parts)]),
        torch.cat([none, *(strengths for *_, strengths in parts)]),
        changes,
    )


def recolor(images: Tensor, plan: ColorPlan) -> Tensor:
    """Apply a plan to images [b c h w] on the same device, uint8 or float in [0, 1]; gives float32 in [0, 1]."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images.float().clone()
    counts = [count for _, count in plan.changes]
    for (name, _), rows, factors in zip(plan.changes, plan.rows.split(counts), plan.factors.split(counts), strict=True):
        x[rows] = _CHANGES[name](x[rows], factors.view(-1, 1, 1, 1))
    return x


def recolored(view: Tensor, draw: Tensor) -> Tensor:
    """Apply a draw [`DRAW`] to one view [c h w]; the dtype stays."""
    changed = recolor(view[None], plan_colors(draw[None], len(view)))[0]
    return changed if view.is_floating_point() else (changed * 255).round().to(view.dtype)


def _luma(x: Tensor) -> Tensor:
    red, green, blue = (channel * weight for channel, weight in zip(x.split(1, dim=1), _LUMA, strict=True))
    return red + green + blue


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other, x, factor).clamp(0, 1)


def _brightness(x: Tensor, factor: Tensor) -> Tensor:
    return (x * factor).clamp(0, 1)


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    mean = _luma(x).mean((1, 2, 3), keepdim=True) if x.shape[1] == 3 else x.mean((2, 3), keepdim=True)
    return _blend(x, mean.expand_as(x), factor)


def _saturation(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(x, _luma(x).expand_as(x), factor)


def _hue(x: Tensor, turn: Tensor) -> Tensor:
    """Shift the hue of x [b 3 h w] by ``turn`` [b 1 1 1] full circles, through hue, chroma and value."""
    r, g, b = x.unbind(1)
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    some = torch.where(chroma > 0, chroma, 1.0)
    sector = torch.where(value == r, (g - b) / some, torch.where(value == g, (b - r) / some + 2, (r - g) / some + 4))
    turned = sector + 6 * turn[:, 0]
    parts = []
    for start in (5, 3, 1):  # red, green, blue
        k = turned + start  # from -1 to 11; below 0 counts as 0 does
        k = torch.where(k >= 6, k - 6, k)
        parts.append(value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.stack(parts, dim=1)


def _grey(x: Tensor, factor: Tensor) -> Tensor:
    return _luma(x).expand(-1, 3, -1, -1)


_CHANGES = {"brightness": _brightness, "contrast": _contrast, "saturation": _saturation, "hue": _hue, "grey": _grey}
