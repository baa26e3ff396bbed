"""What a recipe is: the values by which a classifier or a linear probe is trained, each of them an option."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_type_hints

from patchloom.audio.augment import SHIFT
from patchloom.data.source import Source
from patchloom.data.splits import MAX_HELD_OUT
from patchloom.errors import PatchloomError, check_type
from patchloom.nets.encode import width
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.system.distributed import refused_by_all, world

Auto = Literal["auto"]

# Updates of a training whose epochs are auto: minutes on a CPU, an hour on a GPU. A small set needs as many as a larger
# one to move the weights as far, so it has more epochs; a large one is still seen so many times.
_UPDATES = {"cpu": 1_000, "gpu": 20_000}
_EPOCHS = (10, 300)
_VALIDATION_SHARE = 0.15
_LEAST_VALIDATION = 20  # images: with fewer, an image more or less is over 5 points, and chance would choose

# options that act on one kind of data alone, by the noun of a source
ONLY_FOR = {
    "images": ("cutmix", "randaugment", "randaugment_std", "erasing", "crop_scale", "flip"),
    "recordings": ("shift", "noise_share", "noise_volume"),
}
_AT_ONCE = 256  # images that a frozen encoder takes


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of a training; the field names are options of the protocols that train.

    Attributes:
        epochs: passes over the training images; auto gives 1,000 updates on a CPU and 20,000 on a GPU, in 10 to 300
            epochs.
        warmup_epochs: epochs in which the learning rate rises; auto is a tenth of the epochs. Scaled in proportion
            where only the epochs are changed.
        updates: so many updates instead of epochs; 0 goes by the epochs.
        warmup_updates: updates of the warm-up, where these are counted. Scaled in proportion, as halve_every is, where
            only the updates are changed.
        halve_every: updates after which the learning rate is halved, again and again, after a warm-up at a tenth of
            the peak (MP3's speech models); 0 lets it rise in the warm-up, and fall to 0 as a cosine.
        batch: images per step, repeats included; auto follows from the number of training images.
        blr: base learning rate; the peak is blr · batch / 256.
        lr: the peak itself, whatever the batch, instead of a base learning rate; 0 goes by blr.
        weight_decay: of AdamW, for weights of two and more dimensions.
        betas: of AdamW.
        layer_decay: ratio of the learning rates of a block and the next one; 1 switches it off.
        drop_path: rate of stochastic depth in the last block; it grows linearly from 0.
        dropout: rate of dropout in the encoder: of the tokens that enter the blocks, and of the outputs of attention
            and of both layers of each MLP.
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
        shift: of a recording: the largest shift to either side, in seconds.
        noise_share: of the recordings to which background noise is added, where the data brings some.
        noise_volume: the largest factor of that noise; each is drawn evenly from 0.
        recordings: whether they are trained on, so that what cuts and recolours images does not act; no option.
    """

    epochs: int | Auto = 100
    warmup_epochs: float | Auto = 5
    updates: int = 0
    warmup_updates: int = 0
    halve_every: int = 0
    batch: int | Auto = 1024
    blr: float = 1e-3
    lr: float = 0.0
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float = 0.75
    drop_path: float = 0.1
    dropout: float = 0.0
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
    shift: float = SHIFT
    noise_share: float = 0.8
    noise_volume: float = 0.1
    recordings: bool = False

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is on."""
        return self.mixup > 0 or self.cutmix > 0

    def check(self) -> None:
        """Validate the values."""
        check_values(self, _RANGES, ("blr", "layer_decay", "crop_scale", "patience"))
        if self.epochs != "auto" and self.warmup_epochs != "auto" and self.warmup_epochs > self.epochs:
            raise PatchloomError(f"--warmup_epochs {self.warmup_epochs} is more than --epochs {self.epochs}: lower it")
        if self.warmup_updates > self.updates:
            raise PatchloomError(f"--warmup_updates {self.warmup_updates:,} is more than --updates {self.updates:,}")
        if self.batch != "auto" and self.mixes and self.batch % 2:
            raise PatchloomError(
                "mixup and cutmix pair the images of a batch, which must be even: use --batch_size "
                f"{self.batch + 1}, or --mixup 0 --cutmix 0"
            )
        if self.batch != "auto" and self.batch < self.repeats:
            raise PatchloomError(
                f"--batch_size {self.batch} cannot hold {self.repeats} views of an image: lower --repeats"
            )

    def acting_on(self, source: Source) -> Recipe:
        """The recipe as it acts on what a source holds."""
        return self.heard(bool(source.noise)) if source.noun == "recordings" else self

    def heard(self, noise: bool) -> Recipe:
        """The recipe for recordings, which are shifted and mixed with noise, if there is any, instead of cut as images.

        Mixup is of whole pictures, so it acts on those of recordings, too.
        """
        unlike: dict[str, Any] = {"cutmix": 0.0, "randaugment": 0.0, "erasing": 0.0, "crop_scale": 1.0, "flip": False}
        return replace(self, **unlike, recordings=True, noise_share=self.noise_share if noise else 0.0)

    def settled(self, n: int, device: str, own_validation: bool = False) -> ResolvedRecipe:
        """The recipe with every ``auto`` resolved."""
        kind = "cpu" if device == "cpu" else "gpu"
        batch, epochs, warmup, validation = self.batch, self.epochs, self.warmup_epochs, self.validation
        if validation == "auto":
            enough = own_validation or round(_VALIDATION_SHARE * n) >= _LEAST_VALIDATION
            validation = _VALIDATION_SHARE if enough else 0.0
        n -= 0 if own_validation else validation_images(validation, n)
        if batch == "auto":
            usual = 64 if kind == "cpu" else 256
            images = max(8, min(usual, 2 ** (n // 8).bit_length() // 2))
            batch = -(-images // (unit := self.unit())) * unit * self.repeats
        if epochs == "auto":
            per_epoch = max(1, n // batch)
            fewest, most = _EPOCHS
            epochs = int(min(most, max(fewest, round(_UPDATES[kind] / per_epoch))))
        rises = round(epochs / 10 if warmup == "auto" else warmup, 2)
        return self._resolved(batch=batch, epochs=epochs, warmup_epochs=rises, validation=validation)

    def _resolved(self, **chosen: Any) -> ResolvedRecipe:
        return ResolvedRecipe(**vars(self) | chosen)

    def unit(self, accumulate: int = 1) -> int:
        """Images that a step must have a multiple of: each process, and each part of its share, takes as many.

        Mixup and cutmix pair the views that are computed together.
        """
        return world() * accumulate * (2 if self.mixes and self.repeats % 2 else 1)

    def peak(self, batch: int) -> float:
        """The highest learning rate, where a step has ``batch`` images."""
        return self.lr or self.blr * batch / 256

    def rate_option(self) -> str:
        """The option that says what the learning rate is, with its value."""
        return f"--lr (now {self.lr:g})" if self.lr else f"--blr (now {self.blr:g})"

    def parts(self, images: int) -> int:
        """Of how many batches that are read and encoded one after the other a step of ``images`` is made."""
        return 1

    def plain(self) -> dict[str, Any]:
        """As a dict for JSON, without what does not act."""
        idle = {"recordings", *ONLY_FOR["images" if self.recordings else "recordings"]}
        idle |= {"epochs", "warmup_epochs"} if self.updates else {"updates", "warmup_updates"}
        idle |= {name for name in ("halve_every", "dropout") if not getattr(self, name)}
        idle |= set() if self.noise_share else {"noise_share", "noise_volume"}
        return {name: value for name, value in {**asdict(self), "betas": list(self.betas)}.items() if name not in idle}


@dataclass(frozen=True)
class ProbeRecipe(Recipe):
    """Hyper-parameters of the papers' linear probe on a frozen encoder, trained by LARS on random crops.

    What else a `Recipe` has is switched off in it.

    Attributes:
        momentum: of LARS.
    """

    epochs: int | Auto = 90
    warmup_epochs: float | Auto = 10
    batch: int | Auto = 16_384
    blr: float = 0.1
    weight_decay: float = 0.0
    layer_decay: float = 1.0
    drop_path: float = 0.0
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    randaugment: float = 0.0
    pooling: Literal["class", "mean", "instance"] = "class"  # type: ignore[assignment]  # a probe reads one more
    noise_share: float = 0.0
    momentum: float = 0.9

    def check(self) -> None:
        """See `Recipe`; a batch norm needs two images."""
        super().check()
        if self.batch == 1:
            raise PatchloomError("the linear probe norms over the images of a batch: use --batch_size 2 or more")

    def parts(self, images: int) -> int:
        """See `Recipe`: a step has thousands of images, and only features of them have to be in memory."""
        return math.ceil(images / _AT_ONCE)

    def plain(self) -> dict[str, Any]:
        """As a dict for JSON, without what is switched off."""
        own = "shift" if self.recordings else "crop_scale flip"
        told = f"epochs warmup_epochs batch blr lr weight_decay momentum {own} pooling"
        return {"optimizer": "LARS", **{name: getattr(self, name) for name in told.split()}}

    def _resolved(self, **chosen: Any) -> ResolvedProbeRecipe:
        return ResolvedProbeRecipe(**vars(self) | chosen)


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe(Recipe):
    """`Recipe` without ``auto``, as `Recipe.settled` makes it: a training takes no other."""

    epochs: int
    warmup_epochs: float
    batch: int
    validation: float

    def __post_init__(self) -> None:
        refuse_auto(self)


@dataclass(frozen=True, kw_only=True)
class ResolvedProbeRecipe(ResolvedRecipe, ProbeRecipe):
    """`ProbeRecipe` without ``auto``."""


def refuse_auto(recipe: Any, but: str = "") -> None:
    """Refuse a resolved recipe in which a value is still ``auto``, ``but`` for one."""
    if left := [name for name, value in vars(recipe).items() if value == "auto" and name != but]:
        raise ValueError(f"{left[0]} is auto in a resolved recipe")


_RANGES = {
    **{"epochs": (1, float("inf")), "warmup_epochs": (0, float("inf")), "batch": (1, float("inf"))},
    **{"blr": (0, float("inf")), "lr": (0, float("inf")), "momentum": (0, 0.9999), "weight_decay": (0, float("inf"))},
    **{"layer_decay": (0, 1), "drop_path": (0, 0.99)},
    **{"smoothing": (0, 0.99), "mixup": (0, float("inf")), "cutmix": (0, float("inf")), "randaugment": (0, 10)},
    **{"randaugment_std": (0, float("inf")), "erasing": (0, 1), "repeats": (1, 100), "crop_scale": (0, 1)},
    **{"ema": (0, 0.999999), "clip": (0, float("inf")), "validation": (0, 0.9), "patience": (0, 1)},
    **{name: (0, float("inf")) for name in ("updates", "warmup_updates", "halve_every", "noise_volume")},
    **{"dropout": (0, 0.99), "shift": (0, 60), "noise_share": (0, 1)},
}


def check_values(recipe: Any, ranges: Mapping[str, tuple[float, float]], positive: Iterable[str]) -> None:
    """Validate the values of a recipe's fields."""
    for name, hint in get_type_hints(type(recipe)).items():
        check_type(name, getattr(recipe, name), hint)
    for name, (low, high) in ranges.items():
        value = getattr(recipe, name, low)
        if not isinstance(value, str) and not all(
            low <= one <= high for one in (value if isinstance(value, tuple) else (value,))
        ):
            bounds = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
            raise PatchloomError(f"--{name} must be {bounds}, not {value}")
    for name in positive:
        if getattr(recipe, name) == 0:
            raise PatchloomError(f"--{name} must be above 0")
    if not all(0 <= beta < 1 for beta in recipe.betas):
        raise PatchloomError(f"--betas must lie in [0, 1), not {list(recipe.betas)}")


def validation_images(share: float, n: int) -> int:
    """How many of ``n`` training images are held out to choose the epoch, where that is a ``share`` of them."""
    return min(max(1, round(share * n)), MAX_HELD_OUT, n - 1) if share else 0


def images_per_step(recipe: ResolvedRecipe, n: int, accumulate: int = 1) -> tuple[int, int]:
    """(Distinct images, images with repeats) per step of all processes, with ``n`` images that are trained on."""
    images = min(max(1, recipe.batch // recipe.repeats), n)
    images -= images % (unit := recipe.unit(accumulate))
    # fewer images may be of fewer parts, which divide them no more
    while images and (left := images % (recipe.parts(images) * unit)):
        images -= left
    if not images and unit > 2:
        raise refused_by_all(f"{n:,} images are too few for steps of {unit}, which processes and --accumulate share")
    if not images:
        raise PatchloomError("mixup and cutmix need 2 images in a batch: use --mixup 0 --cutmix 0")
    return images, images * recipe.repeats


def check_shares(recipe: ResolvedRecipe, accumulate: int) -> None:
    """Refuse a batch that the processes cannot share evenly, or not in so many parts."""
    images, unit = max(1, recipe.batch // recipe.repeats), recipe.unit(accumulate)
    if world() * accumulate == 1 or images % unit == 0:
        return
    by = " and ".join(
        [f"by {world()} processes"] * (world() > 1) + [f"in {accumulate} parts (--accumulate)"] * (accumulate > 1)
    )
    pairs = ", with pairs for mixup" if unit > world() * accumulate else ""
    raise refused_by_all(
        f"--batch_size {recipe.batch} cannot be shared {by}{pairs}: give a multiple of {unit * recipe.repeats}"
    )


# The recipes by name: the papers', and one for small data.


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


def published_recipe(name: str, vit: Encoder, known: Mapping[str, Sized] = RECIPES) -> Recipe:
    """The recipe of that name for an encoder of this size, as it stands."""
    if name not in known:
        raise PatchloomError(f"there is no recipe {name}: choose one of {', '.join(known)}")
    base, sizes = known[name]
    size = size_of(vit)
    if size not in sizes and size == "XS":  # the smallest size in the papers
        size = "S"
    return replace(base, **sizes.get(size, {}))


def recipe_for(name: str, vit: Encoder, changes: Mapping[str, Any], known: Mapping[str, Sized] = RECIPES) -> Recipe:
    """The recipe of that name for an encoder of this size, with ``changes``, in which None means no change."""
    recipe = published_recipe(name, vit, known)
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
    """Values of a recipe that change with its length, if they are not ``given``."""
    epochs, updates = given.get("epochs"), given.get("updates", recipe.updates)
    in_epochs = [name for name in ("epochs", "warmup_epochs") if name in given]
    if updates and in_epochs:
        why = f"--updates {updates:,}" if "updates" in given else f"this recipe, which makes {updates:,} updates"
        raise PatchloomError(f"--{in_epochs[0]} does not go with {why}: give --updates and --warmup_updates")
    if not updates and given.get("warmup_updates"):
        raise PatchloomError("--warmup_updates is for a training whose --updates are counted: give --warmup_epochs")
    was, warmup = recipe.epochs, recipe.warmup_epochs
    scaled: dict[str, Any] = {}
    if updates and recipe.updates:
        scaled = {"warmup_updates": recipe.warmup_updates, "halve_every": recipe.halve_every}
        scaled = {name: math.ceil(value * updates / recipe.updates) for name, value in scaled.items()}
    elif updates:
        share = 0.1 if was == "auto" or warmup == "auto" else warmup / was
        scaled = {"warmup_updates": round(share * updates)}
    elif was != "auto" and warmup != "auto" and isinstance(epochs, int):
        scaled = {"warmup_epochs": warmup * epochs / was}
    return {name: value for name, value in scaled.items() if name not in given}
