"""On-disc cache of decoded images and recordings, so that each is decoded only once.

Nothing is decoded for the cache alone: the process that first reads an image for a training step also stores it. A
folder holds the images of one source at one setting. Its name is a digest of both, so a folder is never out of date,
only unused, and may be deleted at any time. A file in it is a part: images that one process read one after the other,
the pixels of each as uint8 [h w c]; their index, int64 [images 5]: number of the image, offset of its pixels in bytes,
h, w and c; and the number of images, int64. A part appears whole, by renaming, and other processes then find it.
Images of more than 8 bits are not stored. Recordings are stored as int16 samples at the requested rate, with h = 1 and
w bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
import threading
import uuid
from copy import copy
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.data.augment import resize_part
from patchloom.data.reading import Pass, sample_indices
from patchloom.data.source import Source, View, digest
from patchloom.errors import PatchloomError, TemporaryError
from patchloom.system.device import free_memory
from patchloom.system.files import cache_root, disk_error_kind, remove_leftovers, size_in_words, write_whole

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # a module elsewhere

# "whole": original size; a number: largest shorter side in pixels, to which larger images are reduced
Cache = Literal["whole"] | int

_FORMAT = "images 3"  # increment when the code that decodes, resizes or stores images changes
_MAX_BYTES = 2**26  # size of a part, the most that an interruption costs a process
_PARTS = 256  # fewest parts of a folder: images that are not in one yet are few, so others need not decode them again
# images that wait for the disc, of _MAX_BYTES at most; on a slow one, further images are stored in a later epoch
_WAITING = 16
_IDLE = 60.0  # seconds without an image after which a part is complete: in later epochs, only few are left to store
_SAMPLE = 16  # images from which the needed disc space is estimated
_FORGOTTEN = 3600  # seconds after which a half-written part must be left over from a dead process
_SPARE = 2**30  # bytes that stay free on the disc, for checkpoints

# `--cache auto`: of the memory that is free, because files that the memory holds are read much faster than others; of
# the disc, with all that this cache holds, because the images of other data sets and of earlier states add up.
_OF_MEMORY, _OF_DISC = 1 / 2, 1 / 4


def cache_images(source: Source, cache: Cache, auto: bool = False) -> CachedImages:
    """Return the same images or recordings, which are stored when they are first read, and then memory-mapped.

    Parts that exist already are used; damaged ones are removed. This may be interrupted at any time, and several
    processes may do it at once.

    Args:
        source: images or recordings.
        cache: size at which images are stored.
        auto: whether ``--cache auto`` chose this. Then a folder that cannot be written is no error, unused folders of
            this kind may be removed to make room, and this one may be removed later.
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
    folder = _folder(stamp, cache)
    cached = CachedImages(source, cache, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, _FORGOTTEN)
        if auto:
            _make_room(folder, len(source) * _mean_bytes(source, cache, folder, auto))
        elif missing := cached.missing():
            _check_writable(folder)
            mean = _mean_bytes(source, cache, folder, auto)
            need, free = missing * mean, shutil.disk_usage(folder).free - _SPARE
            if mean == 0:
                raise PatchloomError(
                    f"the images of {source.name} are of more than 8 bits and are not cached: leave out --cache"
                )
            if need > free:
                raise TemporaryError(
                    f"--cache {cache} needs about {size_in_words(need)} and {folder} has {size_in_words(max(0, free))} "
                    f"free, besides {size_in_words(_SPARE)} for checkpoints: make room, name a larger disc by "
                    "XDG_CACHE_HOME, or give a smaller --cache"
                )
    except OSError as problem:
        if not auto:
            raise disk_error_kind(problem)(
                f"{folder} could not be written ({problem.strerror or problem}): make room, name another disc by "
                "XDG_CACHE_HOME, or leave out --cache"
            ) from problem
    if not auto and (about := _about(folder)).get("auto"):  # the user wants it from now on
        with contextlib.suppress(PatchloomError):
            write_whole(folder / _ABOUT, json.dumps(about | {"auto": False}))
    cached.hold()
    return cached


def choose_cache(source: Source, typical: int) -> tuple[Literal["none", "whole"], str]:
    """Choose a cache for ``--cache auto``, with the reason: that of whole images, if they fit.

    ``typical`` is the number of bytes of a median image.
    """
    noun, memory = source.noun, 2**30 * free_memory("cpu")
    less = "--cache with a number of pixels needs less"

    def needed(need: float) -> str:
        return f"{len(source):,} decoded {noun} need {size_in_words(need)}"

    def too_large(need: float) -> str:
        of = f"more than half of the {size_in_words(memory)} of free memory"
        return f"{needed(need)}, {of}: {less}" if need > _OF_MEMORY * memory else ""

    if why := too_large(len(source) * typical):  # first: the state of a million files takes seconds
        return "none", why
    stamp = source.known_stamp()
    if stamp is None:
        return "none", f"changes of the {noun} cannot be detected"
    folder = _folder(stamp, "whole")
    try:
        _check_writable(folder)
        need = len(source) * _mean_bytes(source, "whole", folder, auto=True)
        room = _Room(folder)
    except OSError as problem:
        return "none", f"{folder} cannot be written: {problem.strerror or problem}"
    if not need:
        return "none", f"{noun} of more than 8 bits are not cached"
    if why := too_large(need):
        return "none", why
    if need > room.most:
        left = f"{size_in_words(room.most)} of disc are left for such {noun}"
        return "none", f"{needed(need)}, and {left}: {less}, or delete some of {folder.parent}"
    free = f"{size_in_words(memory)} of memory and {size_in_words(room.free)} of disc are free"
    return "whole", f"{needed(need)}; {free}"


class CachedImages(View):
    """Images of another source, stored and read as `cache_images` says.

    Args:
        source: source of the images.
        cache: size at which they are stored, and returned, also those that are not stored.
        folder: folder of the files.
        failure: int64 [1], number of the system's error for which no process stores any more; 0 for none.
    """

    def __init__(self, source: Source, cache: Cache, folder: Path, failure: Tensor | None = None) -> None:
        self.source, self.cache, self.folder = source, cache, folder
        self.name, self.classes, self.labels, self.groups = source.name, source.classes, source.labels, source.groups
        self.sound = source.sound
        self._failure = torch.zeros(1, dtype=torch.int64).share_memory_() if failure is None else failure
        self._told = False
        self._writer: _Writer | None = None
        self._lock: BinaryIO | None = None
        self._paths: list[Path] = []
        self._maps: dict[int, Tensor] = {}
        self._seen = -1  # state of the folder
        self._places = np.full((len(source), 5), -1)  # part, offset, h, w, c
        self._look()

    def __reduce__(self) -> tuple[Any, ...]:
        # another process opens its own maps
        return CachedImages, (self.source, self.cache, self.folder, self._failure)

    def __len__(self) -> int:
        return len(self.source)

    def _at(self, i: int) -> tuple[Source, int]:
        return self.source, i

    def read(self, i: int) -> Tensor:
        if self._places[i, 0] < 0:
            self._look()  # other processes may have stored it
        if (stored := self._stored(i)) is not None:
            return stored
        image = self.source.read(i)
        h, w = image.shape[-2:]
        size = _stored_size(h, w, self.cache)
        if size != (h, w) and not image.is_floating_point():  # those of more than 8 bits stay as they are
            image = resize_part(image, 0, 0, h, w, size)
        self._look()  # they may have stored it meanwhile
        if self._places[i, 0] < 0 and not image.is_floating_point() and not self._failure.item():
            if self._writer is None or self._writer.process != os.getpid():  # each process has its own
                self._writer = _Writer(self.folder, -(-len(self) // _PARTS), self._failure)
            self._writer.put(i, image)
        return image

    def missing(self) -> int:
        """Return the number of images that are not stored."""
        return int((self._places[:, 0] < 0).sum())

    def hold(self) -> None:
        """Mark the folder as used, now and until this process ends, so that no other process removes it."""
        self._lock = _lock(self.folder)
        with contextlib.suppress(OSError):  # read-only
            self.folder.mkdir(parents=True, exist_ok=True)  # another process may have removed it just before
            os.utime(self.folder / _ABOUT)

    def close(self) -> None:
        """Finish the part that this process is writing."""
        if self._writer is not None and self._writer.process == os.getpid():
            self._writer.close()
        self._writer = None

    def problem(self) -> str:
        number = int(self._failure.item())
        if not number or self._told:
            return ""
        self._told = True
        return (
            f"decoded {self.noun} are no longer stored in {self.folder} ({os.strerror(number)}): those that are not "
            "stored yet are decoded in every epoch"
        )

    def _stored(self, i: int) -> Tensor | None:
        part, start, h, w, c = self._places[i].tolist()
        if part < 0:
            return None
        if part not in self._maps:
            path = self._paths[part]
            try:  # Private maps: writing into an image does not change the file. Worker processes share the memory.
                size = path.stat().st_size
                self._maps[part] = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError):  # deleted meanwhile
                self._places[self._places[:, 0] == part] = -1
                return None
        if self.sound is not None:
            return self._maps[part][start : start + w].view(torch.int16)[None, None]
        return self._maps[part].as_strided((c, h, w), (1, w * c, c), start)

    def _look(self) -> None:
        """Look for new parts."""
        try:
            state = self.folder.stat().st_mtime_ns
            if state == self._seen:
                return
            self._seen, known = state, set(self._paths)
            paths = [path for path in self.folder.glob("*.part") if path not in known]
        except OSError:  # deleted meanwhile
            return
        for path in paths:
            with contextlib.suppress(OSError):  # deleted meanwhile
                if (index := _index(path, len(self))) is None:
                    path.unlink()
                    continue
                self._places[index[:, 0]] = np.insert(index[:, 1:], 0, len(self._paths), axis=1)
                self._paths.append(path)

    def _heard_as(self, sound: Sound) -> Source:
        if self.sound is not None and self.sound.rate != sound.rate:
            raise PatchloomError(
                f"the recordings of {self.name} are cached at {self.sound.rate:,} samples a second, not at "
                f"{sound.rate:,}: choose the rate before they are cached"
            )
        heard = copy(self)  # the same files, mapped once
        heard.source, heard.sound = self.source.heard_as(sound), sound
        return heard

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        return self.source.order(rng, chosen)

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def stamp(self) -> str | None:
        stamp = self.source.stamp()
        return stamp if stamp is None or self.cache == "whole" else digest([stamp, str(self.cache)])


class _Writer:
    """Threads of a process that write parts, so that reading never waits for the disc.

    It claims the images that it stores, which other processes then do not: runs with one seed read in the same order. A
    claim is a lock of one byte of a file, so it ends with its process. Without such locks (Windows), images may be
    stored several times.

    Args:
        folder: folder of the parts.
        each: number of images from which a part is complete.
        failure: see `CachedImages`.
    """

    def __init__(self, folder: Path, each: int, failure: Tensor) -> None:
        self.process, self.folder, self.each, self.failure = os.getpid(), folder, each, failure
        self._taken: set[int] = set()
        self._claims: BinaryIO | None = None
        with contextlib.suppress(OSError):  # read-only, which storing will report
            self._claims = (folder / "claims").open("ab", buffering=0)
        self._images: Queue[tuple[int, Tensor] | None] = Queue(_WAITING)
        self._threads = [threading.Thread(target=self._write, daemon=True)]
        self._threads[0].start()
        self.close = Finalize(None, self._close, exitpriority=0)  # also called when a worker process ends

    def put(self, i: int, image: Tensor) -> None:
        """Store image i, unless another process does, or the disc is behind: a later epoch will store it."""
        behind = self._images.full() or self._images.qsize() * image.nbytes > _MAX_BYTES
        if i in self._taken or behind:
            return
        busy = False
        if fcntl is not None and self._claims is not None:
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, i)
            except OSError as problem:
                busy = problem.errno in (errno.EACCES, errno.EAGAIN)  # otherwise the disc has no locks
        if not busy:
            self._images.put_nowait((i, image))
            self._taken.add(i)

    def _close(self) -> None:
        while self._threads[0].is_alive():
            with contextlib.suppress(Full):
                self._images.put(None, timeout=1)
                break
        for thread in self._threads:  # the first may start more
            thread.join()

    def _write(self) -> None:
        part: _Part | None = None
        while True:
            try:
                job = self._images.get(timeout=None if part is None else _IDLE)
            except Empty:
                assert part is not None  # otherwise it would still wait
                self._publish_apart(part)
                part = None
                continue
            if job is None:
                break
            if self.failure.item():
                continue
            try:
                part = part or _Part(self.folder)
                part.add(*job)
            except OSError as problem:
                self._fail(part, problem)
                part = None
            if part is not None and (part.end >= _MAX_BYTES or len(part.index) >= self.each):
                self._publish_apart(part)
                part = None
        if part is not None:
            self._publish(part)

    def _publish_apart(self, part: _Part) -> None:
        """Publish a part in another thread: flushing to the disc takes long."""
        self._threads.append(threading.Thread(target=self._publish, args=(part,), daemon=True))
        self._threads[-1].start()

    def _publish(self, part: _Part) -> None:
        try:
            part.publish()
        except OSError as problem:
            self._fail(part, problem)
        if fcntl is not None and self._claims is not None:
            for i, *_ in part.index:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, i)

    def _fail(self, part: _Part | None, problem: OSError) -> None:
        self.failure.fill_(problem.errno or errno.EIO)
        if part is not None:
            part.remove()


class _Part:
    """Unfinished part in a folder."""

    def __init__(self, folder: Path) -> None:
        name = uuid.uuid4().hex
        self.unfinished, self.path = folder / f".part.{name}", folder / f"{name}.part"
        self.index: list[tuple[int, ...]] = []
        self.end = 0
        self.file = self.unfinished.open("wb")

    def add(self, i: int, image: Tensor) -> None:
        """Append image i, uint8 [c h w], or a recording, int16 [1 1 n]."""
        pixels = image.view(torch.uint8) if image.dtype == torch.int16 else image
        c, h, w = pixels.shape
        if shutil.disk_usage(self.path.parent).free < _SPARE + pixels.nbytes:  # each time: many processes write at once
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.index.append((i, self.end, h, w, c))
        self.end += self.file.write(pixels.permute(1, 2, 0).contiguous().numpy().data)

    def publish(self) -> None:
        """Complete the file, flush it to the disc, and give it its name."""
        with self.file:
            self.file.write(np.array([*np.ravel(self.index), len(self.index)], dtype=np.int64).data)
            self.file.flush()
            os.fsync(self.file.fileno())
        os.replace(self.unfinished, self.path)

    def remove(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self.unfinished.unlink()


def _index(path: Path, images: int) -> np.ndarray | None:
    """Return the index of a part, int64 [m 5], of a source with ``images`` images; None if the part is damaged."""
    size = path.stat().st_size
    count = int(np.fromfile(path, np.int64, offset=size - 8)[0]) if size > 48 else 0
    if not 0 < count <= (size - 8) // 40:
        return None
    index = np.fromfile(path, np.int64, offset=size - 8 - 40 * count)[:-1].reshape(count, 5)
    sizes = index[:, 2:].astype(float).prod(1)  # as int64, huge numbers could wrap around
    whole = (index[:, 2:] > 0).all() and (index[:, 0] >= 0).all() and (index[:, 0] < images).all()
    whole = whole and (index[:, 1] == sizes.cumsum() - sizes).all() and sizes.sum() == size - 8 - 40 * count
    return index if whole else None


def _stored_size(h: int, w: int, cache: Cache) -> tuple[int, int]:
    """Return the size (h, w) at which an image of h x w pixels is stored."""
    if cache == "whole" or min(h, w) <= cache:
        return h, w
    return round(h * cache / min(h, w)), round(w * cache / min(h, w))


# Folders, and the room for them.


_ABOUT = "about.json"


def _folder(stamp: str, cache: Cache) -> Path:
    return cache_root() / "images" / digest([_FORMAT, str(cache), stamp])


def _about(folder: Path) -> dict[str, Any]:
    """Return what is known about a folder: "data", "cache", "mean" bytes per image, and whether "auto" made it."""
    try:
        about = json.loads((folder / _ABOUT).read_text("utf-8"))
    except (OSError, ValueError):  # missing or damaged
        return {}
    return about if isinstance(about, dict) else {}


def _mean_bytes(source: Source, cache: Cache, folder: Path, auto: bool) -> float:
    """Return the mean bytes per stored image, from a sample; 0 if they are of more than 8 bits."""
    known = _about(folder).get("mean")
    if isinstance(known, int | float) and 0 <= known < math.inf:
        return float(known)

    def stored_bytes(_: int, image: Tensor) -> int:
        c, h, w = image.shape
        return 0 if image.is_floating_point() else c * math.prod(_stored_size(h, w, cache)) * image.element_size()

    indices = sample_indices(len(source), _SAMPLE)
    mean = sum(size for _, size in Pass(source, indices, stored_bytes)) / len(indices)
    with contextlib.suppress(PatchloomError):  # a full disc
        write_whole(folder / _ABOUT, json.dumps({"data": source.name, "cache": cache, "mean": mean, "auto": auto}))
    return mean


def _check_writable(folder: Path) -> None:
    """Raise an OSError if no file can be created in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


class _Room:
    """Disc space for a folder of ``--cache auto``.

    Attributes:
        free: bytes that are free on the disc.
        allowed: bytes that all folders together may have for this one to be filled.
        unused: other folders of auto that no process uses, the least recently used one first: time of use, folder and
            bytes.
        others: bytes in all other folders.
        most: most bytes that this folder may have.
    """

    def __init__(self, folder: Path) -> None:
        self.free = shutil.disk_usage(folder).free
        sizes: dict[Path, int] = {}
        for one in filter(Path.is_dir, folder.parent.iterdir()):
            sizes[one] = 0
            with contextlib.suppress(OSError):  # removed by another process
                for path in one.iterdir():
                    sizes[one] += path.stat().st_size
        self.allowed = _OF_DISC * (self.free + sum(sizes.values()))
        self.others = sum(sizes.values()) - sizes.get(folder, 0)
        self.unused: list[tuple[float, Path, int]] = []
        for one, size in sizes.items():
            if one != folder and _about(one).get("auto") is True and (lock := _lock(one, alone=True)) is not None:
                self.unused.append((os.fstat(lock.fileno()).st_mtime, one, size))
                lock.close()
        self.unused.sort()
        self.most = max(0.0, self.allowed - self.others + sum(size for _, _, size in self.unused))


def _make_room(folder: Path, need: float) -> None:
    """Remove unused folders of ``--cache auto``, until ``need`` bytes may be in ``folder``."""
    room = _Room(folder)
    for _, one, size in room.unused:
        if room.others + need <= room.allowed:
            return
        if (lock := _lock(one, alone=True)) is not None:
            with lock:
                shutil.rmtree(one, ignore_errors=True)
            room.others -= size


def _lock(folder: Path, alone: bool = False) -> BinaryIO | None:
    """Lock a folder, shared to use it or ``alone`` to remove it; None if that is not possible.

    The lock lasts until the file is closed, here and in the processes that inherit it.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        file = opened.enter_context((folder / _ABOUT).open("rb"))
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
            opened.pop_all()  # it stays open
            return file
    return None
