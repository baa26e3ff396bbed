"""Tests of what a command loads: a library that takes long to import is loaded only by what needs it."""

import gc
import json
import subprocess
import sys

import pytest

from patchloom import cli

# each takes a tenth of a second or more
TRAINING = ("torch", "numpy", "timm", "torchvision", "scipy")
OWN = tuple(f"patchloom.{name}" for name in ("evaluate.protocols", "evaluate.trainer", "train.final_evaluation"))
OTHERS = ("matplotlib", "scipy.optimize", "scipy.signal", "sklearn", "pandas", "transformers")
UNLESS_NEEDED = ("imagecodecs", "tifffile")  # 28 MB, for some formats of files
# each takes a tenth of the time of --help
LIGHT = ("importlib.metadata", "email")
FIRST_STEP = """
from patchloom.train import loop
from patchloom.train.step import Stepper

class Enough(BaseException):
    pass

update = Stepper.update

def last(*given):
    update(*given)
    raise Enough

Stepper.update = last
try:
    loop.pretrain("shapes:200", out="run", epochs=1, task="TASK", workers=0)
except Enough:
    pass
"""


def loaded(program: str, names: tuple[str, ...], folder) -> list[str]:
    """Run a program in a new process, and return which of these modules it has loaded."""
    report = f"import json, sys\nprint(json.dumps([name for name in {names!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_help_loads_no_library(tmp_path):
    """Nor does the package; `test_cli_help` has all pages, but not what costs a tenth of a page's time."""
    program = "import patchloom\ndir(patchloom)\nfrom patchloom.cli import main\n"
    for words in ("--help", "pretrain --help", "evaluate knn --help", "look --help", "recipes"):
        program += f"assert main({words.split()!r}) == 0\n"
    assert loaded(program, (*TRAINING, *OTHERS, *LIGHT), tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("task", ["droppos", "extrema"])
def test_the_first_step_waits_for_no_library_of_evaluation_or_pictures(task, tmp_path):
    assert loaded(FIRST_STEP.replace("TASK", task), (*OTHERS, *OWN, *UNLESS_NEEDED), tmp_path) == []
    assert (tmp_path / "run" / "checkpoints").is_dir(), "it trained"


def test_a_verb_is_imported_without_garbage_collection(monkeypatch, capsys):
    seen = []

    def function(verb):
        seen.append((verb, gc.isenabled()))
        return lambda **given: seen.append(gc.isenabled())

    monkeypatch.setattr(cli, "function_of", function)
    assert cli.main(["check", "shapes"]) == 0
    assert seen == [("check", False), True]
