"""Splitting a source: held-out and test images, stratified, with exact copies kept out of both parts."""

from __future__ import annotations

import numpy as np

from patchloom.data.sources.base import Source
from patchloom.errors import PatchloomError

MAX_HELD_OUT = 2000


def hold_out(
    source: Source, share: float = 0.05, max_images: int = MAX_HELD_OUT, seed: int = 0, *, exact: bool = True
) -> tuple[Source, Source]:
    """Split a source into (training, held-out) images, stratified by label where there are labels.

    Exact copies of held-out images are in neither part. Both parts are in the source's order.

    Args:
        source: images.
        share: of the images that is held out, at least 1 image.
        max_images: upper limit of the held-out images.
        seed: of the draw.
        exact: look for exact copies; False reads no files.

    Raises:
        PatchloomError: fewer than 2 images.
    """
    return apart(source, *choose(source, min(round(share * len(source)), max_images), seed, exact=exact))


def split_for_test(source: Source, share: float = 0.2, seed: int = 0) -> tuple[Source, Source]:
    """Split data without test images of its own into (training, test), stratified by label.

    Exact copies of test images are in neither part.

    Raises:
        PatchloomError: fewer than 2 images.
    """
    return apart(source, *choose(source, round(share * len(source)), seed))


def apart(source: Source, second: np.ndarray, copies: np.ndarray) -> tuple[Source, Source]:
    """(all other images, the images ``second``); the images ``copies`` are in neither. Both are indices, int64 [n]."""
    rest = np.setdiff1d(np.arange(len(source)), np.concatenate([second, copies]))
    return source.subset(rest), source.subset(second)


def choose(
    source: Source, count: int, seed: int, known: np.ndarray | None = None, *, exact: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``count`` images, at least 1 and never all, stratified by label where there are labels.

    Args:
        source: images.
        count: how many to draw.
        seed: of the draw.
        known: contents [m] to avoid while there are others; fewer than ``count`` may be drawn then.
        exact: look for exact copies, where the source knows its contents.

    Returns:
        Sorted indices of the drawn images, and of their exact copies.

    Raises:
        PatchloomError: fewer than 2 images, or copies of one image only.
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
    """Draw ``count`` of the images with ``labels`` [n], stratified: sorted indices, int64 [count].

    The last image of a label is drawn only when nothing else is left, so that a rare class stays in the training set.
    """
    rng = np.random.default_rng(seed)
    turn = np.empty(len(labels))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # Evenly spaced with a random start: any prefix of the sorted turns holds the labels in proportion.
        turn[members] = (np.arange(len(members)) + rng.random()) / len(members)
        turn[members[-1]] += 1
    return np.sort(np.argsort(turn, kind="stable")[:count])
