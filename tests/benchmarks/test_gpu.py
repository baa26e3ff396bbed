"""Script of the GPU measurements, in miniature on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu
import gpu_attempt
import gpu_nccl
import pytest
import torch
from gpu_tables import markdown

from patchloom.errors import PatchloomError
from patchloom.tasks import ready_tasks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def call(out, *words):
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The results of the whole script: minutes on a GPU, about one here."""
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
    machine = sections["machine"]["figures"]["result"]
    peak = machine["products"][machine["precision"]]
    assert set(results) == {f"nano {task}" for task in ready_tasks()}
    for one in results.values():
        assert one["batch"] == 4 and one["images/s"] == pytest.approx(4 / one["seconds"])
        assert one["operations a second"] == pytest.approx(one["operations an image"] * one["images/s"])
        assert one["of products"] == pytest.approx(one["operations a second"] / peak)
        assert list(one["tried"]) == ["2", "4"]


def test_peers_are_measured_where_they_are_installed(sections):
    (one,) = (one["result"] for one in sections["peers"].values())
    assert len(one["rows"]) + len(one["absent"]) == 4 and "patchloom mae" in one["rows"]


def test_a_group_of_one_makes_its_collectives_and_changes_nothing(sections):
    (one,) = (one["result"] for one in sections["group"].values())
    assert one["backend"] == "gloo" and one["difference"] == 0
    assert one["collectives"]["all_reduce"] > 10 and one["collectives"]["all_gather"] == 1


def test_runs_report_their_measurements(sections):
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
    assert len(headings) == len(gpu.SECTIONS) and "figures have no meaning" in page
    for task in ready_tasks():
        assert f"| nano {task} |" in page


def test_what_is_done_is_not_repeated_and_what_failed_is_tried_again(tiny, monkeypatch, capsys):
    out = tiny[0]
    before = out.read_text()
    kept = json.loads(before)
    kept["sections"]["machine"]["figures"] = {"state": "failed", "error": ["no luck"], "attempts": 1}
    out.write_text(json.dumps(kept))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(out)])
    assert gpu.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("machine")  # the row that had failed, and the end
    after = json.loads(out.read_text())
    one = after["sections"]["machine"].pop("figures")
    assert one["state"] == "done" and one["attempts"] == 2
    kept["sections"]["machine"] = {}
    assert after["sections"] == kept["sections"]
    out.write_text(before)


def test_figures_of_two_machines_are_not_mixed(tmp_path):
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


def test_one_process_that_uses_its_group():
    one = gpu_nccl.One(1)
    assert one > 1 and not one == 1 and one / 2 == 0.5 and list(range(one)) == [0] and 8 // one == 8


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    methods = []
    monkeypatch.setattr(gpu_attempt, "context", methods.append)
    monkeypatch.setattr(gpu_attempt, "attempt", lambda *given: {"state": "failed", "error": ["no CUDA GPUs"]})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "figures.json")])
    before = signal.getsignal(signal.SIGTERM)
    assert gpu.main() == 2 and signal.getsignal(signal.SIGTERM) is before
    told = capsys.readouterr().err
    assert "no process here can use" in told and "--tiny" in told and methods == ["forkserver", "spawn"]
    assert not (tmp_path / "figures.json").exists()


def test_rows_without_results_are_listed_on_the_page():
    about = {"machine": {"name": "one", "cuda": "13", "memory": 1, "cores": 1, "torch": "2", "python": "3"}}
    about |= {"tiny": False, "date": "2026-11-21", "begun": "2026-11-21", "commit": "abc"}
    rows = {"a": {"state": "failed", "error": ["E1", "E2", "E3"], "attempts": 2}}
    page = markdown({"about": about, "sections": {"steps": rows | {"b": {"state": "not reached", "attempts": 0}}}})
    assert "- a: failed (attempt 2). E2 E3" in page and "- b: not reached." in page
