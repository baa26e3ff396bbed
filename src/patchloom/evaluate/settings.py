"""What is common to all protocols, and the labelled images that it measures on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_type_hints

import numpy as np
import torch

from patchloom.data import Source, copies_sentence, open_data, split_for_test
from patchloom.data.sources.builtin import in_memory
from patchloom.data.splits import pick
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import has_labels, labelled
from patchloom.hints import check
from patchloom.machine import Cores, cores, workers

_FEW_BATCHES = 8  # on a CPU: to start processes for fewer costs more than they save, up to seconds where none is forked


@dataclass(frozen=True)
class EvalSettings:
    """How to measure, whatever the protocol.

    Attributes:
        seed: of the splits, of everything that is trained, and of the untrained encoder.
        seeds: repeat with so many seeds, counted up from ``seed``, and report mean and spread.
        device: "auto" or what torch calls it.
        batch_size: images at once where nothing is trained but on their features.
        workers: processes that read images; auto goes by the device, and is 0 where starting them would not pay.
        max_train: use a stratified subset of at most so many training images, for a quick look.
        cache: keep features on the disc, and use those of an earlier pass over the same images.
    """

    seed: int = 0
    seeds: int = 1
    device: str = "auto"
    batch_size: int = 256
    workers: int | Literal["auto"] = "auto"
    max_train: int | None = None
    cache: bool = True

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            PatchloomError: a number out of its range, or a value of another kind.
        """
        for name, hint in get_type_hints(EvalSettings).items():
            check(name, getattr(self, name), hint)
        for name, least in {"batch_size": 1, "workers": 0, "seed": 0, "seeds": 1, "max_train": 2}.items():
            value = getattr(self, name)
            if value not in (None, "auto") and value < least:
                raise PatchloomError(f"--{name} must be {least} or more, not {value}")

    @property
    def at(self) -> torch.device:
        """The device.

        Raises:
            PatchloomError: it cannot be used here.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.empty(0, device=self.device)
            return torch.device(self.device)
        except (RuntimeError, AssertionError) as problem:  # torch built without CUDA asserts
            raise PatchloomError(f"the device {self.device} cannot be used here: choose auto or cpu") from problem

    @property
    def readers(self) -> tuple[int, str]:
        """How many processes may read images at most, and why."""
        return workers(self.at.type, Cores(cores())) if self.workers == "auto" else (self.workers, "as you said")

    def workers_for(self, source: Source, batches: int, trained: bool = False) -> int:
        """Processes that read so many batches of ``source``, for a pass over it or to be ``trained`` on.

        No result depends on it. auto is never more than can read while another batch is computed on; images in memory
        are only worth a process where crops of them are made.
        """
        if self.workers != "auto":
            return self.workers
        few = batches < _FEW_BATCHES and self.at.type == "cpu"
        return 0 if few or (in_memory(source) and not trained) else min(self.readers[0], batches - 1)

    def reading(self, source: Source) -> dict[str, int]:
        """Arguments of the functions that read every image of ``source`` once."""
        batches = -(-len(source) // self.batch_size)
        return {"batch_size": self.batch_size, "workers": self.workers_for(source, batches)}


@dataclass(frozen=True)
class Parts:
    """Training and test images, and how they came about, in words."""

    train: Source
    test: Source
    story: str


def parts_of(data: str | Path, settings: EvalSettings, labels: bool = True) -> Parts:
    """The training and test images of ``data``; a stratified fifth is split off where there is no test.

    Exact copies of test images that are split off are in neither part. Where the data's own test images are copies of
    training images, the story says how many.

    Args:
        data: as `patchloom.data.open_data` takes it.
        settings: the seed, and how many training images to use.
        labels: only images that have one.

    Raises:
        PatchloomError: no such data, or no labels where they are needed.
    """
    opened = open_data(data)
    own = has_labels(opened.test) if labels else opened.test is not None
    whole = labelled(opened.train) if labels else opened.train
    if own:
        train, test = whole, labelled(opened.test) if labels else opened.test
        story = "The data brings its own test images."
    else:
        train, test = split_for_test(whole, seed=settings.seed)
        lacks, fifth, unseen = ("labelled ", "stratified ", ", without their labels") if labels else ("", "", "")
        story = (
            f"The data brings no {lacks}test images, so a {fifth}fifth was split off for the test "
            f"(seed {settings.seed}): pre-training may have seen those images{unseen}."
        )
        if copies := len(whole) - len(train) - len(test):
            story += f" Nothing was trained on {copies:,} exact copies of test images."
    n = len(train)
    if settings.max_train is not None and settings.max_train < n:
        train = stratified(train, settings.max_train, settings.seed)
        used = f"a stratified {settings.max_train:,} of {n:,} training images were used (seed {settings.seed})"
        story += f" For a quick look, only {used}."
    if (contents := train.contents()) is None:
        story += " Exact copies among the images were not looked for."
    elif own:
        story += copies_sentence(test, contents)
    return Parts(train, test, story)


def stratified(source: Source, count: int, seed: int) -> Source:
    """``count`` of a source's images, each class, if there are any, in its share; a rare class keeps an image."""
    n = len(source)
    labels = np.zeros(n, np.int64) if source.labels is None else source.labels
    # what is left when the others are drawn
    return source.subset(np.setdiff1d(np.arange(n), pick(labels, n - count, seed)))
