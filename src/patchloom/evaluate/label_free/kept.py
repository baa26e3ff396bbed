"""Whether an image's neighbours stay the same when only some of its patches are seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.nets.encode import encode, patch_count
from patchloom.nets.hierarchical import Encoder
from patchloom.nets.pooling import pool
from patchloom.patches.partition import share_of
from patchloom.withhold.encoder_input import all_patches, mask_patches

_AT_ONCE = 1024  # images whose cosines are in memory
_TIED = 1e-6  # difference of two cosines below which float32 features cannot tell which is the nearer one


def neighbours_kept(whole: Tensor, partial: Tensor, k: int = 10) -> Tensor:
    """The share of each image's k nearest others that are so for a part of its patches as well, [n] float64.

    Nearest by cosine; the others are seen whole both times. By chance it is k / (n - 1). Others whose cosines differ by
    no more than float32 resolves are equally near, and share the places that are left among the k: what is counted is
    the expected share if chance chooses among them. Of constant features it is chance.

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
    found = []
    for own in torch.arange(n).split(_AT_ONCE):
        before, after = (_chosen(queries[own], whole, own, k) for queries in (whole, partial))
        found.append((before * after).sum(1) / k)
    return torch.cat(found)


def _chosen(queries: Tensor, others: Tensor, own: Tensor, k: int) -> Tensor:
    """Return how probable it is that each other is among the k nearest, [q n] float64; the sum of each row is k.

    Args:
        queries: [q d].
        others: [n d].
        own: [q] the place of each query among the others, where it is not looked for.
        k: neighbours.
    """
    near = F.normalize(queries.double(), dim=1) @ F.normalize(others.double(), dim=1).T
    near[torch.arange(len(own)), own] = -torch.inf
    last = near.topk(k, dim=1).values[:, -1:]
    above, level = near > last + _TIED, (near - last).abs() <= _TIED
    left = (k - above.sum(1, keepdim=True)) / level.sum(1, keepdim=True)
    return above.double() + left * level


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
