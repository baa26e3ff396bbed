"""On-disc cache of decoded images and recordings, so that each is decoded only once.

A folder holds the images of one source at one setting. Its name is a digest of both, so a folder is never out of date,
only unused, and may be deleted at any time. A file in it is a part: some consecutive images, the pixels of each as
uint8 [h w c], followed by an index, int64 [images 4]: the offset of the pixels in bytes, h, w and c. The offset is -1
for images that are not cached, because they have more than 8 bits or cannot be read; these are read from their own
files. Recordings are stored as int16 samples at the requested rate, with h = 1 and w bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from patchloom.audio.config import Sound
from patchloom.data.augment import resize_part
from patchloom.data.decode import Unreadable
from patchloom.data.source import Source, digest
from patchloom.data.stats import sample_images
from patchloom.data.workers import in_workers
from patchloom.display import StatusMessage, print_line
from patchloom.errors import PatchloomError, TemporaryError
from patchloom.system.files import cache_root, disk_error_kind, size_in_words, write_whole

# "whole": original size; a number: largest shorter side in pixels, to which larger images are reduced
Cache = Literal["whole"] | int

_FORMAT = "images 1"  # increment when the code that decodes, resizes or stores images changes
_MAX_BYTES, _MAX_IMAGES = 2**29, 4096  # size of a part, the most that an interruption costs a process
_SAMPLE = 64  # images from which the needed disc space is estimated
_FORGOTTEN = 3600  # seconds after which a half-written part must be left over from a dead process


def cache_images(source: Source, cache: Cache, workers: int = 0, say: Callable[[str], None] = print_line) -> Source:
    """Return the same images or recordings, decoded once, stored, and then read from memory-mapped files.

    Images of more than 8 bits are not stored. Parts that exist already are used; missing or damaged ones are written
    first. This may be interrupted at any time, and several processes may do it at once.
    """
    if source.sound is not None and cache != "whole":
        raise PatchloomError(
            f"--cache {cache} is a size of images, and {source.name} holds recordings: give --cache whole"
        )
    if source.in_memory:
        raise PatchloomError(f"the {source.noun} of {source.name} are in memory already: leave out --cache")
    stamp = source.stamp()
    if stamp is None:
        raise PatchloomError(f"changes of the {source.noun} of {source.name} cannot be detected: leave out --cache")
    folder = cache_root() / "images" / digest([_FORMAT, str(cache), stamp])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parts = _Parts(source, cache, folder, _mean_bytes(source, cache, folder))
        missing = [number for number in range(len(parts)) if parts.index(number) is None]
        if missing:
            _make(parts, missing, workers, say)
    except OSError as problem:
        raise _unwritable(folder, problem) from problem
    return CachedImages(source, cache, parts.each, [parts.path(number) for number in range(len(parts))])


class CachedImages(Source):
    """Images of another source, read from the files of `cache_images`.

    Args:
        source: source of the images; those that are not stored are read from it.
        cache: setting with which they were stored.
        each: number of images per file; the last one may hold fewer.
        paths: paths of the files, in order.
    """

    def __init__(self, source: Source, cache: Cache, each: int, paths: list[Path]) -> None:
        self.source, self.cache, self.each, self.paths = source, cache, each, paths
        self.name, self.classes, self.labels, self.groups = source.name, source.classes, source.labels, source.groups
        self.sound = source.sound
        indices = [_index(path, min(each, len(source) - i * each)) for i, path in enumerate(paths)]
        intact = [index for index in indices if index is not None]
        if len(intact) < len(indices):
            raise PatchloomError(f"{paths[0].parent} was changed while it was opened: run the same command again")
        self._index: np.ndarray = np.concatenate(intact)
        # Private maps: writing into an image does not change the file. Worker processes still share the memory.
        self._maps = [
            torch.from_file(os.fspath(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
            for path in paths
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedImages, (self.source, self.cache, self.each, self.paths)  # another process opens its own maps

    def __len__(self) -> int:
        return len(self._index)

    def read(self, i: int) -> Tensor:
        start, h, w, c = self._index[i].tolist()
        if start < 0:
            return self.source.read(i)
        if self.sound is not None:
            return self._maps[i // self.each][start : start + w].view(torch.int16)[None, None]
        return self._maps[i // self.each].as_strided((c, h, w), (1, w * c, c), start)

    def _heard_as(self, sound: Sound) -> Source:
        if self.sound is not None and self.sound.rate != sound.rate:
            raise PatchloomError(
                f"the recordings of {self.name} are cached at {self.sound.rate:,} samples a second, not at "
                f"{sound.rate:,}: choose the rate before they are cached"
            )
        heard = copy(self)  # the same files, mapped once
        heard.source, heard.sound = self.source.heard_as(sound), sound
        return heard

    def describe(self, i: int) -> str:
        return self.source.describe(i)

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        return self.source.order(rng, chosen)

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def stamp(self) -> str | None:
        stamp = self.source.stamp()
        return stamp if stamp is None or self.cache == "whole" else digest([stamp, str(self.cache)])


class _Parts(Dataset[int | PatchloomError]):
    """Data set that writes a part by its number, and returns its number of images or the error that occurred."""

    def __init__(self, source: Source, cache: Cache, folder: Path, mean: float) -> None:
        self.source, self.cache, self.folder, self.mean = source, cache, folder, mean
        self.each = max(1, min(_MAX_IMAGES, int(_MAX_BYTES // max(mean, 1))))

    def __len__(self) -> int:
        return -(-len(self.source) // self.each)

    def __getitem__(self, number: int) -> int | PatchloomError:
        try:
            if self.index(number) is None:  # otherwise another process was faster
                self._write(number)
        except OSError as problem:
            return _unwritable(self.folder, problem)
        return len(self.images(number))

    def images(self, number: int) -> range:
        return range(number * self.each, min((number + 1) * self.each, len(self.source)))

    def path(self, number: int) -> Path:
        images = self.images(number)
        return self.folder / f"{images.start:09}-{images.stop:09}.part"

    def index(self, number: int) -> np.ndarray | None:
        return _index(self.path(number), len(self.images(number)))

    def _write(self, number: int) -> None:
        unfinished = self.folder / f".{uuid.uuid4().hex}"
        index, end = [], 0
        try:
            with unfinished.open("wb") as file:
                for i in self.images(number):
                    try:
                        image = _to_cache(self.source.read(i), self.cache)
                    except Unreadable:
                        image = None
                    if image is None:
                        index.append((-1, 0, 0, 0))
                        continue
                    c, h, w = image.shape
                    index.append((end, h, w, c))
                    end += file.write(image.permute(1, 2, 0).contiguous().numpy().data)
                file.write(np.array(index, dtype=np.int64).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.path(number))
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()


def _to_cache(image: Tensor, cache: Cache) -> Tensor | None:
    """Return the form in which an image [c h w] is stored: uint8 [c h w], reduced if needed; None above 8 bits.

    For a recording [1 1 n], these are its bytes [1 1 2n].
    """
    if image.dtype == torch.int16:
        return image.view(torch.uint8)
    if image.is_floating_point():
        return None
    h, w = image.shape[-2:]
    if cache == "whole" or min(h, w) <= cache:
        return image
    return resize_part(image, 0, 0, h, w, (round(h * cache / min(h, w)), round(w * cache / min(h, w))))


def _index(path: Path, images: int) -> np.ndarray | None:
    """Return the index of a part with ``images`` images, int64 [images 4]; None if the part is missing or damaged."""
    try:
        room = path.stat().st_size - images * 32
        index = np.fromfile(path, np.int64, offset=max(room, 0)).reshape(images, 4)
    except (OSError, ValueError):
        return None
    there = index[index[:, 0] >= 0]
    sizes = there[:, 1:].prod(1)
    whole = (there[:, 1:] > 0).all() and (there[:, 0] == sizes.cumsum() - sizes).all() and sizes.sum() == room
    return index if whole else None


def _mean_bytes(source: Source, cache: Cache, folder: Path) -> float:
    """Return the mean bytes per stored image, from a sample; the first process's value is stored and used by all."""
    about = folder / "about.json"
    try:
        return float(json.loads(about.read_text("utf-8"))["mean"])
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged
        pass
    unreadable: list[str] = []
    found = [_to_cache(image, cache) for _, image in sample_images(source, _SAMPLE, 0, unreadable)]
    mean = sum(0 if image is None else image.numel() for image in found) / (len(found) + len(unreadable))
    if mean == 0:
        raise PatchloomError(
            f"the images of {source.name} are of more than 8 bits and are not cached: leave out --cache"
        )
    write_whole(about, json.dumps({"data": source.name, "cache": cache, "mean": mean}))
    return mean


def _make(parts: _Parts, missing: list[int], workers: int, say: Callable[[str], None]) -> None:
    """Write the missing parts, if the disc has enough space."""
    for path in parts.folder.glob(".*"):
        with contextlib.suppress(OSError):  # removed by another process
            if time.time() - path.stat().st_mtime > _FORGOTTEN:
                path.unlink()
    images, folder = sum(len(parts.images(number)) for number in missing), parts.folder
    need, free = images * parts.mean, shutil.disk_usage(folder).free
    if need > free:
        raise TemporaryError(
            f"--cache {parts.cache} needs about {size_in_words(need)} and {folder} has {size_in_words(free)} free: "
            "make room, name a larger disc by XDG_CACHE_HOME, or give a smaller --cache"
        )
    room = f"about {size_in_words(need)}; {size_in_words(free)} are free"
    noun = parts.source.noun
    say(f"Decoding {images:,} {noun}, to be cached in {folder} ({room})")
    # Processes that fill the same folder begin at different parts, so that they share the work.
    turn = uuid.uuid4().int % len(missing)
    with StatusMessage(f"decoding {noun}", images) as waiting:
        for count in in_workers(parts, missing[turn:] + missing[:turn], workers):
            waiting.advance(count)
    say(f"  {waiting.done:,} of {images:,} {noun} are cached")


def _unwritable(folder: Path, problem: OSError) -> PatchloomError:
    return disk_error_kind(problem)(
        f"{folder} could not be written ({problem.strerror or problem}): make room, name another disc by "
        "XDG_CACHE_HOME, or leave out --cache"
    )
