"""Worker processes and threads that read images."""

from __future__ import annotations

import atexit
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from pickle import PicklingError
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch.distributed import is_initialized
from torch.utils.data import DataLoader, Dataset

from patchloom.errors import PatchloomError, TemporaryError, one_line
from patchloom.system.signals import leave_signals, starting_workers, worker_context

# torch's messages about a worker that was killed, or ran out of shared memory
_LOST_WORKER = re.compile(r"DataLoader worker \(pid|bus error|shared memory|received 0 items of ancdata")

_LOST = (
    "a process that read images has died, perhaps because memory ran out (in a container: /dev/shm): run the same "
    "command again to continue from the last checkpoint; if it dies again, free memory"
)

_THREADS = 8

# where torch puts the tensors that processes pass to each other, on Linux; other systems set no limit of its own
SHARED = Path("/dev/shm")
_AHEAD = 2  # batches that each worker makes in advance, torch's default
_TAKEN = 2  # further batches: in use, and on the way to a GPU

_T = TypeVar("_T")
_R = TypeVar("_R")

_under_way: WeakSet[Generator[Any, None, None]] = WeakSet()


class Readers(NamedTuple):
    """Worker processes that read, and the number of batches that each makes ahead."""

    workers: int
    ahead: int


def fitting_readers(workers: int, nbytes: int) -> tuple[Readers, int]:
    """Return the readers whose batches of ``nbytes`` fit into shared memory, and the bytes that are free there.

    If ``workers`` with two batches each do not fit, each makes one ahead; if that does not, there are fewer, down to
    none: then the process that trains reads itself. Processes that train together on a machine share what is free.
    """
    try:
        free = shutil.disk_usage(SHARED).free
    except OSError:  # not on Linux
        return Readers(workers, _AHEAD), 0
    sharing = 1
    if is_initialized():
        from patchloom.system.distributed import processes_here  # slow to import; here it has been

        sharing = processes_here()
    room = free // sharing // max(1, nbytes) - _TAKEN
    if workers * _AHEAD <= max(0, room):
        return Readers(workers, _AHEAD), free
    return Readers(max(0, min(workers, room)), 1), free


def in_workers(
    made: Dataset[Any], numbers: Sequence[int], workers: int, pinned: bool = False, repeated: bool = False
) -> Iterator[Any]:
    """Yield ``made[number]`` for each number, in order, prepared by worker processes.

    There are as many as `fitting_readers` says, if each number takes ``made.nbytes`` of shared memory on its way. Those
    of passes that are ``repeated``, over a data set that compares equal, live on inside `living_workers`.
    """
    living = _living.get() if repeated and workers else None
    prepared = (_in_workers if living is None else living.read)(made, numbers, workers, pinned)
    _under_way.add(prepared)
    return prepared


@atexit.register
def _end_workers() -> None:
    """End them as torch does; otherwise multiprocessing would kill them at exit, which torch reports as a failure."""
    for prepared in list(_under_way):
        prepared.close()


def _in_workers(made: Dataset[Any], numbers: Sequence[int], workers: int, pinned: bool) -> Generator[Any, None, None]:
    # One pass of the loader is the whole run, so that workers are started once and not anew in every epoch.
    yield from _delivered(_loader(made, numbers, workers, pinned))


def _loader(
    made: Dataset[Any], numbers: Sequence[Any], workers: int, pinned: bool, living: bool = False
) -> DataLoader[Any]:
    readers = Readers(0, _AHEAD)
    if workers:  # otherwise a data set need not find out the bytes of its batches
        readers, _ = fitting_readers(workers, getattr(made, "nbytes", 0))
    return DataLoader(
        made,
        batch_size=None,
        sampler=numbers,
        num_workers=readers.workers,
        prefetch_factor=readers.ahead if readers.workers else None,
        collate_fn=_unchanged,
        pin_memory=pinned,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # otherwise it would draw a number from torch's global generator
        multiprocessing_context=worker_context() if readers.workers else None,
        persistent_workers=living and readers.workers > 0,
    )


def _delivered(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    try:
        for one in _begun(loader):  # not in a variable, which the frame of an exception would keep alive
            if isinstance(one, PatchloomError):
                raise one
            yield one
    except RuntimeError as problem:
        raise lost_worker(problem) or problem from problem
    except (ConnectionError, EOFError, FileNotFoundError) as problem:  # a tensor whose sender has died
        if not loader.num_workers:
            raise
        raise TemporaryError(_LOST) from problem


class _Several(Dataset[Any]):
    """Several data sets; an index is the number of one, and an index into it."""

    def __init__(self, made: Sequence[Dataset[Any]]) -> None:
        self.made = [*made]
        self.nbytes = max(getattr(one, "nbytes", 0) for one in made)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        which, number = place
        return self.made[which][number]


class _LivingWorkers:
    """Worker processes that live on between passes. They know the data sets of the passes so far."""

    def __init__(self) -> None:
        self.made: list[Dataset[Any]] = []
        self.places: list[tuple[int, int]] = []  # of the present pass
        self.workers, self.pinned, self.busy = 0, False, False
        self.loader: DataLoader[Any] | None = None

    def read(
        self, made: Dataset[Any], numbers: Sequence[int], workers: int, pinned: bool
    ) -> Generator[Any, None, None]:
        """Yield as `in_workers` does; a pass within another one, or that is the first of its kind, starts processes."""
        if self.busy:
            yield from _in_workers(made, numbers, workers, pinned)
            return
        if made not in self.made or workers > self.workers or pinned > self.pinned:
            self.close()
            self.made += [] if made in self.made else [made]
            self.workers, self.pinned = max(workers, self.workers), pinned or self.pinned
            self.loader = _loader(_Several(self.made), self.places, self.workers, self.pinned, living=True)
        assert self.loader is not None  # made in the first pass
        which = self.made.index(made)
        self.places[:] = [(which, number) for number in numbers]
        self.busy = True
        try:
            yield from _delivered(self.loader)
        except BaseException:
            self.made.clear()  # start anew
            raise
        finally:
            self.busy = False

    def close(self) -> None:
        """End the processes."""
        running: Any = None if self.loader is None else self.loader._iterator  # torch has no public name for this
        if running is not None:
            running._shutdown_workers()
        self.loader = None


_living: ContextVar[_LivingWorkers | None] = ContextVar("living", default=None)


@contextmanager
def living_workers() -> Iterator[None]:
    """Let the worker processes of repeated passes live until the end of this block, instead of starting them anew."""
    workers = _LivingWorkers()
    before = _living.set(workers)
    try:
        yield
    finally:
        _living.reset(before)
        workers.close()


def _begun(loader: DataLoader[Any]) -> Iterator[Any]:
    try:
        with starting_workers():
            return iter(loader)
    except (PicklingError, AttributeError, TypeError) as problem:  # where processes are not forked
        if not loader.num_workers:
            raise
        raise PatchloomError(
            f"the images cannot be sent to worker processes ({one_line(problem)}): give --workers 0, "
            "or define their classes in a module, outside of any function"
        ) from problem


def lost_worker(problem: BaseException) -> PatchloomError | None:
    """Return the error to show if ``problem``, raised by torch, means that a worker process died; None otherwise.

    torch raises it from a signal handler, so at any place in the program.
    """
    if not isinstance(problem, RuntimeError) or not _LOST_WORKER.search(str(problem)):
        return None
    return TemporaryError(_LOST)


def _unchanged(one: Any) -> Any:
    return one


def _begin_worker(worker: int) -> None:
    leave_signals()
    torch.set_num_threads(1)  # the processes are the parallelism; more threads would compete for the same cores


def in_threads(function: Callable[[_T], _R], items: Iterable[_T]) -> Generator[_R, None, None]:
    """Apply a function to items in 8 threads; results come in order. After an exception no further item is started.

    An item that takes long does not delay Ctrl-C: the standard library's pools wait for it, also at the program's exit.
    """
    todo: SimpleQueue[tuple[Future[_R], _T] | None] = SimpleQueue()

    def work() -> None:
        while (job := todo.get()) is not None:
            future, item = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(item))
                except BaseException as problem:
                    future.set_exception(problem)

    futures: deque[Future[_R]] = deque()
    for item in items:
        futures.append(Future())
        todo.put((futures[-1], item))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(futures)))]
    for thread in threads:
        todo.put(None)
        thread.start()
    try:
        while futures:
            yield futures.popleft().result()
    except KeyboardInterrupt:
        threads.clear()
        raise
    finally:
        for future in futures:
            future.cancel()
        for thread in threads:
            thread.join()
