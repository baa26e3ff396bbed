"""The recipes by name: the papers', and one for small data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.evaluate.recipes import ProbeRecipe, Recipe
from patchloom.nets.encode import width
from patchloom.nets.hierarchical import Encoder, is_hierarchical

# the recipe of ViT-B, which is the default, and changes for other sizes
Sized = tuple[Recipe, dict[str, dict[str, Any]]]

# MAE, Table 9; the other papers start from it, and it supplies the values that they do not state
_MAE = Recipe()
# for small data: light, since the papers' full augmentation would need many times their epochs
_SMALL = Recipe(
    epochs="auto",
    warmup_epochs="auto",
    batch="auto",
    drop_path=0.0,
    mixup=0.0,
    cutmix=0.0,
    randaugment=0.0,
    crop_scale=0.6,
    clip=5.0,
    validation="auto",
    patience=0.3,
)
# SimMIM's, which LUT takes over where it stands on SimMIM (LUT, appendix B.1); its rate is 1.25e-3 for 512 images
_SIMMIM = Recipe(warmup_epochs=20, batch=2048, blr=6.25e-4, layer_decay=0.65, erasing=0.25, clip=5.0)
# DeiT, Table 9, on which MP3 builds, with the batch of MP3 on ImageNet; DeiT states its rate as 5e-4 for 512 images
_MP3 = Recipe(epochs=150, batch=2048, blr=2.5e-4, layer_decay=1.0, erasing=0.25, repeats=3, pooling="class")
# as long as MP3 trains from scratch on small sets, of which it states the batch, too
_MP3_SMALL = replace(_MP3, epochs=400)
# MP3 on speech, section 4.3. The text at hand lacks both learning rates, and states no patience: these are ours
_MP3_SPEECH = Recipe(
    updates=30_000,
    warmup_updates=500,
    halve_every=10_000,
    batch=256,
    lr=1e-3,
    weight_decay=0.0,
    layer_decay=1.0,
    drop_path=0.0,
    dropout=0.1,
    mixup=0.0,
    cutmix=0.0,
    randaugment=0.0,
    pooling="class",
    validation="auto",
    patience=0.5,
)
# ExtreMA; 1e-3 with 0.75 is for encoders of ImageNet-1k, 5e-4 with 0.65 for those of ImageNet-22k
_EXTREMA_S = {"S": {"epochs": 200}}

RECIPES: dict[str, Sized] = {
    "small": (_SMALL, {"XS": {"blr": 4e-3}}),
    "mae": (_MAE, {"L": {"epochs": 50}}),
    "droppos": (replace(_MAE, layer_decay=0.8), {"L": {"epochs": 50}}),
    "mp3": (_MP3, {}),
    "mp3-cifar100": (replace(_MP3_SMALL, batch=256), {}),
    "mp3-tiny-imagenet": (replace(_MP3_SMALL, batch=512), {}),
    "mp3-speech": (_MP3_SPEECH, {}),
    "restore": (replace(_MAE, pooling="class"), {}),
    "simmim": (_SIMMIM, {}),
    "extrema": (_MAE, _EXTREMA_S),
    "extrema-22k": (replace(_MAE, blr=5e-4, layer_decay=0.65), _EXTREMA_S),
    # 1 % and 10 % of the labels, at a rate that no batch scales
    "extrema-few": (replace(_MAE, epochs=1000, lr=5e-6), {}),
    "lut": (
        replace(_MAE, blr=2.5e-4, layer_decay=0.65),
        {"S": {"epochs": 300, "blr": 5e-4, "layer_decay": 0.75}, "L": {"epochs": 50, "blr": 1e-3}},
    ),
}

# linear probes: MAE, Table 10 and appendix A.1; ExtreMA, Table 14
PROBES: dict[str, Sized] = {
    "mae": (ProbeRecipe(), {}),
    "extrema": (ProbeRecipe(batch=4096, pooling="instance"), {}),
}


def size_of(vit: Encoder) -> str:
    """XS (narrower than ViT-S), S, B or L, by width and depth; of a Swin B up to Swin-B, whose last stage is 1024."""
    d = width(vit)
    if d > 1024 or (not is_hierarchical(vit) and (d == 1024 or len(vit.feature_info) >= 24)):
        return "L"
    return "XS" if d < 384 else "S" if d == 384 else "B"


def published(name: str, vit: Encoder, known: Mapping[str, Sized] = RECIPES) -> Recipe:
    """The recipe of that name for an encoder of this size, as it stands.

    Raises:
        PatchloomError: no such recipe.
    """
    if name not in known:
        raise PatchloomError(f"there is no recipe {name}: choose one of {', '.join(known)}")
    base, sizes = known[name]
    size = size_of(vit)
    if size not in sizes and size == "XS":  # the smallest size in the papers
        size = "S"
    return replace(base, **sizes.get(size, {}))


def recipe_for(name: str, vit: Encoder, changes: Mapping[str, Any], known: Mapping[str, Sized] = RECIPES) -> Recipe:
    """The recipe of that name for an encoder of this size, with ``changes``, in which None means no change.

    Raises:
        PatchloomError: no such recipe, or an invalid value.
    """
    recipe = published(name, vit, known)
    given = {key: value for key, value in changes.items() if value is not None}
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    if given.get("lr") and "blr" in given:
        raise PatchloomError("--lr and --blr both say what the learning rate is: give one of them")
    if "blr" in given:
        given["lr"] = 0.0
    recipe = replace(recipe, **given, **_in_proportion(recipe, given))
    recipe.check()
    return recipe


def _in_proportion(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a recipe that change with its length, if they are not ``given``.

    Raises:
        PatchloomError: the length is given in epochs and in updates.
    """
    epochs, updates = given.get("epochs"), given.get("updates", recipe.updates)
    in_epochs = [name for name in ("epochs", "warmup_epochs") if name in given]
    if updates and in_epochs:
        why = f"--updates {updates:,}" if "updates" in given else f"this recipe, which makes {updates:,} updates"
        raise PatchloomError(f"--{in_epochs[0]} does not go with {why}: give --updates and --warmup_updates")
    if not updates and given.get("warmup_updates"):
        raise PatchloomError("--warmup_updates is for a training whose --updates are counted: give --warmup_epochs")
    timed = "auto" not in (recipe.epochs, recipe.warmup_epochs)
    scaled: dict[str, Any] = {}
    if updates and recipe.updates:
        scaled = {"warmup_updates": recipe.warmup_updates, "halve_every": recipe.halve_every}
        scaled = {name: math.ceil(value * updates / recipe.updates) for name, value in scaled.items()}
    elif updates:
        share = recipe.warmup_epochs / recipe.epochs if timed else 0.1
        scaled = {"warmup_updates": round(share * updates)}
    elif timed and isinstance(epochs, int):
        scaled = {"warmup_epochs": recipe.warmup_epochs * epochs / recipe.epochs}
    return {name: value for name, value in scaled.items() if name not in given}
