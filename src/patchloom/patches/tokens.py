"""Conversion between images and patches, and selection of patch tokens.

Letters: b batch, c channels, h w height width, n patches of the grid, k selected patches, p rows and
columns of pixels of a patch.
"""

import torch
from torch import Tensor

from patchloom.sizes import Sides


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the tokens [b k d] at ``indices`` [b k] of ``tokens`` [b n d]; ``tokens`` may also be [b n].

    The gradient has the same bits each time on a GPU, too, if no image has an index more than twice: additions to a
    token come in any order.
    """
    if tokens.ndim == 2:
        return tokens.gather(1, indices)
    first = torch.arange(indices.shape[0], device=indices.device)[:, None] * tokens.shape[1]
    # tokens[images, indices] would sort all indices in its backward pass on a GPU; gather is slower on a CPU
    return tokens.flatten(0, 1).index_select(0, (first + indices).flatten()).unflatten(0, indices.shape)


def scatter_tokens(tokens: Tensor, indices: Tensor, into: Tensor) -> Tensor:
    """Return a copy of ``into`` [b n d] with ``tokens`` [b k d] at ``indices`` [b k]; undoes `gather_tokens`."""
    rows = torch.arange(indices.shape[0], device=indices.device)[:, None]
    return into.index_put((rows, indices), tokens.to(into.dtype))


def in_grid_order(tokens: Tensor, *parts: Tensor) -> Tensor:
    """Sort tokens [b n d] in the order of ``parts`` [b k], which together are all n patches, into grid order."""
    return gather_tokens(tokens, torch.cat(parts, dim=1).argsort(dim=1))


def grid_of(images: Tensor, p: Sides) -> Sides:
    """Return rows and columns of patches of ``p`` pixels in images [b c h w]."""
    return images.shape[2] // p[0], images.shape[3] // p[1]


def patchify(images: Tensor, p: Sides, indices: Tensor | None = None) -> Tensor:
    """Cut images [b c h w] into flat patches [b n c*p[0]*p[1]], row by row, or only into those of ``indices`` [b k].

    Inside a patch the order is that of a convolution's weight (channel, row, column), so that a patch projection is
    one matrix product with the flattened weight. Other patches are never copied. Indices [v*b k] are those of v views
    of every image, the first views of all images first.
    """
    b, c, h, w = images.shape
    if h % p[0] or w % p[1]:
        raise ValueError(f"images of {h}x{w} pixels cannot be cut into patches of {p[0]}x{p[1]}")
    cut = images.reshape(b, c, h // p[0], p[0], w // p[1], p[1])
    patches = cut.permute(0, 2, 4, 1, 3, 5)  # [b rows columns c *p], a view
    if indices is None:
        return patches.flatten(3).flatten(1, 2)
    m = indices.shape[0]  # len would fix the number of images in an exported graph
    if b and m % b:
        raise ValueError(f"{m} rows of indices are not a multiple of {b} images")
    columns = patches.shape[2]
    rows = torch.arange(b, device=indices.device).repeat(m // max(1, b))[:, None]
    return patches[rows, indices // columns, indices % columns].flatten(2)


def unpatchify(patches: Tensor, p: Sides, grid: Sides) -> Tensor:
    """Put flat patches [b n c*p[0]*p[1]] of a ``grid`` back into images [b c h w]; undoes `patchify`."""
    b = patches.shape[0]
    rows, columns = grid
    cut = patches.reshape(b, rows, columns, -1, *p).permute(0, 3, 1, 4, 2, 5)
    return cut.reshape(b, -1, rows * p[0], columns * p[1])


def patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation [b n 1] of each patch over all its numbers (MAE section 3), unbiased, 1e-6 inside."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()


def patch_channel_statistics(patches: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return mean and deviation [b n f] of each channel of each flat patch [b n f], as in Beyond Masking.

    The deviation is unbiased, with 1e-6 added to avoid division by zero; images should be in [0, 1].
    """
    mean, _, deviation = _centred(patches, channels)
    size = patches.shape[-1] // channels
    return mean.expand(*mean.shape[:-1], size).flatten(-2), deviation.expand(*mean.shape[:-1], size).flatten(-2)


def normalize_channels(patches: Tensor, channels: int) -> Tensor:
    """Return flat patches [b n f], each channel with its mean subtracted and divided by its deviation, as above."""
    _, apart, deviation = _centred(patches, channels)
    return apart.div_(deviation).flatten(-2)


def _centred(patches: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, distance to it, and deviation of each channel [b n c f/c] of flat patches [b n f]."""
    each = patches.unflatten(-1, (channels, -1))
    mean = each.mean(-1, keepdim=True)
    apart = each - mean
    # on a CPU a quarter of the time of torch's std
    deviation = torch.linalg.vector_norm(apart, dim=-1, keepdim=True) / (each.shape[-1] - 1) ** 0.5
    return mean, apart, deviation + 1e-6
