"""Runs of a comparison, each in its own process, with one progress line for all of them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from patchloom.display import StatusMessage, duration, print_line, time_left
from patchloom.errors import PatchloomError, Stopped
from patchloom.pace import Pace
from patchloom.runs.folder import FolderLocked, RunFolder, read_metrics
from patchloom.runs.settings import option_text
from patchloom.system.files import make_folder, no_link, open_regular
from patchloom.system.load import LoadWatch
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
_STOPPING = "stopping after this update, with a checkpoint; run the same command to resume"
_STOPPED = "stopped, with all progress saved: run the same command to resume"
OVERHEAD = 60.0  # seconds of a run before and after its training, roughly: start, pictures, final evaluation


@dataclass(frozen=True)
class Length:
    """Length of the runs of an arm.

    Attributes:
        batch: images per step.
        epochs: number of epochs; None if the clock ends the training (--minutes).
        seconds: training time in seconds, of equal samples a forecast; None if unknown.
    """

    batch: int
    epochs: float | None
    seconds: float | None


@dataclass
class Job:
    """Pre-training run of a comparison.

    Attributes:
        task: name of its arm in tables.
        seed: random seed of the run.
        folder: folder of the run.
        data: names of its data.
        length: length of its training.
        given: values of options of ``pretrain`` by name.
        failure: last line of its output, if it failed.
    """

    task: str
    seed: int
    folder: Path
    data: Sequence[str]
    length: Length
    given: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""

    @property
    def name(self) -> str:
        """Name such as "mae, seed 0"."""
        return f"{self.task}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """File for its output."""
        return self.folder.parent / "logs" / f"{self.folder.name}.txt"

    def last_line(self) -> str:
        """Return the last line of its output, without the leading program name; "" without a log."""
        with contextlib.suppress(OSError), open_regular(self.log) as file:
            file.seek(max(0, self.log.stat().st_size - _LAST))
            printed = file.read().decode("utf-8", "replace").strip() or "it ended without output"
            return printed.rpartition("\n")[2].strip().rpartition("\r")[2].removeprefix("patchloom: ")
        return ""

    @property
    def seconds(self) -> float:
        """Estimated duration, including `OVERHEAD`."""
        return (self.length.seconds or 0.0) + OVERHEAD

    @property
    def finished(self) -> bool:
        """Whether the run has finished, now or earlier."""
        return RunFolder(self.folder).read_summary() is not None

    def done(self) -> float:
        """Return the finished fraction of the run."""
        if self.finished:
            return 1.0
        clock = self.length.epochs is None
        whole = (self.length.seconds if clock else self.length.epochs) or math.inf
        try:
            trained = read_metrics(RunFolder(self.folder).metrics)["seconds" if clock else "epoch"][-1] / whole
        except (PatchloomError, KeyError, IndexError):  # not written yet
            return 0.0
        return min(0.99, max(0.0, trained) * (1 - OVERHEAD / self.seconds)) if trained < math.inf else 0.0


class TrainedRun(NamedTuple):
    """Training of a finished run.

    Attributes:
        task: name of its arm.
        seed: random seed.
        seconds: time of its steps and held-out measures.
        updates: number of updates of the weights.
        images: images seen, counting repeats.
    """

    task: str
    seed: int
    seconds: float
    updates: int
    images: int

    @property
    def text(self) -> str:
        """Seconds and updates in words."""
        return f"{exact_duration(self.seconds)} of training, {self.updates:,} updates"


def exact_duration(seconds: float) -> str:
    """Format a time so that deviations of some per cent show."""
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def read_trained(job: Job) -> TrainedRun:
    """Return the training that a finished run recorded."""
    folder = RunFolder(job.folder)
    columns = read_metrics(folder.metrics)
    ends = {name: float(columns[name][-1]) for name in ("seconds", "step", "images") if len(columns.get(name, ()))}
    if len(ends) < 3 or not all(0 <= end < math.inf for end in ends.values()):
        raise PatchloomError(f"{folder.metrics} does not end with seconds, step and images: restore it from a copy")
    updates = math.ceil(ends["step"] / folder.read_config().accumulate)
    return TrainedRun(job.task, job.seed, ends["seconds"], updates, round(ends["images"]))


_WINDOW = 600.0  # seconds; rows of a long run come minutes apart


class Bar(StatusMessage):
    """Progress line: current runs, finished fraction, and time left."""

    def __init__(self, jobs: Sequence[Job], at_once: int, clock: Callable[[], float] = time.monotonic):
        self.jobs, self.running = jobs, list[str]()
        whole = sum(job.seconds for job in jobs)
        # its units are planned seconds
        super().__init__("training", pace=Pace(whole, self._over(), 1 / at_once, _WINDOW, clock))

    def _over(self) -> float:
        return sum(job.seconds * job.done() for job in self.jobs)

    def line(self) -> str:
        """Format the line, with the time left first, since a narrow terminal cuts the end."""
        over = self._over()
        if over > self.pace.done:
            self.pace.update(over)
        share = over / self.pace.total if self.pace.total else 1.0
        filled = "█" * round(20 * share) + "·" * (20 - round(20 * share))
        ended = sum(job.finished for job in self.jobs)
        names = "; ".join(self.running)
        return f"{time_left(self.left())} {filled} {share:.0%} · {ended} of {len(self.jobs)} runs finished · {names}"


class _Process(NamedTuple):
    job: Job
    slot: int
    process: subprocess.Popen[bytes]
    begun: float

    def ask_to_stop(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.process.send_signal(signal.SIGTERM)


def run_all(jobs: Sequence[Job], at_once: int, devices: Sequence[str], told: Callable[[Job, float], None]) -> None:
    """Run all jobs that have not finished yet; ``told`` gets each that ended and the seconds that it took.

    A job that fails is left out; the others continue. A job whose folder is locked by another process, such as one that
    outlived a killed comparison, waits until that process ends. When this process ends for any reason, the others stop.
    """
    todo = list(jobs)
    running: list[_Process] = []
    waiting: set[str] = set()  # names of jobs that were announced as waiting
    bar, load = Bar(jobs, at_once), LoadWatch()
    with Stop(_STOPPING) as stop, bar:
        try:
            while (todo and not stop.asked) or running:
                todo = [job for job in todo if not job.finished]  # finished here, or by the process they waited for
                for job in [*todo]:
                    if len(running) == at_once or stop.asked:
                        break
                    if not is_locked(job.folder):
                        todo.remove(job)
                        free = min({*range(at_once)} - {one.slot for one in running})
                        running.append(_start(job, free, devices))
                    elif job.name not in waiting:
                        waiting.add(job.name)
                        print_line(f"  {job.name} waits: another process is still training in {job.folder}")
                bar.running = [one.job.name for one in running]
                time.sleep(_LOOK)
                if news := load.news():
                    print_line(f"  {news}")
                if stop.asked:
                    for one in running:
                        one.ask_to_stop()
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    one.process.communicate()  # closes the pipe
                    if not one.job.finished and is_locked(one.job.folder):  # another process was faster
                        todo.insert(0, one.job)
                    elif not stop.asked:
                        one.job.failure = "" if one.job.finished else one.job.last_line()
                        told(one.job, time.monotonic() - one.begun)
        finally:  # no process outlives an error here, some seconds, or a second Ctrl-C
            try:
                for one in running:
                    one.ask_to_stop()
                until = time.monotonic() + _PATIENCE
                for one in running:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        one.process.wait(max(0.0, until - time.monotonic()))
            finally:
                for one in running:
                    one.process.kill()
                    one.process.communicate()
    if stop.asked:
        raise Stopped(_STOPPED)


def _start(job: Job, slot: int, devices: Sequence[str]) -> _Process:
    make_folder(job.log.parent)
    environment = {**os.environ, ENDS_WITH_STDIN: "1"}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    words = [*_PROGRAM, *job.data, *(f"--{name}={option_text(name, value)}" for name, value in job.given.items())]
    # nothing is written to the pipe: its end tells the process that this one has ended
    pipe, own = subprocess.PIPE, os.name == "posix"
    with open(job.log, "ab", opener=no_link) as log:
        # a separate process group: Ctrl-C reaches this process only, which asks the others once
        process = subprocess.Popen(words, stdin=pipe, stdout=log, stderr=log, env=environment, start_new_session=own)
    return _Process(job, slot, process, time.monotonic())
