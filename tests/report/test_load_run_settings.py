"""Tests of the reasons for settings, and of the command that repeats a run."""

import shlex
from dataclasses import replace

import pytest

from patchloom.options import parse_pretrain
from patchloom.report.load_run import CHOSEN, DEFAULT, command_of, load_run, settings_of
from patchloom.runs.settings import request


def typed_again(command: str):
    """Return the settings and the folder of a command."""
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
    kinds = [
        "default" if one.reason == DEFAULT else "given" if not one.reason else "auto"
        for one in settings_of(load_run(run))
    ]
    assert set(kinds) == {"auto", "given", "default"}
    assert kinds == sorted(kinds, key=["auto", "given", "default"].index)


def test_the_command_means_the_same_run(run, finished):
    asked = load_run(run)
    again, out = typed_again(command_of(asked))
    assert again.plain() == asked.asked and out == str(run.with_name("mine-again"))
    words = shlex.split(command_of(asked))
    assert "--clip" not in words and "--task.mask_ratio" not in words and "auto" not in words


def test_a_run_that_is_not_finished_goes_on(run):
    (run / "summary.txt").unlink()
    assert typed_again(command_of(load_run(run)))[1] == str(run)


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "mae-vit-b"},
        {"recipe": "mae-vit-b", "epochs": 7, "batch_size": 64},
        {"img_size": (64, 32), "patch_size": (8, 4), "flip": False, "clip": 1e-07, "model": {"name": "swin-nano"}},
        {"model": {"name": "nano", "num_heads": 2, "class_token": False}, "group": r"^(.*) '\"_\$", "cache": 64},
    ],
)
def test_any_settings_are_typed_so_that_they_are_read_again(run, tmp_path, options):
    folder = tmp_path / "a b, 'c' $(d)\n<img>"
    folder.mkdir()
    task = "auto" if "recipe" in options else "mae"
    asked = request(folder, task, options)
    command = command_of(replace(load_run(run), asked=asked.plain()))
    assert typed_again(command)[0] == asked


def test_options_of_a_task_are_typed(run, images):
    asked = request(
        [str(images), str(images / "a")], {"name": "droppos", "temperature": float("inf"), "sigma": 0.5}, {}
    )
    command = command_of(replace(load_run(run), asked=asked.plain()))
    assert typed_again(command)[0] == asked


def test_what_cannot_be_typed_has_no_command(run):
    found = load_run(run)
    assert command_of(replace(found, asked={})) == ""
    assert command_of(replace(found, asked=found.asked | {"data": ""})) == ""


def test_nobodys_code_is_run(run, tmp_path):
    """The report must not import a file that a run names."""
    file = tmp_path / "theirs.py"
    file.write_text("raise SystemExit('run')\n")
    found = load_run(run)
    asked = found.asked | {"task": {"name": f"{file}:Theirs#0123456789abcdef", "strength": 3}}
    its = replace(found, asked=asked)
    words = shlex.split(command_of(its))
    assert words[words.index("--task") + 1] == f"{file}:Theirs" and words[words.index("--task.strength") + 1] == "3"
    assert settings_of(its)
