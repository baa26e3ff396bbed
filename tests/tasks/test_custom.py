"""Custom tasks: classes in a file, a module or a program, how a run finds them again, and errors."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import patchloom
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode, entry_width, input_size, patch_count
from patchloom.options import parse_pretrain
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import request
from patchloom.runs.task import load_task
from patchloom.tasks import custom, task_class, task_name, with_defaults
from patchloom.tasks.mae import MAE
from patchloom.withhold.encoder_input import all_patches

HALF = '''
"""Half of the patches are removed; their pixels are asked."""

from patchloom.tasks.mae import MAE


class Half(MAE):
    """Half of the patches are removed.

    Args:
        encoder: the ViT to train.
        share: share of the patches that are removed.
        loud: say so.
    """

    def __init__(self, encoder, share: float = 0.5, loud=False):
        super().__init__(encoder, mask_ratio=share, decoder_width=32, decoder_depth=1, decoder_heads=2)
        open(__file__ + ".ran", "a").write("x")
'''
SMALL = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}, "epochs": 1, "batch_size": 32}


class ImportableTask(MAE):
    """MAE in an importable module."""


@pytest.fixture(autouse=True)
def met_nothing(monkeypatch):
    """Forget all loaded classes, as in a new process."""
    monkeypatch.setattr(custom, "_HERE", {})
    monkeypatch.setattr(custom, "_TYPED", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.startswith("patchloom_")]:
        del sys.modules[name]


@pytest.fixture
def half(tmp_path) -> Path:
    path = tmp_path / "half.py"
    path.write_text(HALF)
    return path


def forget() -> None:
    """Forget everything that another process would not know."""
    custom._HERE.clear()
    custom._TYPED.clear()
    for name in [name for name in sys.modules if name.startswith("patchloom_")]:
        del sys.modules[name]


def failed(capsys, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("patchloom: ") and err.count("\n") == 1, err
    return err


def test_a_class_is_named_by_its_place(half, monkeypatch):
    monkeypatch.chdir(half.parent)
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
    assert inside.startswith("__main__:Inside#") and task_class(inside) is Inside
    forget()
    with pytest.raises(PatchloomError, match="the task Inside was a class in a program.*task=Inside"):
        task_class(inside)
    with pytest.raises(PatchloomError, match="the task It is in the module not_there, which cannot be imported here"):
        task_class("not_there:It")


def test_its_options_are_those_of_its_signature(half, capsys):
    given, _ = parse_pretrain(["digits", "--task", f"{half}:Half", "--task.share", "0.25", "--task.loud", "true"])
    assert given["task"] == {"name": f"{half}:Half", "share": 0.25, "loud": True}
    assert with_defaults({"name": f"{half}:Half"})["share"] == 0.5
    said = failed(capsys, "pretrain", "digits", "--task", f"{half}:Half", "--task.shre", "0.5")
    assert "did you mean --task.share?" in said
    said = failed(capsys, "pretrain", "digits", "--task", f"{half}:Half", "--task.share", "much")
    assert "--task.share cannot be much: it takes a number" in said
    with pytest.raises(PatchloomError, match="--task.loud cannot be 3: it takes true or false"):
        request("digits", {"name": f"{half}:Half", "loud": 3}, {})


REFUSED = {
    "nowhere.py:Half": "there is no file {folder}/nowhere.py",
    "half.py:Hlf": "{folder}/half.py has no class Hlf; did you mean Half?",
    "half.py:open": "half.py has no class open; its tasks are Half",
    "broken.py:It": "{folder}/broken.py cannot be run (SyntaxError in line 2: ",
    "raises.py:It": "{folder}/raises.py cannot be run (KeyError in line 1: 'gone')",
    "imports.py:It": "cannot be run (ModuleNotFoundError in line 1: No module named 'nothing_of_that_name')",
    "none.py": "{folder}/none.py has no task: give one as FILE.py:CLASS",
    "two.py": "{folder}/two.py has the tasks A, B: give one as FILE.py:CLASS",
    "net.py:Net": "Net is not a pretext task: derive its class from patchloom.tasks.task.Task",
    "abstract.py:It": "the task It has no method given",
    "first.py:It": "the first argument of the task It is vit: rename it to encoder",
    "needs.py:It": "the option share of the task It has no default: give it one",
    "types.py:It": "the types of the options of It cannot be read (name 'No' is not defined)",
    "half.py:Half#0123456789abcdef": "leave out #0123456789abcdef",
}
FILES = {
    "half": HALF,
    "broken": "x = 1\nclass It(:\n",
    "raises": "{}['gone']",
    "imports": "import nothing_of_that_name",
    "none": "import torch\nfrom patchloom.tasks.mae import MAE",
    "two": "from patchloom.tasks.mae import MAE\nclass A(MAE): pass\nclass B(MAE): pass",
    "net": "from torch import nn\nclass Net(nn.Module): pass",
    "abstract": "from patchloom.tasks.task import Task\nclass It(Task): pass",
    "first": "from patchloom.tasks.mae import MAE\nclass It(MAE):\n    def __init__(self, vit): pass",
    "needs": "from patchloom.tasks.mae import MAE\nclass It(MAE):\n    def __init__(self, encoder, share): pass",
    "types": "from patchloom.tasks.mae import MAE\nclass It(MAE):\n    def __init__(self, encoder, a: 'No' = 1): 1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_tasks_are_rejected_in_one_sentence(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        Path(f"{file}.py").write_text(text)
    said = REFUSED[name].format(folder=tmp_path)
    assert said in failed(capsys, "pretrain", "digits", "--task", name)
    with pytest.raises(PatchloomError) as refused:
        patchloom.pretrain("digits", name)
    assert said in str(refused.value)


def test_an_instance_is_rejected_with_a_remedy():
    with pytest.raises(PatchloomError, match="--task cannot be an object of type Linear: .*FILE.py:CLASS, or a class"):
        patchloom.pretrain("digits", nn.Linear(2, 2))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images without labels, so that no time is spent on evaluation."""
    folder = tmp_path_factory.mktemp("photos")
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (80, 32, 32, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A run of a task in a file, with the file."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "half.py").write_text(HALF)
    task = {"name": str(folder / "half.py:Half"), "share": 0.25}
    return patchloom.pretrain(photos, task, out=folder / "run", **SMALL).folder


@pytest.fixture
def copied(run, tmp_path) -> Path:
    """A copy of the run that names another file; the file has not been run yet."""
    shutil.copytree(run, tmp_path / "run")
    forget()
    return tmp_path / "run"


def runs_of(run: Path) -> int:
    return len((run.parent / "half.py.ran").read_text())


def test_look_and_evaluate_run_it_if_it_is_named(run, copied, capfd):
    stored = RunFolder(run).read_config().task
    assert stored == {"name": task_name(f"{run.parent}/half.py:Half"), "share": 0.25, "loud": False}
    assert patchloom.load_encoder(run)[1].task == "Half"
    forget()
    capfd.readouterr()
    with pytest.raises(PatchloomError, match="give --task"):
        patchloom.look(copied)
    patchloom.look(copied, task=f"{run.parent}/half.py:Half")
    assert capfd.readouterr().err == ""
    patchloom.look(copied)  # it was named in this process
    forget()
    with pytest.raises(PatchloomError, match="was trained by Half, which does not predict positions"):
        patchloom.evaluate("positions", copied, "digits", task=f"{run.parent}/half.py:Half")
    forget()
    assert main(["export", str(copied)]) == 0, "an encoder needs no task"


def test_the_configuration_repeats_it(run, tmp_path):
    with pytest.raises(PatchloomError, match="--task .*half.py:Half on the command line"):
        parse_pretrain(["--config", str(run / "config.yaml")])
    task = f"--task={run.parent}/half.py:Half"
    given, _ = parse_pretrain(["--config", str(run / "config.yaml"), task])
    assert request(given.pop("data"), given.pop("task"), given).task == RunFolder(run).read_config().task


def test_a_file_that_has_changed(photos, run, copied, tmp_path, capsys):
    file = run.parent / "half.py"
    ran = runs_of(run)
    try:
        file.write_text(HALF + "\n# changed\n")
        said = failed(capsys, "look", copied)
        assert f"--task {file}:Half" in said
        assert runs_of(run) == ran, "nothing was run"
        assert main(["look", str(copied), "--task", f"{file}:Half"]) == 0
        assert f"{file}:Half has changed since {copied} was trained with it" in capsys.readouterr().err
        again = ["pretrain", str(photos), "--task", f"{file}:Half", "--task.share", "0.25", "--epochs", "1"]
        again += ["--batch_size", "32", "--model", "nano", "--model.embed_dim", "32", "--model.depth", "1"]
        said = failed(capsys, *again, "--model.num_heads", "2", "--out", copied)
        assert f"{file}:Half has changed since {copied} was begun: restore it to go on" in said and "--out" in said
        file.unlink()
        assert f"there is no file {file}" in failed(capsys, "look", copied, "--task", f"{file}:Half")
        moved = tmp_path / "moved.py"
        moved.write_text(HALF)
        assert main(["look", str(copied), "--task", f"{moved}:Half"]) == 0
        assert len(patchloom.look(copied, task=task_class(f"{moved}:Half"))) == 1
    finally:
        file.write_text(HALF)


def test_a_run_found_in_the_output_folder_runs_no_code(photos, run, copied, capsys):
    """Only code that the user names is run, not the task of a run found in the output folder."""
    ran = runs_of(run)
    said = failed(capsys, "pretrain", photos, "--task", "mae", "--epochs", "1", "--out", copied)
    assert "task" in said and runs_of(run) == ran and not custom._HERE


def test_a_run_from_its_weights(photos, run, tmp_path):
    shutil.copy(run.parent / "half.py", tmp_path / "half.py")
    again = patchloom.pretrain(photos, f"{tmp_path}/half.py:Half", out=tmp_path / "run", from_run=run, **SMALL)
    assert "the encoder of" in (again.folder / "log.txt").read_text()


def test_a_class_that_only_the_program_has(photos, tmp_path, capfd):
    class Mine(MAE):
        pass

    settings = SMALL | {"epochs": 1}
    done = patchloom.pretrain(photos, Mine, out=tmp_path / "run", **settings)
    assert patchloom.pretrain(photos, Mine, out=tmp_path / "run", **settings).summary == done.summary
    assert len(patchloom.look(done)) == 1 and patchloom.look(done, task=Mine)
    stored = yaml.safe_load((done.folder / "config.yaml").read_text())["task"]["name"]
    assert stored.startswith("__main__:Mine#")
    forget()
    with pytest.raises(PatchloomError, match="the task Mine was a class in a program.*task=Mine"):
        patchloom.look(done)
    assert patchloom.look(done, task=Mine) and load_task(done, Mine).card.task == "Mine"


@pytest.mark.parametrize("model", ["nano", "swin-nano"])
@pytest.mark.parametrize(("withheld", "token"), [("blank", "mask_token"), ("dropped", "position_token")])
def test_a_stand_in_that_is_missing_is_named(model, withheld, token):
    if model == "nano":
        vit = build_encoder(EncoderSpec("nano", img_size=(32, 32), patch_size=8))
    else:
        vit = build_encoder(EncoderSpec(model, img_size=(64, 64), patch_size=4, positions="none"))
    n = patch_count(vit)
    images = torch.zeros(2, 3, *input_size(vit))
    given = replace(all_patches(images, n), **{withheld: torch.ones(2, n, dtype=torch.bool)})
    with pytest.raises(PatchloomError, match=rf"placeholders\(\) returns no {token}: return"):
        encode(vit, given)
    width = entry_width(vit)
    assert encode(vit, given, **{token: torch.zeros(width)}).isfinite().all()
