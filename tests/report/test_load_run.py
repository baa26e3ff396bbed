"""Tests of reading a run's folder, also of unfinished, damaged and older runs."""

import csv
import json
import os
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from patchloom.errors import PatchloomError
from patchloom.report.load_run import _rounded, disambiguate_runs, load_run, settings_of
from patchloom.runs.folder import RunFolder
from patchloom.runs.verdict import Health, Verdict, write_health
from patchloom.train.checkpointing import TrainState


def test_a_finished_run_tells_all_of_itself(run):
    found = load_run(run)
    assert found.finished and found.state() == "finished" and found.name == "mine" and found.epoch == 2
    assert (found.measure, found.percent) == ("position accuracy", True)
    assert found.asked["task"]["mask_ratio"] == "auto" and found.reasons["task.mask_ratio"]
    assert found.reasons["channels"] == "as the images" and "epochs" not in found.reasons
    last = [row["held_out"] for row in csv.DictReader((run / "metrics.csv").open()) if row["held_out"]][-1]
    assert f"{found.measured.value:.6g}" == last and found.measured.n == len(found.data["held_out"])
    assert not found.problems and found.health is not None and found.health.ended
    write_health(run, Health(Verdict.HEALTHY, 2.0, True, words=("it learns", "")))
    assert load_run(run).health == Health(Verdict.HEALTHY, 2.0, True, words=("it learns", ""))


def test_a_run_of_an_older_version_keeps_words_and_no_reasons(run):
    """The text of an old measure is not parsed: a neutral label replaces its name."""
    (run / "reasons.yaml").unlink()
    tensors, about, _ = (checkpoints := RunFolder(run).checkpoints).read()
    checkpoints.save(tensors, about | {"measured": ["position accuracy 7.2% (chance 6.2%)", "position accuracy 7.2%"]})
    found = load_run(run)
    assert (found.measure, found.percent, found.reasons) == ("held-out measure", False, {}) and not found.problems
    assert {setting.reason for setting in settings_of(found)} >= {"chosen for you"}
    state = TrainState.of(checkpoints.about(), {})
    assert state.measured is None and state.step == about["step"]


def test_reasons_are_no_comments_of_the_configuration(run):
    (run / "config.yaml").write_text("".join(line for line in open(run / "config.yaml") if not line.startswith("#")))
    assert load_run(run).reasons["channels"] == "as the images"
    (run / "reasons.yaml").write_text("channels: [1]\n")
    found = load_run(run)
    assert found.reasons == {} and "reasons.yaml" in found.problems[0]


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
    assert found.state(now=written + 60) == "epoch 2 of 2, training"
    assert found.state(now=written + 7200.5).startswith("epoch 2 of 2, not finished; last written 2 h 0")
    ending = replace(found, settings=replace(found.settings, epochs=1.98701))  # whole steps go beyond it
    assert ending.state(now=written) == "epoch 1.99 of 1.99, training"
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


def test_values_of_another_kind_cost_their_own_part(run):
    (run / "requested.yaml").write_text("data: x\ntask: mae\n")
    for name in ("last", "before"):
        path = run / "checkpoints" / f"{name}.safetensors"
        save_file(load_file(path), path, metadata={"about": json.dumps({"step": "many", "steps": 3})})
    found = load_run(run)
    assert (found.asked, found.about) == ({}, {}) and "requested.yaml is not what patchloom wrote" in found.problems[0]


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
