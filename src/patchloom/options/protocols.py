"""Declarations of the evaluation protocols, a dataclass each; `patchloom.options.evaluate` has the common options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from patchloom.options.declare import DATA, MACHINE, MODEL, TASK, TRAINING, Auto, as_in, option
from patchloom.options.evaluate import Pooling, PositionChoice, Precision, Protocol
from patchloom.options.recipes import (
    AttentiveValues,
    ClassifierValues,
    DetectValues,
    Overrides,
    ProbeValues,
    SegmentValues,
    overrides,
)

if TYPE_CHECKING:
    from patchloom.runs.settings import TaskLike
else:
    TaskLike = str  # what can be typed

KS = (1, 5, 20, 100)
DEFAULT_IMAGES = 1000

Kind = TypeVar("Kind")
Method = Literal["finetune", "linear"]
HeadOn = Literal["features", "projection"]
PositionPlaceholder = Literal["learned", "zeros"]


PROTOCOLS: dict[str, Protocol] = {}


def protocol(name: str, path: str, **facts: Any) -> Callable[[type[Kind]], type[Kind]]:
    """Decorate the options of a protocol: they become its entry of ``PROTOCOLS``. ``facts`` are further attributes."""

    def declare(kind: type[Kind]) -> type[Kind]:
        PROTOCOLS[name] = Protocol(kind, path, **facts)
        return kind

    return declare


@dataclass(frozen=True)
class _Frozen:
    """How the features of a frozen encoder are extracted."""

    test_crop: float = option(
        1.0,
        "side of the centre crop over the short side of the resized image; 1: the largest centre crop. 0.875 is the "
        "papers' 224 of 256",
        above=0,
        most=1,
        group=DATA,
        rare=True,
    )
    last_norm: bool = option(
        True, "features after the encoder's last norm; false takes them before it", group=MODEL, rare=True
    )


@protocol("knn", "patchloom.evaluate.protocols.knn.knn", title="kNN accuracy", papers=("wu2018instance",))
@dataclass(frozen=True)
class Knn(_Frozen):
    """Classify by the nearest neighbours among training images, by cosine similarity of frozen features."""

    pooling: Pooling | Literal["all"] = option(
        "all",
        'feature pooling: "class", "mean", "prefix" (mean of class token and registers), "instance" (with an instance '
        'head), "both" (class and mean), or "all"',
    )
    ks: Sequence[int] = option(KS, "numbers of neighbours k", least=1)
    gallery: float = option(1.0, "stratified fraction of the training images to search", above=0, most=1)
    blend: float | list[float] | None = option(
        None, "shares of the trained weights in blends with those that the run began with, such as 0.25,0.5,0.75"
    )


@protocol("linear", "patchloom.evaluate.protocols.linear.linear", title="linear probe", trains=True)
@dataclass(frozen=True)
@overrides(
    ProbeValues,
    only=(
        *("epochs", "warmup_epochs", "blr", "weight_decay", "momentum", "optimizer", "crop_scale", "flip"),
        *("test_crop", "last_norm"),
    ),
)
class Linear(Overrides):
    """Train a linear classifier on frozen features."""

    pooling: Pooling | Literal["all"] = option(
        "all",
        'feature pooling: "class", "mean", "instance" (with an instance head), "prefix" (mean of class token and '
        'registers), "both" (class and mean), or "all". A paper\'s recipe takes one of the first three, and "all" '
        "means the paper's",
    )
    recipe: str = option(
        "logistic",
        "logistic (ours: regression on features of centre crops, in a minute), or a paper's, mae or extrema (90 epochs "
        "of random crops), whose values the options below override",
        group=TASK,
    )
    control: bool = option(
        True, "control training on an untrained encoder, and on the start of a run with --init or --from"
    )
    precision: Precision = option(
        "auto",
        "precision of the frozen encoder: float32 or bfloat16 products; auto is that of pretrain",
        group=MACHINE,
        rare=True,
    )
    blend: float | list[float] | None = option(
        None,
        "shares of the trained weights in blends with those that the run began with, such as 0.25,0.5,0.75; logistic "
        "only",
    )
    save: bool = option(
        False,
        "whether to save the encoder with the quoted probe as a classifier, for the verb predict; logistic only",
    )
    out: str | None = option(None, "file for that classifier; default: probed/DATA-linear-SEED.safetensors in the run")


@protocol(
    "attentive",
    "patchloom.evaluate.protocols.attentive.attentive",
    title="attentive probe",
    papers=("psomas2025attention",),
    trains=True,
)
@dataclass(frozen=True)
@overrides(
    AttentiveValues,
    only=(
        *("epochs", "warmup_epochs", "updates", "blr", "lr", "weight_decay", "momentum", "optimizer", "crop_scale"),
        *("flip", "test_crop", "validation", "patience", "queries", "reduce", "form", "whole", "cached"),
    ),
)
class Attentive(Overrides):
    """Train queries that pool the frozen encoder's tokens, and a linear classifier on them."""

    recipe: str = option(
        "small",
        "small (ours: AdamW on tokens of centre crops, which are encoded once), or ep (efficient probing's for "
        "ImageNet: LARS, 90 epochs of random crops); options below override it",
        group=TASK,
    )
    control: bool = as_in(Linear, "control")
    precision: Precision = as_in(Linear, "precision")


@protocol("regress", "patchloom.evaluate.protocols.regress.regress", title="regression")
@dataclass(frozen=True)
class Regress(_Frozen):
    """Predict the numbers in a column of the data from frozen features, by ridge regression and nearest neighbours."""

    column: str | None = option(None, "column of the numbers to predict; images without one are left out", group=DATA)
    pooling: Pooling | Literal["all"] = option("all", "feature pooling, as in linear")
    k: int = option(20, "number of neighbours", least=1)


@protocol("positions", "patchloom.evaluate.protocols.positions.positions", own_network=True)
@dataclass(frozen=True)
class Positions:
    """Measure how well a run's own task predicts positions, with more and less withheld than in training."""

    images: int = option(1000, "maximal number of test images", least=1, group=DATA)
    task: TaskLike | None = option(
        None, "FILE.py:CLASS, or the class, of a custom task that has moved or changed since the run", group=TASK
    )


@protocol("position-sensitivity", "patchloom.evaluate.protocols.positions.position_sensitivity")
@dataclass(frozen=True)
class PositionSensitivity:
    """Mask most position embeddings of a frozen encoder, and predict positions by a linear layer."""

    finetuned: str | Path | None = option(
        None, "file of a classifier or encoder fine-tuned from it, to evaluate as well"
    )
    ratio: float = option(0.75, "fraction of the position embeddings to mask", above=0, most=1, rare=True)
    placeholder: PositionPlaceholder = option(
        "zeros",
        "replacement of masked embeddings: zeros (only a linear layer is trained) or learned",
        rare=True,
    )
    standardize: bool = option(
        False,
        "features with mean 0 and deviation 1 for the linear layer, so that encoders of different scales learn "
        "equally fast",
    )
    steps: int = option(1000, "training steps of the linear layer, with 64 images each", least=1, group=TRAINING)


@protocol("order", "patchloom.evaluate.protocols.positions.order")
@dataclass(frozen=True)
class Order:
    """Test probes of normal images on shuffled patches, and with position embeddings set to zero."""

    pooling: Literal["class", "mean", "both"] = option("mean", 'feature pooling: "class", "mean" or "both"')
    k: int = option(20, "number of neighbours of the kNN probe", least=1)


@protocol(
    "label-free", "patchloom.evaluate.protocols.label_free.label_free", data="images without labels, such as a folder"
)
@dataclass(frozen=True)
class LabelFree:
    """Measure an encoder without labels: rank of its features, and retrieval of images by crops and by few patches."""

    images: int = option(DEFAULT_IMAGES, "maximal number of test images", group=DATA)


@protocol("layers", "patchloom.evaluate.protocols.knn.layers")
@dataclass(frozen=True)
class Layers:
    """Classify by the nearest neighbours among training images, with the features of every layer."""

    k: int = option(20, "number of neighbours", least=1)
    test_crop: float = as_in(_Frozen, "test_crop")
    out: str | Path | None = option(
        None, "output file of the plot; by default ``RUN/pictures/layers.png`` if ``run`` is a folder"
    )


@protocol("finetune", "patchloom.evaluate.protocols.finetune.finetune", title="fine-tuned accuracy", trains=True)
@dataclass(frozen=True)
@overrides(ClassifierValues)
class Finetune(Overrides):
    """Train the whole encoder and a linear head on labelled images, with training from scratch as control."""

    recipe: str = option(
        "small",
        "small (ours), or from a paper: mae, mae-normalized, droppos, mp3, mp3-300, mp3-cifar100, mp3-tiny-imagenet, "
        "mp3-speech, restore, simmim, extrema, extrema-22k, extrema-few or lut; options below override it",
        group=TASK,
    )
    positions: PositionChoice = option(
        "auto",
        "position embeddings: keep, fixed (sine-cosine), learned, relative (attention bias) or none; auto is keep, or "
        "learned for an encoder without positions",
        group=MODEL,
        rare=True,
    )
    control: bool = option(True, "control training from the start of a run with --init or --from, or else from scratch")
    from_scratch: bool = option(False, "training from scratch only")
    precision: Precision = option(
        "auto",
        "precision of products in training: float32 or bfloat16; auto is that of pretrain",
        group=MACHINE,
        rare=True,
    )
    out: str | None = option(
        None,
        "output file of the classifier; by default finetuned/DATA-RECIPE-SEED.safetensors in the run",
    )


@protocol("blocks", "patchloom.evaluate.protocols.finetune.blocks", title="fine-tuned last blocks", trains=True)
@dataclass(frozen=True)
@overrides(ClassifierValues)
class Blocks(Overrides):
    """Train new transformer blocks on the frozen encoder's tokens (blocks:2, blocks:4), with controls."""

    count: int = option(2, "number of blocks")
    recipe: str = as_in(Finetune, "recipe")
    control: bool = as_in(Linear, "control")
    precision: Precision = as_in(Finetune, "precision")


@protocol("few-shot", "patchloom.evaluate.protocols.fewshot.fewshot", title="accuracy with few labels", trains=True)
@dataclass(frozen=True)
@overrides(ClassifierValues)
class FewShot(Overrides):
    """Fine-tune, or fit a linear probe, with a small part of the labels."""

    labels: float | str | None = option(
        None,
        "labelled images: a stratified fraction of the training images, such as 0.01; a stratified number of 2 or "
        "more; or a text file with one name per line, such as SimCLR's. Default 0.1 without per_class",
        group=DATA,
    )
    per_class: int | None = option(None, "number of images per class, instead", least=1, group=DATA)
    method: Method = option("finetune", "finetune or linear; recipe and the following options are for finetune")
    head_on: HeadOn = option(
        "features",
        "input of the head: features, or the first layer of the run's projection, as in ExtreMA",
        rare=True,
    )
    recipe: str = as_in(Finetune, "recipe")
    positions: PositionChoice = as_in(Finetune, "positions")
    control: bool = as_in(Finetune, "control")
    precision: Precision = as_in(Finetune, "precision")


@protocol(
    "keywords",
    "patchloom.evaluate.protocols.keywords.keywords",
    title="keyword accuracy",
    data="recordings of words: one folder per word, or the layout of Speech Commands",
    trains=True,
)
@dataclass(frozen=True)
@overrides(ClassifierValues)
class Keywords(Overrides):
    """Fine-tune on recordings of words, to classify keywords, silence and other words."""

    words: str | list[str] | None = option(
        None,
        "keywords, separated by commas (default: the ten of Speech Commands, or all classes of other data)",
        group=DATA,
    )
    labels: float = option(
        1.0,
        "stratified fraction of the training recordings to use, such as 0.1, or a number of 2 or more",
        group=DATA,
    )
    recipe: str = option(
        "small",
        "small (ours), or from a paper: mp3-speech for recordings; mae, mae-normalized, droppos, mp3, mp3-300, "
        "mp3-cifar100, mp3-tiny-imagenet, restore, simmim, extrema, extrema-22k, extrema-few or lut for images; "
        "options below override it",
        group=TASK,
    )
    positions: PositionChoice = as_in(Finetune, "positions")
    control: bool = as_in(Finetune, "control")
    precision: Precision = as_in(Finetune, "precision")
    out: str | None = option(
        None,
        "output file of the classifier; by default finetuned/keywords-DATA-RECIPE-SEED.safetensors in the run",
    )


@protocol("ensemble", "patchloom.evaluate.protocols.finetune.ensemble", own_network=True)
@dataclass(frozen=True)
class Ensemble:
    """Average the softmax outputs of two or more fine-tuned classifiers."""

    others: str | list[str] = option("", "further classifiers or folders, separated by commas")
    precision: Precision = option(
        "auto",
        "precision of products: float32 or bfloat16; auto is bfloat16 on CUDA devices that support it",
        group=MACHINE,
        rare=True,
    )
    test_crop: float | None = option(
        None,
        "side of the centre crop over the short side of the resized image; by default that with which each classifier "
        "was tested after fine-tuning",
        above=0,
        most=1,
        group=DATA,
        rare=True,
    )


@protocol(
    "segment",
    "patchloom.dense.segment.segment",
    title="segmentation",
    data="images with label maps, such as images/ and labels/; train/, val/ and test/ in them are optional",
    trains=True,
)
@dataclass(frozen=True)
@overrides(SegmentValues)
class Segment(Overrides):
    """Train a head that gives each pixel a class, and measure mIoU on the test images."""

    recipe: str = option(
        "small",
        "small (ours), or a paper's, which train UPerNet: mae, lut, droppos, restore, restore-4e-4 or extrema; each "
        "value below replaces one of the recipe",
        group=TASK,
    )
    head: Literal["upernet", "linear"] = option(
        "upernet", "segmentation head: upernet, or linear on the frozen encoder", group=MODEL
    )
    positions: PositionChoice = option(
        "auto",
        "position embeddings: keep, fixed (sine-cosine), learned, relative (attention bias) or none; auto is keep, or "
        "learned for an encoder without positions. A frozen encoder keeps its own",
        group=MODEL,
        rare=True,
    )
    ignore: int = option(255, "number in the label maps of pixels that do not count", group=DATA)
    threshold: int | None = option(
        None,
        "number in the label maps from which on pixels are the second of two classes, such as 128 for masks with soft "
        "edges; then all pixels count",
        group=DATA,
    )
    control: bool = option(True, "whether to train the controls as well")
    from_scratch: bool = as_in(Finetune, "from_scratch")
    precision: Precision = as_in(Finetune, "precision")
    save: bool = option(False, "whether to save the trained model, for the verb predict")
    out: str | None = option(
        None, "file for the saved model; default: segmented/DATA-RECIPE-SEED.safetensors in the run"
    )


@protocol(
    "detect",
    "patchloom.dense.detect.detect",
    title="detection",
    data="images with boxes as COCO, Pascal VOC or YOLO files; train/, val/ and test/ are optional",
    papers=("li2022vitdet", "ren2015faster"),
    trains=True,
)
@dataclass(frozen=True)
@overrides(DetectValues)
class Detect(Overrides):
    """Train a detector on the encoder, and measure average precision of boxes and masks on the test images."""

    recipe: str = option(
        "small",
        "small (ours), vitdet (DropPos' and ViTDet's), restore (Beyond Masking's), or extrema (its program's, after "
        "CAE); each value below replaces one of the recipe",
        group=TASK,
    )
    masks: bool | Auto = option(
        "auto", "prediction of a mask for each object; auto: if all training images have masks", group=DATA
    )
    positions: PositionChoice = as_in(Finetune, "positions")
    control: bool = option(
        True, "whether to train the start of a run with --init or --from as well, or else from scratch"
    )
    from_scratch: bool = as_in(Finetune, "from_scratch")
    precision: Precision = as_in(Finetune, "precision")
    save: bool = as_in(Segment, "save")
    out: str | None = option(
        None, "file for the saved model; default: detected/DATA-RECIPE-SEED.safetensors in the run"
    )
