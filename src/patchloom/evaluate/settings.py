"""Settings common to all protocols, and the training and test images of an evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np
import torch

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.duplicates import copies_sentence
from patchloom.data.near_duplicates import near_copies, parted_wholes
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data, split_names
from patchloom.data.splits import pick, split_for_test
from patchloom.data.stats import dropped_colours
from patchloom.display import StatusMessage, is_first
from patchloom.errors import PatchloomError, check_type
from patchloom.evaluate.features import has_labels, only_labelled
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.runs.held_out import seen_in_pretraining
from patchloom.system.distributed import first_decides, launch_once, launched_processes, processes_here, world
from patchloom.system.hardware import Cores, choose_workers, cores, usable_device

_AT_ONCE = 256  # images, where the encoder stays frozen
_FEW_BATCHES = 8  # on a CPU: for fewer, starting processes costs more than it saves (seconds where they are not forked)

_told: ContextVar[set[str] | None] = ContextVar("told", default=None)  # notes on the data


@dataclass(frozen=True)
class EvalSettings:
    """Settings of any protocol.

    Attributes:
        seed: of splits, training and the untrained encoder.
        seeds: repeat with so many seeds, counted up from ``seed``, and report mean and range.
        device: what computes: auto (a GPU where there is one), cpu, cuda, or another name that torch has for it.
        batch_size: images a step of training, repeats included; auto is the recipe's. Where nothing is trained, images
            at once; auto is 256.
        accumulate: parts in which a step of training is computed, one after the other, in less memory.
        devices: processes on each machine that train together, with a device each; auto is what torchrun or SLURM
            started, or 1.
        workers: processes that read images; auto depends on the device, and is 0 where starting them does not pay.
        max_train: train on a stratified subset of at most so many images, for a quick look.
        cache: cache features on disc, and use those of an earlier pass over the same images.
        group: which images no split may part, as in pretrain: parent (their folder), a column, or a pattern.
        model: timm's name of the model, where the encoder is a file of weights alone; not needed for what the papers'
            own programs saved.
    """

    seed: int = 0
    seeds: int = 1
    device: str = "auto"
    batch_size: int | Literal["auto"] = "auto"
    accumulate: int = 1
    devices: int | Literal["auto"] = "auto"
    workers: int | Literal["auto"] = "auto"
    max_train: int | None = None
    cache: bool = True
    group: str | None = None
    model: str | None = None

    def check(self) -> None:
        """Validate the values."""
        for name, hint in get_type_hints(EvalSettings).items():
            check_type(name, getattr(self, name), hint)
        for name, least in {
            "batch_size": 1,
            "accumulate": 1,
            "devices": 1,
            "workers": 0,
            "seed": 0,
            "seeds": 1,
            "max_train": 2,
        }.items():
            value = getattr(self, name)
            if value not in (None, "auto") and value < least:
                raise PatchloomError(f"--{name} must be {least} or more, not {value}")

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return usable_device(self.device)

    @property
    def readers(self) -> tuple[int, str]:
        """Largest number of processes that read images, and the reason for it."""
        return (
            choose_workers(self.torch_device.type, Cores(cores(), processes_here()))
            if self.workers == "auto"
            else (self.workers, "as you said")
        )

    def workers_for(self, source: Source, batches: int, trained: bool = False) -> int:
        """Number of processes that read ``batches`` batches of ``source``, for one pass over it or for training.

        No result depends on it. auto is at most ``batches`` - 1, the number that can be read while another batch is
        processed; images in memory are worth a process only where random crops are made.
        """
        if self.workers != "auto":
            return self.workers
        few = batches < _FEW_BATCHES and self.torch_device.type == "cpu"
        return 0 if few or (source.in_memory and not trained) else min(self.readers[0], batches - 1)

    def reading(self, source: Source) -> dict[str, Any]:
        """Keyword arguments of functions that read every image of ``source`` once."""
        return {"batch_size": self.at_once, "workers": self.workers_for(source, self.batches(source))}

    @property
    def at_once(self) -> int:
        """Images of a batch where nothing is trained."""
        return _AT_ONCE if self.batch_size == "auto" else self.batch_size

    def batches(self, source: Source) -> int:
        """Batches in which every image of ``source`` is read once."""
        return -(-len(source) // self.at_once)


@dataclass(frozen=True)
class Parts:
    """Training and test images, and sentences on their origin.

    Attributes:
        train, test: the images.
        story: the sentences.
        validation: images that the data brings for choices; None: training images are held out for them.
    """

    train: Source
    test: Source
    story: str
    validation: Source | None = None


@contextmanager
def print_notes_once() -> Iterator[None]:
    """Inside, what is to be known of the data is printed when it is opened, and once, however many seeds open it."""
    before = _told.set(set())
    try:
        yield
    finally:
        _told.reset(before)


def share_steps(settings: EvalSettings) -> None:
    """Start or join the processes that train together."""
    launch_once(settings.torch_device.type, settings.devices)


def share_nothing(settings: EvalSettings, what: str) -> None:
    """Refuse several processes, and parts of a step, for ``what`` trains nothing by steps."""
    if launched_processes() > 1:
        raise PatchloomError(f"{what} is for one process: start it without torchrun")
    if settings.devices not in ("auto", 1):
        raise PatchloomError(f"{what} is for one process: leave out --devices {settings.devices}")
    if settings.accumulate != 1:
        raise PatchloomError(f"{what} trains nothing by steps: leave out --accumulate {settings.accumulate}")


T = TypeVar("T")


def open_together(opened: Callable[[], T]) -> T:
    """What ``opened`` gives in each process; what is wrong with the data is said once, by the first."""
    if world() > 1:
        first_decides(lambda: opened() and None)
    return opened()


def open_with_notes(data: DataLike, group: str | None = None) -> Data:
    """Open images; where `print_notes_once` is asked for, print what of them was left out or taken otherwise."""
    with StatusMessage("listing the images"):
        opened = open_together(lambda: open_data(data, group=group))
    print_notes(opened.notes)
    return opened


def print_notes(notes: Sequence[str]) -> None:
    """Where `print_notes_once` is asked for, print those of the notes that were not yet."""
    told = _told.get()
    if told is None:
        return
    for note in notes:
        if note not in told and is_first():
            print(f"{note}.", flush=True)
    told.update(notes)


def parts_of(
    data: DataLike,
    settings: EvalSettings,
    labels: bool = True,
    card: EncoderCard | None = None,
    run: str | Path | None = None,
) -> Parts:
    """The training and test images of ``data``; without test images, a stratified fifth is split off.

    Exact copies of test images that are split off are in neither part. Where the data's own test images are copies of
    training images, or were in the pre-training of ``run``, the story says how many.
    """
    opened = open_with_notes(data, settings.group)
    if card is not None:
        opened = with_encoder_sound(opened, card.sound, card.name)
    with StatusMessage("looking for copies among the images"):
        parts = _parted(opened, settings, labels, "" if card is None else card.note, run)
    if card is not None:
        tell_colours(parts.train, card)
    tell_leaks(parts.train, parts.test, own=opened.test is not None)
    return parts


def tell_colours(source: Source, card: EncoderCard) -> None:
    """Where `print_notes_once` is asked for, print that an encoder of grey images drops colours, if there are some."""
    if _told.get() is not None and (said := dropped_colours(source, len(card.mean))):
        print_notes([said])


def tell_leaks(train: Source, test: Source, own: bool) -> None:
    """Where `print_notes_once` is asked for, print why test images may not be new: one patient's on both sides, near
    copies.

    No test image is read, which is for the end.
    """
    if _told.get() is None or train.groups is not None:
        return
    said = parted_wholes(train, test, "split the data by them" if own else "")
    if not said and not own and (close := near_copies(train)) is not None:
        said = close.sentence().removesuffix(".")
    print_notes([said] if said else [])


def _parted(opened: Data, settings: EvalSettings, labels: bool, note: str, run: str | Path | None) -> Parts:
    own = opened.test if not labels or has_labels(opened.test) else None
    whole = only_labelled(opened.train) if labels else opened.train
    if own is not None:
        train, test = whole, only_labelled(own) if labels else own
        story = f"The data brings its own test {train.noun}."
        story += "" if run is None else seen_in_pretraining(run, test)
    else:
        train, test = split_for_test(whole, seed=settings.seed)
        noun = whole.noun
        whole_groups = "" if whole.groups is None else " in whole groups"
        lacks, fifth, unseen = ("labelled ", "stratified ", ", without their labels") if labels else ("", "", "")
        story = (
            f"The data brings no {lacks}test {noun}, so a {fifth}fifth was split off for the test{whole_groups} "
            f"(seed {settings.seed}): pre-training may have seen those {noun}{unseen}."
        )
        if copies := len(whole) - len(train) - len(test):
            story += f" Nothing was trained on {copies:,} exact copies of test {noun}."
    return limit_training_images(Data(train, test), f"{note} {story}".strip(), settings, looked=own is None)


def limit_training_images(opened: Data, story: str, settings: EvalSettings, looked: bool = False) -> Parts:
    """The parts of labelled data that brings its own, with at most as many training images as the settings say."""
    train, test = opened.train, opened.test
    assert test is not None
    n, noun = len(train), train.noun
    if settings.max_train is not None and settings.max_train < n:
        train = stratified_subset(train, settings.max_train, settings.seed)
        used = f"a stratified {settings.max_train:,} of {n:,} training {noun} were used (seed {settings.seed})"
        story += f" For a quick look, only {used}."
    return Parts(train, test, story + note_copies(train, test, looked))


def note_copies(train: Source, test: Source, looked: bool) -> str:
    """Return the sentence on test images that are exact copies of training images, after a space, or ""."""
    if (contents := train.contents()) is None:
        return f" Exact copies among the {train.noun} were not looked for."
    return "" if looked else copies_sentence(test, contents)


def stratified_subset(source: Source, count: int, seed: int) -> Source:
    """A stratified subset of ``count`` images; without labels a uniform one. A rare class keeps at least one image."""
    n = len(source)
    labels = np.zeros(n, np.int64) if source.labels is None else source.labels
    # the complement of a draw, which spares the last image of each class
    return source.subset(np.setdiff1d(np.arange(n), pick(labels, n - count, seed)))


# Where files of an evaluation lie in a run.


def place_in_run(
    run: str | Path, data: DataLike, label: str, seed: int, folder: str, suffix: str, what: str = ""
) -> Path | None:
    """The file ``folder``/WHATDATA-LABEL-SEEDSUFFIX in a run; None where that is no folder or file of the user's.

    Several names of data stand one behind another.
    """
    if str(run).startswith("timm:"):
        return None
    home = Path(run) if Path(run).is_dir() else Path(run).parent
    name = re.sub(r"[^\w.-]+", "-", "-".join(Path(one).name for one in split_names(data)))
    return home / folder / f"{what}{name}-{label}-{seed}{suffix}"
