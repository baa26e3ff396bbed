"""Asking for an original picture back: Beyond Masking's targets and its two losses, and what a trivial answer gets.

Letters as in `patchloom.views`; f is the length c·p·p of a flat patch. Images are in [0, 1] here.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.views.tokens import grid_of, patch_channel_statistics, patchify, unpatchify


def restoration_targets(images: Tensor, p: int, asked: Tensor | None, normalized: bool) -> Tensor:
    """The patches ``asked`` [b m] (None: all n) of images [b c h w] as targets [b m f], each channel normalised."""
    patches = patchify(images, p, asked)
    if not normalized:
        return patches
    mean, deviation = patch_channel_statistics(patches, images.shape[1])
    return (patches - mean) / deviation


def centre_of(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle ``size`` (h, w) of images [b c H W], whose sides are longer by even numbers of pixels."""
    top, left = (images.shape[2] - size[0]) // 2, (images.shape[3] - size[1]) // 2
    return images[:, :, top : top + size[0], left : left + size[1]]


def canvas_errors(predicted: Tensor, canvas: Tensor, p: int, masked: Tensor, normalized: bool) -> tuple[Tensor, Tensor]:
    """The two errors [b] of masking and zooming in (Beyond Masking's m + a).

    The prediction shows the whole canvas at the size of the input. Grown to the canvas's size, its centre answers for
    the ``masked`` patches of the input, and its outer band for what the input did not show. The band is four strips,
    whose mean squared errors are added up, as the authors' program does.

    Args:
        predicted: [b c h w], in normalised pixels if ``normalized``.
        canvas: [b c H W] in [0, 1]; its middle h x w pixels were the input.
        p: patch side.
        masked: [b m] patches of the input that were not seen.
        normalized: targets are normalised, each channel of each patch.
    """
    size, whole = tuple(predicted.shape[2:]), tuple(canvas.shape[2:])
    grown = F.interpolate(predicted, whole, mode="area")
    inside = patchify(centre_of(grown, size), p, masked)
    hole = restoration_targets(centre_of(canvas, size), p, masked, normalized)
    shrunk = F.interpolate(canvas, size, mode="area")
    target = unpatchify(restoration_targets(shrunk, p, None, normalized), p, grid_of(shrunk, p))
    apart = (grown - F.interpolate(target, whole, mode="area")).square()
    # weighted rather than cut out: on the way back each cut would be a canvas of zeros
    band = (apart * _strips(whole, size, apart.device)).sum((1, 2, 3)) / apart.shape[1]
    return (inside - hole).square().mean((1, 2)), band


def _strips(whole: tuple[int, int], size: tuple[int, int], device: torch.device) -> Tensor:
    """[H W]: one over its area in each of the four strips around the middle ``size``, 0 in the middle.

    Above and below they are as wide as the canvas, at the sides as high as the middle.
    """
    (h, w), (top, left) = size, ((whole[0] - size[0]) // 2, (whole[1] - size[1]) // 2)
    weights = torch.zeros(whole, device=device)  # made there: copying it would wait for a GPU
    for strip in (weights[:top], weights[top + h :], weights[top : top + h, :left], weights[top : top + h, left + w :]):
        strip.fill_(1 / max(1, strip.numel()))
    return weights


def answer_of(guess: Tensor, truth: Tensor, p: int, normalized: bool) -> Tensor:
    """A guessed picture [b c h w] as the answer [b n f] that a network would have to give.

    With normalised targets each channel's deviation in a patch is held down to the true one, so that a smooth guess is
    not blown up to noise.
    """
    patches, true = patchify(guess, p), patchify(truth, p)
    if not normalized:
        return patches
    (mean, deviation), (_, scale) = (patch_channel_statistics(x, guess.shape[1]) for x in (patches, true))
    return (patches - mean) / torch.maximum(deviation, scale)
