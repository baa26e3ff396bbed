"""Worker processes and threads that read images."""

from __future__ import annotations

import atexit
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pickle import PicklingError
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, Dataset

from patchloom.errors import PatchloomError, TemporaryError
from patchloom.system.signals import leave_signals, starting_workers, worker_context

# torch's messages about a worker that was killed, or ran out of shared memory
_LOST_WORKER = re.compile(r"DataLoader worker \(pid|bus error|shared memory|received 0 items of ancdata")

_LOST = (
    "a process that read images has died, perhaps because memory ran out (in a container: /dev/shm): run the same "
    "command again to continue from the last checkpoint; if it dies again, free memory"
)

_THREADS = 8

_T = TypeVar("_T")
_R = TypeVar("_R")

_under_way: WeakSet[Generator[Any, None, None]] = WeakSet()


def in_workers(made: Dataset[Any], numbers: Sequence[int], workers: int, pinned: bool = False) -> Iterator[Any]:
    """Yield ``made[number]`` for each number, in order, prepared by worker processes."""
    prepared = _in_workers(made, numbers, workers, pinned)
    _under_way.add(prepared)
    return prepared


@atexit.register
def _end_workers() -> None:
    """End them as torch does; otherwise multiprocessing would kill them at exit, which torch reports as a failure."""
    for prepared in list(_under_way):
        prepared.close()


def _in_workers(made: Dataset[Any], numbers: Sequence[int], workers: int, pinned: bool) -> Generator[Any, None, None]:
    # One pass of the loader is the whole run, so that workers are started once and not anew in every epoch.
    loader: DataLoader[Any] = DataLoader(
        made,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_unchanged,
        pin_memory=pinned,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # otherwise it would draw a number from torch's global generator
        multiprocessing_context=worker_context() if workers else None,
    )
    try:
        for one in _begun(loader):  # not in a variable, which the frame of an exception would keep alive
            if isinstance(one, PatchloomError):
                raise one
            yield one
    except RuntimeError as problem:
        raise lost_worker(problem) or problem from problem
    except (ConnectionError, EOFError, FileNotFoundError) as problem:  # a tensor whose sender has died
        if not workers:
            raise
        raise TemporaryError(_LOST) from problem


def _begun(loader: DataLoader[Any]) -> Iterator[Any]:
    try:
        with starting_workers():
            return iter(loader)
    except (PicklingError, AttributeError, TypeError) as problem:  # where processes are not forked
        if not loader.num_workers:
            raise
        raise PatchloomError(
            f"the images cannot be sent to worker processes ({' '.join(str(problem).split())}): give --workers 0, "
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
