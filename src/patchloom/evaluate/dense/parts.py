"""Training, validation and test images of an evaluation whose images are annotated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import numpy as np

from patchloom.data import Data
from patchloom.data.annotated.base import Annotated, AnnotatedData, T
from patchloom.data.groups import grouped, splittable
from patchloom.data.splits import choose, pick
from patchloom.errors import PatchloomError
from patchloom.evaluate.dense.recipes import held_out
from patchloom.evaluate.settings import EvalSettings, on_copies, tell_leaks
from patchloom.runs.held_out import seen_in_pretraining
from patchloom.waiting import Waiting

_TEST_SHARE = 0.2


@dataclass(frozen=True)
class DenseParts(Generic[T]):
    """Training, validation and test images, and sentences on their origin.

    Attributes:
        train: what is trained on and, with ``held``, what validation images are split off.
        validation: images of the data's own to choose by.
        test: are read once, at the end.
        story: of the origin.
    """

    train: Annotated[T]
    validation: Annotated[T] | None
    test: Annotated[T]
    story: str

    def trained_on(self, share: float, seed: int) -> tuple[Annotated[T], Annotated[T] | None]:
        """Images to train on and to validate by, where ``share`` is that of a recipe: 0 has none of the latter."""
        if not share or self.validation is not None:
            return self.train, self.validation if share else None
        n = len(self.train)
        if n < 2:
            raise PatchloomError("a single training image cannot be split: use --validation 0")
        held, copies = choose(splittable(self.train.images), held_out(share, n), seed)
        rest = np.setdiff1d(np.arange(n), np.concatenate([held, copies]))
        return self.train.subset(rest), self.train.subset(held)


def dense_parts(
    opened: AnnotatedData[T], settings: EvalSettings, note: str = "", run: str | Path | None = None
) -> DenseParts[T]:
    """The parts of annotated images: without test images of the data's own, a fifth is split off.

    Args:
        opened: the data.
        settings: the seed, groups, and how many training images to use.
        note: what is to be said of the encoder, as the story begins.
        run: the encoder, as the user named it.

    Raises:
        PatchloomError: too few images to be split, or no such groups.
    """
    train, validation, brought = opened.train, opened.validation, opened.test
    if settings.group is not None:
        whole = train.subset(np.arange(len(train)))
        whole.images = grouped(Data(train.images, None), settings.group).train
        train = whole
    whole_groups = "" if train.images.groups is None else " in whole groups"
    if brought is None:
        chosen, copies = choose(train.images, round(_TEST_SHARE * len(train)), settings.seed)
        rest = np.setdiff1d(np.arange(len(train)), np.concatenate([chosen, copies]))
        train, test = train.subset(rest), train.subset(chosen)
        copied = f" Nothing was trained on {len(copies):,} exact copies of test images." if len(copies) else ""
        story = (
            f"The data brings no test images, so a fifth was split off for the test{whole_groups} (seed "
            f"{settings.seed}): pre-training may have seen those images, without their labels.{copied}"
        )
    else:
        test = brought
        brings = "its own validation and test images" if validation is not None else "its own test images"
        story = f"The data brings {brings}."
        if run is not None:
            story += seen_in_pretraining(run, test.images)
    n = len(train)
    if settings.max_train is not None and settings.max_train < n:
        chosen = np.setdiff1d(np.arange(n), pick(np.zeros(n, np.int64), n - settings.max_train, settings.seed))
        train = train.subset(chosen)
        own = " and, for as few labels as said, none of its validation images" if validation is not None else ""
        story += f" Only {settings.max_train:,} of {n:,} training images were used{own} (seed {settings.seed})."
        validation = None
    with Waiting("looking for copies among the images"):
        story += on_copies(train.images, test.images, looked=brought is None)
    tell_leaks(train.images, test.images, own=brought is not None)
    return DenseParts(train, validation, test, f"{note} {story}".strip())
