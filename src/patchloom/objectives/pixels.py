"""Asking for pixels: MAE's targets and loss, and trivial answers to compare with.

Letters as in `patchloom.views`; f is the length c·p·p of a flat patch, m the number of masked patches.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.views.tokens import grid_of, normalize_patches, patch_statistics, patchify, put, unpatchify


def pixel_targets(images: Tensor, p: int, asked: Tensor, normalized: bool) -> Tensor:
    """The patches ``asked`` [b m] of images [b c h w] as targets [b m f], each normalised by itself if asked for."""
    patches = patchify(images, p, asked)
    return normalize_patches(patches) if normalized else patches


def pixel_loss(predicted: Tensor, target: Tensor, absolute: bool = False) -> Tensor:
    """Mean squared error over the masked patches [b m f], in float32 (MAE section 3); absolute: L1 (SimMIM)."""
    loss = F.l1_loss if absolute else F.mse_loss
    return loss(predicted.float(), target.float())


def pixel_errors(predicted: Tensor, target: Tensor, absolute: bool = False) -> Tensor:
    """`pixel_loss` of each image [b]."""
    apart = predicted.float() - target.float()
    return (apart.abs() if absolute else apart.square()).mean((1, 2))


def trivial_errors(
    images: Tensor, p: int, visible: Tensor, masked: Tensor, normalized: bool, absolute: bool = False
) -> dict[str, Tensor]:
    """Errors [b] of two answers that need no learning, on the scale of `pixel_errors`.

    ``mean colour``: every masked patch is painted in its true mean colour (per channel).
    ``blurred copy``: a Gaussian blur of the visible patches, as wide as a patch, spreads into the holes. With
    normalised targets it is given each patch's true mean, and its deviation is held down to the true one.

    Args:
        images: [b c h w] normalised pixels.
        p: patch side.
        visible, masked: [b k], [b m] patch indices.
        normalized: whether the targets are per-patch normalised.
        absolute: absolute errors instead of squared ones.
    """
    truth = patchify(images, p, masked)
    mean, deviation = patch_statistics(truth)
    scale = deviation if normalized else torch.ones_like(deviation)
    by_channel = truth.unflatten(-1, (images.shape[1], -1))
    colour = by_channel.mean(-1, keepdim=True).expand_as(by_channel).flatten(2)
    blurred = patchify(spread(images, p, visible), p, masked)
    if normalized:
        own_mean, own_deviation = patch_statistics(blurred)
        blurred = (blurred - own_mean) * (deviation / own_deviation).clamp_max(1) + mean
    errors = {"mean colour": colour, "blurred copy": blurred}
    return {name: pixel_errors(answer / scale, truth / scale, absolute) for name, answer in errors.items()}


@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def spread(images: Tensor, p: int, visible: Tensor) -> Tensor:
    """Images [b c h w] whose holes are filled by a Gaussian blur of the visible patches (σ of one patch side)."""
    b, c, h, w = images.shape
    grid = grid_of(images, p)
    ones = torch.ones(*visible.shape, p * p, device=images.device)
    known = unpatchify(put(ones, visible, torch.zeros(b, grid[0] * grid[1], p * p, device=images.device)), p, grid)
    seen, weight = images * known, known
    for side, axis in ((h, 2), (w, 3)):
        at = torch.arange(side, device=images.device, dtype=images.dtype)
        # as a matrix product the kernel may reach across the image, so no hole stays empty, and borders need no padding
        kernel = torch.exp(-((at[:, None] - at) / p).square() / 2).clamp_min(1e-12)
        seen, weight = (torch.tensordot(kernel, x, dims=([1], [axis])).movedim(0, axis) for x in (seen, weight))
    return seen / weight


def recovered_images(
    predicted: Tensor, images: Tensor, p: int, masked: Tensor, statistics: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Images [b c h w] with the masked patches replaced by the predictions [b m f].

    Args:
        predicted: plain pixels, or normalised ones if ``statistics`` are given.
        images: the originals.
        p: patch side.
        masked: [b m] which patches are predicted.
        statistics: mean and deviation [b m 1] by which normalised predictions are put back. They are the original's
            (`patch_statistics`) or guessed (`guessed_statistics`), and a picture's caption has to say which.
    """
    grid = grid_of(images, p)
    predicted = predicted.float()
    if statistics is not None:
        mean, deviation = statistics
        predicted = predicted * deviation + mean
    return unpatchify(put(predicted, masked, patchify(images, p)), p, grid)


def guessed_statistics(images: Tensor, p: int, visible: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation [b m 1] of the masked patches, guessed from the visible ones alone by spreading theirs."""
    grid = grid_of(images, p)
    patches = patchify(images, p)
    painted = (statistic.expand_as(patches) for statistic in patch_statistics(patches))
    mean, deviation = (patchify(spread(unpatchify(x, p, grid), p, visible), p, masked) for x in painted)
    return mean.mean(-1, keepdim=True), deviation.mean(-1, keepdim=True)


def paint_patches(images: Tensor, p: int, which: Tensor, value: float) -> Tensor:
    """Images [b c h w] with the patches ``which`` [b m] (indices) painted in one ``value``."""
    grid = grid_of(images, p)
    patches = patchify(images, p)
    paint = torch.full((*which.shape, patches.shape[-1]), value, device=images.device, dtype=patches.dtype)
    return unpatchify(put(paint, which, patches), p, grid)
