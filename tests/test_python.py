"""patchloom as a library: verbs are functions, and errors have the messages of the command line."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

import patchloom
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.options import VERBS

CALLED = [name for name in VERBS if name not in ("tasks", "recipes")]  # these list what there is


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_costs_nothing():
    heavy = "('torch', 'timm', 'numpy', 'jsonargparse', 'matplotlib')"
    in_a_fresh_process(
        f"import sys, patchloom; dir(patchloom); assert not [name for name in {heavy} if name in sys.modules]"
    )


def test_every_verb_is_listed_and_can_be_called():
    for name in CALLED:
        verb = getattr(patchloom, name)
        assert name in patchloom.__all__ and name in dir(patchloom) and callable(verb)
        assert inspect.signature(verb) == inspect.signature(inspect.unwrap(verb))
        assert "data" in inspect.signature(verb).parameters
    assert {"PatchloomError", "TASKS", "load_encoder", "open_data"} <= {*patchloom.__all__} <= {*dir(patchloom)}


@pytest.mark.parametrize("first", ["", "import patchloom.evaluate.protocols, patchloom.look.task_pictures"])
def test_a_name_is_a_verb_and_a_module(first):
    """This holds for every order of imports."""
    in_a_fresh_process(
        f"{first}\n"
        "import patchloom\n"
        "assert patchloom.evaluate is patchloom.evaluate and callable(patchloom.evaluate)\n"
        "import patchloom.evaluate.protocols as protocols, patchloom.look.task_pictures\n"
        "from patchloom.evaluate.settings import EvalSettings\n"
        "from patchloom import look, check\n"
        "assert patchloom.evaluate.protocols is protocols and patchloom.look is look\n"
        "for verb in (patchloom.evaluate, look, check, patchloom.bench, patchloom.export):\n"
        "    try:\n"
        "        verb(nothing=1)\n"
        "    except patchloom.PatchloomError as problem:\n"
        "        continue\n"
        "    raise AssertionError(verb)\n"
    )


SLIPS = {
    "pretrain": [
        (("shapes",), {"model.depth": 2}, "--model.depth is written in Python as model={'name': ..., 'depth': ...}"),
        (("shapes",), {"epoch": 3}, "there is no option --epoch; did you mean --epochs?"),
        (("shapes",), {"epochs": "many"}, "--epochs cannot be many: it takes a number or auto"),
        (("shapes",), {"epochs": True}, "--epochs cannot be True: it takes a number or auto"),
        (("shapes",), {"task": "dropos"}, "no task is called dropos; did you mean droppos?"),
        (
            ("shapes",),
            {"task": {"name": "mae", "mask_rato": 1}},
            "mae has no option mask_rato; did you mean mask_ratio?",
        ),
        (("shapes",), {"task": {"mask_ratio": 0.5}}, "the task has no name"),
        (
            ("shapes",),
            {"task": 5},
            "--task cannot be an object of type int: it takes a name, FILE.py:CLASS, or a class",
        ),
        (("shapes",), {"task": int}, "int is not a pretext task: derive its class from patchloom.tasks.task.Task"),
        (("shapes",), {"model": 5}, "--model cannot be 5: give a name, or a dict of a name and sizes"),
        (("shapes",), {"init": 5}, "--init cannot be 5: it takes text"),
        (("shapes",), {"out": 5}, "--out cannot be 5: it takes text or a path"),
        (("shapes",), {"img_size": "huge"}, "--img_size cannot be huge"),
        (("shapes", "mae", 3), {}, "pretrain takes data, task without a name: give all others as NAME=VALUE"),
        (("shapes",), {"data": "digits"}, "pretrain is given data twice"),
        ((), {}, "pretrain needs data, as in patchloom.pretrain(data)"),
        ((5,), {}, "an object of type int is not a set of images"),
    ],
    "check": [
        (("shapes",), {"image": 3}, "there is no option --image; did you mean --images?"),
        (("shapes",), {"images": "all"}, "--images cannot be all: it takes a whole number"),
        (("shapes",), {"estimate": "no"}, "--estimate cannot be no: it takes true or false"),
        (([],), {}, "the list of images is empty"),
    ],
    "evaluate": [
        (("knn", "nowhere", "shapes"), {"kz": 3}, "there is no option --kz"),
        (("knn", "nowhere", "shapes"), {"ks": "5,20"}, "--ks cannot be 5,20: it takes a list"),
        (("knn", "nowhere", "shapes"), {"batch_size": "x"}, "--batch_size cannot be x: it takes a whole number"),
        (("nearest", "nowhere", "shapes"), {}, "there is no protocol nearest"),
        ((5, "nowhere", "shapes"), {}, "--protocol cannot be 5: it takes text"),
        (("knn", 5, "shapes"), {}, "--run cannot be 5: it takes text or a path"),
        (("knn", "nowhere"), {}, "evaluate needs data, as in patchloom.evaluate(protocol, run, data)"),
        (("knn", "nowhere", "shapes"), {}, "there is no encoder at nowhere"),
    ],
    "look": [
        (("nowhere",), {"image": 4}, "there is no option --image; did you mean --images?"),
        (("nowhere",), {"images": "few"}, "--images cannot be few: it takes a whole number"),
        (("nowhere",), {}, "nowhere is not the folder of a run"),
    ],
    "export": [
        (("nowhere",), {"too": "timm"}, "there is no option --too; did you mean --to?"),
        (("nowhere",), {"to": 5}, "--to cannot be 5: it takes text"),
        (("nowhere",), {}, "there is no encoder at nowhere"),
    ],
    "predict": [
        (("nowhere",), {}, "predict needs data, as in patchloom.predict(model, data)"),
        (("nowhere", "shapes"), {"scores": 0.5}, "there is no option --scores; did you mean --score?"),
        (("nowhere", "shapes"), {"score": 2}, "--score must be from 0 to 1, not 2"),
        (("nowhere", "shapes"), {"pictures": -1}, "--pictures must be 0 or more, or all, not -1"),
        (("nowhere", "shapes"), {}, "there is no model at nowhere"),
    ],
    "bench": [
        ((), {"round": 3}, "there is no option --round; did you mean --rounds?"),
        ((), {"rounds": 0.5}, "--rounds cannot be 0.5: it takes a whole number"),
        ((), {"tasks": "mea"}, "no task is called mea; did you mean mae?"),
        (("digits",), {"tasks": [5]}, "--task cannot be an object of type int"),
    ],
    "load_encoder": [
        ((5,), {}, "--source cannot be 5: it takes text or a path"),
        ((), {}, "load_encoder needs source, as in patchloom.load_encoder(source)"),
        (("nowhere",), {"device": "cpu"}, "there is no option --device; load_encoder takes source, model"),
        (("nowhere",), {}, "there is no encoder at nowhere"),
    ],
    "open_data": [(("nowhere",), {}, "nowhere does not exist"), (("shapes",), {"seeds": 1}, "did you mean --seed?")],
}


@pytest.mark.parametrize(
    ("verb", "given", "options", "said"), [(verb, *slip) for verb, slips in SLIPS.items() for slip in slips]
)
def test_a_wrong_argument_gives_one_sentence(verb, given, options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PatchloomError, match=re.escape(said)) as refused:
        getattr(patchloom, verb)(*given, **options)
    assert "\n" not in str(refused.value) and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["look", "nowhere", "--image", "4"],
        ["look", "nowhere", "--images", "few"],
        ["bench", "--round", "3"],
        ["pretrain", "shapes", "--epoch", "3"],
        ["pretrain", "shapes", "--epochs", "many"],
        ["evaluate", "knn", "nowhere", "shapes", "--galery", "0.5"],
        ["evaluate", "nearest", "nowhere", "shapes"],
        ["export", "nowhere", "--to", "keras"],
    ],
)
def test_the_message_is_that_of_the_command_line(words, capsys):
    verb, *rest = words
    places = [word for word in (rest if not rest[0].startswith("--") else rest[:0])]
    options = {}
    for place, word in enumerate(rest):
        if word.startswith("--"):
            places, options = rest[:place], {word[2:]: rest[place + 1]}
    with pytest.raises(PatchloomError) as refused:
        getattr(patchloom, verb)(*places, **{k: int(v) if v.isdigit() else v for k, v in options.items()})
    capsys.readouterr()
    assert main(words) == 2
    assert capsys.readouterr().err == f"patchloom: {refused.value}\n"


def test_numbers_of_numpy_are_numbers():
    with pytest.raises(PatchloomError, match="nowhere is not the folder of a run"):
        patchloom.look("nowhere", images=np.int64(4))
    with pytest.raises(PatchloomError, match="--epochs must be above 0 and at most 2,147,483,647, not 0"):
        patchloom.pretrain("shapes", epochs=np.int32(0))
