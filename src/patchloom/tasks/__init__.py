"""The pretext tasks, one file a paper. ``TASKS`` names them; adding one is one file and one line here."""

import importlib
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

from patchloom.errors import PatchloomError
from patchloom.hints import check

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


def with_defaults(task: Mapping[str, Any]) -> dict[str, Any]:
    """All options of ``task`` (its ``name`` and some of them), checked against the signature of its class.

    Raises:
        PatchloomError: no such task or option, or a value of another type.
    """
    if "name" not in task:
        raise PatchloomError(f"the task has no name: give name, one of {', '.join(TASKS)}, beside its options")
    cls = task_class(task["name"])
    parameters = {name: one for name, one in inspect.signature(cls).parameters.items() if name != "encoder"}
    hints = get_type_hints(cls.__init__)
    for option, value in task.items():
        if option == "name":
            continue
        if option not in parameters:
            near = get_close_matches(option, parameters, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise PatchloomError(f"{task['name']} has no option {option}{hint} Its options: {', '.join(parameters)}.")
        check(f"task.{option}", value, hints[option])
    return {"name": task["name"]} | {name: task.get(name, one.default) for name, one in parameters.items()}


def build_task(task: Mapping[str, Any], encoder):
    """The pretext task with ``name`` and options as in ``task``, around ``encoder``.

    Raises:
        PatchloomError: no such task or option, or values that the task refuses.
    """
    options = with_defaults(task)
    return task_class(options.pop("name"))(encoder, **options)
