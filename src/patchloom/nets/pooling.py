"""What stands for a whole image: the class token, a mean of tokens, or an instance head's answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.encode import encode, final_norm, has_class_token, patch_count, pooled_norm, prefix_count
from patchloom.nets.heads import InstanceHead, represent
from patchloom.nets.hierarchical import Encoder
from patchloom.withhold.encoder_input import all_patches

POOLED = {  # in words
    "class": "the class token",
    "prefix": "the mean of class token and registers",
    "mean": "the mean of the patch tokens",
    "both": "the class token and the mean of the patch tokens",
    "instance": "the instance representation",
}


def tokens_of(vit: Encoder, head: InstanceHead | None) -> tuple[str, ...]:
    """Names of what `pooled_tokens` returns."""
    names = ("class",) * has_class_token(vit) + ("mean",)
    names += ("prefix",) * (prefix_count(vit) > has_class_token(vit))  # without registers it would be the class token
    return names + ("instance",) * (head is not None)


def summaries(vit: Encoder, tokens: Tensor) -> dict[str, Tensor]:
    """What an encoder's tokens [b prefix+n d], of any layer, have of `tokens_of`, without a head: [b d] by name.

    These are the class token, the mean of the patch tokens, and as ``prefix`` the mean of class token and registers,
    which Pixio trains as class tokens and takes for the whole image (Yang et al. 2025, program: evaluation by kNN).
    """
    prefix = prefix_count(vit)
    found = {"class": tokens[:, 0], "mean": tokens[:, prefix:].mean(1), "prefix": tokens[:, :prefix].mean(1)}
    return {name: found[name] for name in tokens_of(vit, None)}


def pooled_tokens(vit: Encoder, images: Tensor, head: InstanceHead | None = None) -> dict[str, Tensor]:
    """Features [b d] of whole images [b c h w] by the names of `tokens_of`, after the encoder's last norm."""
    return pool(vit, encode(vit, all_patches(images, patch_count(vit)), norm=False), head)


def pool(vit: Encoder, unnormed: Tensor, head: InstanceHead | None = None) -> dict[str, Tensor]:
    """`pooled_tokens` of an encoder's tokens [b prefix+n d], which are not normed yet."""
    tokens = final_norm(vit, unnormed).float()
    found = {name: pooled_norm(vit, pooled) for name, pooled in summaries(vit, tokens).items()}
    if head is not None:
        found["instance"] = represent(vit, head, unnormed)
    return {name: found[name] for name in tokens_of(vit, head)}


def pooled_by(pooling: str, tokens: Mapping[str, Tensor]) -> Tensor:
    """Of tokens [n d] by name, those of a pooling; [n 2d] for "both", which concatenates class token and mean.

    Raises:
        PatchloomError: the encoder has no class token, no registers, or no instance head.
    """
    check_pooling(pooling, tokens)
    return torch.cat([tokens["class"], tokens["mean"]], dim=1) if pooling == "both" else tokens[pooling]


def poolings_of(tokens: Collection[str]) -> tuple[str, ...]:
    """Poolings of tokens of these names."""
    return (*tokens, "both") if {"class", "mean"} <= set(tokens) else tuple(tokens)


def check_pooling(pooling: str, tokens: Collection[str]) -> None:
    """Refuse a pooling that needs a token which is not among these.

    Raises:
        PatchloomError: a class token, registers or an instance head is missing.
    """
    if pooling not in poolings_of(tokens):
        lacks = {"instance": "module beside it", "prefix": "register tokens"}.get(pooling, "class token")
        raise PatchloomError(f"this encoder has no {lacks} to give {pooling} features: use --pooling mean")
