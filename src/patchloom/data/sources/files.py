"""Files of images or recordings, given by their paths."""

from __future__ import annotations

import os
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, starmap
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.audio.decode import decode_recording, read_recording
from patchloom.data.decode import decode_image, read_image
from patchloom.data.duplicates import contents_on_disc
from patchloom.data.source import Source, digest, stamp_of_files


class PackedStrings(Sequence[str]):
    """Strings in one block of bytes: compact for a million paths, and shared with forked worker processes."""

    def __init__(self, names: Sequence[str]) -> None:
        lengths = (len(name.encode("utf-8", "surrogateescape")) for name in names)
        self.ends = np.cumsum(np.fromiter(lengths, np.int64, len(names)))
        self.letters = "".join(names).encode("utf-8", "surrogateescape")

    @classmethod
    def of(cls, letters: bytes, ends: np.ndarray) -> PackedStrings:
        """Create from all strings joined, in UTF-8, and the offset of the end of each, int64 [n]."""
        names = cls.__new__(cls)
        names.letters, names.ends = letters, ends
        return names

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends.data:
            yield self.letters[start:end].decode("utf-8", "surrogateescape")
            start = end

    def __getitem__(self, i: int) -> str:  # type: ignore[override]  # slices are not supported
        if not 0 <= i < len(self.ends):
            raise IndexError(i)
        return self.letters[self.ends[i - 1] if i else 0 : self.ends[i]].decode("utf-8", "surrogateescape")

    def under(self, prefix: str) -> range:
        """Return the indices of strings that begin with ``prefix``, which is not empty; all must be sorted."""
        return range(bisect_left(self, prefix), bisect_left(self, prefix[:-1] + chr(ord(prefix[-1]) + 1)))

    def where(self, kept: np.ndarray, cut: int = 0) -> PackedStrings:
        """Return some of the strings, without their first bytes.

        Args:
            kept: bool [n], strings to return.
            cut: number of bytes to remove from the beginning of each.
        """
        lengths = np.diff(self.ends, prepend=0)
        starts = self.ends - lengths
        letters = np.repeat(kept, lengths)
        letters[(starts[kept][:, None] + np.arange(cut)).ravel()] = False
        return PackedStrings.of(
            np.frombuffer(self.letters, np.uint8)[letters].tobytes(), np.cumsum(lengths[kept] - cut)
        )


class EncodedFiles(Source):
    """Source of encoded files of images, or of recordings: a path or the bytes of each is what it stores."""

    @abstractmethod
    def stored(self, i: int) -> Path | bytes:
        """Return the path of the file of image i, or the bytes of that file; see `Source.stored`."""

    def read(self, i: int) -> Tensor:
        stored = self.stored(i)
        if self.sound is None:
            return decode_image(stored, self.describe(i)) if isinstance(stored, bytes) else read_image(stored)
        rate, name = self.sound.rate, self.describe(i)
        return decode_recording(stored, name, rate) if isinstance(stored, bytes) else read_recording(stored, rate)

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        return contents_on_disc(self, self.stored, chosen)


class Files(EncodedFiles):
    """Files of images, or of recordings, by their paths.

    Args:
        name: name as the user typed it.
        root: folder that the paths are relative to.
        paths: paths of the files; absolute ones are allowed.
        classes: names of the classes.
        labels: int64 [n], indices into ``classes``, -1 for none.
        columns: other columns of a table, [n] by name.
        sound: settings with which recordings are read; None for images.
        groups: int64 [n], see `Source`.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        paths: Sequence[str],
        classes: tuple[str, ...] = (),
        labels: np.ndarray | None = None,
        columns: Mapping[str, Sequence[str]] | None = None,
        sound: Sound | None = None,
        groups: np.ndarray | None = None,
    ) -> None:
        names = paths if isinstance(paths, PackedStrings) else PackedStrings(paths)
        self.columns = {column: PackedStrings(values) for column, values in (columns or {}).items()}
        self.name, self.root, self.paths, self.classes, self.labels = name, root, names, classes, labels
        self.sound, self.groups = sound, groups
        self.parts: list[str] | None = None  # of each file, the part that a table lists, see `Parts`

    def __len__(self) -> int:
        return len(self.paths)

    def describe(self, i: int) -> str:
        return str(self.root / self.paths[i])

    def place(self, i: int) -> str:
        return self.paths[i].replace(os.sep, "/")

    def stored(self, i: int) -> Path:
        return self.root / self.paths[i]

    def column(self, name: str) -> Sequence[str] | None:
        return self.columns.get(name)

    def column_names(self) -> Sequence[str]:
        return [*self.columns]

    @property
    def only_folder(self) -> str:
        """First-level sub-folder that holds all files, whose paths are sorted; "" if there is none."""
        top, slash, _ = self.paths[0].partition("/") if len(self) else ("", "", "")
        return top if slash and len(self.paths.under(f"{top}/")) == len(self) else ""

    def inside(self, folder: str) -> Files:
        """Return the files in a first-level sub-folder, without labels; paths are sorted."""
        kept = np.zeros(len(self), bool)
        there = self.paths.under(f"{folder}/")
        kept[there.start : there.stop] = True
        paths = self.paths.where(kept, len(f"{folder}/".encode("utf-8", "surrogateescape")))
        return Files(self.name, self.root / folder, paths, sound=self.sound)

    def fingerprint(self) -> str:
        """Return a digest of relative paths, sizes, mtimes and labels; moving the folder does not change it."""

        def state(i: int, path: str) -> str:
            size = changed = -1
            with suppress(OSError, ValueError):  # ValueError: a name that no file can have
                stat = os.stat(self._place(path))
                size, changed = stat.st_size, stat.st_mtime_ns
            return f"{path}\t{size}\t{changed}\t{-1 if self.labels is None else self.labels[i]}"

        return digest(chain(self.classes, starmap(state, enumerate(self.paths))))

    def _place(self, path: str) -> str:
        # creating a Path for each of a million files would take longer than stat
        return os.path.join(os.fspath(self.root), path)

    def stamp(self) -> str:
        files = stamp_of_files(map(self._place, self.paths))
        return files if self.sound is None else digest([files, str(self.sound.rate)])
