import sys
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # the scripts import one another

import gpu_attempt  # noqa: E402, found by the path above

ROWS = """
import os, subprocess, sys, time

def good(seconds, known=None):
    return {"known": known, "seconds": seconds}

def bad(seconds):
    raise ValueError("the row is wrong")

def dies(seconds):
    print("last words", flush=True)
    os.abort()

def endless(seconds, file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(file, "w").write(str(child.pid))
    time.sleep(60)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BaseContext:
    """A context that starts processes, which find a module of failing rows."""
    (tmp_path / "rows_that_fail.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gpu_attempt, "GRACE", 0.5)
    return gpu_attempt.context()  # with the modules that other tests fork from the same server
