"""Whether what is asked for is what a run was begun with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from patchloom.data import is_given
from patchloom.errors import PatchloomError
from patchloom.recipes import recipe_named, recipe_names
from patchloom.runs.settings import LAUNCH, Settings
from patchloom.sides import compact, in_pixels
from patchloom.tasks import usual_task, with_defaults
from patchloom.tasks.code import Code, is_code, met, only_here, refuse_changed

# Defaults of versions that did not know auto there, of settings and of options of a task. What auto became, the run has
# stored, so the same command means the same run.
_BEFORE_AUTO = {"held_out": 0.05, "weight_decay": 0.05}
_AUTO_SINCE_RECIPES = {"crop_scale": 0.2}  # of versions with recipes, and before
_OPTIONS_BEFORE_AUTO = {"loss": "byol", "momentum": 0.996}


def command(asked: dict[str, Any], data: str | list[str], out: Path | None) -> str:
    """Return the command of a run without its epochs, for a shell; "" where there is none, as of data in memory.

    Args:
        asked: what was asked for.
        data: the images, which may lie elsewhere by now.
        out: folder of the run; None of the one that it gets without ``--out``.
    """
    task, model = asked["task"], asked["model"]
    if is_given(data) or only_here(task["name"]):
        return ""
    recipe = recipe_named(asked["recipe"]).settings if asked.get("recipe") in recipe_names() else {}
    usual = Settings("").plain() | {name: one for name, one in recipe.items() if not isinstance(one, Mapping)}
    words = (
        []
        if recipe or task["name"] == usual_task(data)[0]
        else [f"--task={Code.of(task['name']).typed if is_code(task['name']) else task['name']}"]
    )
    for owner, given, defaults in (("task", task, with_defaults({"name": task["name"]})), ("model", model, {})):
        its = {**defaults, "name": "auto" if owner == "model" else task["name"], **recipe.get(owner, {})}
        for name, value in given.items():
            if value != its.get(name):
                words.append(f"--{owner}={value}" if name == "name" else f"--{owner}.{name}={_word(value)}")
    for name, value in asked.items():
        if name not in ("data", "task", "model", "epochs", "minutes") and value != usual.get(name):
            sizes = name in ("img_size", "patch_size") and value != "auto"
            said = in_pixels(compact(value)) if sizes else _word(value)
            words.append(f"--{'from' if name == 'from_run' else name}={said}")
    if out is not None:
        words.append(f"--out={out}")
    words = [part for word in words for part in word.split("=", 1)]
    return shlex.join(["patchloom", "pretrain", *(data if isinstance(data, list) else [data]), *words])


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def differences(requested: dict[str, Any], settings: Settings, became: dict[str, Any], run: Path) -> list[str]:
    """'name: was A, now B' for every setting that differs from those with which a run was begun.

    Args:
        requested: what was asked for then; what the version of then did not have yet is at its default.
        settings: what is asked for now.
        became: what every ``auto`` of then became; empty if that is not known.
        run: folder of the run.

    Raises:
        PatchloomError: the task is one of the user's own, and its code has changed.
    """
    before, now = Settings("").plain() | requested, settings.plain()
    refuse_changed(before["task"].get("name", ""), now["task"]["name"], run)
    for one in (before, now):
        # options that are gone are named as differences; nobody has asked to run the code of another's run
        with suppress(PatchloomError):
            one["task"] = with_defaults(one["task"]) if met(one["task"].get("name", "")) else one["task"]
    if "recipe" not in requested:  # else a version that knows auto wrote it, and somebody gave the value
        _as_auto(before, now, _BEFORE_AUTO)
        _as_auto(before["task"], now["task"], _OPTIONS_BEFORE_AUTO)
    _as_auto(before, now, _AUTO_SINCE_RECIPES)
    for name in (*LAUNCH, "recipe"):  # it may go on with other devices; a recipe is what it sets
        before[name] = now[name]
    return _differences(before, now, became)


def _as_auto(before: dict[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Make auto of what was at its default ``before``, where it is auto ``now``."""
    for name, was in defaults.items():
        if name in before and before[name] == was and now.get(name) == "auto":
            before[name] = "auto"


def _differences(before: dict[str, Any], now: dict[str, Any], became: dict[str, Any], prefix: str = "") -> list[str]:
    """The sentences of `differences`.

    One that is now what its ``auto`` had become is the same. The options of another task, or of another model, are not
    named one by one.
    """
    if prefix and before.get("name") != now.get("name") and became.get("name") != now.get("name"):
        return [f"{prefix.rstrip('.')}: was {before.get('name')}, now {now.get('name')}"]
    found = []
    for name in sorted({*before, *now}, key=lambda name: (name != "data", name)):
        a, b, resolved = before.get(name), now.get(name), became.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, resolved if isinstance(resolved, dict) else {}, f"{prefix}{name}.")
        elif a != b and not (a == "auto" and b == resolved):
            a, b = (in_pixels(one) if name == "patch_size" else one for one in (a, b))
            found.append(f"{prefix}{name}: was {a}, now {b}")
    return found
