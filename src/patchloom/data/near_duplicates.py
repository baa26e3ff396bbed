"""Detection of near-copies among images with neighbouring names, such as frames of a film, from a few pairs."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.decode import Unreadable
from patchloom.data.notes import limit_examples
from patchloom.data.source import Source
from patchloom.data.splits import PARENT, group_names
from patchloom.errors import PatchloomError
from patchloom.system.documents import is_whole

_PAIRS = 64
_SECONDS = 4.0  # time limit: if decoding is slow, fewer pairs are compared, but at least `_FEWEST`
_FEWEST = 12
_LOOKED = 4096  # most neighbours tried: if each lies in a separate folder, none can be compared
_SORTED = 100_000  # most names that are sorted; above that, the order of the source is used
_TRIED = 20_000  # names on which patterns are tried
_SIDE = 16  # side of a thumbnail
_ROUNDED = 1e-4  # contrast below which a thumbnail is of one colour, relative to its brightness: rounding
# In frames of CamVid, a second apart, 78 % of the neighbours have a correlation above 0.8, and above that of 95 % of
# other pairs. In CIFAR-10, photographs of raccoons and synthetic shapes, 4 % to 11 % are above 95 % of other pairs, and
# hardly any is above 0.8.
_CLOSE = 0.8
_MANY = 0.3
# Common parts of names. Frames: all before the last _ or -, or before the last number. Tiles, named by row and column:
# all before the first _ or -, or up to the first number. One film: all but the number's last two digits.
_PATTERNS = (
    *(r"^(.*)_", r"^(.*)-", r"^(.*?)\d+\D*$", PARENT),
    *(r"^([^/_]+)_", r"^(.*/[^/_]+)_", r"^([^/-]+)-", r"^(.*/[^/-]+)-"),
    *(r"^([^/\d]*\d+)[^/\d]", r"^(.*/[^/\d]*\d+)[^/\d]"),
    r"^(.*?\d+)\d\d\D*$",
)


# words for a subject of several images: in names of columns, or with a number in names of files
_SUBJECTS = (
    "slide|patient|subject|case|donor|specimen|animal|video|clip|film|sequence|seq|scene|scan|volume|wsi|plate|batch"
)
_SUBJECT_COLUMN = re.compile(rf"({_SUBJECTS})([-_ ]?(id|name|number|no))?", re.IGNORECASE)
_LEAST_VALUES, _LEAST_EACH = 5, 3  # of a column with another name: fewer values are classes, fewer images each are rare
_LARGEST = 0.5  # fraction of the images of its commonest value
_WHOLES = re.compile(rf"(?<![A-Za-z])({_SUBJECTS})[-_ ]?\d", re.IGNORECASE)
_NAMED = 0.5  # share of the names that must have such a word


class NearCopies(NamedTuple):
    """Near-copies among images with neighbouring names.

    Attributes:
        close: number of pairs that look alike.
        pairs: number of pairs that were compared.
        group: value of ``--group`` that keeps them together; None if none was found.
        groups: names of those groups.
    """

    close: int
    pairs: int
    group: str | None
    groups: tuple[str, ...]

    def sentence(self) -> str:
        """Return a warning, with a remedy."""
        said = (
            f"neighbours in name are near copies ({self.close} of {self.pairs} pairs compared), like frames of one "
            "film: held-out images then say little about new ones"
        )
        if self.group is None:
            return f"{said}. --group PATTERN keeps images together by a pattern in their names."
        some = limit_examples(self.groups, most=4)
        return (
            f"{said}. --group {shlex.quote(self.group)} keeps them together, in {len(self.groups):,} groups ({some})."
        )


def near_copies(source: Source, seed: int = 0) -> NearCopies | None:
    """Compare up to 64 pairs of neighbours in name; return None if they look no more alike than other images do.

    Thumbnails are compared by their correlation. Images in groups or without names are not compared. Nor are
    recordings: two of one speaker or one word are similar in loudness, but far from copies.
    """
    n = len(source)
    if n < _FEWEST or not source.modality.resizable or source.groups is not None or source.place(0) is None:
        return None
    order = np.arange(n)
    if n <= _SORTED:
        keys = [_by_number(source.place(i) or "") for i in range(n)]
        order = np.array(sorted(range(n), key=keys.__getitem__))
    begin, rng = time.monotonic(), np.random.default_rng(seed)
    pairs: list[tuple[int, int]] = []
    each: list[Tensor] = []  # thumbnails of each pair
    for at in rng.permutation(n - 1)[:_LOOKED].tolist():
        if len(pairs) == _PAIRS or (len(pairs) >= _FEWEST and time.monotonic() - begin > _SECONDS):
            break
        pair = int(order[at]), int(order[at + 1])
        if len({(source.place(i) or "").rpartition("/")[0] for i in pair}) > 1:  # of two folders
            continue
        try:
            each.append(torch.cat([thumbnails(source.read(i)[None]) for i in pair]))
        except Unreadable:
            if time.monotonic() - begin > _SECONDS:
                break
            continue
        pairs.append(pair)
    if len(pairs) < _FEWEST - 1:
        return None
    left, right = torch.stack(each).unbind(1)
    alike = (left * right).sum(1).numpy()
    others = (left @ left.T).numpy()[np.triu_indices(len(pairs), 1)]
    close = alike > max(_CLOSE, float(np.quantile(others, 0.95)))
    if close.mean() < _MANY:
        return None
    some = np.arange(n) if n <= _TRIED else np.sort(rng.permutation(n)[:_TRIED])
    tried, paired = source.subset(some), source.subset(np.array(pairs)[close].flatten())
    for pattern in (*_PATTERNS, *filter(None, [group_in_names(source)])):
        if pattern == PARENT and source.labels is not None:  # folders are classes
            continue
        with suppress(PatchloomError):
            names, sizes = np.unique(group_names(tried, pattern), return_counts=True)
            both = np.array(group_names(paired, pattern)).reshape(-1, 2)
            # it keeps close pairs together and still splits the images
            if 2 <= len(names) <= n / 3 and sizes.max() <= 0.9 * len(some) and (both[:, 0] == both[:, 1]).mean() >= 0.8:
                return NearCopies(int(close.sum()), len(pairs), pattern, tuple(names.tolist()))
    return NearCopies(int(close.sum()), len(pairs), None, ())


def group_in_names(source: Source) -> str | None:
    """Return a value of ``--group`` from a word in most names for a subject of several images, such as patient12."""
    n = len(source)
    if n == 0 or source.place(0) is None:
        return None
    some = range(0, n, -(-n // _TRIED))
    words = Counter(word[1] for i in some if (word := _WHOLES.search(source.place(i) or "")))
    if not words:
        return None
    most, count = words.most_common(1)[0]
    return rf"(?<![A-Za-z]){most}[-_ ]?\d+" if count >= _NAMED * len(some) else None


def grouping_columns(columns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the columns of a table that may name what several images share, such as a patient, the likeliest first.

    A column has such a name, or values that repeat and divide the images into several parts, none of them large.
    Numbers with a fraction are measurements, and no names.
    """
    named, dividing = [], []
    for column, values in columns.items():
        given = [value for value in values if value]
        times = Counter(given)
        if not 1 < len(times) < len(given):
            continue
        several = _LEAST_VALUES <= len(times) <= len(values) / _LEAST_EACH
        if _SUBJECT_COLUMN.fullmatch(column):
            named.append(column)
        elif several and max(times.values()) <= _LARGEST * len(values):
            fractions = 0
            for value in times:
                with suppress(ValueError, OverflowError):
                    fractions += not float(value).is_integer() or "." in value
            if fractions < len(times):
                dividing.append((-len(times), column))
    return (*named, *(column for _, column in sorted(dividing)))


def subject_note(source: Source) -> str:
    """Return a warning about a table's column of subjects of several images that no option names, or ""."""
    for column in source.subjects if source.groups is None else ():
        count = len({value for value in source.column(column) or () if value})
        if 1 < count < len(source):
            known = _SUBJECT_COLUMN.fullmatch(column)
            shares = "" if known else f"if {source.noun} of one value belong together, such as those of one patient, "
            return (
                f"{column} in {source.name} has {count:,} values for {len(source):,} {source.noun}: {shares}"
                f"--group {shlex.quote(column)} keeps those of each in one split"
            )
    return ""


def parted_wholes(train: Source, test: Source, remedy: str = "") -> str:
    """Return a warning about patients, slides or the like with images in both sources, by names of files; or ""."""
    if (group := group_in_names(train)) is None or test.place(0) is None:
        return ""
    there = Counter(group_names(train, group))
    both = sorted({*group_names(test, group)} & {*there} - {""}, key=lambda name: _by_number(name))
    if not both or sum(there.values()) < 2 * len(there):  # each image is of another subject
        return ""
    some = limit_examples(both, most=4)
    return (
        f"by their names, {train.noun} of {len(both):,} groups ({some}) are in training and in test, so scores say "
        f"less about new ones: {remedy or f'--group {shlex.quote(group)} keeps them together'}"
    )


def _by_number(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts frame 9 before frame 10."""
    return [(0, int(part)) if is_whole(part) else (1, part) for part in re.split(r"(\d+)", name)]


def thumbnails(images: Tensor) -> Tensor:
    """Return grey values [b _SIDE²] of images [b c h w], of zero mean and unit length; zeros for one of one colour."""
    step = max(1, min(images.shape[2:]) // (4 * _SIDE))
    grey = images[:, :, ::step, ::step].float().mean(1, keepdim=True)
    small = F.interpolate(grey, (_SIDE, _SIDE), mode="area").flatten(1)
    rounded = _ROUNDED * small.abs().amax(1, keepdim=True)
    small = small - small.mean(1, keepdim=True)
    return small / torch.maximum(small.norm(dim=1, keepdim=True), rounded.clamp(min=1e-6))
