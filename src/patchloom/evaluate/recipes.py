"""Fine-tuning recipes: the papers' by name, one for small data, and changes of any value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import Parameter, signature
from typing import Any, Literal, get_type_hints

from timm.models.vision_transformer import VisionTransformer

from patchloom.data.splits import MAX_HELD_OUT
from patchloom.errors import PatchloomError
from patchloom.evaluate.report import Report
from patchloom.hints import check
from patchloom.nets.encode import width

Auto = Literal["auto"]

# Updates of a training whose epochs are auto: minutes on a CPU, an hour on a GPU. A small set needs as many as a larger
# one to move the weights as far, so it has more epochs; a large one is still seen so many times.
_UPDATES = {"cpu": 1_000, "gpu": 20_000}
_EPOCHS = (10, 300)
_VALIDATION_SHARE = 0.15
_LEAST_VALIDATION = 20  # images: with fewer, an image more or less is over 5 points, and chance would choose


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of a training; the field names are options of the protocols that train.

    Attributes:
        epochs: passes over the training images; auto gives 1,000 updates on a CPU and 20,000 on a GPU, in 10 to 300
            epochs.
        warmup_epochs: epochs in which the learning rate rises; auto is a tenth of the epochs. Scaled in proportion
            where only the epochs are changed.
        batch: images per step, repeats included; auto follows from the number of training images.
        blr: base learning rate; the peak is blr · batch / 256, followed by a cosine decay to 0.
        weight_decay: of AdamW, for weights of two and more dimensions.
        betas: of AdamW.
        layer_decay: ratio of the learning rates of a block and the next one; 1 switches it off.
        drop_path: rate of stochastic depth in the last block; it grows linearly from 0.
        smoothing: label smoothing.
        mixup: alpha of mixup; 0 switches it off. With cutmix too, each batch gets one of them at random.
        cutmix: alpha of cutmix; 0 switches it off.
        randaugment: magnitude of RandAugment, up to 10; 0 switches it off.
        randaugment_std: standard deviation of that magnitude.
        erasing: probability of random erasing.
        repeats: views of each image in a step (repeated augmentation).
        crop_scale: smallest area of a random crop, as a share of the image's; the largest is 1.
        flip: mirror half of the images. Switch it off where left and right differ in meaning.
        pooling: input of the head: class token, which is added where there is none, or mean of the patch tokens.
        ema: decay of a moving average of the weights, which is then tested instead of them; 0 switches it off.
        clip: maximal norm of the gradient; 0 switches it off.
        validation: share of the training images that is not trained on but decides which epoch's weights are tested;
            auto is 0.15, at most 2,000 images, and 0 where that is below 20 images; 0 trains on all and tests the last.
        patience: share of the epochs; so many without a higher accuracy on the validation images end the training. 1
            switches it off.
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
    validation: float | Auto = 0.0
    patience: float = 1.0

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is on."""
        return self.mixup > 0 or self.cutmix > 0

    def check(self) -> None:
        """Validate the values.

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
        for name in ("blr", "layer_decay", "crop_scale", "patience"):
            if getattr(self, name) == 0:
                raise PatchloomError(f"--{name} must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise PatchloomError(f"--betas must lie in [0, 1), not {list(self.betas)}")
        if "auto" not in (self.epochs, self.warmup_epochs) and self.warmup_epochs > self.epochs:
            raise PatchloomError(f"--warmup_epochs {self.warmup_epochs} is more than --epochs {self.epochs}: lower it")
        if self.batch != "auto" and self.mixes and self.batch % 2:
            raise PatchloomError(
                "mixup and cutmix pair the images of a batch, which must be even: use --batch_size "
                f"{self.batch + 1}, or --mixup 0 --cutmix 0"
            )
        if self.batch != "auto" and self.batch < self.repeats:
            raise PatchloomError(
                f"--batch_size {self.batch} cannot hold {self.repeats} views of an image: lower --repeats"
            )

    def settled(self, n: int, device: str) -> Recipe:
        """The recipe with every ``auto`` resolved, for ``n`` training images and a type of device."""
        kind = "cpu" if device == "cpu" else "gpu"
        batch, epochs, warmup, validation = self.batch, self.epochs, self.warmup_epochs, self.validation
        if validation == "auto":
            validation = _VALIDATION_SHARE if round(_VALIDATION_SHARE * n) >= _LEAST_VALIDATION else 0.0
        n -= validation_images(validation, n)
        if batch == "auto":
            usual = 64 if kind == "cpu" else 256
            batch = max(8, min(usual, 2 ** (n // 8).bit_length() // 2)) * self.repeats
        if epochs == "auto":
            per_epoch = max(1, n // batch)
            epochs = min(_EPOCHS[1], max(_EPOCHS[0], round(_UPDATES[kind] / per_epoch)))
        if warmup == "auto":
            warmup = epochs / 10
        warmup = round(warmup, 2)
        return replace(self, batch=batch, epochs=epochs, warmup_epochs=warmup, validation=validation)

    def plain(self) -> dict[str, Any]:
        """As a dict for JSON."""
        return {**asdict(self), "betas": list(self.betas)}


_RANGES = {
    **{"epochs": (1, float("inf")), "warmup_epochs": (0, float("inf")), "batch": (1, float("inf"))},
    **{"blr": (0, float("inf")), "weight_decay": (0, float("inf")), "layer_decay": (0, 1), "drop_path": (0, 0.99)},
    **{"smoothing": (0, 0.99), "mixup": (0, float("inf")), "cutmix": (0, float("inf")), "randaugment": (0, 10)},
    **{"randaugment_std": (0, float("inf")), "erasing": (0, 1), "repeats": (1, 100), "crop_scale": (0, 1)},
    **{"ema": (0, 0.999999), "clip": (0, float("inf")), "validation": (0, 0.9), "patience": (0, 1)},
}


def validation_images(share: float, n: int) -> int:
    """How many of ``n`` training images are held out to choose the epoch, where that is a ``share`` of them."""
    return min(max(1, round(share * n)), MAX_HELD_OUT, n - 1) if share else 0


def of_step(recipe: Recipe, n: int) -> tuple[int, int]:
    """(Distinct images, images with repeats) per step, with ``n`` images that are trained on.

    Raises:
        PatchloomError: mixup or cutmix with a single image.
    """
    images = min(max(1, recipe.batch // recipe.repeats), n)
    if recipe.mixes and images * recipe.repeats % 2:
        images -= 1
    if not images:
        raise PatchloomError("mixup and cutmix need 2 images in a batch: use --mixup 0 --cutmix 0")
    return images, images * recipe.repeats


# MAE, table 9; the other papers start from it, and it supplies the values that they do not state
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
# DeiT, table 9, on which MP3 builds; DeiT states its rate as 5e-4 for 512 images
_DEIT = Recipe(epochs=150, blr=2.5e-4, layer_decay=1.0, erasing=0.25, repeats=3, pooling="class")

# by name: the recipe of ViT-B, which is the default, and changes for other sizes
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
    d = width(vit)
    if d >= 1024 or len(vit.feature_info) >= 24:
        return "L"
    return "XS" if d < 384 else "S" if d == 384 else "B"


def recipe_for(name: str, vit: VisionTransformer, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of that name for an encoder of this size, with ``changes``, in which None means no change.

    Raises:
        PatchloomError: no such recipe, or an invalid value.
    """
    if name not in RECIPES:
        raise PatchloomError(f"there is no recipe {name}: choose one of {', '.join(RECIPES)}")
    base, sizes = RECIPES[name]
    size = size_of(vit)
    if size not in sizes and size == "XS":  # the smallest size in the papers
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


def takes_recipe(protocol: Callable[..., Report]) -> Callable[..., Report]:
    """Decorator that replaces the last parameter ``**changes`` of a protocol by an option for every field of `Recipe`.

    Signature and docstring follow from the fields and their descriptions, so that neither is written twice. The base
    learning rate may be a list, of which the best on held-out training images is chosen.
    """
    own = signature(protocol)
    # of the batch, the settings common to all protocols tell: one name for one thing
    hints = {name: hint | None for name, hint in get_type_hints(Recipe).items() if name != "batch"}
    hints["blr"] = float | list[float] | None
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint) for name, hint in hints.items()]
    own_options = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    protocol.__signature__ = own.replace(parameters=[*own_options, *added])  # type: ignore[attr-defined]
    protocol.__annotations__ |= hints
    descriptions = inspect.cleandoc(Recipe.__doc__).partition("Attributes:\n")[2]
    descriptions = re.sub(r"    batch: .*\n(?:     .*\n)*", "", descriptions).replace(
        "    blr: base learning rate;", "    blr: base learning rate, or a list to choose from;"
    )
    protocol.__doc__ = re.sub(
        r"^    changes: .*\n", lambda _: descriptions + "\n", inspect.getdoc(protocol), flags=re.M
    )
    return protocol
