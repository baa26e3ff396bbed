"""Splitting a source: held-out and test images, stratified, with exact copies kept out of both parts."""

from __future__ import annotations

import numpy as np

from patchloom.data.sources.base import Source
from patchloom.errors import PatchloomError

MAX_HELD_OUT = 2000


def hold_out(
    source: Source, share: float = 0.05, max_images: int = MAX_HELD_OUT, seed: int = 0, *, exact: bool = True
) -> tuple[Source, Source]:
    """Split into (training, held out); the second takes `share` of the images, at least 1 and at most `max_images`.

    Stratified where there are labels. Both keep the source's order. Exact copies of held-out images are in neither
    part; exact=False does not look for them, and reads no files.

    Raises: PatchloomError for fewer than 2 images.
    """
    return apart(source, *choose(source, min(round(share * len(source)), max_images), seed, exact=exact))


def split_for_test(source: Source, share: float = 0.2, seed: int = 0) -> tuple[Source, Source]:
    """Split labelled data that brings no test images into (training, test), stratified.

    Exact copies of test images are in neither part. Raises: PatchloomError for fewer than 2 images.
    """
    return apart(source, *choose(source, round(share * len(source)), seed))


def apart(source: Source, second: np.ndarray, copies: np.ndarray) -> tuple[Source, Source]:
    """(all other images, those of the indices `second`); `copies` are indices that are in neither part."""
    rest = np.setdiff1d(np.arange(len(source)), np.concatenate([second, copies]))
    return source.subset(rest), source.subset(second)


def choose(
    source: Source, count: int, seed: int, known: np.ndarray | None = None, *, exact: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` images, at least 1 and never all, stratified where there are labels.

    known: contents that are not drawn, as long as there are others; then perhaps fewer than `count` are.
    exact: look for copies, where the source can compare contents.

    Returns: their indices and those of their exact copies, both sorted. Raises: PatchloomError for fewer than 2 images.
    """
    n = len(source)
    if n < 2:
        raise PatchloomError(
            f"{source.name} holds {n} image{'s'[: n != 1]}, which cannot be split: add at least 2 images"
        )
    labels = np.zeros(n, np.int64) if source.labels is None else source.labels
    contents = source.contents() if exact else None
    if contents is None:
        return pick(labels, min(max(count, 1), n - 1), seed), np.empty(0, np.int64)
    _, first, which = np.unique(contents, return_index=True, return_inverse=True)
    if len(first) < 2:
        raise PatchloomError(
            f"the {n} files of {source.name} are copies of one image, or none could be read: add others"
        )
    candidates = np.sort(first)  # one of each content: all images, where there are no copies
    if known is not None:
        new = candidates[~np.isin(contents[candidates], known)]
        candidates = new if len(new) else candidates
    count = min(max(count, 1), len(first) - 1, len(candidates))
    chosen = candidates[pick(labels[candidates], count, seed)]
    return chosen, np.setdiff1d(np.flatnonzero(np.isin(which, which[chosen])), chosen)


def pick(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Sorted indices of `count` images drawn at random, from each label in proportion.

    The last image of a label is drawn only when nothing else is left: a rare class stays in the training images.
    """
    rng = np.random.default_rng(seed)
    turn = np.empty(len(labels))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # Evenly spaced with a random start: any prefix of the sorted turns holds the labels in proportion.
        turn[members] = (np.arange(len(members)) + rng.random()) / len(members)
        turn[members[-1]] += 1
    return np.sort(np.argsort(turn, kind="stable")[:count])
