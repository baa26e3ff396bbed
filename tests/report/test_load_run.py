"""Tests of reading a run's folder: unfinished and damaged runs, settings, commands and comparisons."""

import json
import shlex
import shutil
from dataclasses import replace

import pytest
from refusing import refusal
from running import csv_rows
from safetensors.torch import load_file, save_file

from patchloom.options.parse import parse_pretrain
from patchloom.report.report import report
from patchloom.report.settings import CHOSEN, DEFAULT, command_of, settings_of
from patchloom.results.verdict import Health, Verdict, write_health
from patchloom.runs.past import expand_runs, is_comparison, load_run, load_runs
from patchloom.runs.settings import request
from patchloom.system.checksummed import write_checksummed


def test_a_finished_run_tells_all_of_itself(run):
    found = load_run(run)
    assert found.finished and found.state() == "finished" and found.name == "mine" and found.epoch == 2
    assert (found.measured.measure, found.measured.unit) == ("position accuracy", "%")
    assert found.asked["task"]["mask_ratio"] == "auto" and found.reasons["task.mask_ratio"]
    assert found.reasons["channels"] == "as the images" and "epochs" not in found.reasons
    last = [row["held_out"] for row in csv_rows(run / "metrics.csv") if row["held_out"]][-1]
    assert f"{found.measured.value:.6g}" == last and found.measured.n == len(found.data["held_out"])
    assert not found.problems and found.health is not None and found.health.ended
    write_health(run, Health(Verdict.HEALTHY, "it learns", "", 2.0, True))
    assert load_run(run).health == Health(Verdict.HEALTHY, "it learns", "", 2.0, True)


def test_reasons_are_read_from_their_own_file(run):
    (run / "config.yaml").write_text("".join(line for line in open(run / "config.yaml") if not line.startswith("#")))
    assert load_run(run).reasons["channels"] == "as the images"
    (run / "reasons.yaml").write_text("channels: [1]\n")
    found = load_run(run)
    assert found.reasons == {} and "reasons.yaml" in found.problems["reasons"]
    (run / "reasons.yaml").unlink()
    found = load_run(run)
    assert found.reasons == {} and not found.problems
    assert "chosen for you" in {setting.reason for setting in settings_of(found)}


def test_a_run_that_trains_says_how_far_it_is(run):
    (run / "summary.txt").unlink()
    (run / "encoder.safetensors").unlink()
    found = load_run(run)
    written = found.last_written()
    assert found.state(now=written + 60) == "epoch 2 of 2, training"
    assert found.state(now=written + 7200.5).startswith("epoch 2 of 2, not finished; last written 2 h 0")
    ending = replace(found, settings=replace(found.settings, epochs=1.98701))  # whole steps go beyond it
    assert ending.state(now=written) == "epoch 1.99 of 1.99, training"
    long = replace(found, settings=replace(found.settings, epochs=1200.0))
    assert long.state(now=written) == "epoch 1,200 of 1,200, training"
    (run / "metrics.csv").unlink()
    assert load_run(run).epoch == 2  # by the checkpoint
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    early = load_run(run)
    assert early.epoch == 0 and early.metrics == {} and early.measured.measure == "held-out measure"


def test_what_is_damaged_costs_its_own_part(run):
    (run / "metrics.csv").write_text("epoch,loss\n1,zero\n")
    (run / "data.yaml").write_text("[")
    (run / "requested.yaml").write_text("no settings")
    found = load_run(run)
    assert (found.metrics, found.data, found.asked) == ({}, {}, {})
    assert found.problems.keys() == {"metrics", "data", "asked"}
    assert all("\n" not in one for one in found.problems.values())
    (run / "requested.yaml").write_text("data: x\ntask: mae\n")
    damaged = {"requested.yaml": {"step": "many", "steps": 3}, "last.safetensors": {"measured": {"n": 3}}}
    for problem, about in damaged.items():
        for name in ("last", "before"):
            path = run / "checkpoints" / f"{name}.safetensors"
            save_file(load_file(path), path, metadata={"about": json.dumps(about)})
        found = load_run(run)
        assert found.asked == {} and found.measured.measure == "held-out measure"
        assert any(problem in one for one in found.problems.values())


def test_runs_of_one_name_are_told_apart_by_the_folders_above(finished, tmp_path):
    for places, names in (
        (["a/one", "b/two"], ["one", "two"]),
        (["c/run", "d/run", "d/two"], ["c/run", "d/run", "two"]),
        (["x/a/run", "y/a/run", "x/b/run"], ["x/a/run", "y/a/run", "b/run"]),
    ):
        for place in places:
            shutil.copytree(finished, tmp_path / place)
        assert [one.name for one in load_runs([tmp_path / place for place in places])] == names
    assert "is not the folder of a run" in refusal(load_run, tmp_path)


def test_runs_without_what_is_needed_are_refused(run):
    (run / "metrics.csv").write_text("epoch,loss\n1,zero\n")
    assert len(load_runs([run])) == 1 and load_runs([run], needed=["results"])
    assert "not a number" in refusal(load_runs, [run], needed=["results", "metrics"])
    assert "given twice" in refusal(load_runs, [run, run.parent / "." / run.name])


# Settings with their reasons, and the command that repeats a run.


def typed_again(command: str):
    verb, name, *words = shlex.split(command)
    assert (verb, name) == ("patchloom", "pretrain")
    given, out = parse_pretrain(words)
    data, task = given.pop("data"), given.pop("task")
    return request(data, task, given), out


def test_every_value_has_its_reason(run):
    found = {one.name: one for one in settings_of(load_run(run))}
    assert found["channels"].value == "3" and found["channels"].reason == "as the images"
    assert found["task.mask_ratio"].reason not in ("", CHOSEN, DEFAULT)
    assert found["epochs"].value == "2" and found["epochs"].reason == ""
    assert found["model.embed_dim"].value == "32" and found["task.name"].reason == ""
    assert found["clip"].reason == DEFAULT and found["compile"].value == "false"
    assert found["img_size"].value == "32x32" and "rate" not in found and "task.pixel_decoder_depth" not in found
    kinds = [{DEFAULT: 2, "": 1}.get(one.reason, 0) for one in found.values()]
    assert set(kinds) == {0, 1, 2} and kinds == sorted(kinds)  # chosen for the user, given, defaults


def test_the_command_means_the_same_run(run, finished):
    asked = load_run(run)
    again, out = typed_again(command_of(asked))
    assert again.plain() == asked.asked and out == str(run.with_name("mine-again"))
    words = shlex.split(command_of(asked))
    assert not {"--clip", "--task.mask_ratio", "auto"} & set(words)
    (run / "summary.txt").unlink()
    assert typed_again(command_of(load_run(run)))[1] == str(run)  # an unfinished run goes on


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("auto", {"recipe": "mae-vit-b", "epochs": 7, "batch_size": 64}),
        ("mae", {"img_size": (64, 32), "patch_size": (8, 4), "flip": False, "model": {"name": "swin-nano"}}),
        (
            "mae",
            {"clip": 1e-07, "model": {"name": "nano", "class_token": False}, "group": r"^(.*) '\"_\$", "cache": 64},
        ),
        ({"name": "droppos", "temperature": float("inf"), "sigma": 0.5}, {}),
    ],
)
def test_any_settings_are_typed_so_that_they_are_read_again(finished, tmp_path, task, options):
    folder = tmp_path / "a b, 'c' $(d)\n<img>"
    folder.mkdir()
    asked = request([folder, tmp_path] if isinstance(task, dict) else folder, task, options)
    command = command_of(replace(load_run(finished), asked=asked.plain()))
    assert typed_again(command)[0] == asked


def test_what_cannot_be_typed_has_no_command(finished):
    found = load_run(finished)
    assert command_of(replace(found, asked={})) == ""
    assert command_of(replace(found, asked=found.asked | {"data": ""})) == ""


def test_a_report_never_imports_the_code_that_a_run_names(finished, tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text("raise SystemExit('run')\n")
    found = load_run(finished)
    asked = found.asked | {"task": {"name": f"{file}:Theirs#0123456789abcdef", "strength": 3}}
    its = replace(found, asked=asked)
    words = shlex.split(command_of(its))
    assert words[words.index("--task") + 1] == f"{file}:Theirs" and words[words.index("--task.strength") + 1] == "3"
    assert settings_of(its)


def begin(folder, seeds=2):
    """Write the plan of a comparison like `patchloom.compare.plan.store`."""
    folder.mkdir()
    write_checksummed(folder / "compare.yaml", {"asked": {"seeds": seeds}, "arms": {"mae": {}, "droppos": {}}})
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
    places, (said,) = expand_runs([lab])
    assert places == runs and "2 of 4 runs have begun, 1 finished" in said
    (runs[1] / "summary.txt").write_text("It learnt.\n")
    runs += [add(lab, "mae-seed1")]
    (lab / "report.html").write_text("")
    places, (said,) = expand_runs([tmp_path / "other", lab])
    assert places == [tmp_path / "other", *runs] and "3 of 4 runs have begun" in said and "report.html" in said
    assert is_comparison(lab) and not is_comparison(runs[0])


def test_a_comparison_without_a_run_or_a_plan_is_a_sentence(tmp_path):
    lab = begin(tmp_path / "lab")
    assert "no run of the comparison" in refusal(expand_runs, [lab])
    add(lab, "mae-seed0")
    write_checksummed(lab / "compare.yaml", {"asked": {}, "arms": {}})
    assert "compare.yaml is not the plan" in refusal(expand_runs, [lab])


def test_the_page_of_a_comparison_leaves_its_own_alone(finished, tmp_path):
    lab = begin(tmp_path / "lab")
    for name in ("droppos-seed0", "droppos-seed1"):
        shutil.copytree(finished, lab / name)
    (lab / "report.html").write_text("what it found")
    path = report(lab)
    assert path == lab / "runs.html" and (lab / "report.html").read_text() == "what it found"
    text = path.read_text("utf-8")
    assert "<h1>Runs of lab</h1>" in text and "2 of 4 runs" in text
    assert 'id="run-2-title">droppos-seed1<' in text
    assert report(lab, out=tmp_path / "own.html").exists()
