"""Whether an image's neighbours stay the same when only some of its patches are seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from patchloom.nets.encode import encode, patch_count
from patchloom.nets.hierarchical import Encoder
from patchloom.nets.pooling import pool
from patchloom.patches.partition import share_of
from patchloom.questions.agreement import nearest
from patchloom.withhold.encoder_input import all_patches, mask_patches


def neighbours_kept(whole: Tensor, partial: Tensor, k: int = 10) -> Tensor:
    """The share of each image's k nearest others that are so for a part of its patches as well, [n] float64.

    Nearest by cosine; the others are seen whole both times. By chance it is k / (n - 1).

    Args:
        whole: [n d] features of all patches.
        partial: [n d] those of some patches of the same images.
        k: neighbours.

    Raises:
        ValueError: there are not more than k others, all of which would be kept.
    """
    n = len(whole)
    if n - 1 <= k:
        raise ValueError(f"of {n} images each has {n - 1} others: {k} nearest would be all of them")
    own = torch.arange(n)
    before, after = (nearest(queries, whole, own, k)[0] for queries in (whole, partial))
    return (before[:, :, None] == after[:, None]).any(2).double().mean(1)


def partial_means(vit: Encoder, images: Tensor, order: Tensor, shares: Sequence[float]) -> dict[float, Tensor]:
    """Means [b d] of the patch tokens where only a share of the patches enters, by the shares.

    Args:
        vit: a plain ViT: of a Swin no patches can be left out as these are.
        images: [b c h w] normalised.
        order: [b n] all patches of each image in a random order; the first ones enter, at least one.
        shares: of the patches.
    """
    n = patch_count(vit)
    given, found = all_patches(images, n), {}
    for share in shares:
        some = mask_patches(given, order[:, : max(1, share_of(n, share))])
        found[share] = pool(vit, encode(vit, some, norm=False), None)["mean"]
    return found
