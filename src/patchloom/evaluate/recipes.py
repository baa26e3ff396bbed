"""Recipes: hyper-parameters for training classifiers and linear probes, each of them an option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from patchloom.data.splits import MAX_HELD_OUT
from patchloom.errors import PatchloomError
from patchloom.nets.encode import input_size, width
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.options.declare import check_declared
from patchloom.options.recipes import AttentiveValues, ClassifierValues, ProbeValues
from patchloom.schedules import halving_rate
from patchloom.system.distributed import refused_by_all, world


# Course of a training with labels: its length, optimiser and learning rate, resolved for its data.
@dataclass(frozen=True, kw_only=True)
class Course:
    """Length, optimiser and learning rate of a training.

    Attributes:
        steps: number of updates.
        per_epoch: updates of an epoch.
        unit: unit in which the length is counted.
        batch: images per update, counting repeats, over all processes.
        peak: peak learning rate.
        rate_option: the option that sets it, with its value, for messages.
        warmup: updates of warm-up, over which the rate rises linearly; early stopping begins after it.
        decay: decay of the learning rate after the warm-up: cosine or linear, to 0 one update after the last; steps, to
            a tenth at each of the ``drops``; or halving, as in `patchloom.schedules.halving_rate`.
        drops: fractions of the training at which the learning rate drops, with decay steps.
        halve_every: updates between halvings, with decay halving.
        optimizer, betas, momentum, weight_decay, layer_decay: as in `patchloom.nets.optimizer`.
        clip: maximal norm of the gradient; 0 disables clipping.
        ema: decay of a moving average of the weights, which is then tested; 0 disables it.
        every: updates between two validations.
        patience: fraction of the training without a higher score after which it ends; 1 disables early stopping.
    """

    steps: int
    per_epoch: int
    unit: Literal["epoch", "update", "step"]
    batch: int
    peak: float
    rate_option: str
    warmup: int = 0
    decay: Literal["cosine", "linear", "steps", "halving"] = "cosine"
    drops: tuple[float, ...] = ()
    halve_every: int = 0
    optimizer: Literal["adamw", "sgd", "lars"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    weight_decay: float = 0.0
    layer_decay: float = 1.0
    clip: float = 0.0
    ema: float = 0.0
    every: int = 1
    patience: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0."""
        if self.decay == "halving":
            return halving_rate(step, self.warmup, self.peak, self.halve_every)
        done, rest = step + 1, self.steps - self.warmup + 1
        if done < self.warmup:
            return done * (self.peak / self.warmup)
        if self.decay == "steps":
            return self.peak * 0.1 ** sum(step >= round(share * self.steps) for share in self.drops)
        passed = done - self.warmup
        if self.decay == "linear":
            return self.peak * (1 - passed / rest)
        return 0.5 * self.peak * (1 + math.cos(math.pi * passed / rest))  # in timm's order, for equal bits

    def count(self, step: int) -> float:
        """Return ``step`` updates in the unit of the course."""
        return step / self.per_epoch if self.unit == "epoch" else step

    @property
    def total(self) -> str:
        """Number of units of the whole course, such as "10", or "0.67" of a fraction of an epoch."""
        return f"{round(self.count(self.steps), 2):,.10g}"

    @property
    def length(self) -> str:
        """The whole course in its unit, such as "10 epochs"."""
        return f"{self.total} {self.unit}{'s' * (self.total != '1')}"

    def position(self, step: int) -> str:
        """Return the progress after ``step`` updates, such as "epoch 2.0 of 10"."""
        done = f"{self.count(step):,.1f}" if self.unit == "epoch" else f"{step:,}"
        return f"{self.unit} {done} of {self.total}"


# Number of updates if the epochs are auto: minutes on a CPU, an hour on a GPU. Small sets get more epochs, since the
# weights need a certain number of updates; large sets get a minimal number of epochs.
_UPDATES = {"cpu": 1_000, "gpu": 20_000}
_EPOCHS = (10, 300)
_VALIDATION_SHARE = 0.15
_PLAIN_IF_SET = ("halve_every", "dropout", "fresh_norm", "train_positions")  # values that are named only if they act
_LEAST_VALIDATION = 20  # images: with fewer, one image changes the accuracy by over 5 points

# options for one kind of data only, by the noun of a source
ONLY_FOR = {
    "images": ("cutmix", "randaugment", "randaugment_std", "erasing", "crop_scale", "flip", "test_crop"),
    "recordings": ("shift", "noise_share", "noise_volume"),
}
_CROPPED_UP_TO = 224  # pixels
_AT_ONCE = 256  # images per batch of a frozen encoder
_VALIDATIONS = 30  # maximal number of validations of a training


def held_out_count(share: float, n: int, most: int) -> int:
    """Return the number of ``n`` training images that a share is, to choose the tested weights by."""
    return min(max(1, round(share * n)), most, n - 1) if share else 0


class Resolved:
    """Hyper-parameters without ``auto``, which a training needs.

    Attributes:
        validation: fraction of the training images that is held out to choose the tested weights; 0: none.
        most_held_out: largest number of these images.
        later: value that may stay auto.
    """

    validation: float
    most_held_out: ClassVar[int] = MAX_HELD_OUT
    later: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if left := [name for name, value in vars(self).items() if value == "auto" and name != self.later]:
            raise ValueError(f"{left[0]} is auto in a resolved recipe")

    def held_out(self, n: int) -> int:
        """Return the number of ``n`` training images that are held out to choose the tested weights."""
        return held_out_count(self.validation, n, self.most_held_out)

    def timed(self, n: int) -> tuple[Any, int]:
        """Return a recipe whose steps on ``n`` images are timed, and how many of them take as long as one of this."""
        return self, 1

    def course(self, n: int, accumulate: int = 1) -> Course:
        """Return the course of a training on ``n`` images."""
        raise NotImplementedError

    def plain(self) -> dict[str, Any]:
        """Return values for JSON, without those that have no effect."""
        raise NotImplementedError


@dataclass(frozen=True)
class Recipe(ClassifierValues):
    """Hyper-parameters of a training; the field names are options of the protocols that train."""

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def check(self) -> None:
        check_declared(self)
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

    def for_recordings(self, noise: bool) -> Recipe:
        """Return the recipe for recordings: shifts and noise, if there is any, replace image augmentation.

        Mixup applies to whole pictures, including those of recordings.
        """
        unlike: dict[str, Any] = {"cutmix": 0.0, "randaugment": 0.0, "erasing": 0.0, "crop_scale": 1.0, "flip": False}
        unlike["test_crop"] = 1.0
        return replace(self, **unlike, recordings=True, noise_share=self.noise_share if noise else 0.0)

    def settled(self, n: int, device: str, own_validation: bool = False) -> ResolvedRecipe:
        """Return the recipe with every ``auto`` resolved."""
        kind = "cpu" if device == "cpu" else "gpu"
        batch, epochs, warmup, validation = self.batch, self.epochs, self.warmup_epochs, self.validation
        if validation == "auto":
            enough = own_validation or round(_VALIDATION_SHARE * n) >= _LEAST_VALIDATION
            validation = _VALIDATION_SHARE if enough else 0.0
        n -= 0 if own_validation else held_out_count(validation, n, MAX_HELD_OUT)
        if batch == "auto":
            usual = 64 if kind == "cpu" else 256
            images = max(8, min(usual, 2 ** (n // 8).bit_length() // 2))
            batch = -(-images // (unit := self.unit())) * unit * self.repeats
        if epochs == "auto":
            per_epoch = max(1, n // batch)
            fewest, most = _EPOCHS
            epochs = int(min(most, max(fewest, round(_UPDATES[kind] / per_epoch))))
        rises = round(epochs / 10 if warmup == "auto" else warmup, 2)
        chosen: dict[str, Any] = {"batch": batch, "epochs": epochs, "warmup_epochs": rises, "validation": validation}
        return _RESOLVED[type(self)](**vars(self) | chosen)

    def unit(self, accumulate: int = 1) -> int:
        """Return a divisor of the batch size: every process and every accumulated part gets the same number of images.

        Mixup and cutmix pair the views that are computed together.
        """
        return world() * accumulate * (2 if self.mixes and self.repeats % 2 else 1)

    def parts(self, images: int) -> int:
        """Return the number of batches into which a step of ``images`` is split for reading and encoding."""
        return 1

    def plain(self) -> dict[str, Any]:
        idle = {"recordings", *ONLY_FOR["images" if self.recordings else "recordings"]}
        idle |= {"epochs", "warmup_epochs"} if self.updates else {"updates", "warmup_updates"}
        idle |= {name for name in _PLAIN_IF_SET if not getattr(self, name)}
        idle |= set() if self.noise_share else {"noise_share", "noise_volume"}
        return {name: value for name, value in {**asdict(self), "betas": list(self.betas)}.items() if name not in idle}


@dataclass(frozen=True)
class ProbeRecipe(ProbeValues, Recipe):
    """Hyper-parameters of the papers' linear probe on a frozen encoder, trained on random crops.

    The other fields of `Recipe` are disabled.
    """

    def check(self) -> None:
        """Validate the values; batch norm needs two images."""
        super().check()
        if self.batch == 1:
            raise PatchloomError("the linear probe has a batch norm: use --batch_size 2 or more")

    def parts(self, images: int) -> int:
        """Return the number of batches of a step, whose thousands of images are held in memory as features only."""
        return math.ceil(images / _AT_ONCE)

    def plain(self) -> dict[str, Any]:
        own = "shift" if self.recordings else "crop_scale flip test_crop"
        told = f"epochs warmup_epochs batch blr lr weight_decay momentum {own} pooling last_norm"
        return {"optimizer": self.optimizer.upper(), **{name: getattr(self, name) for name in told.split()}}


@dataclass(frozen=True)
class AttentiveRecipe(AttentiveValues, ProbeRecipe):
    """Hyper-parameters of an attentive probe on a frozen encoder."""

    def check(self) -> None:
        super().check()
        if self.form == "cross" and self.reduce != 1:
            raise PatchloomError("--form cross keeps the width of the tokens: leave out --reduce")

    def plain(self) -> dict[str, Any]:
        own: dict[str, Any] = {"form": self.form, "whole": self.whole, "cached": self.cached}
        if self.form == "efficient":
            own |= {"queries": self.queries, "reduce": self.reduce}
        if self.validation:
            own |= {"validation": self.validation, "patience": self.patience}
        idle = {"pooling", "last_norm", *({"momentum"} if self.optimizer == "adamw" else ())}
        idle |= {"crop_scale", "flip", "shift"} if self.cached else set()
        return own | {name: value for name, value in super().plain().items() if name not in idle}

    def parts(self, images: int) -> int:
        return 1 if self.cached else super().parts(images)


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe(Recipe, Resolved):
    """`Recipe` without ``auto``, returned by `Recipe.settled` and required for training."""

    epochs: int
    warmup_epochs: float
    batch: int
    validation: float

    def course(self, n: int, accumulate: int = 1) -> Course:
        _, batch = images_per_step(self, n, accumulate)
        per_epoch = max(1, n // batch)
        steps = self.updates or self.epochs * per_epoch
        warmup = self.warmup_updates if self.updates else round(self.warmup_epochs * per_epoch)
        return Course(
            steps=steps,
            per_epoch=per_epoch,
            unit="update" if self.updates else "epoch",
            batch=batch,
            peak=self.lr or self.blr * batch / 256,
            rate_option=f"--lr (now {self.lr:g})" if self.lr else f"--blr (now {self.blr:g})",
            warmup=min(warmup, steps - 1),
            decay="halving" if self.halve_every else "cosine",
            halve_every=self.halve_every,
            betas=self.betas,
            weight_decay=self.weight_decay,
            layer_decay=self.layer_decay,
            clip=self.clip,
            ema=self.ema,
            every=math.ceil(steps / per_epoch / _VALIDATIONS) * per_epoch,
            patience=self.patience,
        )

    def timed(self, n: int) -> tuple[ResolvedRecipe, int]:
        """Return a recipe with steps of one part each, and the number of parts."""
        images, _ = images_per_step(self, n)
        parts = self.parts(images)
        return (self if parts == 1 else replace(self, batch=images // parts)), parts


@dataclass(frozen=True, kw_only=True)
class ResolvedProbeRecipe(ResolvedRecipe, ProbeRecipe):
    """`ProbeRecipe` without ``auto``."""

    def course(self, n: int, accumulate: int = 1) -> Course:
        return replace(super().course(n, accumulate), optimizer=self.optimizer, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class ResolvedAttentiveRecipe(ResolvedProbeRecipe, AttentiveRecipe):
    """`AttentiveRecipe` without ``auto``."""


_RESOLVED: dict[type[Recipe], type[ResolvedRecipe]] = {
    Recipe: ResolvedRecipe,
    ProbeRecipe: ResolvedProbeRecipe,
    AttentiveRecipe: ResolvedAttentiveRecipe,
}


def images_per_step(recipe: ResolvedRecipe, n: int, accumulate: int = 1) -> tuple[int, int]:
    """Return (distinct images, images with repeats) per step of all processes, with ``n`` training images."""
    images = min(max(1, recipe.batch // recipe.repeats), n)
    images -= images % (unit := recipe.unit(accumulate))
    # a smaller batch may be in fewer parts and no longer divisible
    while images and (left := images % (recipe.parts(images) * unit)):
        images -= left
    if not images and unit > 2:
        raise refused_by_all(f"{n:,} images are too few for steps of {unit}, shared by processes and --accumulate")
    if not images:
        raise PatchloomError("mixup and cutmix need 2 images in a batch: use --mixup 0 --cutmix 0")
    return images, images * recipe.repeats


def check_shares(recipe: ResolvedRecipe, accumulate: int) -> None:
    """Refuse a batch that cannot be divided evenly among processes and accumulated parts."""
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


# Recipes by name: those of the papers, and one for small data.


Known = TypeVar("Known")
# the default is the recipe of ViT-B; other sizes change it
Sized = tuple[Recipe, dict[str, dict[str, Any]]]

# MAE, Table 9; the other papers build on it, and it supplies values that they do not state. Erasing is the default of
# the programs of all of them (MAE, DropPos, Beyond Masking, ExtreMA, LUT); of the papers DeiT and MP3 alone name it
_MAE = Recipe(erasing=0.25)
# for small data: light augmentation, since the papers' full one would need many times their epochs
_SMALL = Recipe(
    epochs="auto",
    warmup_epochs="auto",
    batch="auto",
    drop_path=0.0,
    mixup=0.0,
    cutmix=0.0,
    randaugment=0.0,
    crop_scale=0.6,
    test_crop=1.0,
    clip=5.0,
    validation="auto",
    patience=0.3,
)
# the programs of MAE, LUT and ExtreMA have a new norm on the mean, and train the positions; those of DropPos and SimMIM
# have the norm. The papers do not say it
_NEW_NORM: dict[str, Any] = {"fresh_norm": True}
_NEW_NORM_POSITIONS: dict[str, Any] = {"fresh_norm": True, "train_positions": True}
# SimMIM's, which LUT uses when it builds on SimMIM (LUT, appendix B.1); its rate is 1.25e-3 for 512 images
_SIMMIM = replace(_MAE, warmup_epochs=20, batch=2048, blr=6.25e-4, layer_decay=0.65, clip=5.0, **_NEW_NORM)
# DeiT, Table 9, the basis of MP3, with MP3's batch on ImageNet; DeiT states its rate as 5e-4 for 512 images
_MP3 = replace(_MAE, epochs=150, batch=2048, blr=2.5e-4, layer_decay=1.0, repeats=3, pooling="class")
# MP3's schedule and batch for training from scratch on small sets
_MP3_SMALL = replace(_MP3, epochs=400)
# MP3 on speech, section 4.3; learning rates and patience are ours, since the available text does not state them
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
# ExtreMA; 1e-3 with 0.75 for encoders of ImageNet-1k, 5e-4 with 0.65 for those of ImageNet-22k
_EXTREMA_S = {"S": {"epochs": 200}}

RECIPES: dict[str, Sized] = {
    "small": (_SMALL, {"XS": {"blr": 4e-3}}),
    "mae": (replace(_MAE, **_NEW_NORM_POSITIONS), {"L": {"epochs": 50}}),
    # the page of MAE's program, for its encoders of 1,600 epochs on normalised pixels (MAE, Table 3)
    "mae-normalized": (
        replace(_MAE, blr=5e-4, layer_decay=0.65, **_NEW_NORM_POSITIONS),
        {"L": {"epochs": 50, "blr": 1e-3, "layer_decay": 0.75, "drop_path": 0.2}},
    ),
    "droppos": (replace(_MAE, layer_decay=0.8, **_NEW_NORM), {"L": {"epochs": 50}}),
    "mp3": (_MP3, {}),
    # DeiT's program pads and crops images of up to 32 pixels, and does not resize them for the test
    "mp3-cifar100": (replace(_MP3_SMALL, batch=256, crop_scale="padded", test_crop=1.0), {}),
    "mp3-tiny-imagenet": (replace(_MP3_SMALL, batch=512), {}),
    "mp3-300": (replace(_MP3, epochs=300), {}),  # MP3, Table 4: the row without positions, with DeiT's warm-up of 5
    "mp3-speech": (_MP3_SPEECH, {}),
    "restore": (replace(_MAE, pooling="class"), {}),
    "simmim": (_SIMMIM, {}),
    "extrema": (replace(_MAE, **_NEW_NORM_POSITIONS), _EXTREMA_S),
    "extrema-22k": (replace(_MAE, blr=5e-4, layer_decay=0.65, **_NEW_NORM_POSITIONS), _EXTREMA_S),
    # 1 % and 10 % of the labels, with a fixed learning rate for any batch; the head is on the projection
    "extrema-few": (replace(_MAE, epochs=1000, lr=5e-6, train_positions=True), {}),
    "lut": (
        replace(_MAE, blr=2.5e-4, layer_decay=0.65, **_NEW_NORM_POSITIONS),
        {"S": {"epochs": 300, "blr": 5e-4, "layer_decay": 0.75}, "L": {"epochs": 50, "blr": 1e-3}},
    ),
}

# linear probes: MAE, Table 10 and appendix A.1; ExtreMA, Table 14, and its program where the paper is silent: the
# teacher, without its last norm
PROBES: dict[str, tuple[ProbeRecipe, dict[str, dict[str, Any]]]] = {
    "mae": (ProbeRecipe(), {}),
    "extrema": (ProbeRecipe(batch=4096, pooling="instance", last_norm=False, network="teacher"), {}),
}

# attentive probes: ours, on tokens that are encoded once, for small data; and efficient probing's (its program, for
# ImageNet-1k)
ATTENTIVE: dict[str, tuple[AttentiveRecipe, dict[str, dict[str, Any]]]] = {
    "small": (
        AttentiveRecipe(
            epochs="auto",
            warmup_epochs="auto",
            batch=256,
            optimizer="adamw",
            lr=1e-3,
            validation="auto",
            patience=0.3,
            test_crop=1.0,
            cached=True,
        ),
        {},
    ),
    "ep": (AttentiveRecipe(batch=4096), {}),
}


def named_recipe(name: str, known: Mapping[str, Known]) -> Known:
    """Return the recipe of that name."""
    if name not in known:
        raise PatchloomError(f"there is no recipe {name}: choose one of {', '.join(known)}")
    return known[name]


def published_recipe(name: str, vit: Encoder, known: Mapping[str, Sized] = RECIPES) -> Recipe:
    """Return the unmodified recipe of that name for an encoder of this size."""
    base, sizes = named_recipe(name, known)
    d, size = width(vit), "B"  # as is a Swin up to Swin-B
    if d > 1024 or (not is_hierarchical(vit) and (d == 1024 or len(vit.feature_info) >= 24)):
        size = "L"
    elif d <= 384:  # the smallest size in the papers is S
        size = "XS" if d < 384 and "XS" in sizes else "S"
    recipe = replace(base, **sizes.get(size, {}))
    # as in the programs of the papers, which crop images of up to 224 pixels only
    return recipe if max(input_size(vit)) <= _CROPPED_UP_TO else replace(recipe, test_crop=1.0)


def recipe_for(name: str, vit: Encoder, changes: Mapping[str, Any], known: Mapping[str, Sized] = RECIPES) -> Recipe:
    """Return the recipe of that name for an encoder of this size with ``changes``, in which None means no change."""
    recipe = published_recipe(name, vit, known)
    given = {key: value for key, value in changes.items() if value is not None}
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    if given.get("lr") and "blr" in given:
        raise PatchloomError("--lr and --blr both set the learning rate: give one of them")
    if "blr" in given:
        given["lr"] = 0.0
    epochs, updates = given.get("epochs"), given.get("updates", recipe.updates)
    in_epochs = [name for name in ("epochs", "warmup_epochs") if name in given]
    if updates and in_epochs:
        why = f"--updates {updates:,}" if "updates" in given else f"this recipe, which has {updates:,} updates"
        raise PatchloomError(f"--{in_epochs[0]} does not go with {why}: give --updates and --warmup_updates")
    if not updates and given.get("warmup_updates"):
        raise PatchloomError("--warmup_updates needs --updates: give that too, or --warmup_epochs")
    was, warmup = recipe.epochs, recipe.warmup_epochs
    scaled: dict[str, Any] = {}  # values that depend on the length, unless they are given
    if updates and recipe.updates:
        scaled = {"warmup_updates": recipe.warmup_updates, "halve_every": recipe.halve_every}
        scaled = {name: math.ceil(value * updates / recipe.updates) for name, value in scaled.items()}
    elif updates:
        share = 0.1 if was == "auto" or warmup == "auto" else warmup / was
        scaled = {"warmup_updates": round(share * updates)}
    elif was != "auto" and warmup != "auto" and isinstance(epochs, int):
        scaled = {"warmup_epochs": warmup * epochs / was}
    recipe = replace(recipe, **scaled | given)
    recipe.check()
    return recipe
