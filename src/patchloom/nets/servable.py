"""Which of timm's models `encode` can serve, and which to take instead of another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

import timm
import torch
from timm.layers import Attention, PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.hints import nearest, squeezed
from patchloom.nets.hierarchical import check_hierarchical, is_hierarchical

_ALIKE = 20  # names that are tried when one like another is looked for


def check_servable(vit: nn.Module, name: str) -> None:
    """Refuse, by name, a model whose forward pass `encode` would not reproduce, and say which one to take instead.

    Raises:
        PatchloomError: neither a plain ViT nor a plain Swin, or one with parts that are not known.
    """
    if not _is_plain(vit):
        other = served_like(name)
        raise PatchloomError(
            f"{name} is timm's {type(vit).__name__}, and patchloom serves its plain VisionTransformer and "
            f"SwinTransformer only{f': the nearest of these is {other}' if other else ''}"
        )
    if is_hierarchical(vit):
        check_hierarchical(vit, name)
    elif unknown := _unknown_parts(vit):
        raise PatchloomError(f"{name} has {unknown[0]} inside, which patchloom cannot serve: choose a plain ViT")


def _is_plain(vit: nn.Module) -> bool:
    return is_hierarchical(vit) or type(vit) is VisionTransformer


def _unknown_parts(vit: VisionTransformer) -> list[str]:
    """What is inside a ViT besides what `encode` knows, in words."""
    unknown = [type(block).__name__ for block in vit.blocks if type(block) is not Block]
    unknown += [
        type(getattr(block, "attn", None)).__name__
        for block in vit.blocks
        if type(getattr(block, "attn", None)) is not Attention
    ]
    unknown += ["gated attention" for block in vit.blocks if getattr(getattr(block, "attn", None), "gate", None)]
    if type(vit.patch_embed) is not PatchEmbed:
        unknown.append(type(vit.patch_embed).__name__)
    if not isinstance(vit.patch_drop, nn.Identity):
        unknown.append("patch_drop_rate")
    return unknown


def served_like(name: str) -> str:
    """The model that can be served whose name is most like that of one that cannot; "" if none is.

    Of a name with the tag of its weights, one with weights that timm publishes.
    """
    model, tag, _ = name.partition(".")
    tagged = {one.partition(".")[0]: one for one in reversed(timm.list_models(["vit_*", "swin_*"], pretrained=True))}
    alike = get_close_matches(model, tagged, n=_ALIKE)
    alike.sort(key=lambda one: -len(_words(one) & _words(model)))  # a dinov3 is nearer to dinov2 than to radio_v3
    return next((tagged[one] if tag else one for one in alike if _servable(one)), "")


def _words(model: str) -> set[str]:
    """Of a name, without numbers."""
    return set(re.sub(r"\d", "", model).split("_"))


def models_like(word: str, pretrained: bool = False, own: Iterable[str] = ()) -> list[str]:
    """Up to three models that can be served and whose names hold ``word``, small ones first, or one that is like it.

    Args:
        word: what was given for a name.
        pretrained: only those with weights that timm publishes, which are part of the name.
        own: names of others that may have been meant.
    """
    names = timm.list_models(["vit_*", "swin_*"], pretrained=pretrained)
    if (typed := squeezed(word.removeprefix("timm:"))) in ("", "vit"):
        return []
    holding = sorted((name for name in names if typed in squeezed(name)), key=_size)
    found = list(islice(filter(_servable, holding), 3))
    near = nearest(word.removeprefix("timm:"), [*own, *names])
    return found or ([near] if near else [])


def _size(name: str) -> tuple[int, int]:
    sizes = ("tiny", "small", "base", "large")
    return next((i for i, size in enumerate(sizes) if size in name), len(sizes)), len(name)


def _servable(name: str) -> bool:
    try:
        with torch.device("meta"):
            vit = timm.create_model(name.partition(".")[0], num_classes=0)
        if _is_plain(vit):
            check_servable(vit, name)
            return True
    except Exception:  # timm's constructors raise many kinds
        pass
    return False
