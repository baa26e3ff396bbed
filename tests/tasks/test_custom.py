"""Custom tasks: classes in a file, a module or a program, how a run finds them again, and errors."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killing import SMALL, typed
from refusing import failed, refusal
from small import forget, small
from swins import swin
from torch import nn

import patchloom
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.nets.encode import encode, entry_width, input_size, patch_count
from patchloom.options.parse import parse_pretrain
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import request
from patchloom.runs.task import load_task
from patchloom.tasks import custom, task_class, task_name, with_defaults
from patchloom.tasks.mae import MAE
from patchloom.withhold.encoder_input import all_patches

HALF = """
from patchloom.tasks.mae import MAE


class Half(MAE):
    def __init__(self, encoder, share: float = 0.5, loud=False):
        super().__init__(encoder, mask_ratio=share, decoder_width=32, decoder_depth=1, decoder_heads=2)
        open(__file__ + ".ran", "a").write("x")
"""
ONE = SMALL | {"epochs": 1}


class ImportableTask(MAE):
    """MAE in an importable module."""


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget()
    yield
    forget()


def test_a_class_is_named_by_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half = tmp_path / "half.py"
    half.write_text(HALF)
    name = task_name("half.py:Half")
    assert name.startswith(f"{half}:Half#") and len(name.rpartition("#")[2]) == 16
    assert task_name(f"{half}:Half") == task_name(half.name) == task_name(name) == name
    loaded = task_class("half.py:Half")
    assert loaded.__name__ == "Half" and task_class(name) is loaded and task_name(loaded) == name
    half.write_text(HALF + "# another comment\n")
    assert task_name("half.py:Half") != name and task_class(name) is loaded, "a run goes on with what it began with"
    assert task_name(MAE) == "mae" and task_name("mae") == "mae"


def test_a_class_of_a_program():
    name = task_name(ImportableTask)
    assert name.startswith(f"{__name__}:ImportableTask#") and task_class(name) is ImportableTask

    class Inside(MAE):
        pass

    inside = task_name(Inside)
    assert inside.startswith("__main__:Inside#") and task_class(inside) is Inside and custom.only_here(inside)
    forget()
    with pytest.raises(PatchloomError, match="class in a program.*task=Inside"):
        task_class(inside)
    assert "module not_there, which cannot be imported" in refusal(task_class, "not_there:It")
    with pytest.raises(PatchloomError, match="type Linear: .*FILE.py:CLASS, or a class"):
        task_name(nn.Linear(2, 2))


def test_its_options_are_those_of_its_signature(tmp_path, capsys):
    half = tmp_path / "half.py"
    half.write_text(HALF)
    given, _ = parse_pretrain(["digits", "--task", f"{half}:Half", "--task.share", "0.25", "--task.loud", "true"])
    assert given["task"] == {"name": f"{half}:Half", "share": 0.25, "loud": True}
    assert with_defaults({"name": f"{half}:Half"})["share"] == 0.5
    for words, said in ((["--task.shre", "0.5"], "mean --task.share?"), (["--task.share", "much"], "cannot be much")):
        assert said in failed(capsys, "pretrain", "digits", "--task", f"{half}:Half", *words)
    assert "--task.loud cannot be 3" in refusal(request, "digits", {"name": f"{half}:Half", "loud": 3}, {})


IMPORT = "from patchloom.tasks.mae import MAE\n"
# name, text of its file, words of the refusal
REFUSED = [
    ("nowhere.py:Half", None, "there is no file {folder}/nowhere.py"),
    ("it.py:Hlf", HALF, "{folder}/it.py has no class Hlf; did you mean Half?"),
    ("it.py:open", HALF, "it.py has no class open; its tasks are Half"),
    ("it.py:Half#0123456789abcdef", HALF, "leave out #0123456789abcdef"),
    ("it.py:It", "x = 1\nclass It(:\n", "{folder}/it.py cannot be run (SyntaxError in line 2: "),
    ("it.py:It", "{}['gone']", "cannot be run (KeyError in line 1: 'gone')"),
    ("it.py:It", "import nothing_of_that_name", "cannot be run (ModuleNotFoundError in line 1: "),
    ("it.py", f"import torch\n{IMPORT}", "{folder}/it.py has no task: give one as FILE.py:CLASS"),
    ("it.py", f"{IMPORT}class A(MAE): pass\nclass B(MAE): pass", "{folder}/it.py has the tasks A, B: "),
    ("it.py:Net", "from torch import nn\nclass Net(nn.Module): pass", "Net is not a pretext task"),
    ("it.py:It", "from patchloom.tasks.task import Task\nclass It(Task): pass", "It has no method given"),
    ("it.py:It", f"{IMPORT}class It(MAE):\n    def __init__(self, vit): pass", "vit: rename it to encoder"),
    ("it.py:It", f"{IMPORT}class It(MAE):\n    def __init__(self, encoder, a): pass", "option a .* has no default"),
    ("it.py:It", f"{IMPORT}class It(MAE):\n    def __init__(self, encoder, a: 'No' = 1): 1", "'No' is not"),
]


@pytest.mark.parametrize(("name", "text", "words"), REFUSED)
def test_invalid_tasks_are_refused_in_one_sentence(name, text, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("it.py").write_text(text)
    said = failed(capsys, "pretrain", "digits", "--task", name)
    assert re.search(re.escape(words.format(folder=tmp_path)).replace(r"\.\*", ".*"), said), said
    assert refusal(patchloom.pretrain, "digits", name) in said


@pytest.fixture(scope="module")
def run(unlabelled_images, tmp_path_factory, quick_probe):
    folder = tmp_path_factory.mktemp("run")
    (folder / "half.py").write_text(HALF)
    task = {"name": str(folder / "half.py:Half"), "share": 0.25}
    return patchloom.pretrain(unlabelled_images, task, out=folder / "run", **ONE).folder


@pytest.fixture
def copied(run, tmp_path) -> Path:
    """A copy of the run that names another file; the file has not been run yet."""
    shutil.copytree(run, tmp_path / "run")
    forget()
    return tmp_path / "run"


def test_look_and_evaluate_run_it_if_it_is_named(run, copied, capfd):
    stored = RunFolder(run).read_config().task
    assert stored == {"name": task_name(f"{run.parent}/half.py:Half"), "share": 0.25, "loud": False}
    assert patchloom.load_encoder(run)[1].task == "Half"
    forget()
    capfd.readouterr()
    assert "give --task" in refusal(patchloom.look, copied)
    patchloom.look(copied, task=f"{run.parent}/half.py:Half")
    assert capfd.readouterr().err == ""
    patchloom.look(copied)  # it was named in this process
    forget()
    with pytest.raises(PatchloomError, match="was trained by Half, which does not predict positions"):
        patchloom.evaluate("positions", copied, "digits", task=f"{run.parent}/half.py:Half")
    forget()
    assert main(["export", str(copied)]) == 0, "an encoder needs no task"
    with pytest.raises(PatchloomError, match="--task .*half.py:Half on the command line"):
        parse_pretrain(["--config", str(run / "config.yaml")])
    given, _ = parse_pretrain(["--config", str(run / "config.yaml"), f"--task={run.parent}/half.py:Half"])
    assert request(given.pop("data"), given.pop("task"), given).task == stored


def test_a_class_that_only_the_program_has(unlabelled_images, run, tmp_path):
    class Mine(MAE):
        pass

    done = patchloom.pretrain(unlabelled_images, Mine, out=tmp_path / "run", from_run=run, **ONE)
    assert "the encoder of" in (done.folder / "log.txt").read_text()
    assert len(patchloom.look(done)) == 1 and patchloom.look(done, task=Mine)
    forget()
    assert "Mine was a class in a program" in refusal(patchloom.look, done)
    assert patchloom.look(done, task=Mine) and load_task(done, Mine).card.task == "Mine"


def test_a_file_that_has_changed(unlabelled_images, run, copied, tmp_path, capsys):
    file = run.parent / "half.py"
    ran = (run.parent / "half.py.ran").read_text()
    try:
        file.write_text(HALF + "\n# changed\n")
        said = failed(capsys, "look", copied)
        assert f"--task {file}:Half" in said
        failed(capsys, "pretrain", unlabelled_images, "--task", "mae", "--epochs", "1", "--out", copied)
        assert (run.parent / "half.py.ran").read_text() == ran and not custom._HERE, "nothing was run"
        assert main(["look", str(copied), "--task", f"{file}:Half"]) == 0
        assert f"{file}:Half has changed since {copied} was trained with it" in capsys.readouterr().err
        again = typed(unlabelled_images, copied, {"epochs": 1})
        said = failed(capsys, *again, "--task", f"{file}:Half", "--task.share", "0.25")
        assert f"{file}:Half has changed since {copied} was begun: restore it to go on" in said and "--out" in said
        file.unlink()
        assert f"there is no file {file}" in failed(capsys, "look", copied, "--task", f"{file}:Half")
        moved = tmp_path / "moved.py"
        moved.write_text(HALF)
        assert main(["look", str(copied), "--task", f"{moved}:Half"]) == 0
        assert len(patchloom.look(copied, task=task_class(f"{moved}:Half"))) == 1
    finally:
        file.write_text(HALF)


@pytest.mark.parametrize(("withheld", "token"), [("blank", "mask_token"), ("dropped", "position_token")])
def test_a_stand_in_that_is_missing_is_named(withheld, token):
    for vit in (small(MAE, p=8).encoder, swin(p=4)):
        n = patch_count(vit)
        given = all_patches(torch.zeros(2, 3, *input_size(vit)), n)
        given = replace(given, **{withheld: torch.ones(2, n, dtype=torch.bool)})
        with pytest.raises(PatchloomError, match=rf"placeholders\(\) returns no {token}: return"):
            encode(vit, given)
        assert encode(vit, given, **{token: torch.zeros(entry_width(vit))}).isfinite().all()
