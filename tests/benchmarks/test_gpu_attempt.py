"""One row of the GPU measurements: failures, time limit, and end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_attempt


def attempt(made, folder, name, seconds=60.0, **arguments):
    return gpu_attempt.attempt(made, f"rows_that_fail.{name}", arguments, seconds, folder / "logs" / "row.log")


def test_a_row_that_raises_or_dies_leaves_its_last_lines(made, tmp_path):
    assert attempt(made, tmp_path, "good", known=3) == {"state": "done", "result": {"known": 3, "seconds": 60.0}}
    bad = attempt(made, tmp_path, "bad")
    assert bad["state"] == "failed" and bad["error"][-1] == "ValueError: the row is wrong"
    dead = attempt(made, tmp_path, "dies")
    assert dead["state"] == "failed" and "-6" in dead["error"][0] and "last words" in dead["error"]


def test_a_row_that_takes_too_long_is_ended_with_all_that_it_started(made, tmp_path):
    late = attempt(made, tmp_path, "endless", seconds=3.0, file=str(tmp_path / "child"))
    assert late["state"] == "late" and "stopped after 3 s" in late["error"][0]
    assert gone(tmp_path / "child")


def test_a_row_ends_with_its_parent(made, tmp_path):
    words = f"import gpu_attempt, multiprocessing as m, pathlib, sys; sys.path.insert(0, {str(tmp_path)!r}); "
    words += "gpu_attempt.attempt(m.get_context('forkserver'), 'rows_that_fail.endless', "
    words += f"{{'file': {str(tmp_path / 'child')!r}}}, 60.0, pathlib.Path({str(tmp_path / 'row.log')!r}))"
    found = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    asking = subprocess.Popen([sys.executable, "-c", words], env=found)
    try:
        assert within(30, lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    finally:
        asking.kill()
        asking.wait()
    assert gone(tmp_path / "child")


def within(seconds, true):
    """Wait until a condition holds, and return whether it does."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(true())


def gone(file):
    """Whether the process whose number a file holds ends soon."""
    stat = Path("/proc", file.read_text(), "stat")

    def has_ended():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return within(5, has_ended)
