"""Pictures of patches: holes filled by a blur, patches painted over, or images rebuilt from predicted places."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import gather_tokens, grid_of, patchify, scatter_tokens, unpatchify
from patchloom.sizes import Sides

# Values without a colour, in pictures that are drawn in normalised pixels.
WITHHELD = float("nan")  # drawn hatched, like all empty places
WRONG = float("inf")  # drawn cross-hatched


def fill_holes(images: Tensor, p: Sides, visible: Tensor) -> Tensor:
    """Fill the holes of images [b c h w] by a Gaussian blur of the visible patches (σ: the side of a patch).

    Along an axis with a single patch, such as the height of a recording's frame, nothing is blurred: holes are filled
    along the other axis only.
    """
    b, _, h, w = images.shape
    grid = grid_of(images, p)
    with torch.autocast(images.device.type, enabled=False):
        ones = torch.ones(*visible.shape, p[0] * p[1], device=images.device)
        nowhere = torch.zeros(b, grid[0] * grid[1], p[0] * p[1], device=images.device)
        known = unpatchify(scatter_tokens(ones, visible, nowhere), p, grid)
        seen, weight = images * known, known
        for side, sigma, axis in ((h, p[0], 2), (w, p[1], 3)):
            if side == sigma:
                continue
            at = torch.arange(side, device=images.device, dtype=images.dtype)
            # as a matrix product the kernel spans the whole image: no hole stays empty, and borders need no padding
            kernel = torch.exp(-((at[:, None] - at) / sigma).square() / 2).clamp_min(1e-12)
            seen, weight = (torch.tensordot(kernel, x, dims=([1], [axis])).movedim(0, axis) for x in (seen, weight))
        return seen / weight


def paint_patches(images: Tensor, p: Sides, which: Tensor) -> Tensor:
    """Return images [b c h w] whose patches ``which`` [b m] (indices) are withheld."""
    grid = grid_of(images, p)
    patches = patchify(images, p)
    paint = torch.full((*which.shape, patches.shape[-1]), WITHHELD, device=images.device, dtype=patches.dtype)
    return unpatchify(scatter_tokens(paint, which, patches), p, grid)


def scatter_places(visible: Tensor, dropped: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return places [b k] for a picture of the input: patches without a position are shuffled.

    Args:
        visible: [b k] true places.
        dropped: [b k] True where the position is withheld, in the same number for every image.
        generator: random generator for the order; None: the global one.
    """
    b = len(visible)
    which = dropped.nonzero()[:, 1].view(b, -1)
    (order,) = random_partition(b, which.shape[1], (which.shape[1],), generator, visible.device)
    return visible.scatter(1, which, gather_tokens(visible, gather_tokens(which, order)))


def mix_patches(images: Tensor, others: Tensor, p: Sides, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shuffle the patches of two images together and deal them into two sets of equal size (MP3 Figs. 14-15).

    Args:
        images, others: [b c h w], pair by pair.
        p: rows and columns of pixels of a patch.
        generator: random generator for the order.

    Returns:
        Two sets of patches, each in the form of images [b c h w].
    """
    pool, grid = torch.cat([patchify(images, p), patchify(others, p)], dim=1), grid_of(images, p)
    b, n = len(pool), grid[0] * grid[1]
    first, second = random_partition(b, 2 * n, (n, n), generator, images.device)
    return unpatchify(gather_tokens(pool, first), p, grid), unpatchify(gather_tokens(pool, second), p, grid)


def mark_wrong(images: Tensor, p: Sides, visible: Tensor, placed: Tensor) -> Tensor:
    """Draw images [b c h w] with masked patches empty and wrongly placed ones crossed, at their true places."""
    patches = patchify(images, p)
    shown = torch.where((placed == visible)[..., None], gather_tokens(patches, visible), WRONG)
    drawn = scatter_tokens(shown, visible, torch.full_like(patches, WITHHELD))
    return unpatchify(drawn, p, grid_of(images, p))


def put_together(images: Tensor, p: Sides, visible: Tensor, placed: Tensor) -> Tensor:
    """Rebuild images [b c h w] from the visible patches [b k] at places [b k]; the mean where several are placed.

    A patch at place n, one behind the last, is left out.
    """
    grid = grid_of(images, p)
    patches = patchify(images, p, visible)
    sums = patches.new_zeros(len(images), grid[0] * grid[1] + 1, patches.shape[-1])
    sums.scatter_add_(1, placed[..., None].expand_as(patches), patches)
    landed = torch.zeros_like(sums[..., 0]).scatter_add_(1, placed, torch.ones_like(placed, dtype=sums.dtype))
    return unpatchify((sums / landed[..., None])[:, :-1], p, grid)  # 0 / 0 is nan: withheld


# Principal components of features as colours: similar features have similar colours.


# quantiles at the ends of the colour scale, so that a few outliers do not stretch it
_ENDS = (0.02, 0.98)


class Principal(NamedTuple):
    """First principal axes of features, on the CPU in float64.

    Attributes:
        mean: [d] mean of the features.
        axes: [k d] axes of length 1, in order of decreasing variance.
        variance: [k] variance along each axis, as a fraction of the total.
        low, high: [k] 2nd and 98th centile along each axis.
    """

    mean: Tensor
    axes: Tensor
    variance: Tensor
    low: Tensor
    high: Tensor

    def project(self, features: Tensor) -> Tensor:
        """Project features [... d] to components [... k]; nan stays."""
        return (features.detach().cpu().double() - self.mean) @ self.axes.T

    def colours(self, features: Tensor) -> Tensor:
        """Scale components of features [... d] from low to high centile to [0, 1]: [... k]; nan stays."""
        shown = (self.project(features) - self.low) / (self.high - self.low).clamp_min(1e-9)
        return shown.clamp(0, 1).float()


def principal(features: Tensor, count: int = 3) -> Principal:
    """Return the first ``count`` principal axes of features [m d], or as many as there are.

    The sign of an axis is arbitrary. As in scikit-learn, its largest number is made positive, so that colours are the
    same in every run.
    """
    flat = features.detach().cpu().double()
    mean = flat.mean(0)
    tall = flat - mean
    if len(tall) > tall.shape[1]:  # same axes from a small matrix
        tall = torch.linalg.qr(tall, mode="r").R
    _, values, axes = torch.linalg.svd(tall, full_matrices=False)
    variance = values.square() / values.square().sum().clamp_min(1e-30)
    axes, variance = axes[:count], variance[:count]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * largest.sign()
    low, high = torch.quantile((flat - mean) @ axes.T, torch.tensor(_ENDS).double(), dim=0)
    return Principal(mean, axes, variance, low, high)
