"""Phases of `gpu.py` on whole programs: the suite's GPU tests, reading, and runs of ``pretrain``.

What a phase needs is imported in it: the process of the tests needs no torch, whose import takes seconds.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import threading
import time
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from gpu import ROOT, Call, Rows

if TYPE_CHECKING:
    import pytest

WORKERS = 10  # each has a context of half a GB on the GPU
_SUMMARY = 15.0  # seconds for pytest's summary
_EACH = 75  # seconds of a test
_RUNS = (("droppos", 60, False), ("mae", 40, False), ("droppos", 60, True))  # task, epochs, compiled
_PHOTOGRAPHS = 1024


class Reports:
    """Plugin of pytest that stores the outcome of each test as soon as it has ended."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.note(report, report.outcome, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(report, "not collected", 0.0)

    def note(self, report: Any, outcome: str, seconds: float) -> None:
        """Store an outcome, and the last lines of a failure."""
        figures = {"outcome": outcome, "seconds": seconds}
        if report.failed:
            lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            figures["error"] = " | ".join(lines[-3:])[:400] or report.longreprtext[-400:]
        self.rows.note("tests", report.nodeid, "failed" if report.failed else "done", **figures)


def gpu_tests() -> list[str]:
    """Return the files that have tests marked "gpu": collecting the whole suite takes half a minute."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in files if "mark.gpu" in path.read_text("utf-8"))


def tests(call: Call) -> None:
    """Run the suite's GPU tests by several processes, and stop them in time."""
    import pytest

    os.chdir(ROOT)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # equal sums in every run; it is read once in a process
    words = ["-m", "gpu", "-v", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-o"]
    words += ["addopts=--import-mode=importlib", "--durations=12", f"--basetemp={call.work / 'pytest'}"]
    words += ["-k", call.select] if call.select else []
    if find_spec("xdist"):
        words += ["-n", "0"] if call.tiny else ["-n", str(WORKERS), "--dist", "worksteal"]
    words += [f"--timeout={_EACH}"] if find_spec("pytest_timeout") else []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    ends = threading.Timer(max(1.0, call.left() - _SUMMARY), os.kill, (os.getpid(), signal.SIGINT))
    ends.daemon = True
    ends.start()
    code = pytest.main([*words, *gpu_tests()], plugins=[Reports(call.rows)])
    ends.cancel()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!s}")


def photographs(call: Call) -> Path:
    """Draw JPEG files of 500 x 375 pixels, once."""
    folder = call.work / "photographs"
    if not folder.is_dir():
        from data_rate import draw_photographs

        beside = call.work / f"photographs-{os.getpid()}"
        beside.mkdir(parents=True)
        draw_photographs(beside, 40 if call.tiny else _PHOTOGRAPHS)
        with contextlib.suppress(OSError):  # another phase was first
            beside.rename(folder)
    return folder


def loading(call: Call) -> None:
    """Measure images per second that are read, cropped to 224 pixels and copied to the device."""
    from patchloom.data.augment import RandomCrop
    from patchloom.data.cache import cache_images
    from patchloom.data.loader import training_batches
    from patchloom.data.sources.open import open_data
    from patchloom.system.device import synchronize

    files = open_data(photographs(call)).train
    side, batch, most = (32, 4, 1) if call.tiny else (224, 256, 15)
    crop = RandomCrop((side, side))
    cached = cache_images(files, 256)
    with call.row("first epoch, which stores the images at 256 pixels") as figures:
        begun = time.perf_counter()
        epoch = len(files) // batch
        for _ in training_batches(cached, crop, batch, 0, 0, epoch, most):
            pass
        seconds = time.perf_counter() - begun
        figures |= {"seconds": seconds, "images/s": epoch * batch / seconds}
    plans = {f"images of 256 pixels, {workers} workers": (cached, workers) for workers in (most, most // 2)}
    plans[f"JPEG files, {most} workers"] = files, most
    for name in call.open_rows(plans, 6):
        source, workers = plans[name]
        with call.row(name) as figures:
            batches = training_batches(source, crop, batch, 0, 0, 10**6, workers, device=call.device)
            for _ in islice(batches, 1 if call.tiny else 3 * workers):
                pass  # start the workers, and use up the batches that they have prepared
            synchronize(call.device)
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < (0.3 if call.tiny else 3.5):
                next(batches)
                steps += 1
            synchronize(call.device)
            rate = steps * batch / (time.perf_counter() - begun)
            figures["images/s"] = rate
            batches.close()


def runs(call: Call) -> None:
    """Run ``pretrain`` from the command to the final evaluation."""
    plans = {f"pretrain {task}{', compiled' * compiled}": (task, epochs, compiled) for task, epochs, compiled in _RUNS}
    for name in call.open_rows(plans, 18):
        with call.row(name) as figures:
            figures |= run(call, *plans[name])


def run(call: Call, task: str, epochs: int, compiled: bool) -> dict[str, float | None]:
    """Run ``pretrain`` on the photographs, stored at 256 pixels."""
    from gpu_steps import MODELS, TINY

    from patchloom.pace import Pace
    from patchloom.train.loop import pretrain

    sizes = TINY | {"batch_size": 4} if call.tiny else {"model": MODELS["S"], "img_size": 224, "batch_size": call.batch}
    sizes |= {"device": call.device, "epochs": 1 if call.tiny else epochs, "cache": 256, "compile": compiled}
    out, plain, shares = call.work / "runs" / f"{task}-{compiled}", Pace.waiting, [0.0]
    shutil.rmtree(out, ignore_errors=True)  # of a process that has ended

    def waiting(pace: Pace) -> float:
        shares.append(plain(pace))
        return shares[-1]

    begun = time.perf_counter()
    with patch.object(Pace, "waiting", waiting):  # which only the log has
        pretrain(photographs(call), task, out=out, **sizes)
    return {"images/s": steady(out), "waiting": shares[-1], "seconds": time.perf_counter() - begun}


def steady(run: Path) -> float | None:
    """Return images per second in the second half of a run, without its start; None if it was too short."""
    with open(run / "metrics.csv", newline="") as file:
        rows = [(int(row["images"]), float(row["seconds"])) for row in csv.DictReader(file) if row["seconds"]]
    rows = rows[len(rows) // 2 :]
    if len(rows) < 2 or rows[-1][1] <= rows[0][1]:
        return None
    return (rows[-1][0] - rows[0][0]) / (rows[-1][1] - rows[0][1])
