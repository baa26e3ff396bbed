"""The pretext tasks, one file a paper. ``TASKS`` names them; adding one is one file and one line here."""

import importlib
import inspect
from difflib import get_close_matches
from typing import Any

from patchloom.errors import PatchloomError

# class paths, not classes: listing the tasks must not import torch
TASKS = {
    "mae": "patchloom.tasks.mae.MAE",
    "droppos": "patchloom.tasks.droppos.DropPos",
}


def task_class(name: str) -> type:
    """The class of a task by its name.

    Raises:
        PatchloomError: no task has that name.
    """
    if name not in TASKS:
        near = get_close_matches(name.lower(), TASKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise PatchloomError(f"no task is called {name}{hint} Choose one of: {', '.join(TASKS)}.")
    module, _, attribute = TASKS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def check_options(task: dict[str, Any]) -> type:
    """The class of ``task`` (its ``name`` and options), if it has all these options.

    Raises:
        PatchloomError: no such task, or one that has no such option.
    """
    cls = task_class(task["name"])
    known = [name for name in inspect.signature(cls).parameters if name != "encoder"]
    for option in task:
        if option != "name" and option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise PatchloomError(f"{task['name']} has no option {option}{hint} Its options: {', '.join(known)}.")
    return cls


def build_task(task: dict[str, Any], encoder):
    """The pretext task with ``name`` and options as in ``task``, around ``encoder``.

    Raises:
        PatchloomError: no such task or option, or values that the task refuses.
    """
    options = {name: value for name, value in task.items() if name != "name"}
    return check_options(task)(encoder, **options)
