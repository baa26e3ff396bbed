"""Patches in pictures: holes filled by a blur, patches painted over, or put together where they were predicted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import gather_tokens, grid_of, patchify, scatter_tokens, unpatchify
from patchloom.sizes import Sides

# Values that stand for what has no colour in pictures, because pictures are drawn in normalised pixels.
WITHHELD = float("nan")  # hatched, as whatever is empty
WRONG = float("inf")  # hatched crosswise


def fill_holes(images: Tensor, p: Sides, visible: Tensor) -> Tensor:
    """Images [b c h w] whose holes are filled by a Gaussian blur of the visible patches (σ of a patch side).

    Where one patch is as long as the image, as one of the frames of a recording is high, nothing is blurred that way:
    what is filled in lies between holes and patches the other way alone.
    """
    with torch.autocast(images.device.type, enabled=False):
        return _fill_holes(images, p, visible)


def _fill_holes(images: Tensor, p: Sides, visible: Tensor) -> Tensor:
    b, c, h, w = images.shape
    grid = grid_of(images, p)
    ones = torch.ones(*visible.shape, p[0] * p[1], device=images.device)
    nowhere = torch.zeros(b, grid[0] * grid[1], p[0] * p[1], device=images.device)
    known = unpatchify(scatter_tokens(ones, visible, nowhere), p, grid)
    seen, weight = images * known, known
    for side, sigma, axis in ((h, p[0], 2), (w, p[1], 3)):
        if side == sigma:
            continue
        at = torch.arange(side, device=images.device, dtype=images.dtype)
        # as a matrix product the kernel may reach across the image, so no hole stays empty, and borders need no padding
        kernel = torch.exp(-((at[:, None] - at) / sigma).square() / 2).clamp_min(1e-12)
        seen, weight = (torch.tensordot(kernel, x, dims=([1], [axis])).movedim(0, axis) for x in (seen, weight))
    return seen / weight


def paint_patches(images: Tensor, p: Sides, which: Tensor, value: float) -> Tensor:
    """Images [b c h w] with the patches ``which`` [b m] (indices) painted in one ``value``."""
    grid = grid_of(images, p)
    patches = patchify(images, p)
    paint = torch.full((*which.shape, patches.shape[-1]), value, device=images.device, dtype=patches.dtype)
    return unpatchify(scatter_tokens(paint, which, patches), p, grid)


def scatter_places(visible: Tensor, dropped: Tensor, generator: torch.Generator) -> Tensor:
    """Places [b k] for a picture of what was given: patches without a position change places at random.

    Args:
        visible: [b k] true places.
        dropped: [b k] True where the position is withheld, in the same number for every image.
        generator: source of the order.
    """
    b = len(visible)
    which = dropped.nonzero()[:, 1].view(b, -1)
    (order,) = random_partition(b, which.shape[1], (which.shape[1],), generator, visible.device)
    return visible.scatter(1, which, gather_tokens(visible, gather_tokens(which, order)))


def mix_patches(images: Tensor, others: Tensor, p: Sides, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The patches of two images shuffled together and dealt into two, each as many as one has (MP3 Figs. 14-15).

    Args:
        images, others: [b c h w], pair by pair.
        p: rows and columns of pixels of a patch.
        generator: source of the order.

    Returns:
        Two sets of patches, each in the form of images [b c h w].
    """
    pool, grid = torch.cat([patchify(images, p), patchify(others, p)], dim=1), grid_of(images, p)
    b, n = len(pool), grid[0] * grid[1]
    first, second = random_partition(b, 2 * n, (n, n), generator, images.device)
    return unpatchify(gather_tokens(pool, first), p, grid), unpatchify(gather_tokens(pool, second), p, grid)


def mark_wrong(images: Tensor, p: Sides, visible: Tensor, placed: Tensor) -> Tensor:
    """Images [b c h w] with masked patches withheld and wrongly placed ones marked, at their true places."""
    patches = patchify(images, p)
    shown = torch.where((placed == visible)[..., None], gather_tokens(patches, visible), WRONG)
    drawn = scatter_tokens(shown, visible, torch.full_like(patches, WITHHELD))
    return unpatchify(drawn, p, grid_of(images, p))


def put_together(images: Tensor, p: Sides, visible: Tensor, placed: Tensor) -> Tensor:
    """Images [b c h w] rebuilt from the visible patches [b k] at the places [b k]; where several land, their mean."""
    grid = grid_of(images, p)
    patches = patchify(images, p, visible)
    sums = patches.new_zeros(len(images), grid[0] * grid[1], patches.shape[-1])
    sums.scatter_add_(1, placed[..., None].expand_as(patches), patches)
    landed = torch.zeros_like(sums[..., 0]).scatter_add_(1, placed, torch.ones_like(placed, dtype=sums.dtype))
    return unpatchify(sums / landed[..., None], p, grid)  # 0 / 0 is nan: withheld


# Principal components of features, as colours: what is of one colour is alike.


_ENDS = (0.02, 0.98)  # centiles of a component between which colours run: a few patches far off would take them all


class Principal(NamedTuple):
    """The first principal axes of some features, on the CPU in float64.

    Attributes:
        mean: [d] of the features.
        axes: [k d] of length 1, the first that of the greatest variance.
        variance: [k] of the features along each, as shares of all there is.
        low, high: [k] the 2nd and the 98th centile along each.
    """

    mean: Tensor
    axes: Tensor
    variance: Tensor
    low: Tensor
    high: Tensor

    def project(self, features: Tensor) -> Tensor:
        """Components [... k] of features [... d]; nan stays."""
        return (features.detach().cpu().double() - self.mean) @ self.axes.T

    def colours(self, features: Tensor) -> Tensor:
        """Components of features [... d], from their low to their high centile, as [... k] in [0, 1]; nan stays."""
        shown = (self.project(features) - self.low) / (self.high - self.low).clamp_min(1e-9)
        return shown.clamp(0, 1).float()


def principal(features: Tensor, count: int = 3) -> Principal:
    """The first ``count`` principal axes of features [m d], or as many as there are.

    An axis and its opposite are the same to a principal component analysis. As in scikit-learn, the one is taken whose
    largest number is positive, so that colours are the same in every run.
    """
    flat = features.detach().cpu().double()
    mean = flat.mean(0)
    tall = flat - mean
    if len(tall) > tall.shape[1]:  # the same axes, of a small matrix
        tall = torch.linalg.qr(tall, mode="r").R
    _, values, axes = torch.linalg.svd(tall, full_matrices=False)
    variance = values.square() / values.square().sum().clamp_min(1e-30)
    axes, variance = axes[:count], variance[:count]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * largest.sign()
    low, high = torch.quantile((flat - mean) @ axes.T, torch.tensor(_ENDS).double(), dim=0)
    return Principal(mean, axes, variance, low, high)
