"""Script of the GPU measurements: in miniature on a CPU, and with phases that crash or hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu
import gpu_runs
import gpu_steps
import peers
import pytest
import timm
import torch

from patchloom.tasks import ready_tasks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_the_whole_script_in_miniature(tmp_path):
    out = tmp_path / "gpu"
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr + (out / "log.txt").read_text()[-3000:]

    # every phase and row is done, and on the page
    rows, page = gpu.Rows(out / "rows.jsonl"), (out / "table.md").read_text()
    lines = rows.lines()
    assert [line["phase"] for line in lines if not line["row"] and line["phase"] != "photographs"] == list(gpu.WANTED)
    begun, ended = (
        {(line["phase"], line["row"]) for line in lines if line["state"] == state} for state in ("begun", "done")
    )
    assert len(begun) > 40 and begun <= ended and {line["state"] for line in lines} == {"begun", "done"}
    assert page in done.stdout and f"- tests skipped: {len(rows.of('tests'))}" in page
    for phase in ("machine", "eager", "compiled", "rest", "loading", "runs", "profile"):
        assert all(row == "versions" or f"| {row} | {phase} |" in page for row in rows.of(phase))

    # every task has a step, mae and droppos first
    eager, compiled, rest = (rows.of(phase) for phase in ("eager", "compiled", "rest"))
    names = [name.removeprefix("S ") for name in eager]
    assert names[:2] == ["mae", "droppos"] and sorted(names) == sorted(ready_tasks())
    assert list(compiled) == ["S mae", "S droppos"] and [*compiled, *rest] == list(eager)
    for line in (*eager.values(), *compiled.values(), *rest.values()):
        assert line["images/s"] == pytest.approx(4 / line["ms"] * 1e3)
        assert line["least"] <= line["ms"] <= line["most"] and line["CPU_ms"] > 0 and line["queued_ms"] > 0
    assert compiled["S mae"]["over_eager"] == pytest.approx(compiled["S mae"]["images/s"] / eager["S mae"]["images/s"])
    timed = [line for line in rows.of("peers").values() if "ms" in line]
    assert len(timed) == 1 + peers.installed(gpu_steps.PEER)
    assert all(line["ours_over_it"] == pytest.approx(line["ms"] / timed[0]["ms"]) for line in timed)
    assert len(rows.of("loading")) == 4 and all(line["images/s"] > 0 for line in rows.of("loading").values())
    assert len(rows.of("runs")) == 3 and all(0 <= line["waiting"] <= 1 for line in rows.of("runs").values())

    # all tests of a GPU are collected, and skipped, as the GPU is hidden
    found = rows.of("tests")
    files = {name.partition("::")[0] for name in found}
    assert files == set(gpu_runs.gpu_tests()) and files >= {"tests/gpu/test_runs.py", "tests/gpu/test_steps.py"}
    assert len(found) > 80 and {line["outcome"] for line in found.values()} == {"skipped"}


# Processes.

PHASES = """
import os, subprocess, sys, time
from dataclasses import replace
from types import SimpleNamespace
import gpu

def broken():
    raise RuntimeError("CUDA error")

def rows(call):
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(synchronize=broken))
    for name in call.open_rows(("good", "wrong", "illegal", "dies", "last"), 1.0):
        with replace(call, tiny=name != "illegal").row(name) as figures:
            if name in ("wrong", "illegal"):
                raise ValueError(f"the row is {name}")
            if name == "dies":
                os.abort()
            figures["images/s"] = 5.0

def hangs(call):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (call.out / "child").write_text(str(child.pid))
    with call.row("endless"):
        time.sleep(60)

def late(call):
    for name in call.open_rows(("never",), 8.0):
        raise AssertionError(name)

gpu.SCRIPT = __file__
def after(call):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # as pytest does; a machine may stop a process and continue it
    subprocess.run(["sh", "-c", "kill -STOP {0}; sleep 0.2; kill -CONT {0}; sleep 0.2".format(os.getpid())])

seconds = {"rows": 30.0, "hangs": 2.0, "late": 0.5, "after": 60.0}
gpu.PHASES = {name: (f"{__name__}.{name}", each) for name, each in seconds.items()}
gpu.GROUPS, gpu.WANTED, gpu._START, gpu._LEAST = (("rows",), ("hangs", "late", "after")), tuple(seconds), 2.5, 0.5
if __name__ == "__main__":
    sys.exit(gpu.main())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "phases.py"
    path.write_text(PHASES)
    return [sys.executable, str(path), "--tiny", "--out", str(tmp_path / "out")]


@pytest.fixture
def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}


@pytest.mark.slow
def test_a_crash_costs_its_row_and_a_hang_its_phase(script, environment, tmp_path):
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=40)  # not 60 of the last
    assert done.returncode == 1
    rows = gpu.Rows(tmp_path / "out" / "rows.jsonl")
    states = {row: line["state"] for row, line in rows.of("rows").items()}
    failed = dict.fromkeys(("wrong", "illegal", "dies"), "failed")
    assert states == {"good": "done", **failed, "last": "done"}, done.stdout + done.stderr
    errors = {row: line.get("error", "") for row, line in rows.of("rows").items()}
    assert errors["illegal"].endswith("its process ended with 1") and "-6" in errors["dies"]
    assert errors["wrong"] == "ValueError: the row is wrong"
    assert sum(line["state"] == "begun" and "error" not in line for line in rows.lines()) == 6  # none twice; one hangs
    assert "killed" in rows.of("hangs")["endless"]["error"] and gone(tmp_path / "out" / "child")
    assert rows.of("late")["never"]["state"] == "not reached"
    assert {"phase": "after", "row": "", "state": "done"}.items() <= rows.lines()[-1].items()
    page = (tmp_path / "out" / "table.md").read_text()
    assert "- failed: rows wrong ValueError" in page and "- not reached: late never" in page


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_call_leaves_no_process(script, environment, tmp_path, number):
    asking = subprocess.Popen([*script, "--phases", "hangs"], env=environment, stdout=subprocess.DEVNULL)
    try:
        child = tmp_path / "out" / "child"
        assert within(30, lambda: child.exists() and child.read_text())
    finally:
        asking.send_signal(number)
        asking.wait()
    assert gone(child) and gpu.Rows(tmp_path / "out" / "rows.jsonl").of("hangs")
    assert (tmp_path / "out" / "table.md").exists() == (number == signal.SIGTERM)


def within(seconds, true):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(true())


def gone(file):
    stat = Path("/proc", file.read_text(), "stat")

    def has_ended():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return within(5, has_ended)


def test_what_cannot_be_measured_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "new")]) == 2 and "--tiny" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "rows.jsonl").write_text("")
    assert gpu.main(["--tiny", "--out", str(tmp_path)]) == 2 and "another --out" in capsys.readouterr().err
    have = f"torch>={torch.__version__.partition('+')[0]}"
    unmet = [f"timm>=99, {timm.__version__} here", "no-such-package, missing here"]
    assert gpu.unmet_requirements([have, "timm>=99", "no-such-package"]) == unmet


def test_the_file_of_gflop_agrees_with_counting_afresh():
    """A step costs what its tokens cost: operations on tokens that are thrown away would be counted."""
    kept = gpu_steps.read_gflop()
    assert kept.keys() >= {f"{size} {task}" for size in gpu.SIZES for task in ready_tasks()} | gpu_steps.ROOFLINE.keys()
    for row in ("S mae", "S mp3", "S nepa", "S latent"):
        assert kept[row] == pytest.approx(gpu_steps.gflop_of(*row.split()), abs=1e-3)
