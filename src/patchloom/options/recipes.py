"""Values of the recipes of trainings with labels, each of them an option of the protocols that train."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

from patchloom.options.declare import DATA, MODEL, TRAINING, Auto, as_in, option
from patchloom.options.evaluate import Network

Border = Literal["padded", "reflected"]
Side = Literal["auto", "native", "size"]
SHIFT = 0.1  # seconds
_LARGEST = 2**14  # pixels


@dataclass(frozen=True)
class ClassifierValues:
    """Hyper-parameters of a training; the field names are options of the protocols that train."""

    epochs: int | Auto = option(
        100,
        "number of epochs; auto gives 1,000 updates on a CPU and 20,000 on a GPU, in 10 to 300 epochs",
        least=1,
        group=TRAINING,
    )
    warmup_epochs: float | Auto = option(
        5,
        "epochs of learning-rate warm-up; auto is a tenth of the epochs. Scaled in proportion if only the epochs are "
        "changed",
        least=0,
        group=TRAINING,
        rare=True,
    )
    updates: int = option(
        0, "number of updates, instead of epochs; 0 uses the epochs", least=0, group=TRAINING, rare=True
    )
    warmup_updates: int = option(
        0,
        "updates of warm-up, with --updates. Scaled in proportion, like halve_every, if only the updates are changed",
        least=0,
        group=TRAINING,
        rare=True,
    )
    halve_every: int = option(
        0,
        "updates between halvings of the learning rate, after a warm-up at a tenth of the peak (MP3's speech models); "
        "0 gives a linear warm-up and a cosine decay to 0",
        least=0,
        group=TRAINING,
        rare=True,
    )
    batch: int | Auto = option(
        1024, "images per step, counting repeats; auto depends on the number of training images", least=1
    )
    blr: float = option(1e-3, "base learning rate; the peak is blr · batch / 256", above=0, group=TRAINING)
    lr: float = option(
        0.0,
        "peak learning rate for any batch, instead of blr; 0 uses blr",
        least=0,
        group=TRAINING,
        rare=True,
    )
    weight_decay: float = option(
        0.05, "weight decay of AdamW, for weights of two and more dimensions", least=0, group=TRAINING, rare=True
    )
    betas: tuple[float, float] = option((0.9, 0.999), "betas of AdamW", least=0, below=1, group=TRAINING, rare=True)
    layer_decay: float = option(
        0.75,
        "ratio of the learning rates of a block and the next one; 1 disables it",
        above=0,
        most=1,
        group=TRAINING,
        rare=True,
    )
    drop_path: float = option(
        0.1,
        "rate of stochastic depth in the last block, growing linearly from 0",
        least=0,
        most=0.99,
        group=TRAINING,
        rare=True,
    )
    dropout: float = option(
        0.0,
        "dropout rate in the encoder, for the input tokens of the blocks and the outputs of attention and of both "
        "layers of each MLP",
        least=0,
        most=0.99,
        group=TRAINING,
        rare=True,
    )
    smoothing: float = option(0.1, "label smoothing", least=0, most=0.99, group=TRAINING, rare=True)
    mixup: float = option(
        0.8,
        "alpha of mixup; 0 disables it. With both mixup and cutmix, each batch gets one at random",
        least=0,
        group=TRAINING,
        rare=True,
    )
    cutmix: float = option(1.0, "alpha of cutmix; 0 disables it", least=0, group=TRAINING, rare=True)
    randaugment: float = option(
        9.0, "magnitude of RandAugment, up to 10; 0 disables it", least=0, most=10, group=TRAINING, rare=True
    )
    randaugment_std: float = option(0.5, "standard deviation of that magnitude", least=0, group=TRAINING, rare=True)
    erasing: float = option(0.0, "probability of random erasing", least=0, most=1, group=TRAINING, rare=True)
    repeats: int = option(
        1, "views of each image in a step (repeated augmentation)", least=1, most=100, group=TRAINING, rare=True
    )
    crop_scale: float | Border = option(
        0.08,
        "smallest area of a random crop, as a fraction of the image's; the largest is 1. padded or reflected: the "
        "whole image, shifted by up to 4 pixels, with black or reflected pixels around it",
        above=0,
        most=1,
        group=DATA,
        rare=True,
    )
    flip: bool = option(
        True, "mirroring of half of the images; disable it if left and right differ in meaning", group=DATA
    )
    test_crop: float = option(
        0.875,
        "side of the centre crop of test images over the short side of the resized image; 1: the largest centre crop. "
        "A paper's 0.875 (224 of 256) is for images of up to 224 pixels; it is 1 above",
        above=0,
        most=1,
        group=DATA,
        rare=True,
    )
    pooling: Literal["class", "mean"] = option(
        "mean", "input of the head: class token (added to encoders without one) or mean of the patch tokens"
    )
    fresh_norm: bool = option(
        False, "new norm before the head, instead of the encoder's last one", group=TRAINING, rare=True
    )
    train_positions: bool = option(
        False,
        "training of the encoder's position embeddings, also if pre-training had fixed ones",
        group=TRAINING,
        rare=True,
    )
    ema: float = option(
        0.0,
        "decay of a moving average of the weights, which is then tested; 0 disables it",
        least=0,
        most=0.999999,
        group=TRAINING,
        rare=True,
    )
    clip: float = option(0.0, "maximal norm of the gradient; 0 disables clipping", least=0, group=TRAINING, rare=True)
    validation: float | Auto = option(
        0.0,
        "fraction of the training images held out to choose the tested epoch; auto is 0.15, at most 2,000 images, and "
        "0 if that is below 20 images; 0 trains on all images and tests the last epoch",
        least=0,
        most=0.9,
        group=TRAINING,
    )
    patience: float = option(
        1.0,
        "early stopping after this fraction of the epochs without a higher validation accuracy, counted from the end "
        "of the warm-up; 1 disables it",
        above=0,
        most=1,
        group=TRAINING,
    )
    shift: float = option(
        SHIFT, "largest shift of a recording to either side, in seconds", least=0, most=60, group=DATA
    )
    noise_share: float = option(
        0.8,
        "fraction of the recordings to which background noise is added, if the data has some",
        least=0,
        most=1,
        group=DATA,
        rare=True,
    )
    noise_volume: float = option(
        0.1, "largest factor of that noise; each is drawn uniformly from 0", least=0, group=DATA, rare=True
    )
    recordings: bool = option(False, "whether the data are recordings, which disables image augmentation")


@dataclass(frozen=True)
class ProbeValues(ClassifierValues):
    """Hyper-parameters of the papers' linear probe on a frozen encoder, trained on random crops."""

    epochs: int | Auto = as_in(ClassifierValues, "epochs", 90)
    warmup_epochs: float | Auto = as_in(ClassifierValues, "warmup_epochs", 10)
    batch: int | Auto = as_in(ClassifierValues, "batch", 16_384)
    blr: float = as_in(ClassifierValues, "blr", 0.1)
    weight_decay: float = as_in(ClassifierValues, "weight_decay", 0.0)
    layer_decay: float = as_in(ClassifierValues, "layer_decay", 1.0)
    drop_path: float = as_in(ClassifierValues, "drop_path", 0.0)
    smoothing: float = as_in(ClassifierValues, "smoothing", 0.0)
    mixup: float = as_in(ClassifierValues, "mixup", 0.0)
    cutmix: float = as_in(ClassifierValues, "cutmix", 0.0)
    randaugment: float = as_in(ClassifierValues, "randaugment", 0.0)
    # a probe has one more value
    pooling: Literal["class", "mean", "instance"] = as_in(  # type: ignore[assignment]
        ClassifierValues, "pooling", "class"
    )
    noise_share: float = as_in(ClassifierValues, "noise_share", 0.0)
    momentum: float = option(0.9, "momentum of the optimizer", least=0, most=0.9999, group=TRAINING, rare=True)
    optimizer: Literal["lars", "sgd", "adamw"] = option("lars", "lars, sgd or adamw", group=TRAINING, rare=True)
    last_norm: bool = option(
        True, "features after the encoder's last norm; false takes them before it", group=MODEL, rare=True
    )
    network: Network = option(
        "student", "the network that is probed, if a run has both; --network overrides it", group=MODEL
    )


@dataclass(frozen=True)
class AttentiveValues(ProbeValues):
    """Hyper-parameters of an attentive probe on a frozen encoder."""

    queries: int = option(
        32, "number of learned queries, which share the width of the pooled features", least=1, most=2**12
    )
    reduce: int = option(1, "width of the tokens over that of the pooled features", least=1, most=2**12)
    form: Literal["efficient", "cross"] = option(
        "efficient",
        "efficient (queries and values only, arXiv 2506.10178), or cross: one query with keys, values and as many "
        "heads as the encoder, as in AIM and V-JEPA",
    )
    whole: bool = option(False, "give the class token and registers to the queries, too")
    cached: bool = option(
        False,
        "tokens of centre crops, encoded once; false encodes random crops in every epoch, as the papers do",
    )


@dataclass(frozen=True)
class DenseValues:
    """Hyper-parameters that segmentation and detection share."""

    steps: int | Auto = option(
        160_000, "number of updates; auto: 1,000 on a CPU and 20,000 on a GPU", least=1, group=TRAINING
    )
    warmup_steps: int | Auto = option(
        1_500,
        "updates of linear warm-up of the learning rate; auto: a tenth of the steps. Scaled in proportion if only the "
        "steps are changed",
        least=0,
        group=TRAINING,
        rare=True,
    )
    batch: int | Auto = option(
        16,
        "images per step, over all processes; auto: 8 on a CPU and 16 on a GPU, or fewer for small sets",
        least=1,
    )
    lr: float = option(1e-4, "peak learning rate", above=0, group=TRAINING, rare=True)
    weight_decay: float = as_in(ClassifierValues, "weight_decay")
    betas: tuple[float, float] = as_in(ClassifierValues, "betas")
    layer_decay: float = as_in(ClassifierValues, "layer_decay", 0.65)
    drop_path: float = as_in(ClassifierValues, "drop_path")
    decay: Literal["linear", "steps"] = option(
        "linear",
        "decay of the learning rate after the warm-up: linear (poly of power 1) to 0, or steps, to a tenth at each of "
        "the drops",
        group=TRAINING,
        rare=True,
    )
    drops: tuple[float, float] = option(
        (8 / 12, 11 / 12),
        "fractions of the training at which the learning rate drops, with decay steps",
        least=0,
        most=1,
    )
    size: int | Auto = option(
        512,
        "height and width in pixels of the encoder's input; auto: 1.5 times that of pre-training",
        least=8,
        most=_LARGEST,
        group=DATA,
    )
    scale: tuple[float, float] = option(
        (0.5, 2.0),
        "range of the random resize factor of training images",
        least=0.01,
        most=100,
        group=DATA,
        rare=True,
    )
    flip: bool = option(True, "random horizontal flips. Switch them off if left and right matter", group=DATA)
    color: bool = option(
        True,
        "random brightness, contrast, saturation and hue, for images of three channels",
        group=DATA,
        rare=True,
    )
    clip: float = as_in(ClassifierValues, "clip")
    validation: float | Auto = option(
        0.0,
        "fraction of the training images held out to choose the tested weights, if the data has no validation images. "
        "auto: 0.15, at most 500 images, and 0 if fewer than 10 images would be held out. 0 trains on all and tests "
        "the last weights, even if the data has validation images",
        least=0,
        most=0.9,
        group=TRAINING,
    )
    patience: float = option(
        1.0,
        "early stopping after this fraction of the steps without a higher validation score, counted from the end of "
        "the warm-up; 1 switches it off",
        above=0,
        most=1,
        group=TRAINING,
    )


@dataclass(frozen=True)
class SegmentValues(DenseValues):
    """Hyper-parameters of segmentation."""

    side: int | Side = option(
        "size",
        "shorter side in pixels to which images are resized, in training before the random factor. native: no "
        "resizing, with windows of the given size. auto: native as far as time allows. Images larger than a window "
        "are tested in windows that overlap by a third",
        least=8,
        most=_LARGEST,
        group=DATA,
    )
    head_width: int | Auto = option(
        "auto",
        "number of channels of the head; auto: the encoder's width, from 64 to 512, as in mmseg",
        least=1,
        most=_LARGEST,
        group=MODEL,
        rare=True,
    )
    auxiliary: float = option(
        0.4,
        "weight of the loss of a second head on the third of the four maps; 0 switches it off",
        least=0,
        most=100,
        group=TRAINING,
        rare=True,
    )
    loss: Literal["cross-entropy", "dice"] = option(
        "cross-entropy",
        "cross-entropy of the pixels, or dice, which adds the Dice loss of the classes",
        group=TRAINING,
    )
    class_weights: bool | Auto = option(
        False,
        "larger weights of rare classes in the cross-entropy, 1 / log(1.02 + fraction of the pixels). auto: true if "
        "all classes but one have under 5 % of the training pixels together",
        group=TRAINING,
    )
    rare_crops: float | Auto = option(
        0.0,
        "fraction of the training crops that hold a class with under 5 % of the pixels. auto: 0.5 under the same "
        "condition, else 0",
        least=0,
        most=0.9,
        group=TRAINING,
    )


@dataclass(frozen=True)
class DetectValues(DenseValues):
    """Hyper-parameters of detection."""

    heads: Literal["papers", "light"] = option(
        "papers",
        "size of the heads: papers, as in ViTDet, with four convolutions before boxes and masks and 512 regions per "
        "image; or light, with fewer of both",
        group=MODEL,
    )
    head_width: int | Auto = option(
        "auto",
        "number of channels of pyramid and heads; auto: 256, and 64 to 256 for light heads, by the encoder's width",
        least=1,
        most=_LARGEST,
        group=MODEL,
        rare=True,
    )
    window: int | Auto = option(
        "auto",
        "side in patches of the attention windows of all but four blocks; 0: none. auto: about the grid of "
        "pre-training, if images are larger than that",
        least=0,
        most=_LARGEST,
        group=MODEL,
    )
    score: float = option(0.05, "lowest score of a detection", least=0, most=1)
    shorter: tuple[int, int] = option(
        (0, 0),
        "range of the random shorter side in pixels of training images, instead of scale; the larger value is used in "
        "testing. 0 0 fits images into the canvas",
        least=0,
        most=_LARGEST,
    )
    longer: int = option(
        0,
        "largest longer side in pixels, with shorter; 0: that of the canvas",
        least=0,
        most=_LARGEST,
    )


# Overrides of recipes, as options of protocols.


# values of a recipe that are no options: --batch_size is common to all protocols, and the data say what they are
_NO_OPTIONS = ("batch", "recordings")


class Overrides:
    """Options of a protocol that override values of its recipe; None leaves the recipe's."""

    overridden: ClassVar[tuple[str, ...]] = ()

    def changes(self) -> dict[str, Any]:
        """Return the values that override those of the recipe, by name."""
        given = {name: getattr(self, name) for name in self.overridden}
        return {name: value for name, value in given.items() if value is not None}


Chosen = TypeVar("Chosen", bound=Overrides)


def overrides(recipe: type[Any], only: Collection[str] = ()) -> Callable[[type[Chosen]], type[Chosen]]:
    """Decorate the options of a protocol, before `dataclass`: they get those that override values of a recipe.

    A base learning rate may be a list: the best one on held-out training images is chosen.

    Args:
        recipe: dataclass of the recipe's values.
        only: names of the values; by default all but the size of the batch, and whether the data are recordings.
    """
    known, hints = {one.name: one for one in fields(recipe)}, get_type_hints(recipe)
    names = tuple(only or [name for name in known if name not in _NO_OPTIONS])

    def decorate(kind: type[Chosen]) -> type[Chosen]:
        for name in names:
            about, hint = known[name].metadata["about"], hints[name] | None
            if name == "blr":
                about, hint = about.replace("rate;", "rate, or a list to choose from;"), float | list[float] | None
            kind.__annotations__[name] = hint
            setattr(kind, name, field(default=None, metadata={**known[name].metadata, "about": about}, kw_only=True))
        kind.overridden = names
        return kind

    return decorate
