"""Pictures that are smaller than their canvas: shrunk and placed on it, with what lies around them, or cut out of it.

As in `patchloom.withhold.degrade`, each image is treated by its own draw, which is an argument, and no value is read
back. `patches_of_others` alone lets images see each other.

Letters: b batch, c channels, h w height and width of the canvas, s t those of a shrunk image, n patches of the canvas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.patches.tokens import grid_of, patchify, unpatchify
from patchloom.sizes import Sides
from patchloom.system.distributed import gathered, rank
from patchloom.withhold.degrade import check_images, check_shape, check_sizes, table

Sizes = Sequence[tuple[int, int]]


def zoom_out(
    images: Tensor, sizes: Sizes, which: Tensor, top: Tensor, left: Tensor, around: Tensor | None = None
) -> Tensor:
    """Each image shrunk and placed on a canvas of its old size (Beyond Masking, degradation b).

    Shrinking is bilinear and antialiased. The batch is shrunk to every size and each image picks its own, so that
    shapes are the same whatever was drawn.

    Args:
        images: [b c h w].
        sizes: (s, t) in pixels to choose from.
        which: [b] int64, the size of each image.
        top: [b] int64, the row of its upper edge.
        left: [b] int64, the column of its left edge.
        around: what fills the rest, broadcast to [b c h w]: a colour [c 1 1] or other images (appendix A.3); None:
            mirror images, as in `mirror_canvas`.
    """
    check_images(images)
    b, _, h, w = images.shape
    check_sizes(sizes, (h, w))
    check_shape("which", which, (b,))
    s, t = (max(sides) for sides in zip(*sizes, strict=True))
    shrunk = torch.stack([F.pad(shrink(images, size), (0, t - size[1], 0, s - size[0])) for size in sizes])
    own = shrunk[which, torch.arange(b, device=images.device)]
    heights, widths = table(sizes, images.device)[which].unbind(1)
    canvas = _mirror(own, heights, widths, (h, w), top, left)
    if around is None:
        return canvas
    rows, columns = (_between(start, side, length) for start, side, length in ((top, heights, h), (left, widths, w)))
    return torch.where(rows[:, None, :, None] & columns[:, None, None], canvas, around.to(canvas.dtype))


def mirror_canvas(small: Tensor, size: tuple[int, int], top: Tensor, left: Tensor) -> Tensor:
    """Images [b c s t] on canvases of ``size`` (h, w), corner at ``top`` and ``left`` [b]: [b c h w].

    The rest is filled with mirror images, again and again if need be. Mirrors stand between pixels: the pixel at the
    edge comes twice, so that the canvas is continuous.
    """
    check_images(small)
    b, _, s, t = small.shape
    check_sizes([(s, t)], size)
    heights, widths = (torch.full((b,), side, device=small.device) for side in (s, t))
    return _mirror(small, heights, widths, size, top, left)


def patches_of_others(images: Tensor, p: Sides, step: Tensor, place: Tensor) -> Tensor:
    """Canvases [b c h w] of patches of ``p`` pixels that come from other images of the batch (appendix A.3).

    The batch is that of all processes. A lone image has no others: its canvas is made of its own patches.

    Args:
        images: [b c h w], of all processes alike.
        p: rows and columns of pixels of a patch, which divide h and w.
        step: [b n] int64, how many images further on, beyond the next one, the patch comes from; in [0, total - 1), as
            `random_others` draws it.
        place: [b n] int64, which of that image's n patches it is.
    """
    every = patchify(gathered(images), p)
    own = rank() * len(images) + torch.arange(len(images), device=images.device)[:, None]
    return unpatchify(every[(own + 1 + step) % len(every), place], p, grid_of(images, p))


def shrink(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images [b c h w] resized to ``size`` (s, t), bilinearly and antialiased."""
    shrunk = images.float()
    # One axis at a time: of two at once torch 2.15 forgets the rows where a single column is left, on the CPU.
    for side in size:
        shrunk = F.interpolate(shrunk.mT, (shrunk.shape[3], side), mode="bilinear", antialias=True)
    return shrunk.to(images.dtype)


def centre_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle ``size`` (h, w) of images [b c H W], whose sides are longer by even numbers of pixels."""
    top, left = _middle(images, size)
    return images[:, :, top : top + size[0], left : left + size[1]]


def crop_at(images: Tensor, size: tuple[int, int], corner: Tensor) -> Tensor:
    """The part of ``size`` (h, w) of each image [b c H W] whose upper left pixel is ``corner`` [b 2] (row, column)."""
    check_shape("corner", corner, (len(images), 2))
    rows, columns = (corner[:, axis, None] + torch.arange(side, device=images.device) for axis, side in enumerate(size))
    return _pick(images, rows, columns)


def central_corner(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Where `centre_crop` of images [b c H W] begins: row and column [b 2] int64."""
    starts = (torch.full((len(images),), start, device=images.device) for start in _middle(images, size))
    return torch.stack(list(starts), 1)


def _middle(images: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    return (images.shape[2] - size[0]) // 2, (images.shape[3] - size[1]) // 2


def _mirror(
    images: Tensor, heights: Tensor, widths: Tensor, size: tuple[int, int], top: Tensor, left: Tensor
) -> Tensor:
    """Canvases [b c *size] of the upper left ``heights`` [b] x ``widths`` [b] pixels of ``images`` [b c s t]."""
    check_shape("top", top, (len(images),))
    check_shape("left", left, (len(images),))
    rows = _mirrored(size[0], heights[:, None], top[:, None])
    columns = _mirrored(size[1], widths[:, None], left[:, None])
    return _pick(images, rows, columns)


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels of images [b c s t] in ``rows`` [b h] and ``columns`` [b w], which may come again: [b c h w]."""
    b, c, _, t = images.shape
    at = (rows[:, :, None] * t + columns[:, None, :]).flatten(1)  # [b h*w], flat: one gather is the quickest way
    size = rows.shape[1], columns.shape[1]
    return images.flatten(2).gather(2, at[:, None].expand(b, c, -1)).unflatten(2, size)


def _mirrored(length: int, side: Tensor, start: Tensor) -> Tensor:
    """Which of ``side`` [b 1] pixels, the first at ``start`` [b 1], is mirrored to each of ``length``: [b length]."""
    # there and back again is a period of two sides
    step = (torch.arange(length, device=side.device) - start).remainder(2 * side)
    return torch.minimum(step, 2 * side - 1 - step)


def _between(start: Tensor, side: Tensor, length: int) -> Tensor:
    """[b length] True at the ``side`` [b] pixels from ``start`` [b] on."""
    at = torch.arange(length, device=start.device) - start[:, None]
    return (at >= 0) & (at < side[:, None])
