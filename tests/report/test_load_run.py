"""What a run's folder tells, also where it is not finished, damaged, or of another version."""

import os
from dataclasses import replace

import pytest

from patchloom.errors import PatchloomError
from patchloom.report.load_run import _rounded, disambiguate_runs, load_run
from patchloom.runs.folder import RunFolder
from patchloom.runs.verdict import Health, write_health


def test_a_finished_run_tells_all_of_itself(run):
    found = load_run(run)
    assert found.finished and found.state() == "finished" and found.name == "mine" and found.epoch == 2
    assert (found.measure, found.percent) == ("position accuracy", True)
    assert found.asked["task"]["mask_ratio"] == "auto" and found.reasons["task.mask_ratio"]
    assert found.reasons["channels"] == "what the images have" and "epochs" not in found.reasons
    assert not found.problems and found.health is not None and found.health.ended
    write_health(run, Health("healthy", "it learns", "", 2.0, True))
    assert load_run(run).health == Health("healthy", "it learns", "", 2.0, True)


def test_reading_changes_nothing(run):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [run, *run.rglob("*")]}

    before = state()
    load_run(run)
    assert state() == before


def test_a_run_that_trains_says_how_far_it_is(run):
    (run / "summary.txt").unlink()
    (run / "encoder.safetensors").unlink()
    found = load_run(run)
    written = found.last_written()
    assert found.state(now=written + 60) == "epoch 2 of 2, on the way"
    assert found.state(now=written + 7200.5).startswith("epoch 2 of 2, not finished; nothing was written for 2 h 0")
    ending = replace(found, settings=replace(found.settings, epochs=1.98701))  # whole steps go beyond it
    assert ending.state(now=written) == "epoch 1.99 of 1.99, on the way"
    assert [_rounded(epochs) for epochs in (1200.0, 2.531, 0.0)] == ["1,200", "2.53", "0"]
    (run / "metrics.csv").unlink()
    assert load_run(run).epoch == 2  # by the checkpoint
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    early = load_run(run)
    assert early.epoch == 0 and early.metrics == {} and early.measure == "held-out measure"


def test_the_checkpoint_before_tells_where_the_last_one_is_damaged(run):
    last = run / "checkpoints" / "last.safetensors"
    step = load_run(run).about["step"]
    last.write_bytes(last.read_bytes()[:100])
    about = load_run(run).about
    assert about == {} or about["step"] <= step
    os.replace(run / "checkpoints" / "before.safetensors", last)
    assert 0 <= load_run(run).about["step"] <= step


def test_what_is_damaged_costs_its_own_part(run):
    (run / "metrics.csv").write_text("epoch,loss\n1,zero\n")
    (run / "data.yaml").write_text("[")
    (run / "requested.yaml").write_text("no settings")
    found = load_run(run)
    assert (found.metrics, found.data, found.asked) == ({}, {}, {})
    assert len(found.problems) == 3 and all("\n" not in one for one in found.problems)


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (["a/one", "b/two"], ["one", "two"]),
        (["a/run", "b/run", "b/two"], ["a/run", "b/run", "two"]),
        (["x/a/run", "y/a/run", "x/b/run"], ["x/a/run", "y/a/run", "b/run"]),
        (["run", "run/run"], [".../run", "run/run"]),
    ],
)
def test_runs_of_one_name_are_told_apart_by_the_folders_above(run, tmp_path, places, names):
    found = load_run(run)
    runs = [replace(found, name=place[-3:], folder=RunFolder(tmp_path / place)) for place in places]
    assert [one.name for one in disambiguate_runs(runs)] == [name.replace("...", tmp_path.name) for name in names]


def test_no_run_is_refused(tmp_path):
    with pytest.raises(PatchloomError, match="is not the folder of a run"):
        load_run(tmp_path)
