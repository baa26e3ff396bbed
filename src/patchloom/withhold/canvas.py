"""Images smaller than their canvas: shrunk and placed on it with a filled border, or cut out of it.

As in `patchloom.withhold.degrade`, each image has its own draw, passed as an argument, and no value is read back from
the device. Images see each other in `patches_of_others` only.

Letters: b batch, c channels, h w height and width of the canvas, s t those of a shrunk image, n patches of the canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.patches.tokens import grid_of, patchify, unpatchify
from patchloom.sizes import Sides
from patchloom.system.distributed import gathered, rank
from patchloom.withhold.degrade import check_batch, check_shape, check_sizes, table

Sizes = Sequence[tuple[int, int]]


def zoom_out(
    images: Tensor, sizes: Sizes, which: Tensor, top: Tensor, left: Tensor, around: Tensor | None = None
) -> Tensor:
    """Shrink each image and place it on a canvas of its old size (Beyond Masking, degradation b).

    Shrinking is bilinear and antialiased. The batch is shrunk to every size and each image picks its own, so that
    shapes do not depend on the draws.

    Args:
        images: [b c h w].
        sizes: (s, t) in pixels to choose from.
        which: [b] int64, index of the size of each image.
        top: [b] int64, row of its upper edge.
        left: [b] int64, column of its left edge.
        around: filling of the rest, broadcast to [b c h w]: a colour [c 1 1] or other images (appendix A.3); None:
            mirror images, as in `mirror_canvas`.
    """
    check_batch(images)
    b, _, h, w = images.shape
    check_sizes(sizes, (h, w))
    check_shape("which", which, (b,))
    s, t = (max(sides) for sides in zip(*sizes, strict=True))
    shrunk = torch.stack([F.pad(shrink(images, size), (0, t - size[1], 0, s - size[0])) for size in sizes])
    own = shrunk[which, torch.arange(b, device=images.device)]
    heights, widths = table(sizes, images.device)[which].unbind(1)
    canvas = mirror_canvas(own, heights, widths, (h, w), top, left)
    if around is None:
        return canvas
    rows, columns = (_between(start, side, length) for start, side, length in ((top, heights, h), (left, widths, w)))
    return torch.where(rows[:, None, :, None] & columns[:, None, None], canvas, around.to(canvas.dtype))


def patches_of_others(images: Tensor, p: Sides, step: Tensor, place: Tensor) -> Tensor:
    """Build canvases [b c h w] from patches of ``p`` pixels of other images of the batch (appendix A.3).

    The batch is that of all processes. For a single image its patches are used.

    Args:
        images: [b c h w], with the same shape in all processes.
        p: rows and columns of pixels of a patch, which divide h and w.
        step: [b n] int64, source image of each patch, as an offset from the next image; in [0, total - 1), as drawn by
            `random_others`.
        place: [b n] int64, index of the patch in that image.
    """
    every = patchify(gathered(images), p)
    own = rank() * len(images) + torch.arange(len(images), device=images.device)[:, None]
    return unpatchify(every[(own + 1 + step) % len(every), place], p, grid_of(images, p))


def shrink(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images [b c h w] to ``size`` (s, t), bilinearly and antialiased."""
    shrunk = images.float()
    # One axis at a time: with both, torch 2.15 on CPU ignores the rows if a single column is left.
    for side in size:
        shrunk = F.interpolate(shrunk.mT, (shrunk.shape[3], side), mode="bilinear", antialias=True)
    return shrunk.to(images.dtype)


Window = tuple[tuple[int, int], tuple[int, int]]


def resize_area(images: Tensor, size: tuple[int, int], window: Window | None = None) -> Tensor:
    """Resize images [b c h w] to ``size``; each new pixel is the mean of all old ones that it overlaps.

    Equal to torch's ``interpolate(mode="area")``, and faster on a CPU, because it takes one axis after the other.

    Args:
        images: [b c h w].
        size: new height and width.
        window: first row and the one after the last, and columns alike, of the part that is returned; None: all.
    """
    return _Area.apply(images, size, window or ((0, size[0]), (0, size[1])))


class _Area(torch.autograd.Function):
    """`resize_area`."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, size: tuple[int, int], window: Window) -> Tensor:
        ctx.axes = tuple(zip(images.shape[2:], size, window, strict=True))
        return _averaged(images, _bands_of(ctx.axes, False, images.device))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        return _averaged(slopes[0], _bands_of(ctx.axes, True, slopes[0].device)), None, None


def enlarged_squares(images: Tensor, *weights: tuple[Tensor, Tensor]) -> Tensor:
    """Return weighted sums [b] of the squared pixels of images [b c h w] that `resize_area` enlarges to H x W.

    An enlarged pixel is a mean of at most two neighbours along either axis, so a sum of squares is one of products of
    neighbours, and its gradient the same products: nothing is enlarged.

    Args:
        images: [b c h w].
        weights: of rows [b H] and of columns [b W], whose products weigh the pixels; sums with several are added. b may
            be 1.
    """
    with torch.no_grad():
        parts = [_with_neighbours(_with_neighbours(images, 2, rows), 3, columns) for rows, columns in weights]
        half = reduce(Tensor.add_, parts)  # of the gradient
    squares = (images * half).sum((1, 2, 3))
    return 2 * squares - squares.detach()


def _with_neighbours(images: Tensor, axis: int, shares: Tensor) -> Tensor:
    """Return Rᵀ diag(``shares``) R of images [b c h w] along an axis, with `resize_area`'s matrix R [H h]."""
    n, length = images.shape[axis], shares.shape[1]
    begin, count = _overlap(torch.arange(length, device=images.device)[:, None], length, n)
    old = torch.arange(n, device=images.device)
    matrix = ((old >= begin) & (old < begin + count)) / count
    shape = (len(shares), 1, -1, 1) if axis == 2 else (len(shares), 1, 1, -1)
    own, beside = (
        (shares[..., None] * pairs).sum(1).view(shape) for pairs in (matrix.square(), matrix[:, 1:] * matrix[:, :-1])
    )
    summed = images * own
    for to, source in ((0, 1), (1, 0)):
        summed.narrow(axis, to, n - 1).addcmul_(images.narrow(axis, source, n - 1), beside)
    return summed


def _overlap(at: Tensor, row: int, other: int) -> tuple[Tensor, Tensor]:
    """Return the first pixel of a row of ``other``, and the number of them, that pixels ``at`` of ``row`` overlap."""
    first = at * other // row
    return first, ((at + 1) * other - 1) // row - first + 1


@cache
def _most_overlapped(row: int, other: int) -> int:
    return max(((i + 1) * other - 1) // row - i * other // row + 1 for i in range(row))


Bands = tuple[Tensor, Tensor]


def _bands_of(axes: Sequence[tuple[int, int, tuple[int, int]]], transposed: bool, device: torch.device) -> list[Bands]:
    """Return, for each axis, the pixels [t k] that are averaged along a row, and their weights [t k], in a window of k.

    They are computed on the device, because a copy to a GPU would wait for it.

    Args:
        axes: lengths of a row before and after; first new pixel, and the one after the last, of the returned part.
        transposed: return those of the gradient, [t old], which sums pixels of the window.
        device: device of the images.
    """
    bands = []
    for old, new, (begin, end) in axes:
        row, other = (old, new) if transposed else (new, old)
        at = torch.arange(old, device=device) if transposed else torch.arange(begin, end, device=device)
        start, count = _overlap(at, row, other)
        step = torch.arange(_most_overlapped(row, other), device=device)[:, None]
        place, inside = start + step, step < count
        if transposed:
            inside &= (place >= begin) & (place < end)
            bands.append(((place - begin).clamp(0, end - begin - 1), inside / _overlap(place, new, old)[1]))
        else:
            bands.append((place.clamp(max=old - 1), inside / count))
    return bands


def _averaged(images: Tensor, bands: Sequence[Bands]) -> Tensor:
    """Return weighted sums of rows and of columns of images [b c h w], as ``bands`` of the two axes say."""
    # columns are slower: they are taken while there are fewer rows
    axes = (3, 2) if bands[0][0].shape[1] > images.shape[2] else (2, 3)
    for axis in axes:
        at, weights = bands[axis - 2]
        weights = weights.to(images.dtype)[(..., None) if axis == 2 else ...]
        summed = _picked(images, axis, at[0]).mul_(weights[0])
        for row, weight in zip(at[1:], weights[1:], strict=True):
            summed.addcmul_(_picked(images, axis, row), weight)
        images = summed
    return images


def _picked(images: Tensor, axis: int, at: Tensor) -> Tensor:
    """Return rows or columns of images [b c h w]."""
    if axis == 2:
        return images.index_select(2, at)
    return images.gather(3, at.expand(*images.shape[:3], -1))  # twice as fast as index_select


def centre_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the central ``size`` (h, w) of images [b c H W], whose sides are longer by even numbers of pixels."""
    top, left = _middle(images, size)
    return images[:, :, top : top + size[0], left : left + size[1]]


def crop_at(images: Tensor, size: tuple[int, int], corner: Tensor) -> Tensor:
    """Return the part of ``size`` (h, w) of each image [b c H W] with upper left ``corner`` [b 2], row and column."""
    check_shape("corner", corner, (len(images), 2))
    rows, columns = (corner[:, axis, None] + torch.arange(side, device=images.device) for axis, side in enumerate(size))
    return _pick(images, rows, columns)


def central_corner(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the upper left pixel of `centre_crop` of images [b c H W]: row and column [b 2] int64."""
    starts = (torch.full((len(images),), start, device=images.device) for start in _middle(images, size))
    return torch.stack(list(starts), 1)


def _middle(images: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    return (images.shape[2] - size[0]) // 2, (images.shape[3] - size[1]) // 2


def mirror_canvas(
    images: Tensor, heights: Tensor, widths: Tensor, size: tuple[int, int], top: Tensor, left: Tensor
) -> Tensor:
    """Place the upper left ``heights`` [b] x ``widths`` [b] pixels of images [b c s t] on canvases of ``size`` (h, w).

    Their corners are at ``top`` and ``left`` [b]: [b c h w]. The rest is filled with mirror images, repeated if
    necessary. Mirrors stand between pixels: the pixel at the edge comes twice, so that the canvas is continuous.
    """
    check_shape("top", top, (len(images),))
    check_shape("left", left, (len(images),))
    rows = _mirrored(size[0], heights[:, None], top[:, None])
    columns = _mirrored(size[1], widths[:, None], left[:, None])
    return _pick(images, rows, columns)


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return pixels [b c h w] of images [b c s t] at ``rows`` [b h] and ``columns`` [b w], which may repeat."""
    b, c, _, t = images.shape
    at = (rows[:, :, None] * t + columns[:, None, :]).flatten(1)  # [b h*w], flat: a single gather is fastest
    size = rows.shape[1], columns.shape[1]
    return images.flatten(2).gather(2, at[:, None].expand(b, c, -1)).unflatten(2, size)


def _mirrored(length: int, side: Tensor, start: Tensor) -> Tensor:
    """Return the source pixel [b length] of each pixel of a row: ``side`` [b 1] from ``start`` [b 1], then mirrored."""
    # forth and back is a period of two sides
    step = (torch.arange(length, device=side.device) - start).remainder(2 * side)
    return torch.minimum(step, 2 * side - 1 - step)


def _between(start: Tensor, side: Tensor, length: int) -> Tensor:
    """Return a mask [b length], True at the ``side`` [b] pixels from ``start`` [b] on."""
    at = torch.arange(length, device=start.device) - start[:, None]
    return (at >= 0) & (at < side[:, None])
