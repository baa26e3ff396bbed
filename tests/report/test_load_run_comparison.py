"""Tests of the runs in a comparison's folder and of their page, also during training."""

import shutil

import pytest

from patchloom.errors import PatchloomError
from patchloom.report.load_run import expand_runs, is_comparison
from patchloom.report.report import report
from patchloom.runs.checksummed import write_checksummed


def begin(folder, seeds=2):
    """Write the plan of a comparison like `patchloom.compare.plan.store`."""
    folder.mkdir()
    write_checksummed(folder / "compare.yaml", {"asked": {"seeds": seeds}, "epochs": {"mae": 2.0, "droppos": 2.0}})
    (folder / "logs").mkdir()
    return folder


def add(folder, name, finished=True):
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text("seed: 0\n")
    if finished:
        (folder / name / "summary.txt").write_text("It learnt.\n")
    return folder / name


def test_a_comparison_stands_for_the_runs_that_are_there(tmp_path):
    lab = begin(tmp_path / "lab")
    runs = [add(lab, "droppos-seed0"), add(lab, "mae-seed0", finished=False)]
    assert expand_runs([lab]) == (runs, ["Comparison lab: 2 of 4 runs have begun, 1 finished."])
    (runs[1] / "summary.txt").write_text("It learnt.\n")
    runs += [add(lab, "mae-seed1")]
    (lab / "report.html").write_text("")
    said = "Comparison lab: 3 of 4 runs have begun, all of them finished; its results are in report.html."
    assert expand_runs([tmp_path / "other", lab]) == ([tmp_path / "other", *runs], [said])
    assert is_comparison(lab) and not is_comparison(runs[0])


def test_a_comparison_without_a_run_or_a_plan_is_a_sentence(tmp_path):
    lab = begin(tmp_path / "lab")
    with pytest.raises(PatchloomError, match="no run of the comparison .*lab has begun: wait"):
        expand_runs([lab])
    add(lab, "mae-seed0")
    write_checksummed(lab / "compare.yaml", {"asked": {}, "epochs": {}})
    with pytest.raises(PatchloomError, match=r"compare.yaml is not the plan of a comparison: give the folders"):
        expand_runs([lab])


def test_the_page_of_a_comparison_leaves_its_own_alone(finished, tmp_path):
    lab = begin(tmp_path / "lab")
    for name in ("droppos-seed0", "droppos-seed1"):
        shutil.copytree(finished, lab / name)
    (lab / "report.html").write_text("what it found")
    path = report(lab)
    assert path == lab / "runs.html" and (lab / "report.html").read_text() == "what it found"
    text = path.read_text("utf-8")
    assert "<h1>Runs of lab</h1>" in text and "2 of 4 runs have begun, all of them finished" in text
    assert 'id="run-2-title">droppos-seed1<' in text
    assert report(lab, out=tmp_path / "own.html").exists()
