"""Runs of a comparison, each in its own process, with one progress line for all of them."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from patchloom.display import StatusMessage, duration, print_line
from patchloom.errors import PatchloomError, Stopped
from patchloom.runs.folder import FolderLocked, RunFolder
from patchloom.system.files import make_folder, no_link, open_regular, read_text
from patchloom.system.signals import ENDS_WITH_STDIN, Stop

# The locks of run folders allow one comparison per folder and one process per run.


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for one comparison inside the context; the folder is created, and removed if it stays empty."""
    made = not folder.exists()
    make_folder(folder)
    lock = RunFolder(folder)
    try:
        lock.lock()
    except FolderLocked:
        raise PatchloomError(
            f"another comparison is running in {folder}: wait until it ends, or choose another folder with --out"
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
    """Return whether another process trains in the folder of a run."""
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
_LOOK = 0.5  # seconds between two checks of the processes
_LAST = 2000  # bytes at the end of a log that are searched for its last line
_PATIENCE = 10.0  # seconds that a process has to stop on request


@dataclass
class Job:
    """Pre-training run of a comparison.

    Attributes:
        task: name of the task in tables and folders.
        seed: random seed of the run.
        folder: folder of the run.
        words: arguments of ``patchloom pretrain``.
        log: file for its output.
        seconds: estimated duration.
        failure: last line of its output, if it failed.
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
        """Name such as "mae, seed 0"."""
        return f"{self.task}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether the run has finished, now or earlier."""
        return RunFolder(self.folder).read_summary() is not None

    def done(self) -> float:
        """Return the finished fraction of the run, from the times of its steps."""
        if self.finished:
            return 1.0
        try:
            *_, row = csv.DictReader(io.StringIO(read_text(RunFolder(self.folder).metrics, newline="")))
            return min(0.99, float(row.get("seconds") or 0) / max(self.seconds, 1e-9))
        except (OSError, ValueError, csv.Error):
            return 0.0


class Bar(StatusMessage):
    """Progress line: current runs, finished fraction, and time left, corrected by the runs that have ended."""

    def __init__(self, jobs: Sequence[Job], at_once: int):
        super().__init__("training")
        self.jobs, self.at_once = jobs, at_once
        self.running: Sequence[_Process] = ()
        self.taken = self.planned = 0.0  # seconds of the runs that ended since the start

    def count_ended(self, one: _Process, seconds: float) -> None:
        """Count a run that has ended after ``seconds``."""
        self.taken += seconds
        self.planned += one.job.seconds * (1 - one.share)

    def line(self) -> str:
        """Format the line, with the time left first, since a narrow terminal cuts the end."""
        whole = sum(job.seconds for job in self.jobs)
        over = sum(job.seconds * job.done() for job in self.jobs)
        share = over / whole if whole else 1.0
        filled = "█" * round(20 * share) + "·" * (20 - round(20 * share))
        names = "; ".join(one.job.name for one in self.running)
        ended = sum(job.finished for job in self.jobs)
        left = duration((whole - over) * self._slower() / self.at_once)
        return f"{left} left {filled} {share:.0%} · {ended} of {len(self.jobs)} runs finished · {names}"

    def _slower(self) -> float:
        """Return the ratio of actual to planned time, over the runs that have ended or are overdue."""
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
    share: float = 0.0  # fraction that was finished before this start
    begun: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Close the log and the pipe of this process."""
        self.log.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


class StopMessages(NamedTuple):
    """Messages for an interrupted comparison: at once on a terminal, and at the end."""

    now: str
    then: str


STOPPED = StopMessages(
    "stopping after this update, with a checkpoint; run the same command to resume",
    "stopped, with all progress saved: run the same command to resume",
)


def run_all(
    jobs: Sequence[Job],
    at_once: int,
    devices: Sequence[str],
    told: Callable[[Job, float], None],
    words: StopMessages = STOPPED,
) -> dict[str, float]:
    """Run all jobs that have not finished yet.

    A job that fails is left out; the others continue. A job whose folder is locked by another process, such as one that
    outlived a killed comparison, waits until that process ends. When this process ends for any reason, the others stop.
    """
    taken: dict[str, float] = {}
    todo = list(jobs)
    running: list[_Process] = []
    waiting: set[str] = set()  # names of jobs that were announced as waiting
    bar = Bar(jobs, at_once)
    with Stop(words.now) as stop, bar:
        try:
            while (todo and not stop.asked) or running:
                todo = [job for job in todo if not job.finished]  # finished here, or by the process they waited for
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
                    if not one.job.finished and is_locked(one.job.folder):  # another process was faster
                        todo.insert(0, one.job)
                        continue
                    seconds = taken[one.job.name] = time.monotonic() - one.begun
                    if one.job.finished:
                        bar.count_ended(one, seconds)
                    elif not stop.asked:
                        one.job.failure = last_line(one.job.log)
                    if not stop.asked:
                        told(one.job, seconds)
        finally:  # no process outlives an error here
            _end(running)
    if stop.asked:
        raise Stopped(words.then)
    return taken


def _next(todo: Sequence[Job], waiting: set[str]) -> Job | None:
    """Return the first job whose folder no other process has locked; None if there is none."""
    for job in todo:
        if not is_locked(job.folder):
            return job
        if job.name not in waiting:
            waiting.add(job.name)
            print_line(f"  {job.name} waits: another process is still training in {job.folder}")
    return None


def _start(job: Job, slot: int, devices: Sequence[str]) -> _Process:
    make_folder(job.log.parent)
    environment = {**os.environ, ENDS_WITH_STDIN: "1"}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    share, log = job.done(), open(job.log, "ab", opener=no_link)  # noqa: SIM115, it is closed when the process has ended
    words = [*_PROGRAM, *job.words]
    # nothing is written to the pipe: its end tells the process that this one has ended
    pipe, own = subprocess.PIPE, os.name == "posix"
    # a separate process group: Ctrl-C reaches this process only, which asks the others once
    process = subprocess.Popen(words, stdin=pipe, stdout=log, stderr=log, env=environment, start_new_session=own)
    return _Process(job, slot, process, log, share)


def _ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGTERM)


def _end(running: Sequence[_Process]) -> None:
    """Ask processes to stop, and kill those that are still running after some seconds or at a second Ctrl-C."""
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
    """Return the last line that a process printed, without the leading program name."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, log.stat().st_size - _LAST))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    found = next((line.strip() for line in reversed(lines) if line.strip()), "it ended without output")
    return found.rpartition("\r")[2].removeprefix("patchloom: ")
