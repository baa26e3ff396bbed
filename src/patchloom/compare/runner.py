"""The pre-trainings of a comparison, each in a process of its own, with one line for all of them."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from patchloom.display import StatusMessage, duration
from patchloom.errors import PatchloomError, Stopped
from patchloom.runs.folder import FolderLocked, RunFolder
from patchloom.system.files import make_folder, no_link
from patchloom.system.signals import ENDS_WITH_STDIN, Stop

# One comparison at a time in a folder, and one process in each run, by the lock of run folders.


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """While entered, no other comparison works in a folder, which is made; one that stays empty is removed."""
    made = not folder.exists()
    make_folder(folder)
    lock = RunFolder(folder)
    try:
        lock.lock()
    except FolderLocked:
        raise PatchloomError(
            f"another comparison is at work in {folder}: wait for its end, or choose another folder with --out"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if made and [one.name for one in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()
        lock.unlock()


def is_locked(run: Path) -> bool:
    """Whether another process trains in the folder of a run."""
    if not (run / ".lock").exists():
        return False
    lock = RunFolder(run)
    try:
        lock.lock()
    except FolderLocked:
        return True
    lock.unlock()
    return False


_PROGRAM = (sys.executable, "-m", "patchloom", "pretrain")
_LOOK = 0.5  # seconds between two looks at the processes
_LAST = 2000  # bytes of a log in which its last line is
_PATIENCE = 10.0  # seconds in which a process that is asked to stop may do so


@dataclass
class Job:
    """A pre-training that is to be made.

    Attributes:
        task: what it is called in tables and folders.
        seed: of the run.
        folder: of the run.
        words: of ``patchloom pretrain``.
        log: what it prints goes there.
        seconds: that it will probably take.
        failure: its last line, where it failed.
    """

    task: str
    seed: int
    folder: Path
    words: list[str]
    log: Path
    seconds: float
    failure: str = ""

    @property
    def name(self) -> str:
        """Such as "mae, seed 0"."""
        return f"{self.task}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end, now or at some time before."""
        return RunFolder(self.folder).read_summary() is not None

    def done(self) -> float:
        """The share of its time that is over, by the seconds of its steps."""
        if self.finished:
            return 1.0
        try:
            with open(RunFolder(self.folder).metrics, newline="", encoding="utf-8") as file:
                *_, row = csv.DictReader(file)
            return min(0.99, float(row.get("seconds") or 0) / max(self.seconds, 1e-9))
        except (OSError, ValueError, csv.Error):
            return 0.0


class Bar(StatusMessage):
    """What is trained now, how far the whole is, and how long it still takes, by what took longer or shorter so far."""

    def __init__(self, jobs: Sequence[Job], at_once: int):
        super().__init__("training")
        self.jobs, self.at_once = jobs, at_once
        self.running: Sequence[_Process] = ()
        self.taken = self.planned = 0.0  # seconds of what ended since this began

    def ended(self, one: _Process, seconds: float) -> None:
        """A run has come to its end after so many seconds."""
        self.taken += seconds
        self.planned += one.job.seconds * (1 - one.share)

    def line(self) -> str:
        """The time left first, since a narrow terminal cuts the end."""
        whole = sum(job.seconds for job in self.jobs)
        over = sum(job.seconds * job.done() for job in self.jobs)
        share = over / whole if whole else 1.0
        filled = "█" * round(20 * share) + "·" * (20 - round(20 * share))
        names = "; ".join(one.job.name for one in self.running)
        ended = sum(job.finished for job in self.jobs)
        left = duration((whole - over) * self._slower() / self.at_once)
        return f"{left} left {filled} {share:.0%} · {ended} of {len(self.jobs)} runs are there · {names}"

    def _slower(self) -> float:
        """How many times longer than planned runs take: those that ended, and those that should have by now."""
        taken, planned = self.taken, self.planned
        for one in self.running:
            seconds, due = time.monotonic() - one.begun, one.job.seconds * (1 - one.share)
            if seconds > due:
                taken, planned = taken + seconds, planned + one.job.seconds * max(0.0, one.job.done() - one.share)
        return taken / planned if planned > 0 else 1.0


@dataclass
class _Process:
    job: Job
    slot: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    share: float = 0.0  # of it that was over before
    begun: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Close what this process has of it."""
        self.log.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class StopMessages(NamedTuple):
    """What is said to whoever stops it: at once on a terminal, and at the end."""

    now: str
    then: str


STOPPED = StopMessages(
    "stopping after this update, with a checkpoint; the same command goes on from there",
    "stopped, and nothing is lost: the same command goes on from there",
)


def run_all(
    jobs: Sequence[Job],
    at_once: int,
    devices: Sequence[str],
    told: Callable[[Job, float], None],
    words: StopMessages = STOPPED,
) -> dict[str, float]:
    """Make all pre-trainings that are not there yet.

    One that fails is left out; the others go on. One in whose folder another process still trains, such as one that a
    comparison left that was killed, waits for its end. When this process ends, by whatever, the others stop with it.
    """
    taken: dict[str, float] = {}
    todo = list(jobs)
    running: list[_Process] = []
    waiting: set[str] = set()  # names of those of which it was said
    bar = Bar(jobs, at_once)
    with Stop(words.now) as stop, bar:
        try:
            while (todo and not stop.asked) or running:
                todo = [job for job in todo if not job.finished]  # now, or by the process for which they waited
                while len(running) < at_once and not stop.asked and (job := _next(todo, waiting)) is not None:
                    todo.remove(job)
                    free = next(i for i in range(at_once) if i not in {one.slot for one in running})
                    running.append(_start(job, free, devices))
                bar.running = [*running]
                time.sleep(_LOOK)
                if stop.asked:
                    for one in running:
                        _ask_to_stop(one.process)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    one.close()
                    if not one.job.finished and is_locked(one.job.folder):  # by one that was a moment earlier
                        todo.insert(0, one.job)
                        continue
                    seconds = taken[one.job.name] = time.monotonic() - one.begun
                    if one.job.finished:
                        bar.ended(one, seconds)
                    elif not stop.asked:
                        one.job.failure = last_line(one.job.log)
                    if not stop.asked:
                        told(one.job, seconds)
        finally:  # whatever went wrong here, nothing of it goes on unseen
            _end(running)
    if stop.asked:
        raise Stopped(words.then)
    return taken


def _next(todo: Sequence[Job], waiting: set[str]) -> Job | None:
    """The first job whose folder no other process has; None where there is none."""
    for job in todo:
        if not is_locked(job.folder):
            return job
        if job.name not in waiting:
            waiting.add(job.name)
            print(f"  {job.name} waits: another process is still training in {job.folder}", flush=True)
    return None


def _start(job: Job, slot: int, devices: Sequence[str]) -> _Process:
    make_folder(job.log.parent)
    environment = {**os.environ, ENDS_WITH_STDIN: "1"}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    share, log = job.done(), open(job.log, "ab", opener=no_link)  # noqa: SIM115, it is closed when the process has ended
    words = [*_PROGRAM, *job.words]
    # the pipe is never written to: its end tells the process that this one is gone
    pipe, own = subprocess.PIPE, os.name == "posix"
    # a group of its own: Ctrl-C is for this process, which asks the others once
    process = subprocess.Popen(words, stdin=pipe, stdout=log, stderr=log, env=environment, start_new_session=own)
    return _Process(job, slot, process, log, share)


def _ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGTERM)


def _end(running: Sequence[_Process]) -> None:
    """Ask processes to stop, and end those that have not some seconds later, or when Ctrl-C comes once more."""
    try:
        for one in running:
            _ask_to_stop(one.process)
        until = time.monotonic() + _PATIENCE
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, until - time.monotonic()))
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
            one.close()


def last_line(log: Path) -> str:
    """The last line that a process printed, without the name of the program before it."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    found = next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a word")
    return found.rpartition("\r")[2].removeprefix("patchloom: ")
