"""How a classifier is trained: the papers' fine-tuning recipes by name, ours for small data, and any value replaced."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import Parameter, signature
from typing import Any, Literal, get_type_hints

from timm.models.vision_transformer import VisionTransformer

from patchloom.errors import PatchloomError
from patchloom.hints import check

Auto = Literal["auto"]

# Images seen by the end of a training whose epochs are auto: minutes on a CPU, an hour on a GPU.
_SAMPLES = {"cpu": 100_000, "gpu": 5_000_000}
_EPOCHS = (10, 300)


@dataclass(frozen=True)
class Recipe:
    """Every value of a training; the field names are options of the protocols that train.

    Attributes:
        epochs: passes over the training images; auto goes by a budget of samples.
        warmup_epochs: passes over which the learning rate rises; auto is a tenth of the epochs. In proportion to the
            recipe's where only the epochs are replaced.
        batch: images a step, repeats included; auto goes by the number of images.
        blr: base learning rate; the peak is blr · batch / 256. A cosine leads to 0.
        weight_decay: AdamW's, for weights of two and more dimensions.
        betas: AdamW's.
        layer_decay: the learning rate of a block over that of the next one; 1 switches it off.
        drop_path: largest rate of stochastic depth, that of the last block.
        smoothing: of the labels.
        mixup: alpha of mixup; 0 switches it off. Where cutmix is on too, a coin decides for each batch.
        cutmix: alpha of cutmix; 0 switches it off.
        randaugment: magnitude of RandAugment, up to 10; 0 switches it off.
        randaugment_std: standard deviation of that magnitude.
        erasing: probability of random erasing.
        repeats: views of each image in a step (repeated augmentation).
        crop_scale: smallest share of an image's area that a random crop shows; crops go up to the whole.
        flip: mirror half of the images. Switch it off where left and right matter.
        pooling: what the head sees: the class token, which is added where there is none, or the mean of the patches.
        ema: decay of a moving average of the weights, which is then what is tested; 0 switches it off.
        clip: largest norm of the gradient; 0 switches it off.
    """

    epochs: int | Auto = 100
    warmup_epochs: float | Auto = 5
    batch: int | Auto = 1024
    blr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float = 0.75
    drop_path: float = 0.1
    smoothing: float = 0.1
    mixup: float = 0.8
    cutmix: float = 1.0
    randaugment: float = 9.0
    randaugment_std: float = 0.5
    erasing: float = 0.0
    repeats: int = 1
    crop_scale: float = 0.08
    flip: bool = True
    pooling: Literal["class", "mean"] = "mean"
    ema: float = 0.0
    clip: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return self.mixup > 0 or self.cutmix > 0

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            PatchloomError: a value of another type, or out of its range.
        """
        for name, hint in get_type_hints(Recipe).items():
            check(name, getattr(self, name), hint)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value != "auto" and not low <= value <= high:
                bounds = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
                raise PatchloomError(f"--{name} must be {bounds}, not {value}")
        if self.blr == 0 or self.layer_decay == 0 or self.crop_scale == 0:
            zero = next(name for name in ("blr", "layer_decay", "crop_scale") if getattr(self, name) == 0)
            raise PatchloomError(f"--{zero} must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise PatchloomError(f"--betas must lie in [0, 1), not {list(self.betas)}")
        if "auto" not in (self.epochs, self.warmup_epochs) and self.warmup_epochs > self.epochs:
            raise PatchloomError(f"--warmup_epochs {self.warmup_epochs} is more than --epochs {self.epochs}: lower it")
        if self.batch != "auto" and self.mixes and self.batch % 2:
            raise PatchloomError(
                f"mixup and cutmix pair the images of a batch, which must be even: use --batch {self.batch + 1}, or "
                "--mixup 0 --cutmix 0"
            )
        if self.batch != "auto" and self.batch < self.repeats:
            raise PatchloomError(f"--batch {self.batch} cannot hold {self.repeats} views of an image: lower --repeats")

    def settled(self, n: int, device: str) -> Recipe:
        """Without ``auto``, for ``n`` training images and a type of device."""
        kind = "cpu" if device == "cpu" else "gpu"
        batch, epochs, warmup = self.batch, self.epochs, self.warmup_epochs
        if batch == "auto":
            usual = 64 if kind == "cpu" else 256
            batch = max(8, min(usual, 2 ** (n // 8).bit_length() // 2)) * self.repeats
        if epochs == "auto":
            epochs = min(_EPOCHS[1], max(_EPOCHS[0], round(_SAMPLES[kind] / n)))
        if warmup == "auto":
            warmup = epochs / 10
        return replace(self, batch=batch, epochs=epochs, warmup_epochs=round(warmup, 2))

    def plain(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {**asdict(self), "betas": list(self.betas)}


_RANGES = {
    **{"epochs": (1, float("inf")), "warmup_epochs": (0, float("inf")), "batch": (1, float("inf"))},
    **{"blr": (0, float("inf")), "weight_decay": (0, float("inf")), "layer_decay": (0, 1), "drop_path": (0, 0.99)},
    **{"smoothing": (0, 0.99), "mixup": (0, float("inf")), "cutmix": (0, float("inf")), "randaugment": (0, 10)},
    **{"randaugment_std": (0, float("inf")), "erasing": (0, 1), "repeats": (1, 100), "crop_scale": (0, 1)},
    **{"ema": (0, 0.999999), "clip": (0, float("inf"))},
}

# MAE's paper, table 9; on it the papers' authors build theirs, and it speaks where theirs are silent
_MAE = Recipe()
# ours: light, since a small set with all of the papers' augmentation would want many times their epochs
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
)
# DeiT, table 9, on which MP3 builds; DeiT states its rate as 5e-4 for 512 images
_DEIT = Recipe(epochs=150, blr=2.5e-4, layer_decay=1.0, erasing=0.25, repeats=3, pooling="class")

# by name: for ViT-B and whatever has no entry of its own; and what is different for other sizes
RECIPES: dict[str, tuple[Recipe, dict[str, dict[str, Any]]]] = {
    "small": (_SMALL, {"XS": {"blr": 4e-3}}),
    "mae": (_MAE, {"L": {"epochs": 50}}),
    "droppos": (replace(_MAE, layer_decay=0.8), {"L": {"epochs": 50}}),
    "mp3": (_DEIT, {}),
    "extrema": (replace(_MAE, layer_decay=0.65), {"S": {"epochs": 200, "layer_decay": 0.75}}),
    "lut": (
        replace(_MAE, blr=2.5e-4, layer_decay=0.65),
        {"S": {"epochs": 300, "blr": 5e-4, "layer_decay": 0.75}, "L": {"epochs": 50, "blr": 1e-3}},
    ),
}


def size_of(vit: VisionTransformer) -> str:
    """XS (narrower than ViT-S), S, B or L, by width and depth."""
    if vit.embed_dim >= 1024 or len(vit.feature_info) >= 24:
        return "L"
    return "XS" if vit.embed_dim < 384 else "S" if vit.embed_dim == 384 else "B"


def recipe_for(name: str, vit: VisionTransformer, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of that name for an encoder of this size, with ``changes``; values of None change nothing.

    Raises:
        PatchloomError: no such recipe, or a value that cannot be.
    """
    if name not in RECIPES:
        raise PatchloomError(f"there is no recipe {name}: choose one of {', '.join(RECIPES)}")
    base, sizes = RECIPES[name]
    size = size_of(vit)
    if size not in sizes and size == "XS":  # the papers' smallest
        size = "S"
    recipe = replace(base, **sizes.get(size, {}))
    given = {key: value for key, value in changes.items() if value is not None}
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    before, epochs = recipe.epochs, given.get("epochs")
    if "auto" not in (before, recipe.warmup_epochs) and isinstance(epochs, int) and "warmup_epochs" not in given:
        given["warmup_epochs"] = recipe.warmup_epochs * epochs / before
    recipe = replace(recipe, **given)
    recipe.check()
    return recipe


def takes_recipe(protocol: Callable) -> Callable:
    """Give a protocol, whose last parameter is ``**changes``, an option for every value of a `Recipe`.

    The options come from the fields and their descriptions, so that neither is written twice. The base learning rate
    may be a list, of which the best on held-out training images is taken.
    """
    own = signature(protocol)
    hints = {name: hint | None for name, hint in get_type_hints(Recipe).items()}
    hints["blr"] = float | list[float] | None
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint) for name, hint in hints.items()]
    own_options = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    protocol.__signature__ = own.replace(parameters=[*own_options, *added])
    protocol.__annotations__ |= hints
    descriptions = inspect.cleandoc(Recipe.__doc__).partition("Attributes:\n")[2]
    descriptions = descriptions.replace(
        "    blr: base learning rate;", "    blr: base learning rate, or a list to choose from;"
    )
    protocol.__doc__ = re.sub(
        r"^    changes: .*\n", lambda _: descriptions + "\n", inspect.getdoc(protocol), flags=re.M
    )
    return protocol
