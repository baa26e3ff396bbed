"""The script for the first GPU, in miniature on a CPU: it must be sound before there is one."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from patchloom.data import Batch
from patchloom.errors import PatchloomError
from patchloom.tasks import TASKS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
sys.path.insert(0, str(SCRIPT.parent))

import gpu  # noqa: E402, found by the path above
import gpu_attempt  # noqa: E402
import gpu_nccl  # noqa: E402
import gpu_steps  # noqa: E402
from gpu_tables import markdown  # noqa: E402

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


def call(out, *words):
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The whole script once: minutes on a GPU, about one here."""
    out = tmp_path_factory.mktemp("tiny") / "figures.json"
    done = call(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


@pytest.fixture(scope="module")
def sections(tiny):
    return json.loads(tiny[0].read_text())["sections"]


def test_every_row_of_every_section_is_done(tiny, sections):
    assert list(sections) == list(gpu.SECTIONS)
    failed = {name: one for rows in sections.values() for name, one in rows.items() if one["state"] != "done"}
    assert not failed, failed
    count = sum(map(len, sections.values()))
    assert f"{count} of {count} rows are done" in tiny[1]


def test_every_task_has_a_step_with_its_rate_work_and_memory(sections):
    results = {name: one["result"] for name, one in sections["steps"].items()}
    assert set(results) == {f"nano {task}" for task in TASKS}
    for one in results.values():
        assert one["batch"] == 4 and one["images/s"] == pytest.approx(4 / one["seconds"])
        assert one["operations a second"] == pytest.approx(one["operations an image"] * one["images/s"])
        assert 0 < one["of products"] < 1.5 and list(one["tried"]) == ["2", "4"]


def test_peers_are_measured_where_they_are_installed(sections):
    (one,) = (one["result"] for one in sections["peers"].values())
    assert len(one["rows"]) + len(one["absent"]) == 4 and "patchloom mae" in one["rows"]


def test_a_group_of_one_makes_its_collectives_and_changes_nothing(sections):
    (one,) = (one["result"] for one in sections["group"].values())
    assert one["backend"] == "gloo" and one["difference"] == 0
    assert one["collectives"]["all_reduce"] > 10 and one["collectives"]["all_gather"] == 1


def test_runs_tell_what_they_measured(sections):
    loading = {name: one["result"]["images/s"] for name, one in sections["loading"].items()}
    assert len(loading) == 3 and loading["256-px cache"] > 0 and loading["JPEG files"] > 0
    (cifar,) = (one["result"] for one in sections["cifar"].values())
    assert set(cifar["learnt"]["knn"]) == {"trained", "untrained", "raw pixels"} and cifar["epochs"] >= 1
    tests = sections["tests"]["pytest -m gpu"]["result"]
    if not torch.cuda.is_available():
        assert tests["counts"]["SKIPPED"] >= 8 * 4 and not tests["failed"]


def test_the_page_has_a_table_of_each_section(tiny):
    page = tiny[0].with_suffix(".md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(headings) == len(gpu.SECTIONS) and "no figure here means anything" in page
    for task in TASKS:
        assert f"| nano {task} |" in page


def test_what_is_done_is_not_repeated_and_what_failed_is_tried_again(tiny):
    out = tiny[0]
    before = out.read_text()
    kept = json.loads(before)
    kept["sections"]["machine"]["figures"] = {"state": "failed", "error": ["no luck"], "attempts": 1}
    out.write_text(json.dumps(kept))
    again = call(out)
    assert again.returncode == 0, again.stderr
    lines = again.stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("machine")  # the row that had failed, and the end
    after = json.loads(out.read_text())
    one = after["sections"]["machine"].pop("figures")
    assert one["state"] == "done" and one["attempts"] == 2
    kept["sections"]["machine"] = {}
    assert after["sections"] == kept["sections"]
    out.write_text(before)


def test_figures_of_two_machines_do_not_meet(tmp_path):
    book = gpu.Book(tmp_path / "a.json")
    about = {"machine": {"name": "one", "cuda": None, "memory": 1, "cores": 1, "torch": "2", "python": "3"}}
    about |= {"tiny": True, "device": "cpu", "date": "2026-11-21", "commit": ""}
    book.begin(about)
    gpu.Book(tmp_path / "a.json").begin(about | {"date": "2026-11-22"})
    with pytest.raises(PatchloomError, match="give another --out"):
        gpu.Book(tmp_path / "a.json").begin(about | {"machine": about["machine"] | {"name": "two"}})
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(PatchloomError, match="not written by this script"):
        gpu.Book(tmp_path / "b.json")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """How processes begin, with a module of rows that they find."""
    (tmp_path / "rows_that_fail.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gpu_attempt, "GRACE", 0.5)
    return multiprocessing.get_context("forkserver")


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


def test_a_row_ends_with_who_asked_for_it(made, tmp_path):
    words = f"import gpu_attempt, multiprocessing as m, pathlib, sys; sys.path.insert(0, {str(tmp_path)!r}); "
    words += "gpu_attempt.attempt(m.get_context('forkserver'), 'rows_that_fail.endless', "
    words += f"{{'file': {str(tmp_path / 'child')!r}}}, 60.0, pathlib.Path({str(tmp_path / 'row.log')!r}))"
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    asking = subprocess.Popen([sys.executable, "-c", words], env=found)
    try:
        assert within(30, lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    finally:
        asking.kill()
        asking.wait()
    assert gone(tmp_path / "child")


def within(seconds, true):
    """Whether something becomes true."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(true())


def gone(file):
    """Whether the process whose number a file holds ends soon."""
    stat = Path("/proc", file.read_text(), "stat")

    def ended():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return within(5, ended)


def test_rows_share_the_time_and_go_on_after_failures(made, tmp_path):
    book = gpu.Book(tmp_path / "figures.json")
    book.kept["about"] = {}
    rows = [gpu.Row("machine", "figures", "rows_that_fail.good", {"known": {}}, 60)]
    rows += [gpu.Row("steps", name, f"rows_that_fail.{name}", {}, 60) for name in ("bad", "dies", "good")]
    gpu.work_through(rows, book, gpu.Budget(600), made, tmp_path / "logs")
    states = {name: book.entry(row)["state"] for row in rows for name in [row.name]}
    assert states == {"figures": "done", "bad": "failed", "dies": "failed", "good": "done"}
    more = [gpu.Row("steps", "new", "rows_that_fail.good", {"known": {}}, 60), *rows]
    gpu.work_through(more, book, gpu.Budget(5), made, tmp_path / "logs")
    assert book.entry(more[0])["state"] == "not reached" and book.entry(rows[1])["state"] == "failed"
    gpu.work_through(more, book, gpu.Budget(600), made, tmp_path / "logs")
    assert book.entry(more[0])["result"]["known"]["machine"]["figures"]["seconds"] > 0  # results of other rows
    assert [book.entry(row)["attempts"] for row in more] == [1, 1, 2, 2, 1]
    assert json.loads((tmp_path / "figures.json").read_text()) == book.kept


def test_time_that_is_left_goes_to_the_sections_after():
    budget = gpu.Budget(100.0)
    assert budget.section_end("cifar", ["cifar"]) == pytest.approx(budget.end, abs=0.1)
    first = budget.section_end("machine", list(gpu.SECTIONS))
    assert first - time.monotonic() == pytest.approx(
        100 * gpu.SECTIONS["machine"] / sum(gpu.SECTIONS.values()), abs=0.1
    )


class Growing:
    """A step whose memory ends beyond 8 images."""

    def __init__(self):
        self.batch = Batch((torch.zeros(2, 3, 4, 4, dtype=torch.uint8),), torch.arange(2), [])
        self.optimizer = SimpleNamespace(zero_grad=lambda set_to_none: None)

    def __call__(self):
        if len(self.batch.indices) > 8:
            raise torch.OutOfMemoryError("no more")


def test_batches_double_until_memory_ends(monkeypatch):
    step = Growing()
    found, tried = gpu_steps.largest(step, 64, "cpu")
    assert found == 8 == len(step.batch.views[0]) and tried[16] == {"state": "out of memory"}
    assert gpu_steps.largest(Growing(), 4, "cpu")[0] == 4
    assert gpu_steps.as_large(Growing(), 64, "cpu") == 8
    # a step of n images needs 1 + n GiB: 16 of them fit into 19, but 32 would not, which is known before
    monkeypatch.setattr(gpu_steps, "memory", lambda device: (0.0, 19.0))
    step = Growing()
    monkeypatch.setattr(gpu_steps, "peak_memory", lambda work, device: 1.0 + len(work.batch.indices))
    monkeypatch.setattr(Growing, "__call__", lambda self: None)
    found, tried = gpu_steps.largest(step, 4096, "cpu")
    assert found == 16 and list(tried) == [2, 4, 8, 16]


def test_waits_are_counted_by_the_line_that_is_to_blame():
    places = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    gpu_steps.count_waits(caught, places)
    ((place, count),) = places.items()
    assert place.startswith("benchmarks/test_gpu.py:") and count == 2


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),
    ],
)
def test_data_sheets_are_found_by_the_whole_name(name, rate):
    assert gpu_steps.data_sheet(name) == (rate and rate * 1e12)


def test_one_process_that_does_not_count_as_alone():
    one = gpu_nccl.One(1)
    assert one > 1 and not one == 1 and one / 2 == 0.5 and list(range(one)) == [0] and 8 // one == 8


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    methods = []
    monkeypatch.setattr(gpu_attempt, "context", methods.append)
    monkeypatch.setattr(gpu_attempt, "attempt", lambda *given: {"state": "failed", "error": ["no CUDA GPUs"]})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "figures.json")])
    assert gpu.main() == 2
    told = capsys.readouterr().err
    assert "no process here can use" in told and "--tiny" in told and methods == ["forkserver", "spawn"]
    assert not (tmp_path / "figures.json").exists()


def test_rows_without_results_are_told_on_the_page():
    about = {"machine": {"name": "one", "cuda": "13", "memory": 1, "cores": 1, "torch": "2", "python": "3"}}
    about |= {"tiny": False, "date": "2026-11-21", "begun": "2026-11-21", "commit": "abc"}
    rows = {"a": {"state": "failed", "error": ["E1", "E2", "E3"], "attempts": 2}}
    page = markdown({"about": about, "sections": {"steps": rows | {"b": {"state": "not reached", "attempts": 0}}}})
    assert "- a: failed (attempt 2). E2 E3" in page and "- b: not reached." in page
