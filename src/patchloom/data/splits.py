"""Splits of a source: held-out and test images, stratified, with exact copies of these in neither part.

If the images are in groups (`Source.groups`), a split takes whole groups.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from typing import Literal

import numpy as np

from patchloom.data.notes import limit_examples
from patchloom.data.source import Data, Source
from patchloom.errors import PatchloomError

MAX_HELD_OUT = 2000
_FEW_GROUPS = 10  # groups of which all choices can be compared
_USUAL, _LEAST, _MOST = 0.05, 64, 0.2  # default share; fewest images for a useful measure; largest share of a small set


def default_held_out_share(n: int, noun: str = "images") -> tuple[float, str]:
    """Return the default share of ``n`` images to hold out, and the reason.

    It is 5 %, or the share of 64 images if that is more, but at most a fifth. With 64 images, a proportion is known to
    within 12 %.
    """
    usual, most = round(_USUAL * n), round(_MOST * n)
    if usual >= min(_LEAST, most):
        return _USUAL, f"the default for {n:,} {noun}" + f"; {MAX_HELD_OUT:,} at most" * (usual > MAX_HELD_OUT)
    if most >= _LEAST:
        return _LEAST / n, f"{_LEAST} of {n:,} {noun}, since fewer say little"
    return _MOST, f"a fifth of {n:,} {noun}, since fewer say little"


def hold_out(
    source: Source,
    share: float | Literal["auto"] = _USUAL,
    max_images: int = MAX_HELD_OUT,
    seed: int = 0,
    *,
    exact: bool = True,
) -> tuple[Source, Source]:
    """Split a source into (training, held-out) images, stratified by label if there are labels.

    Exact copies of held-out images are in neither part. Both parts are in the source's order.
    """
    part = default_held_out_share(len(source))[0] if share == "auto" else share
    return split_off(source, *choose_indices(source, min(round(part * len(source)), max_images), seed, exact=exact))


def split_for_test(source: Source, share: float = 0.2, seed: int = 0) -> tuple[Source, Source]:
    """Split data that has no test images into (training, test), stratified by label.

    Exact copies of test images are in neither part.
    """
    return split_off(source, *choose_indices(source, round(share * len(source)), seed))


def split_off(source: Source, second: np.ndarray, copies: np.ndarray) -> tuple[Source, Source]:
    """Split into (all other images, the images ``second``); ``copies`` are in neither. Both are indices, int64 [n]."""
    rest = np.setdiff1d(np.arange(len(source)), np.concatenate([second, copies]))
    return source.subset(rest), source.subset(second)


def choose_indices(
    source: Source, count: int, seed: int, known: np.ndarray | None = None, *, exact: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``count`` images, at least 1 and never all, stratified by label if there are labels.

    If the images are in groups, whole groups are drawn, with at most ``count`` images, or else the smallest group.

    Args:
        source: source of the images.
        count: number of images to draw.
        seed: random seed of the draw.
        known: contents [m] to avoid while there are others; fewer than ``count`` may be drawn then.
        exact: whether to look for exact copies, if the source knows its contents.

    Returns:
        Indices of the drawn images and of their exact copies, int64, sorted.
    """
    n = len(source)
    if n < 2:
        noun = source.noun.removesuffix("s" if n == 1 else "")
        raise PatchloomError(f"{source.name} holds {n} {noun}, which cannot be split: at least 2 are needed")
    labels = np.zeros(n, np.int64) if source.labels is None else source.labels
    contents = source.contents() if exact else None
    if source.groups is not None:
        if len(np.unique(source.groups)) < 2:
            raise PatchloomError(
                f"all images of {source.name} are in one group, which cannot be split: give another --group, or none, "
                "as @group= after the name of a table"
            )
        seen = np.zeros(n, bool) if known is None or contents is None else np.isin(contents, known)
        chosen = pick_groups(labels, source.groups, count, seed, seen)
        if contents is None:
            return chosen, np.empty(0, np.int64)
        chosen = chosen[np.sort(np.unique(contents[chosen], return_index=True)[1])]
        copies = np.setdiff1d(np.flatnonzero(np.isin(contents, contents[chosen])), chosen)
        if len(chosen) + len(copies) == n:
            raise PatchloomError(
                f"all images of {source.name} are copies of those in one group, so nothing would be left to train on: "
                "give another --group"
            )
        return chosen, copies
    if contents is None:
        return pick(labels, min(max(count, 1), n - 1), seed), np.empty(0, np.int64)
    _, first, which = np.unique(contents, return_index=True, return_inverse=True)
    if len(first) < 2:
        raise PatchloomError(
            f"the {n} files of {source.name} are copies of one {source.noun[:-1]}, or none could be read: add others"
        )
    candidates = np.sort(first)  # one of each content: all images, if there are no copies
    if known is not None:
        new = candidates[~np.isin(contents[candidates], known)]
        candidates = new if len(new) else candidates
    count = min(max(count, 1), len(first) - 1, len(candidates))
    chosen = candidates[pick(labels[candidates], count, seed)]
    return chosen, np.setdiff1d(np.flatnonzero(np.isin(which, which[chosen])), chosen)


def pick_groups(
    labels: np.ndarray, groups: np.ndarray, count: int, seed: int, seen: np.ndarray | None = None
) -> np.ndarray:
    """Draw whole groups of images, stratified by label, with at most ``count`` images in total.

    A group counts for the label of which it has the largest share of all images, so that patients with a few positive
    images are drawn in proportion. If no group is that small, the smallest one is drawn. Few groups may be drawn beyond
    the count, up to half of the images, to have every class in both parts.

    Args:
        labels: labels [n]; negative: unlabelled.
        groups: groups [n], at least two of them; never all are drawn.
        count: largest number of images to draw.
        seed: random seed of the draw.
        seen: bool [n], images whose groups are avoided while there are others.

    Returns:
        Sorted indices of the images, int64 [m].
    """
    names, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    candidates = np.arange(len(names)) if seen is None else np.setdiff1d(group, group[seen])
    candidates = candidates if len(candidates) else np.arange(len(names))
    kinds, kind = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(names), len(kinds)), np.int64)  # images of each label by group
    np.add.at(counts, (group, kind), 1)
    shares = np.where(kinds < 0, 0, counts / counts.sum(0))
    drawn = candidates[_turns(shares.argmax(1)[candidates], seed)]
    taken, room = list[int](), count
    for one in drawn.tolist():
        if sizes[one] <= room and len(taken) + 1 < len(names):
            taken.append(one)
            room -= int(sizes[one])
    taken = taken or [int(drawn[np.argmin(sizes[drawn])])]
    if len(names) <= _FEW_GROUPS:
        # all choices are compared, by the number of classes that one part lacks, and then by the distances from the
        # asked size and from the shares of the classes in all images; a class of one group cannot be in both parts
        several = counts[:, (kinds >= 0) & ((counts > 0).sum(0) > 1)]
        total, n = several.sum(0), sizes.sum()
        chosen = np.arange(1, 2 ** len(candidates))[:, None] >> np.arange(len(candidates)) & 1
        each = np.zeros((len(chosen) + 1, len(sizes)), np.int64)
        each[0, taken], each[1:, candidates] = 1, np.random.default_rng(seed).permutation(chosen)
        inside, size = each @ several, each @ sizes
        lacking = ((inside == 0) | (inside == total)).sum(1)
        parts = inside / np.maximum(inside.sum(1, keepdims=True), 1) - total / max(total.sum(), 1)
        distance = 2 * abs(size - count) / n + abs(parts).sum(1) / 2
        allowed = np.flatnonzero((2 * size <= n) & (lacking < lacking[0]))
        if len(allowed):
            best = allowed[np.lexsort((distance[allowed], lacking[allowed]))[0]]
            taken = np.flatnonzero(each[best]).tolist()
    return np.flatnonzero(np.isin(group, taken))


def lacking_classes(train: Source, test: Source, name: str = "test") -> str:
    """Return a sentence on classes that one of two parts lacks because groups stay whole; "" if there are none."""
    if train.groups is None or train.labels is None or test.labels is None or not train.classes:
        return ""
    known, other = ({*labels[labels >= 0].tolist()} for labels in (train.labels, test.labels))
    parts = {name: known - other, "training": other - known}
    said = [
        f"no {part} {train.noun.removesuffix('s')} has class {limit_examples(train.classes[i] for i in sorted(gone))}"
        for part, gone in parts.items()
        if gone
    ]
    return f"Groups stay whole, and {' and '.join(said)}: label more groups." if said else ""


def pick(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draw ``count`` of the images with ``labels`` [n], stratified: sorted indices, int64 [count].

    The last image of a label is drawn only when nothing else is left, so that a rare class stays in the training set.
    """
    return np.sort(_turns(labels, seed)[:count])


def _turns(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return a random order of images with ``labels`` [n], int64 [n]; any prefix has the labels in proportion."""
    rng = np.random.default_rng(seed)
    turn = np.empty(len(labels))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # Evenly spaced with a random start: any prefix of the sorted turns holds the labels in proportion.
        turn[members] = (np.arange(len(members)) + rng.random()) / len(members)
        turn[members[-1]] += 1
    return np.argsort(turn, kind="stable")


# Groups of images that must stay in one split, such as the frames of one video, by paths or a column of a table.


PARENT = "parent"
_NAMED = 5  # groups that a sentence names


def with_groups(data: Data, group: str) -> Data:
    """Assign the images of data to groups, and add a note on the number of groups."""
    train = copy(data.train)
    names = group_names(train, group)
    found, alone = np.unique([name for name in names if name]), names.count("")
    if not len(found):
        columns = f"a column ({', '.join(train.column_names())}), " if train.column_names() else ""
        raise PatchloomError(
            f"--group {group} matches no image of {train.name}, such as {train.place(0)}: give {columns}a regular "
            "expression for a part of these paths, or parent for the folder"
        )
    if len({*names}) == 1:
        raise PatchloomError(
            f"--group {group} puts all {len(names):,} {train.noun} of {train.name} into one group, such as "
            f"{train.place(0)}, so none could be held out: give a pattern that separates them"
        )
    train.groups = number_groups(names)
    few = f" ({_some(found)})" if len(found) <= _NAMED else ""
    notes = [f"--group {group}: {len(found):,} groups of {train.noun}{few}; each stays in one split"]
    if alone:
        of = f"of {len(names):,} {train.noun}"
        notes.append(f"--group {group}: {alone:,} {of} are in no group, and count as a group each")
    test = data.test
    if test is not None and (test.place(0) is not None or test.column(group) is not None):
        test, of_test = copy(test), group_names(test, group)
        test.groups = number_groups(of_test)
        if both := np.intersect1d(of_test, found).tolist():
            notes.append(
                f"--group {group}: the data has {train.noun} of {len(both):,} of its groups in training and in test "
                f"({_some(both)}), so scores say less about new {train.noun}"
            )
    return replace(data, train=train, test=test, notes=(*data.notes, *notes))


def without_groups(source: Source) -> Source:
    """Return the same images without groups."""
    free = source.subset(np.arange(len(source)))
    free.groups = None
    return free


def splittable(source: Source) -> Source:
    """Return the same images, but `without_groups` if all are in one group, for choices that have to split them."""
    one = source.groups is not None and len(np.unique(source.groups)) < 2
    return without_groups(source) if one else source


def group_names(source: Source, group: str) -> list[str]:
    """Return the name of each image's group; "" for an image in none."""
    if (column := source.column(group)) is not None:
        return list(column)
    try:
        pattern = re.compile(group)
    except re.error as problem:
        raise PatchloomError(
            f"--group {group} is not a regular expression ({problem}): write one such as '^(.*)_', or parent"
        ) from problem
    if pattern.groups > 1:
        raise PatchloomError(
            f"--group {group} has {pattern.groups} pairs of brackets: leave one around what names the group, and write "
            "the others as (?:...)"
        )
    if source.place(0) is None:
        raise PatchloomError(f"--group {group} needs names of files, and the {source.noun} of {source.name} have none")
    if group == PARENT:  # the same folder name in two places is two folders
        return [source.describe(i).replace("\\", "/").rpartition("/")[0] for i in range(len(source))]
    found = [pattern.search(source.place(i) or "") for i in range(len(source))]
    return ["" if one is None else one[pattern.groups] or "" for one in found]


def some_groups(source: Source, group: str) -> str:
    """Return the names of the groups in a part of the images, for a sentence: their number and the first."""
    names = np.unique([name for name in group_names(source, group) if name])
    return f"{len(names):,} ({_some(names)})"


def number_groups(names: list[str]) -> np.ndarray:
    """Number the names: int64 [n], equal for equal names; each "" is a separate group."""
    return np.unique([name or f"\0{i}" for i, name in enumerate(names)], return_inverse=True)[1].astype(np.int64)


def _some(names: np.ndarray | list[str]) -> str:
    shown = [str(name).rpartition("/")[2] or str(name) for name in names]
    return limit_examples(shown, most=_NAMED)
