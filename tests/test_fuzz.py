"""Whatever is typed or configured: one sentence or the work done, and never a traceback.

Options come from the signatures. Nothing is trained: `pretrain` ends once its task is built.
"""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchloom import cli
from patchloom.bench import bench
from patchloom.check import check
from patchloom.evaluate import How
from patchloom.evaluate.protocols import PROTOCOLS, protocol_of
from patchloom.export import export
from patchloom.options import MODEL_OPTIONS
from patchloom.tasks import TASKS, task_class
from patchloom.train import pretrain
from patchloom.train.pictures import look, prepare_task
from patchloom.train.settings import Settings

# enough for a sentence about every setting, and quick to build
SMALL = ["shapes:50", "--model=nano", "--model.embed_dim=32", "--model.depth=1", "--model.num_heads=2"]
FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

NUMBERS = [0, 1, 2, 3, 7, 8, 16, -1, 2**31 - 1, 2**31, 2**63, 10**6, 10**18, 10**400, 0.5, 0.75, 1e-9, -0.5, 1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf"), 1e-400]
WORDS = ["", " ", "auto", "none", "None", "null", "true", "yes", "~", "nan", "inf", "1e308", "0x10", "1_000", "٣", "½"]
WORDS += ["-", "--", "---", "-1", "-x", "=", "a=b", "a b", "a\nb", "a\rb", "a\0b", "\udcff", "\ud83d", "é", "😀", "[", "]"]
WORDS += ["[]", "[1, 2]", "[1", "{}", "{", "{a: 1}", "{mask: 0.5}", "{mask:.5, mask:1}", "{1: 2}", "{name: mae}", "&a", "*a"]
WORDS += ["!!python/object:os.system", "!!int x", "!!binary x", "2026-11-20", "96", "64x128", "9" * 5000, "a" * 300, "%s"]
WORDS += ["{0}", "$HOME", "~/x", "/", ".", "..", "/dev/null", "/proc/self/mem", "a/" * 2000, "@file", "timm:", "timm:vit_x"]
WORDS += ["shapes:0", "shapes:1", "shapes:-1", "shapes:x", "digits", "hf:", "hf:/nowhere", "*.tar", "mae", "[[1], {}]"]
word = st.sampled_from(WORDS) | st.sampled_from(NUMBERS).map(str) | st.text(max_size=6) | st.floats().map(str)


def meant(hint: Any) -> st.SearchStrategy[str]:
    """Words of the kind that a hint takes, in its range or not."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from([str(one) for one in inside])
    if origin is Union or hint.__class__.__name__ == "UnionType":
        return st.one_of(*map(meant, inside))
    if hint in (int, float):
        return st.sampled_from([one for one in NUMBERS if hint is float or isinstance(one, int)]).map(str)
    if hint is bool:
        return st.sampled_from(["true", "false"])
    if origin is dict:
        names = st.sampled_from(["mask", "drop_positions", "pixels", "positions", "agreement", "x", ""])
        return st.dictionaries(names, st.sampled_from(NUMBERS), max_size=3).map(str)
    return word


@cache
def options(owner: Callable, skip: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """Names and hints of what a signature takes as options."""
    hints = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner)
    return [(name, hints[name]) for name in inspect.signature(owner).parameters if name not in skip and name in hints]


def spelt(names: list[tuple[str, Any]]) -> st.SearchStrategy[list[str]]:
    """One option as somebody may type it: with a value of its kind or another, without one, abbreviated, unknown."""

    def typed(chosen: tuple[str, Any]) -> st.SearchStrategy[list[str]]:
        name, hint = chosen
        right = meant(hint)
        value = right | right | right | word
        return st.one_of(
            value.map(lambda one: [f"--{name}={one}"]),
            value.map(lambda one: [f"--{name}={one}"]),
            value.map(lambda one: [f"--{name}", one]),
            value.map(lambda one: [f"--{name[:-1]}", one]),
            st.just([f"--{name}"]),
            word.map(lambda one: [one]),
        )

    return st.sampled_from(names).flatmap(typed)


def of_pretrain(task: str) -> list[tuple[str, Any]]:
    own = [(f"task.{name}", hint) for name, hint in options(task_class(task), ("encoder",))]
    models = [(f"model.{name}", kind) for name, (kind, _) in MODEL_OPTIONS.items()]
    rest = [(name, hint) for name, hint in options(Settings, ("task", "model", "data")) if name != "from_run"]
    return own + models + rest + [("from", str), ("model", str), ("out", str), ("config", str)]


@pytest.fixture(autouse=True)
def untrained(monkeypatch, tmp_path):
    """Settings are resolved and a task is built as always; then it ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("patchloom.machine.measured", lambda *_, **__: 1.0)

    def run(self):
        settled = self._settle()
        prepare_task(settled.settings, settled.stats.mean, settled.stats.std)

    monkeypatch.setattr(pretrain._Pretraining, "run", run)


def said(words: list[str], capfd) -> tuple[int, str]:
    """How the command line ended, and its sentence."""
    capfd.readouterr()
    try:
        code = cli.main(words)
    except SystemExit as end:  # --help
        code = end.code
    err = capfd.readouterr().err
    assert code in (0, None, 2), (words, err)
    if code == 2:
        assert err.startswith("patchloom: ") and err.count("\n") == 1 and err.endswith("\n"), (words, err)
    assert "Traceback" not in err and "unexpected" not in err, (words, err)
    return code, err
