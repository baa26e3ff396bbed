"""What every protocol is told, and the labelled images that it measures on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from patchloom.data import Source, open_data, split_for_test
from patchloom.data.source import pick
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import has_labels, labelled


@dataclass(frozen=True)
class How:
    """How to measure, whatever the protocol.

    Attributes:
        seed: of the splits, of everything that is trained, and of the untrained encoder.
        seeds: repeat with so many seeds, counted up from ``seed``, and report mean and spread.
        device: "auto" or what torch calls it.
        batch_size: images at once where nothing is trained but on their features.
        workers: processes that read images.
        most: use a stratified subset of at most so many training images, for a quick look.
        cache: keep features on the disc, and use those of an earlier pass over the same images.
    """

    seed: int = 0
    seeds: int = 1
    device: str = "auto"
    batch_size: int = 256
    workers: int = 0
    most: int | None = None
    cache: bool = True

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            PatchloomError: a number out of its range.
        """
        for name, least in {"batch_size": 1, "workers": 0, "seed": 0, "seeds": 1, "most": 2}.items():
            value = getattr(self, name)
            if value is not None and value < least:
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
    def reading(self) -> dict[str, int]:
        """Arguments of the functions that read images."""
        return {"batch_size": self.batch_size, "workers": self.workers}


@dataclass(frozen=True)
class Parts:
    """Labelled training and test images, and how they came about, in words."""

    train: Source
    test: Source
    story: str


def parts_of(data: str | Path, how: How) -> Parts:
    """The labelled training and test images of ``data``; a stratified fifth is split off where there is no test.

    Raises:
        PatchloomError: no such data, or no labels.
    """
    opened = open_data(data)
    if has_labels(opened.test):
        train, test = labelled(opened.train), labelled(opened.test)
        story = "The data brings its own test images."
    else:
        train, test = split_for_test(labelled(opened.train), seed=how.seed)
        story = (
            "The data brings no labelled test images, so a stratified fifth was split off for the test "
            f"(seed {how.seed}): pre-training may have seen those images, without their labels."
        )
    n = len(train)
    if how.most is not None and how.most < n:
        train = stratified(train, how.most, how.seed)
        used = f"a stratified {how.most:,} of {n:,} training images were used (seed {how.seed})"
        story += f" For a quick look, only {used}."
    return Parts(train, test, story)


def stratified(source: Source, count: int, seed: int) -> Source:
    """``count`` of a source's labelled images, each class in its share; a rare class keeps an image."""
    n = len(source)
    # what is left when the others are drawn
    return source.subset(np.setdiff1d(np.arange(n), pick(source.labels, n - count, seed)))
