"""patchloom as a library: verbs are functions, and errors have the messages of the command line."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
from refusing import refusal

import patchloom
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.options.parse import VERBS
from patchloom.options.verbs import VERB_OPTIONS

CALLED = [name for name in VERBS if name not in ("tasks", "recipes")]  # these list what there is


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_verb_is_listed_and_can_be_called():
    for name in CALLED:
        verb = getattr(patchloom, name)
        assert name in patchloom.__all__ and name in dir(patchloom) and callable(verb)
        assert {"data", "runs"} & inspect.signature(verb).parameters.keys()
    assert {"PatchloomError", "TASKS", "load_encoder", "open_data"} <= {*patchloom.__all__} <= {*dir(patchloom)}


@pytest.mark.parametrize("name", [name for name in VERB_OPTIONS if name != "look curves"])
def test_help_explains_the_options(name):
    verb, known = getattr(patchloom, name), fields(VERB_OPTIONS[name])
    known = sorted(known, key=lambda one: not one.metadata.get("positional"))  # places, then those of a base, then own
    page = pydoc.plain(pydoc.render_doc(verb))
    assert [*inspect.signature(verb).parameters] == [one.name for one in known]
    assert all(f"{one.name}: {one.metadata['about']}." in page for one in known)


@pytest.mark.slow
def test_a_name_is_a_verb_and_a_module():
    """Whether its module is imported before or after the package."""
    in_a_fresh_process(
        "import patchloom.look.task_pictures\n"
        "import patchloom\n"
        "assert patchloom.evaluate is patchloom.evaluate and callable(patchloom.evaluate)\n"
        "import patchloom.evaluate.protocols as protocols\n"
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


SLIPS = (  # what only Python can be given: verb, arguments, options, and words of the message
    ("pretrain", ("shapes",), {"model.depth": 2}, "written in Python as model={'name': ..., 'depth': ...}"),
    ("pretrain", ("shapes",), {"epochs": True}, "--epochs cannot be True: it takes float or auto"),
    ("pretrain", ("shapes",), {"task": {"name": "mae", "mask_rato": 1}}, "did you mean --task.mask_ratio?"),
    ("pretrain", ("shapes",), {"task": {"mask_ratio": 0.5}}, "the task has no name"),
    ("pretrain", ("shapes",), {"task": 5}, "--task cannot be an object of type int"),
    ("pretrain", ("shapes",), {"task": int}, "int is not a pretext task: derive its class from"),
    ("pretrain", ("shapes",), {"model": 5}, "--model cannot be 5"),
    ("pretrain", ("shapes",), {"out": 5}, "--out cannot be 5: it takes path"),
    ("pretrain", ("shapes", "mae", 3), {}, "pretrain takes data, task without a name"),
    ("pretrain", ("shapes",), {"data": "digits"}, "pretrain is given data twice"),
    ("pretrain", (), {}, "pretrain needs data, as in patchloom.pretrain(data)"),
    ("pretrain", (5,), {}, "an object of type int is not a set of images"),
    ("check", ("shapes",), {"estimate": "no"}, "--estimate cannot be no: it takes true or false"),
    ("check", ([],), {}, "the list of images is empty"),
    ("evaluate", ("knn", "nowhere", "shapes"), {"ks": "5,20"}, "--ks cannot be 5,20: it takes list of int"),
    ("evaluate", ("knn", "nowhere"), {}, "patchloom.evaluate(protocol, run, data)"),
    ("curate", ("nowhere", "shapes"), {"count": 0}, "--count must be 1 or more, not 0"),
    ("predict", ("nowhere", "shapes"), {"score": 2}, "--score must be 0 to 1, not 2"),
    ("predict", ("nowhere", "shapes"), {"pictures": -1}, "--pictures must be 0 or more, not -1"),
    ("predict", ("nowhere", "shapes"), {}, "there is no model at nowhere"),
    ("bench", (), {"rounds": 0.5}, "--rounds cannot be 0.5: it takes int"),
    ("bench", ("digits",), {"tasks": [5]}, "--task cannot be an object of type int"),
    ("load_encoder", (5,), {}, "--source cannot be 5: it takes path"),
    ("load_encoder", ("nowhere",), {"device": "cpu"}, "load_encoder takes source, model"),
    ("open_data", ("shapes",), {"seeds": 1}, "did you mean --seed?"),
)


@pytest.mark.parametrize(("verb", "given", "options", "said"), SLIPS)
def test_a_wrong_argument_gives_one_sentence(verb, given, options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(getattr(patchloom, verb), *given, **options) and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verb", "places", "options"),
    [
        ("look", ["nowhere"], {"image": 4}),
        ("look", ["nowhere"], {"images": "few"}),
        ("bench", [], {"round": 3}),
        ("pretrain", ["shapes"], {"epochs": "many"}),
        ("evaluate", ["knn", "nowhere", "shapes"], {"galery": 0.5}),
        ("evaluate", ["nearest", "nowhere", "shapes"], {}),
        ("export", ["nowhere"], {"to": "keras"}),
    ],
)
def test_the_message_is_that_of_the_command_line(verb, places, options, capsys):
    said = refusal(getattr(patchloom, verb), *places, **options)
    capsys.readouterr()
    assert main([verb, *places, *(f"--{name}={value}" for name, value in options.items())]) == 2
    assert capsys.readouterr().err == f"patchloom: {said}\n"


def test_numbers_of_numpy_are_numbers():
    with pytest.raises(PatchloomError, match="nowhere is not the folder of a run"):
        patchloom.look("nowhere", images=np.int64(4))
    with pytest.raises(PatchloomError, match="--epochs must be above 0 and at most 2,147,483,647, not 0"):
        patchloom.pretrain("shapes", epochs=np.int32(0))
