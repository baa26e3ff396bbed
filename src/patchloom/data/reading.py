"""One pass over items of a source: a value of each, the conversions that were made, and what could not be read."""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from patchloom.data.conversions import ConversionCounts, collect_conversions
from patchloom.data.decode import Unreadable
from patchloom.data.source import Source
from patchloom.data.workers import in_workers
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.system.device import cores

_T = TypeVar("_T")

_EACH = 64  # items that a worker process reads at a time, at most
_TIMED = 8  # items whose reading is timed
# seconds of reading from which worker processes pay, where they are forked and where they have to import torch first
_WORTH, _WORTH_IMPORTS = 1.0, 15.0


def sample_indices(n: int, sample: int | None, seed: int = 0) -> Sequence[int]:
    """Return sorted indices of a random sample of ``n`` items, or of all if there are no more than ``sample``."""
    if sample is None or sample >= n:
        return range(n)
    return sorted(np.random.default_rng(seed).permutation(n)[:sample].tolist())


class Pass(Generic[_T]):
    """One reading of some items. Iterating yields the index and the value of each readable one, in order.

    Args:
        source: source of the items.
        indices: items to read.
        value: function of index and item. With worker processes, it and its result are sent between processes.
        workers: number of processes that read what is not in memory; with auto, one per core if that pays. No result
            depends on it.
        what: status message.

    Attributes:
        broken: index and reason of the items that could not be read so far.
        noticed: conversions of the others, and names and missing pixels of their channels.
    """

    def __init__(
        self,
        source: Source,
        indices: Sequence[int],
        value: Callable[[int, Tensor], _T],
        workers: int | Literal["auto"] = 0,
        what: str = "reading a sample of",
    ) -> None:
        self.source, self.indices, self.value, self.workers, self.what = source, indices, value, workers, what
        self.broken: list[tuple[int, str]] = []
        self.noticed = ConversionCounts()

    @property
    def unreadable(self) -> list[str]:
        """Names of the items that could not be read so far."""
        return [self.source.describe(i) for i, _ in self.broken]

    def sentences(self) -> tuple[str, ...]:
        """Return sentences on the conversions, and on channels that differ."""
        noun, tried = self.source.noun, len(self.indices)
        items = noun if tried == len(self.source) else f"sampled {noun}"
        return tuple(self.noticed.sentences(self.source.describe, tried - len(self.broken), items))

    def __iter__(self) -> Iterator[tuple[int, _T]]:
        first = ""
        read = track_progress(self._read(), len(self.indices), f"{self.what} {self.source.name}")
        for i, noticed, problem, value in read:
            if problem:
                first = first or problem
                reason = re.split(" cannot be read as an? [a-z]+: ", problem)[-1]
                self.broken.append((i, sys.intern(reason)))  # which many files share
            else:
                self.noticed.add(i, *noticed)
                yield i, value
        if len(self.broken) == len(self.indices):
            raise PatchloomError(f"nothing could be read in {self.source.name}: {first or 'it is empty'}")

    def _read(self) -> Iterator[tuple[int, tuple[Any, ...], str, Any]]:
        """Yield index, what was noticed, the error if it cannot be read, and otherwise the value, of each item."""
        reader, rest = _Reader(self.source, self.indices, self.value, _EACH), self.indices
        workers = 0 if self.source.in_memory else self.workers
        if workers == "auto":
            begun = time.perf_counter()
            yield from reader.read(self.indices[:_TIMED])
            rest, each = self.indices[_TIMED:], (time.perf_counter() - begun) / _TIMED
            worth = _WORTH if multiprocessing.get_start_method() == "fork" else _WORTH_IMPORTS
            workers = cores() if each * len(rest) > worth else 0
        if workers:
            at_once = max(1, min(_EACH, len(rest) // (4 * workers)))
            reader = _Reader(self.source, rest, self.value, at_once)
            yield from chain.from_iterable(in_workers(reader, range(-(-len(rest) // at_once)), workers))
        else:  # without a loader, which would take a tenth of a millisecond for each
            yield from reader.read(rest)


class _Reader(Dataset[Any]):
    """Data set that maps a number to what `Pass` reads of ``each`` consecutive items."""

    def __init__(self, source: Source, indices: Sequence[int], value: Callable[[int, Tensor], Any], each: int) -> None:
        self.source, self.indices, self.value, self.each = source, indices, value, each

    def __getitem__(self, number: int) -> Any:
        try:
            return [*self.read(self.indices[number * self.each : (number + 1) * self.each])]
        except PatchloomError as error:  # returned, because a DataLoader would put a traceback into its message
            return error

    def read(self, indices: Sequence[int]) -> Iterator[tuple[int, tuple[Any, ...], str, Any]]:
        for place, i in enumerate(indices):
            if place % self.each == 0:
                self.source.make_ready(indices[place : place + self.each])
            try:
                with collect_conversions() as seen:
                    item = self.source.read(i)
            except Unreadable as error:
                yield i, (), str(error), None
            else:
                missing = None if seen.missing is None else seen.missing.mean((0, 1))
                yield i, (seen.words, seen.names, missing), "", self.value(i, item)
