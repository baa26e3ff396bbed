"""Options common to all evaluation protocols, and the kinds of values that several of them take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from patchloom.options.declare import DATA, MACHINE, MODEL, TRAINING, Auto, option

Network = Literal["student", "teacher"]
Pooling = Literal["class", "mean", "prefix", "instance", "both"]
Precision = Literal["auto", "float32", "bfloat16"]
PositionChoice = Literal["auto", "keep", "fixed", "learned", "relative", "none"]


class Protocol(NamedTuple):
    """Registry entry of a protocol.

    Attributes:
        options: dataclass of its options.
        path: import path of its function; a string, so that listing the protocols does not import torch.
        title: name of its results in plots and in `report`; "" for the protocol's own.
        data: what it takes, for help pages.
        papers: keys of its papers in `patchloom.report.papers.PAPERS`.
        trains: whether it has training steps, which processes can share.
        own_network: whether it measures networks that were trained for it: a task's decoder, fine-tuned classifiers.
    """

    options: type[Any]
    path: str
    title: str = ""
    data: str = "labelled images, such as one folder per class"
    papers: tuple[str, ...] = ()
    trains: bool = False
    own_network: bool = False


@dataclass(frozen=True)
class CommonOptions:
    """Evaluate an encoder by one protocol, with its controls."""

    max_train: int | None = option(
        None, "maximal number of training images, a stratified subset, for a quick look", least=2, group=DATA
    )
    group: str | None = option(
        None,
        "images that splits keep together, as in pretrain: parent (their folder), a column, or a pattern",
        group=DATA,
    )
    cache: bool = option(True, "cache of features on disc, reused for the same images", group=DATA, rare=True)
    model: str | None = option(
        None,
        "timm's name of the model if the encoder is a file of weights only; not needed for checkpoints of the papers' "
        "own code",
        group=MODEL,
    )
    network: Network | None = option(
        None,
        "student, or teacher (its moving average) of a run that has one; by default the student, but the teacher in "
        "linear --recipe extrema, and for frozen features of a file of ExtreMA's program",
        group=MODEL,
    )
    batch_size: int | Auto = option(
        "auto",
        "images per training step, counting repeats; auto uses the recipe. Without training, images per batch; auto is "
        "256",
        least=1,
        group=TRAINING,
    )
    accumulate: int = option(
        1, "number of parts into which a training step is split to save memory", least=1, group=TRAINING, rare=True
    )
    seed: int = option(0, "random seed of splits, training and the untrained encoder", least=0, group=TRAINING)
    seeds: int = option(
        1, "number of seeds, counted up from ``seed``; results are mean and range", least=1, group=TRAINING
    )
    device: str = option("auto", "device: auto (a GPU if available), cpu, cuda or another torch device", group=MACHINE)
    devices: int | Auto = option(
        "auto",
        "number of training processes per machine, with one device each; auto is the number that torchrun or SLURM "
        "started, or 1",
        least=1,
        group=MACHINE,
    )
    workers: int | Auto = option(
        "auto",
        "data-loading processes; auto depends on the device, and is 0 if starting them does not pay",
        least=0,
        group=MACHINE,
    )
    measures: Literal["usual", "all"] = option(
        "usual",
        "measures of classifiers: usual (accuracy, balanced accuracy, recall of each class), or all (also macro F1, "
        "AUROC, average precision, confusion matrix, and the accuracy in each group of --group)",
    )
    dry_run: bool = option(False, "plan only: encoder and data are opened, and nothing is trained or written")
