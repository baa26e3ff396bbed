"""Common settings of all protocols, and the training and test images of an evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.duplicates import copies_sentence
from patchloom.data.near_duplicates import near_copies, parted_wholes, subject_note
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data, split_names
from patchloom.data.splits import choose_indices, lacking_classes, pick, some_groups, splittable
from patchloom.data.stats import input_notes
from patchloom.display import StatusMessage, is_first, print_line
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import has_labels, only_labelled
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.checkpoints.live import has_no_folder
from patchloom.nets.heads import InstanceHead, Stem
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import CommonOptions
from patchloom.results.claims import START, UNTRAINED
from patchloom.runs.encoder import load_encoder, load_extra_module, load_start
from patchloom.runs.held_out import describe_seen, seen_in_pretraining
from patchloom.system.device import Cores, choose_workers, cores, usable_device
from patchloom.system.distributed import first_decides, launch_once, launched_processes, processes_here, world

OWN_TEST = "the data's test split"
TEST_SHARE = 0.2  # of data without test images
_AT_ONCE = 256  # images per batch of a frozen encoder
# on a CPU: below this number, starting processes costs more than it saves (seconds if they are spawned)
_FEW_BATCHES = 8

_printed: ContextVar[set[str] | None] = ContextVar("told", default=None)  # printed notes on the data


class DryRun(Exception):
    """End of a dry run, before the first image is encoded.

    Attributes:
        test: test images.
        sentences: what would be done.
    """

    def __init__(self, test: Source, sentences: Sequence[str]) -> None:
        super().__init__()
        self.test, self.sentences = test, sentences


@dataclass(frozen=True)
class EvalSettings(CommonOptions):
    """Common settings of all protocols."""

    def end_if_dry(self, test: Source, *sentences: str) -> None:
        """End a dry run: encoder and data have been opened, and ``sentences`` say what would be done."""
        if self.dry_run:
            raise DryRun(test, sentences)

    @property
    def all_measures(self) -> bool:
        return self.measures == "all"

    @property
    def torch_device(self) -> torch.device:
        return usable_device(self.device)

    @property
    def readers(self) -> tuple[int, str]:
        """Return the maximal number of data-loading processes and the reason for it."""
        if self.workers != "auto":
            return self.workers, "as requested"
        return choose_workers(self.torch_device.type, Cores(cores(), processes_here()))

    def workers_for(self, source: Source, batches: int, trained: bool = False) -> int:
        """Return the number of processes that may read ``batches`` batches of ``source`` for one pass or for training.

        Results do not depend on it. For auto, images in memory are worth a process only with random crops.
        """
        if self.workers != "auto":
            return self.workers
        few = batches < _FEW_BATCHES and self.torch_device.type == "cpu"
        return 0 if few or (source.in_memory and not trained) else self.readers[0]

    def reading(self, source: Source) -> dict[str, Any]:
        """Return keyword arguments of functions that read every image of ``source`` once."""
        return {"batch_size": self.at_once, "workers": self.workers_for(source, self.batches(source))}

    @property
    def at_once(self) -> int:
        return _AT_ONCE if self.batch_size == "auto" else self.batch_size

    def batches(self, source: Source) -> int:
        return -(-len(source) // self.at_once)


# labelled images: a `Source`, or images with annotations, which have one in ``images``
D = TypeVar("D", bound=Any)


def images_of(part: Any) -> Source:
    """Return the images of a part, without annotations."""
    return part if isinstance(part, Source) else part.images


def split_part(part: D, count: int, seed: int, strict: bool = False) -> tuple[D, D]:
    """Split off a stratified ``count`` of a part's images; exact copies of these are in neither part.

    Images that are all in one group are split like those without groups; ``strict`` refuses them.
    """
    images, n = images_of(part), len(part)
    held, copies = choose_indices(images if strict else splittable(images), count, seed)
    rest = np.setdiff1d(np.arange(n), np.concatenate([held, copies]))
    return part.subset(rest), part.subset(held)


@dataclass(frozen=True)
class Parts(Generic[D]):
    """Training and test images, and a description of their origin.

    Attributes:
        train, test: images of each part.
        story: description in sentences.
        validation: validation images of the data; None: training images are held out instead.
        origin: origin of the test images in a few words, for a headline; "" if it has none.
    """

    train: D
    test: D
    story: str
    validation: D | None = None
    origin: str = ""

    def trained_on(self, recipe: Any, settings: EvalSettings) -> tuple[D, D | None]:
        """Return images to train on, and those by which a recipe chooses the tested weights; None: the last ones."""
        if not recipe.validation or self.validation is not None:
            return self.train, self.validation if recipe.validation else None
        if len(self.train) < 2:
            raise PatchloomError("a single training image cannot be split: use --validation 0")
        return split_part(self.train, recipe.held_out(len(self.train)), settings.seed)


@contextmanager
def print_notes_once() -> Iterator[None]:
    """Print notes on opened data inside this context, each once for all seeds."""
    before = _printed.set(set())
    try:
        yield
    finally:
        _printed.reset(before)


def share_steps(settings: EvalSettings) -> None:
    """Start or join the training processes; a dry run needs none."""
    if not settings.dry_run:
        launch_once(settings.torch_device.type, settings.devices)


def share_nothing(settings: EvalSettings, what: str) -> None:
    """Refuse several processes and accumulation, since ``what`` has no training steps."""
    if launched_processes() > 1:
        raise PatchloomError(f"{what} is for one process: start it without torchrun")
    if settings.devices not in ("auto", 1):
        raise PatchloomError(f"{what} is for one process: leave out --devices {settings.devices}")
    if settings.accumulate != 1:
        raise PatchloomError(f"{what} has no training steps: leave out --accumulate {settings.accumulate}")


T = TypeVar("T")


def open_together(opened: Callable[[], T]) -> T:
    """Return the result of ``opened`` in each process; errors in the data are reported once, by the first."""
    if world() > 1:
        first_decides(lambda: opened() and None)
    return opened()


def open_with_notes(data: DataLike, group: str | None = None) -> Data:
    """Open images; inside `print_notes_once`, print what was left out or read differently."""
    with StatusMessage("listing the images"):
        opened = open_together(lambda: open_data(data, group=group))
    print_notes(opened.notes)
    return opened


def print_notes(notes: Sequence[str]) -> None:
    """Print notes that are new, inside `print_notes_once`."""
    told = _printed.get()
    if told is None:
        return
    for note in notes:
        if note not in told and is_first():
            print_line(f"{note}.")
    told.update(notes)


def parts_of(
    data: DataLike,
    settings: EvalSettings,
    labels: bool = True,
    card: EncoderCard | None = None,
    run: str | Path | None = None,
    prepare: Callable[[Data], Data] = lambda opened: opened,
) -> Parts[Source]:
    """Return the training and test images of ``data``; without test images, split off a stratified fifth.

    Exact copies of test images that are split off are removed from both parts. If the data's own test images are copies
    of training images, or were in the pre-training of ``run``, the story gives their number. ``prepare`` changes the
    opened data before it is split.
    """
    opened = prepare(open_with_notes(data, settings.group))
    if card is not None:
        opened = with_encoder_sound(opened, card.sound, card.name)
    with StatusMessage("looking for copies among the images"):
        own = opened.test if not labels or has_labels(opened.test) else None
        train, test = opened.train, own
        if labels:
            train, test = only_labelled(train), None if own is None else only_labelled(own)
        parts = divide(train, None, test, settings, "" if card is None else card.note, run, labels)
        if lacking := len(opened.train) - len(train):
            sentence = f"{lacking:,} of {len(opened.train):,} {train.noun} have no label and are left out."
            parts = replace(parts, story=f"{parts.story} {sentence}")
    if card is not None:
        print_input_notes(parts.train, card)
    print_leak_notes(parts.train, parts.test, own=opened.test is not None)
    return parts


def print_input_notes(source: Source, card: EncoderCard) -> None:
    """Print the `input_notes` of an encoder, inside `print_notes_once`."""
    if _printed.get() is not None and is_first():
        print_notes(input_notes(source, card.mean, card.std))


def print_leak_notes(train: Source, test: Source, own: bool) -> None:
    """Print why test images may not be independent (patients in both parts, near copies), inside `print_notes_once`.

    No test image is read here.
    """
    if _printed.get() is None or train.groups is not None:
        return
    said = parted_wholes(train, test, "split the data by them" if own else "") or ("" if own else subject_note(train))
    if not said and not own and (close := near_copies(train)) is not None:
        said = close.sentence().removesuffix(".")
    print_notes([said] if said else [])


def divide(
    train: D,
    validation: D | None,
    test: D | None,
    settings: EvalSettings,
    note: str = "",
    run: str | Path | None = None,
    labels: bool = True,
) -> Parts[D]:
    """Return the parts of opened data; without test images, a stratified fifth is split off.

    The story begins with ``note``, and tells whether the pre-training of ``run`` may have seen the test images.
    """
    noun, own = images_of(train).noun, test
    if own is not None:
        story = f"The data brings its own {'validation and ' * (validation is not None)}test {noun}."
        story += "" if images_of(own).groups is None else " Intervals are over its groups."
        story += "" if run is None else seen_in_pretraining(run, images_of(own))
    else:
        n = len(train)
        train, own = split_part(train, round(TEST_SHARE * n), settings.seed, strict=True)
        whole_groups = "" if images_of(train).groups is None else " in whole groups"
        lacks, fifth = ("labelled ", "stratified ") if labels else ("", "")
        story = (
            f"The data brings no {lacks}test {noun}, so a {fifth}fifth was split off for the test{whole_groups} "
            f"(seed {settings.seed}): {describe_seen(run, images_of(own), labels)}."
        )
        if settings.group is not None:
            story += f" Test groups: {some_groups(images_of(own), settings.group)}; intervals are over groups."
        story = f"{story} {lacking_classes(images_of(train), images_of(own))}".rstrip()
        if copies := n - len(train) - len(own):
            story += f" {copies:,} exact copies of test {noun} were left out of training."
    origin = f"a fifth split off (seed {settings.seed})" if test is None else OWN_TEST
    parts = Parts(train, own, f"{note} {story}".strip(), validation, origin)
    return limit_training_images(parts, settings, looked=test is None)


def limit_training_images(parts: Parts[D], settings: EvalSettings, looked: bool = False) -> Parts[D]:
    """Limit the number of training images as the settings say; the story tells this, and copies among test images.

    The data's own validation images are labels, too: a limited training does without them.
    """
    train, story, validation, noun = parts.train, parts.story, parts.validation, images_of(parts.train).noun
    n = len(train)
    if settings.max_train is not None and settings.max_train < n:
        train = stratified_subset(train, settings.max_train, settings.seed)
        own = f" and none of the data's own validation {noun}" if validation is not None else ""
        stratified = "" if images_of(parts.train).labels is None else "a stratified "
        used = f"{stratified}{settings.max_train:,} of {n:,} training {noun}{own} were used (seed {settings.seed})"
        story += f" For a quick look, only {used}."
        validation = None
    if (contents := images_of(train).contents()) is None:
        story += f" Exact copies among the {noun} were not looked for."
    elif not looked:
        story += copies_sentence(images_of(parts.test), contents)
    return replace(parts, train=train, story=story, validation=validation)


def stratified_subset(part: D, count: int, seed: int) -> D:
    """Return a stratified subset of ``count`` images, uniform without labels; a rare class keeps at least one image."""
    n, labels = len(part), images_of(part).labels
    # the complement of a draw that spares the last image of each class
    left_out = pick(np.zeros(n, np.int64) if labels is None else labels, n - count, seed)
    return part.subset(np.setdiff1d(np.arange(n), left_out))


# Paths of evaluation files.


def named_file(out: str | None, settings: EvalSettings, instead: str = "use --save true") -> Path | None:
    """Return the file of ``--out``, which several seeds cannot share."""
    if out is not None and settings.seeds > 1:
        raise PatchloomError(f"--out names one file, but --seeds {settings.seeds} gives several: {instead}")
    return None if out is None else Path(out)


def place_in_run(
    run: str | Path, data: DataLike, label: str, seed: int, folder: str, suffix: str, what: str = ""
) -> Path | None:
    """Return ``folder``/WHATDATA-LABEL-SEEDSUFFIX in a run; None without a run folder or file.

    Several names of data are joined.
    """
    if has_no_folder(run):
        return None
    home = Path(run) if Path(run).is_dir() else Path(run).parent
    name = re.sub(r"[^\w.-]+", "-", "-".join(Path(one).name for one in split_names(data)))
    return home / folder / f"{what}{name}-{label}-{seed}{suffix}"


# What a protocol measures: an encoder, the weights that it began with, and its untrained twin.


class Subject(NamedTuple):
    """Encoder that is evaluated, or a control.

    Attributes:
        name: name in the report.
        vit: encoder.
        card: its card.
        head: instance head; None: there is none.
        stem: first layer of the projection, for a head that is trained on it.
    """

    name: str
    vit: Encoder
    card: EncoderCard
    head: InstanceHead | None = None
    stem: Stem | None = None


class Subjects(NamedTuple):
    """Encoder of a run and its controls.

    Attributes:
        ours: encoder.
        start: weights that an adapted encoder began with, without an instance head; None for one from random weights.
        fresh: same architecture with new weights.
    """

    ours: Subject
    start: Subject | None
    fresh: Subject

    @property
    def controls(self) -> list[Subject]:
        """The start, if there is one, and the fresh encoder."""
        return [*([] if self.start is None else [self.start]), self.fresh]


def open_subjects(
    run: str | Path, settings: EvalSettings, *, tuned: bool = False, fresh: str = UNTRAINED, head: bool = False
) -> Subjects:
    """Load the encoder of a run, with its instance head if wanted and there, and make its controls.

    All authors fine-tune (``tuned``) the student. ``fresh`` is the name of the encoder with new weights.
    """
    network = settings.network or ("student" if tuned else None)
    vit, card = load_encoder(run, settings.model, network)
    own = load_extra_module(run, "pooling", network) if head else None
    return with_controls(Subject(card.name, vit, card, own), load_start(run), settings.seed, fresh)


def with_controls(
    ours: Subject, start: tuple[Encoder, EncoderCard] | None, seed: int, fresh: str = UNTRAINED
) -> Subjects:
    """Return an encoder with the weights that it began with, if any, and with new weights by ``seed``."""
    twin, its = untrained_twin(ours.card, ours.head, seed)
    return Subjects(ours, None if start is None else Subject(START, *start), Subject(fresh, twin, ours.card, its))
