"""Settings of a run with the reason of each, and the command that asks for the same again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from patchloom.data import is_given
from patchloom.errors import PatchloomError
from patchloom.report.content import Setting
from patchloom.report.gather import Gathered
from patchloom.runs.settings import Settings, request
from patchloom.sides import in_pixels
from patchloom.tasks.code import Code, is_code, met

DEFAULT, AUTO = "the default", "chosen for you"
# what changes nothing of the other kind of data
_OF_SOUND = ("seconds", "rate", "features", "bins")
_OF_IMAGES = ("crop_scale", "flip", "randaugment", "randaugment_std", "normalization")


def settings_of(run: Gathered) -> list[Setting]:
    """What was ``auto`` first, with the reason; then what somebody gave; then what is at its default.

    What is still ``auto``, such as the depth of a decoder that there is not, is left out; so is what is for recordings
    where there are images, and the other way round.
    """
    asked, usual = _flat(run.asked), _flat(_usual(run.asked))
    of_recipe = _flat(_usual(run.asked, run.asked.get("recipe"))) if run.asked.get("recipe") else {}
    found: tuple[list[Setting], ...] = ([], [], [])
    for name, value in _flat(run.settings.plain()).items():
        if value in ("auto", None) or name in (_OF_IMAGES if run.sound else _OF_SOUND):
            continue
        setting = Setting(name, _shown(name, value))
        if asked.get(name) == "auto":
            why = run.reasons.get(name) or run.reasons.get(_short(name)) or AUTO
            found[0].append(setting._replace(reason=why))
        elif name in of_recipe and of_recipe[name] == value != usual.get(name):
            found[1].append(setting._replace(reason=f"of the recipe {run.asked['recipe']}"))
        elif name in usual and usual[name] == value and name not in ("data", "task.name"):
            found[2].append(setting._replace(reason=DEFAULT))
        else:
            found[1].append(setting)
    return [*found[0], *found[1], *found[2]]


def command_of(run: Gathered) -> str:
    """The line that begins the same run anew, in another folder; or, of one that is not finished, goes on with it.

    Only what differs from the defaults is said. "" where what was asked for is not known, or cannot be typed, since it
    was given as an object in Python.
    """
    asked = run.asked
    data = asked.get("data", "")
    names = list(map(str, data if isinstance(data, list) else [data]))
    if not asked or any(is_given(name) for name in names) or not all(names):
        return ""
    recipe = asked.get("recipe")
    usual = _flat(_usual(asked, recipe))
    task = str(asked.get("task", {}).get("name", ""))
    words = ["patchloom", "pretrain", *names]
    words += ["--recipe", str(recipe)] if recipe else ["--task", Code.of(task).typed if is_code(task) else task]
    for name, value in _flat(asked).items():
        if name in ("data", "task.name", "recipe") or usual.get(name, "auto") == value:
            continue
        option, word = {"from_run": "--from", "model.name": "--model"}.get(name, f"--{name}"), _typed(name, value)
        words += [f"{option}={word}"] if word.startswith("--") else [option, word]
    place = run.folder.path
    again = place if not run.finished else place.with_name(f"{place.absolute().name}-again")
    return shlex.join([*words, "--out", str(again)])


def _usual(asked: Mapping[str, Any], recipe: str | None = None) -> dict[str, Any]:
    """What would have been asked for if nothing but data, task and recipe had been given; {} where nobody knows."""
    task = str(asked.get("task", {}).get("name", ""))
    if is_code(task) and not met(task):  # nobody has asked to run the code of another's run
        return Settings("").plain()
    try:
        return request(asked["data"], {} if recipe else {"name": task}, {"recipe": recipe} if recipe else {}).plain()
    except (PatchloomError, KeyError):  # such as a task of one's own whose file is gone
        return Settings("").plain()


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def _shown(name: str, value: Any) -> str:
    """A value as people read it."""
    if name == "task.name" and is_code(str(value)):
        return Code.of(str(value)).typed
    if name.endswith("_size") and isinstance(value, list | int):
        return in_pixels(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _typed(name: str, value: Any) -> str:
    """A value as it is typed."""
    if name.endswith("_size") and isinstance(value, list):
        return in_pixels(value)
    return value if isinstance(value, str) else repr(value) if isinstance(value, float) else json.dumps(value)


def _short(name: str) -> str:
    return name.partition(".")[0] if name.endswith(".name") else name
