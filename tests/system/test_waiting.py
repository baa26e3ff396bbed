"""Waiting of OpenMP's threads."""

import os
import subprocess
import sys

import pytest

from patchloom.system import waiting
from patchloom.system.device import own_cores

SCRIPT = """
import os, sys, time
import torch
from patchloom.system import load, waiting

def others(cores):  # let other programs work so much from now on
    begun, ticks = time.perf_counter(), os.sysconf("SC_CLK_TCK")
    load.worked = lambda: int((cores * (time.perf_counter() - begun) + time.process_time() + 1000) * ticks)

others(2.0 * len(os.sched_getaffinity(0)) if "busy" in sys.argv else 0.0)
torch.set_num_threads(2)
numbers = torch.arange(512.0 * 512).view(512, 512).sin()
print(waiting.sleep_when_busy(), end=" ")
time.sleep(1.2)
numbers + 1
before = time.process_time()
for _ in range(100):
    numbers + 1  # by two threads, one of which then waits for the next addition
    time.sleep(0.002)
print(time.process_time() - before, end=" ")
print((numbers @ numbers).sum().item())
"""


def run(*words, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, env=kept | {"OMP_NUM_THREADS": "2"} | variables, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    possible, seconds, total = done.stdout.split()
    return possible == "True", float(seconds), total


@pytest.mark.slow
@pytest.mark.skipif(waiting._libgomp() is None, reason="torch has another OpenMP here")
@pytest.mark.skipif(len(own_cores()) < 2, reason="two threads on one core always sleep")
def test_waiting_threads_leave_their_cores_to_other_work_and_compute_the_same():
    possible, spinning, total = run()
    assert possible
    possible, sleeping, same = run("busy")
    assert possible and same == total
    assert sleeping < spinning / 2, "seconds of processors, of which waiting takes most"


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "300")])
def test_the_users_choice_stays(name, value, monkeypatch):
    for one in waiting._CHOSEN:
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(waiting.threading, "Thread", None)  # none may be started
    assert waiting.sleep_when_busy.__wrapped__() is False


def test_the_watch_ends_where_the_load_is_unknown(monkeypatch):
    monkeypatch.setattr(waiting, "_others", lambda: None)
    monkeypatch.setattr(waiting, "time", None)  # it may not wait
    waiting._watch(None)
