"""Whether what is asked for is what a run was begun with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.runs.settings import LAUNCH, Settings
from patchloom.sides import in_pixels
from patchloom.tasks import with_defaults
from patchloom.tasks.code import met, refuse_changed

# Defaults of versions that did not know auto there, of settings and of options of a task. What auto became, the run has
# stored, so the same command means the same run.
_BEFORE_AUTO = {"held_out": 0.05, "weight_decay": 0.05}
_AUTO_SINCE_RECIPES = {"crop_scale": 0.2}  # of versions with recipes, and before
_OPTIONS_BEFORE_AUTO = {"loss": "byol", "momentum": 0.996}


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
