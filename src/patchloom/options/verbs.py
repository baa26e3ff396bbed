"""Arguments of the verbs other than ``evaluate``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from patchloom.arguments import PathLike
from patchloom.options.declare import AUTO, DATA, MACHINE, MODEL, TASK, TRAINING, Auto, as_in, option, place
from patchloom.options.evaluate import CommonOptions
from patchloom.options.pretrain import PretrainOptions
from patchloom.sizes import PatchSize

if TYPE_CHECKING:
    from torch.nn import Module

    from patchloom.data.sources.in_memory import DataLike
    from patchloom.runs.settings import TaskLike
else:  # without torch
    DataLike = TaskLike = str | Any  # checked where they are opened

    @runtime_checkable
    class Module(Protocol):
        """Module of torch."""

        def state_dict(self) -> Any:
            """Return its weights."""


TASK_PICTURES = "task"  # pictures of a run's pretext task
SHEET_ROWS = 8  # rows of a picture with an image each
LAST = "norm"  # the encoder's output among its layers

HeadChoice = Literal["each", "mean"]
Tokens = Literal["mean", "class", "prefix", "both", "instance", "patches"]
LabelChoice = Literal["random", "herding"]
ExportPooling = Literal["class", "mean", "prefix", "both", "instance"]


@dataclass(frozen=True)
class Pretrain(PretrainOptions):
    """Pre-train an encoder on unlabelled images.

    An existing run in ``out`` is resumed. Every setting of the run is an argument, such as ``epochs=100``.
    """

    data: DataLike = place("folder of images, or another data source")
    task: TaskLike = place("pretext task; auto is mae, and droppos for shapes", AUTO, "name or auto", TASK)
    model: str | Mapping[str, Any] = option(
        "auto",
        "nano, micro, mini (our sizes, smallest first), swin-nano, or a ViT, Eva (DINOv3) or Swin by timm's name",
        kind="name or auto",
        group=MODEL,
    )
    out: str | Path | None = option(
        None,
        "folder of the run (default runs/DATA-TASK or -RECIPE); a run that was stopped there resumes",
        kind="folder",
    )
    dry_run: bool = option(
        False,
        "plan of the run with its time, memory and disc space; nothing is trained. Only caches about this machine and "
        "the images are written. For devices that are not here, the plan has no time",
    )


@dataclass(frozen=True)
class Trial:
    """Options of pretrain for which a few steps are tried."""

    img_size: PatchSize | Auto = as_in(PretrainOptions, "img_size")
    model: str = as_in(Pretrain, "model")
    patch_size: PatchSize | Auto = as_in(PretrainOptions, "patch_size")
    batch_size: int | Auto = as_in(PretrainOptions, "batch_size")
    device: Literal["cpu", "cuda", "mps", "auto"] = as_in(PretrainOptions, "device")
    workers: int | Auto = as_in(PretrainOptions, "workers")

    def settings(self) -> dict[str, Any]:
        """Return all values that are settings of a run, without data and task."""
        shared = {one.name for one in fields(PretrainOptions)} - {"data", "task"}
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name in shared}


@dataclass(frozen=True)
class Check(Trial):
    """Check all images or recordings for faults, and propose settings for pre-training."""

    data: DataLike = place("images, as for pretrain")
    estimate: bool = option(True, "measurement of time and memory in a few steps")
    out: str | Path | None = option(
        None, "file for the names of all unreadable and odd images, each with the reason after a tab"
    )
    picture: str | Path | None = option(None, "PNG file for a picture of the windows of slides that are read")
    images: int | None = option(
        None, "largest number of images to read per split, drawn at random; all if absent", least=1, group=DATA
    )
    group: str | None = option(None, "images that are held out together, as for pretrain", group=DATA)
    recipe: str | None = option(None, "row of a paper's table, as for pretrain", group=TASK)
    task: TaskLike = option(AUTO, "pretext task of the proposal, which keeps all other given settings, too", group=TASK)
    epochs: int | Auto = option("auto", "passes over the training images", group=TRAINING)
    workers: int | Auto = option(
        "auto", "processes that read, here and in the run; auto here: one per core", group=MACHINE
    )


@dataclass(frozen=True)
class Compare:
    """Pre-train by several tasks for equal time and compare the encoders, with confidence intervals."""

    data: DataLike = place(
        "images as for pretrain, with labels (sub-folders) or without; or folders of runs, the reference first"
    )
    finetune: bool | str = option(
        False,
        "fine-tune all encoders on the labels, too, which takes time: true (recipe small), or a recipe of evaluate "
        "finetune",
    )
    out: str | Path | None = option(
        None, "folder of the comparison (default comparisons/DATA); an interrupted one there is resumed"
    )
    dry_run: bool = option(False, "plan only: print the runs and their duration, and train nothing")
    labels: str | Path | None = option(
        None, "separate labelled images for the comparison of encoders (default: the labels of DATA)", group=DATA
    )
    few: Sequence[float] = option(
        (0.01, 0.1), "additional probes with few labels: fractions below 1, or labels per class", group=DATA
    )
    img_size: PatchSize | None = option(None, "image size in pixels; 64x128 is height x width", group=DATA)
    group: str | None = option(
        None, "images to hold out together, as in pretrain: parent (their folder), a column, or a pattern", group=DATA
    )
    model: str | None = option(
        None, "model of all runs; this and the next options default to pretrain's choice", group=MODEL
    )
    patch_size: PatchSize | None = option(None, "patch size in pixels; 40x1 is rows x columns", group=MODEL)
    tasks: Sequence[str] | str | None = option(
        None,
        "names or FILE.py:CLASS, comma-separated or a list (default mae, droppos, mp3, restore, extrema and lut); "
        "options of pretrain behind one are for it alone, as in mae,mae:blr=1e-3:task.mask_ratio=0.5",
        group=TASK,
    )
    beside: Sequence[str] | str = option(
        (), "further encoders to score: timm:NAME, a run or a file; comma-separated or a list", group=TASK
    )
    minutes: float | None = option(
        None, "training time of each run in minutes by the clock (default 20)", above=0, group=TRAINING
    )
    samples: int | None = option(
        None, "number of images seen by each run, counting repeats, instead of --minutes", least=1, group=TRAINING
    )
    batch_size: int | None = option(None, "images per step", group=TRAINING)
    log: str | Sequence[str] | None = option(
        None, "experiment trackers of all runs, as in pretrain: tensorboard, wandb, mlflow, trackio", group=TRAINING
    )
    seeds: int = option(2, "runs of each task, with different random seeds", least=1, group=TRAINING)
    parallel: int = option(
        1, "number of simultaneous runs, each on its own GPU if there are several", least=1, group=MACHINE
    )
    device: Literal["cpu", "cuda", "mps"] | None = option(None, "device that trains and evaluates", group=MACHINE)
    threads: int | None = option(None, "CPU threads of each run", group=MACHINE, rare=True)
    workers: int | None = option(None, "data-loading processes of each run", group=MACHINE)


@dataclass(frozen=True)
class OfEncoder:
    """Options of an encoder that is given as a file of weights, or as a module."""

    model: str | None = option(None, "timm's model name, if the encoder is a file with weights only", group=MODEL)
    device: str = as_in(CommonOptions, "device")
    mean: Iterable[float] | None = option(
        None, "statistics that normalise the images of a module, as in `patchloom.evaluate`"
    )
    std: Iterable[float] | None = option(
        None, "statistics that normalise the images of a module, as in `patchloom.evaluate`"
    )


@dataclass(frozen=True)
class Look(OfEncoder):
    """Draw what a run's pretext task hides and what the model predicts, or what an encoder has learnt."""

    run: PathLike | Module = place(
        "folder of a run; for pictures of an encoder also a file of weights, or timm:NAME, and in Python a module of "
        "timm"
    )
    data: DataLike | None = place(
        "images from any source: its test split, if it has one; for the run's own data, and by default, the images "
        "that the run held out",
        None,
    )
    what: str | list[str] = option(
        TASK_PICTURES,
        "task (pictures of the pretext task), or pictures of the encoder, separated by commas: attention, relative, "
        "features, correlation, depth, neighbours, retrieval, inversion; or all",
    )
    out: str | Path | None = option(
        None,
        "folder for the pictures; default: ``RUN/pictures`` for the run's own images, else ``RUN/pictures-DATA``. For "
        "a file or timm:NAME: ``pictures-NAME-DATA`` in the current folder",
    )
    query: str | list[float] | None = option(
        None,
        "point x,y in pixels of the encoder's input whose patch attention and correlation show; default: a salient "
        "patch of each image. With ``heads`` mean up to four points, as in 80,40;20,60",
    )
    exemplar: str | Path | None = option(None, "image file; retrieval finds the most similar crop of each image")
    blocks: str | int | list[int] | None = option(
        None, "numbers of the blocks to draw, from 1, such as 3,12; default: chosen by each picture"
    )
    images: int = option(SHEET_ROWS, "number of images, at most 8", least=1, most=SHEET_ROWS, group=DATA)
    img_size: PatchSize | None = option(
        None, "height and width in pixels of the encoder's input, if not its own", group=DATA
    )
    heads: HeadChoice | None = option(
        None, "attention of each head, one picture per image, or their mean for four patches of each image", group=MODEL
    )
    task: TaskLike | None = option(
        None, "FILE.py:CLASS, or the class, of your own task if it has moved or changed since the run", group=TASK
    )
    beside: str | list[str] | None = option(
        None,
        "further encoders for relative, depth and retrieval, separated by commas; an untrained one, and the start of "
        "a run with --init or --from, are always included",
        group=TASK,
    )
    steps: int | None = option(
        None,
        "optimisation steps of inversion; default: 3,000 as in the paper, or 300 on a CPU",
        least=1,
        group=TRAINING,
    )
    seed: int = option(0, "random seed of masks and of the untrained encoder", group=TRAINING)


@dataclass(frozen=True)
class Curves:
    """Draw several runs in one plot: their losses, or their results against a setting."""

    runs: PathLike | Sequence[PathLike] = place("folders of two runs or more")
    against: str | None = option(
        None,
        "setting in which they differ, such as task.context_mask_ratio, patch_size or epochs; default: losses are "
        "drawn. Or a setting of their evaluations, such as finetune.epochs or positions.context_mask_ratio, for which "
        "one run is enough. Other settings that differ give a line each; seeds are drawn as mean and range",
    )
    of: str | None = option(
        None,
        "result to draw: position-accuracy (held-out images), knn, linear, finetune, or another protocol in their "
        "results.jsonl; default: all that the runs have in common. Without ``against``: knn or instance-knn, the "
        "accuracy over the epochs of pre-training (ExtreMA, Figs. 4-5, which name no representation)",
    )
    out: str | Path | None = option(None, "folder for picture and table; default: the current folder")


@dataclass(frozen=True)
class OfAllImages(OfEncoder):
    """Options of an encoder's pass over all images of a source."""

    run: PathLike | Module = place(
        "folder of a run, ``.safetensors`` file of an encoder, or ``timm:NAME``; in Python also a module of timm"
    )
    data: DataLike = place("images from any source, with all its splits, with or without labels")
    batch_size: int | Auto = option("auto", "number of images per batch; auto: 256", least=1, group=TRAINING)
    workers: int | Auto = as_in(CommonOptions, "workers")


@dataclass(frozen=True)
class Embed(OfAllImages):
    """Write the embeddings of images to Parquet, npz or safetensors files, with a description of how they were made."""

    to: str | Path | None = option(
        None,
        "folder, which keeps the parts, or file (.parquet, .npz or .safetensors), which joins them in memory. Parquet "
        "needs pyarrow, an extra",
    )
    format: Literal["auto", "parquet", "npz", "safetensors"] = option(
        "auto", "format of the parts; auto: by the suffix of the file, or parquet in a new folder"
    )
    pooling: Tokens = option(
        "mean",
        "vector of an image: mean of the patch tokens, class token, prefix (mean of class token and registers), both "
        "(mean and class token), instance (for an encoder with such a head), or patches (all patch tokens)",
    )
    layer: int | str = option(LAST, "number of a block, from 1, or embedding, or norm (the encoder's output)")
    dtype: Literal["float32", "float16"] = option("float32", "number format of the vectors")
    files: str | Path | None = option(
        None, "file (.parquet, .npz or .safetensors) for the mean vector of each divided file: a row a slide or volume"
    )
    near: str | Path | None = option(None, "image to search for: its nearest neighbours in the result are printed")
    top: int = option(10, "number of nearest neighbours", least=1)
    picture: str | Path | None = option(None, "PNG file for a picture of the image and its nearest neighbours")
    devices: int | Auto = as_in(PretrainOptions, "devices")


@dataclass(frozen=True)
class Curate(OfAllImages):
    """Find near copies and outliers among images, and choose images to label."""

    out: str | Path | None = option(
        None, "folder for the lists and their page; default curated/DATA. It must be new, or empty"
    )
    count: int | Auto = option(
        "auto",
        "number of images to label, of which a larger number begins with the same ones; auto: 100, or all if there "
        "are fewer",
        least=1,
    )
    choose: LabelChoice = option(
        "random",
        "choice of the images to label: random, or herding (MaxHerding: the most typical ones, far from each other; "
        "for classes of about equal size and a few labels of each)",
    )
    alike: float = option(
        0.95, "correlation of small grey copies of two images from which they are near copies", above=0, most=1
    )
    pictures: int = option(40, "number of images of each list on the page", least=0)
    seed: int = option(0, "random seed of the choice", least=0)
    cache: bool = as_in(CommonOptions, "cache")


@dataclass(frozen=True)
class Predict:
    """Write predictions of a trained model: a table of classes, label maps, or objects as COCO JSON, and pictures."""

    model: PathLike = place(
        "file from `evaluate finetune`, or from `evaluate linear`, `segment` or `detect` with ``--save``; or the "
        "folder of a run that has a single one"
    )
    data: DataLike = place("images of any source, all splits, or one image file")
    out: str | Path | None = option(
        None,
        "folder for the predictions; default predictions/DATA. Files of other commands there are kept. The same model "
        "and data replace their earlier files, and remove predictions of deleted images",
    )
    top: int | None = option(
        None,
        "number of a classifier's most probable classes in the table, each with its probability; default: all "
        "classes, in a column each",
        least=1,
    )
    score: float = option(0.5, "lowest score of the objects of a detector", least=0, most=1)
    pictures: int | Literal["all"] = option(
        20,
        "number of images to draw with their predictions, of a classifier the least certain; all draws every image",
        least=0,
    )
    device: str = as_in(CommonOptions, "device")


@dataclass(frozen=True)
class Report:
    """Write an HTML report on one or several runs: one file that needs no network and no other file."""

    runs: PathLike | Sequence[PathLike] = place(
        "folders of runs, or of comparisons, which stand for all runs in them; they may still be training"
    )
    out: str | Path | None = option(
        None,
        "file to write; default: report.html in the run's folder, or in the current folder for several runs. For a "
        "comparison: runs.html in its folder, because report.html there is its own",
    )
    data: DataLike | None = option(None, "images for the map of embeddings; by default the run's held-out images")
    forget: str | None = option(
        None, "evaluation to remove from the run's results.jsonl first: its date there, or its number (1: the oldest)"
    )


@dataclass(frozen=True)
class Results:
    """Make a table of the results of one or several runs, with intervals and differences from controls."""

    runs: PathLike | Sequence[PathLike] = place("folders of runs, or folders that hold runs, such as a comparison")
    to: str | Path | None = option(
        None, "file to write: .csv or .parquet (values, a row for each control), .md or .tex (the printed table)"
    )
    protocol: str | None = option(None, "only results of this protocol, such as knn")
    measure: str | None = option(None, "only results of this measure, such as accuracy")
    all: bool = option(False, "also the results that no headline quotes, such as those for other settings")


@dataclass(frozen=True)
class Export:
    """Write an encoder for use without patchloom, and compare its features with those of the exported code."""

    run: PathLike = place(
        "folder of a run, finished or stopped, ``.safetensors`` file of an encoder, or a published checkpoint of a "
        "model in a standard size; for onnx also the file of a classifier, segmenter or detector, as a whole"
    )
    to: str = option(
        "timm",
        "format: timm (weights and code), hf (folder for the Hugging Face Hub, loaded by timm and transformers), or "
        "onnx (graph with normalisation, for onnxruntime)",
    )
    data: DataLike | None = option(
        None, "images or recordings for the comparison; default: those of the run, or noise if they are unavailable"
    )
    out: str | Path | None = option(
        None, "file to write, or folder for hf; default: ``RUN/timm.safetensors``, ``RUN/hf`` or ``RUN/encoder.onnx``"
    )
    pooling: ExportPooling = option(
        "mean",
        "vector of an image: mean of the patch tokens, class token, prefix (mean of class token and registers; timm "
        "and ONNX only), both (mean and class token), or instance (timm only)",
    )
    fp16: bool = option(False, "half precision for onnx")
    license: str | None = option(
        None, "licence identifier for the model card of hf, such as apache-2.0; default: unknown"
    )
    push: str | None = option(None, "repository on the Hub, such as me/photos-mae, to upload the folder of hf to")
    public: bool = option(False, "public visibility of a new repository; default: private")
    start: bool = option(
        False,
        "export the weights that the run began with (``--init``, ``--from``) instead of the trained ones, to names "
        "that begin with ``start``",
    )
    blend: float | None = option(
        None,
        "share of the trained weights in a blend with those that the run began with, such as 0.5 (WiSE-FT), to names "
        "that begin with ``blend``",
        least=0,
        most=1,
    )
    without_positions: bool = option(
        False,
        "beside the weights, write a linear map of the patch tokens after which a linear probe cannot read row and "
        "column (as RASA), fitted to up to 500 images; timm only",
    )
    model: str | None = option(None, "timm's model name, if RUN is a file with weights only", group=MODEL)


@dataclass(frozen=True)
class Distill:
    """Train a backbone of timm on the pooled and the dense features of an encoder."""

    run: PathLike = place("teacher: folder of a run, ``.safetensors`` file of an encoder, or ``timm:NAME``")
    data: DataLike = place("images to train on, without labels")
    student: str = option(MISSING, "timm's name of the backbone, such as convnext_atto")
    out: str | Path | None = option(None, "folder of the student; default: DATA-STUDENT in runs/")
    dense: float = option(
        1.0, "weight of the loss on dense features, beside 1 for the pooled ones; 0 for pooled features alone", least=0
    )
    dry_run: bool = option(False, "plan only: check the arguments, time a few steps, and write nothing")
    labels: DataLike | None = option(None, "labelled images for the comparison at the end; default: none", group=DATA)
    side: int | None = option(
        None,
        "side of the square images that the student sees, in pixels; default: the teacher's size",
        least=8,
        most=2**14,
        group=DATA,
    )
    group: str | None = option(None, "images of LABELS that a split keeps together, as in pretrain", group=DATA)
    model: str | None = as_in(Export, "model")
    epochs: float = option(100.0, "passes over the images", above=0, group=TRAINING)
    batch_size: int = option(64, "images per step", least=2, group=TRAINING)
    lr: float = option(0.0005, "peak learning rate of AdamW", above=0, group=TRAINING, rare=True)
    decay: float = option(0.04, "weight decay", least=0, group=TRAINING, rare=True)
    seed: int = as_in(PretrainOptions, "seed")
    seeds: int = option(
        1,
        "number of trainings for the comparison, with seeds counted up; the first student is written",
        least=1,
        group=TRAINING,
    )
    device: str = as_in(CommonOptions, "device")
    workers: int | Auto = as_in(CommonOptions, "workers")


@dataclass(frozen=True)
class Bench(Trial):
    """Time a training step of each task on this machine, with its peak speed and the speed of reading."""

    data: DataLike = place("images, as for pretrain", "shapes")
    rounds: int = option(5, "number of timed steps per task", least=1)
    tasks: str | list[str] | None = option(
        None, "task names, separated by commas; all tasks without required options if absent", group=TASK
    )
    precision: Literal["float32", "tf32", "bfloat16", "float16", "auto"] = as_in(PretrainOptions, "precision")
    attention: Literal["fused", "explicit", "auto"] = as_in(PretrainOptions, "attention")
    kernels: Literal["torch", "native", "auto"] = as_in(PretrainOptions, "kernels")
    compile: bool = option(False, "torch.compile, timed in addition", group=MACHINE, rare=True)
    checkpointing: bool = as_in(PretrainOptions, "checkpointing")
    threads: int | Auto = as_in(PretrainOptions, "threads")


# options of each verb
VERB_OPTIONS: dict[str, type[object]] = {
    "check": Check,
    "compare": Compare,
    "look": Look,
    "look curves": Curves,
    "embed": Embed,
    "predict": Predict,
    "report": Report,
    "results": Results,
    "export": Export,
    "distill": Distill,
    "curate": Curate,
    "bench": Bench,
}
