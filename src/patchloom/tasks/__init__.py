"""Pretext tasks: one module per paper; `patchloom.options.tasks` declares them.

The classes are imported when they are first used, as in ``from patchloom.tasks import DropPos``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from patchloom.errors import (
    PatchloomError,
    check_type,
    listing,
    suggestion,
    unknown_option_error,
)
from patchloom.options.declare import AUTO, filled_task
from patchloom.options.tasks import TASKS, Entry
from patchloom.tasks.custom import full_name, is_code, label, load

if TYPE_CHECKING:
    from patchloom.nets.swin import Encoder
    from patchloom.tasks.crossmae import CrossMAE as CrossMAE
    from patchloom.tasks.diet import DIET as DIET
    from patchloom.tasks.distill import Distill as Distill
    from patchloom.tasks.droppos import DropPos as DropPos
    from patchloom.tasks.extrema import ExtreMA as ExtreMA
    from patchloom.tasks.jigsaw import Jigsaw as Jigsaw
    from patchloom.tasks.latent import Latent as Latent
    from patchloom.tasks.loca import LOCA as LOCA
    from patchloom.tasks.lut import LUT as LUT
    from patchloom.tasks.mae import MAE as MAE
    from patchloom.tasks.mixture import Mixture as Mixture
    from patchloom.tasks.mp3 import MP3 as MP3
    from patchloom.tasks.nepa import NEPA as NEPA
    from patchloom.tasks.part import PART as PART
    from patchloom.tasks.restore import Restore as Restore
    from patchloom.tasks.simmim import SimMIM as SimMIM
    from patchloom.tasks.task import Task

__all__ = [
    "AUTO",
    "TASKS",
    "Entry",
    "Task",
    "build_task",
    "check_step_size",
    "encoder_defaults",
    "images_needed",
    "ready_tasks",
    "task_class",
    "task_name",
    "usual_task",
    "with_defaults",
    *(entry.path.rpartition(".")[2] for entry in TASKS.values()),
]


def ready_tasks() -> list[str]:
    """Return the names of the tasks that have no required option."""
    return [name for name, entry in TASKS.items() if not entry.needs]


def usual_task(data: object, noun: str = "images") -> tuple[str, str]:
    """Return the task that ``auto`` becomes for ``data`` (one name of a data source, or several), and the reason."""
    if isinstance(data, list | tuple) and len(data) == 1:
        (data,) = data
    name = data.partition(":")[0] if isinstance(data, str) else ""
    if name == "shapes":
        return "droppos", "measured best on shapes within minutes"
    if name == "tones":
        return "droppos", "their classes differ in order alone, which it predicts"
    return "mae", f"it assumes least about the {noun}; patchloom tasks lists others"


def task_name(task: str | type | Mapping[str, Any]) -> str:
    """Return the name under which a run stores a task: that in ``TASKS``, or the place of its class with a digest."""
    if isinstance(task, type):
        listed = (name for name, entry in TASKS.items() if entry.path == f"{task.__module__}.{task.__qualname__}")
        return next(listed, None) or full_name(task)
    if not isinstance(task, str):
        kind = type(task).__name__
        raise PatchloomError(
            f"--task cannot be an object of type {kind}: it takes a name, FILE.py:CLASS, or a class, and options "
            f"beside it, as in task={{'name': {kind}, 'share': 0.5}}"
        )
    return full_name(task) if is_code(task) and task not in TASKS else task


def task_class(name: str) -> type[Task]:
    """Return the class of a task by name."""
    if name not in TASKS and is_code(name):
        return load(name)
    if name not in TASKS:
        own = "; or give FILE.py:CLASS for one of yours."
        raise PatchloomError(f"no task is called {name}{suggestion(name, TASKS)} Choose {listing(TASKS)}{own}")
    module, _, attribute = TASKS[name].path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def with_defaults(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of ``task`` (its ``name`` and some of them), checked."""
    if "name" not in task:
        raise PatchloomError(f"the task has no name: give name, one of {', '.join(TASKS)}, beside its options")
    name, given = task["name"], {option: value for option, value in task.items() if option != "name"}
    if name in TASKS:
        return {"name": name} | vars(filled_task(TASKS[name].options, given))
    cls = task_class(name)
    parameters = {name: one for name, one in inspect.signature(cls).parameters.items() if name != "encoder"}
    hints = get_type_hints(cls.__init__)
    for option, value in given.items():
        if option not in parameters:
            names = ", ".join(parameters)
            known = [f"task.{one}" for one in parameters]
            raise unknown_option_error(f"task.{option}", known, f"its options: {names}" if names else "it has none")
        default = parameters[option].default
        otherwise = Any if default in (None, inspect.Parameter.empty) else type(default)
        check_type(f"task.{option}", value, hints.get(option, otherwise))
    return {"name": name} | {option: given.get(option, one.default) for option, one in parameters.items()}


def encoder_defaults(task: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the encoder settings that ``task`` (``name`` and options) uses unless the user sets them, with reasons."""
    options = with_defaults(task)
    return task_class(options.pop("name")).encoder_defaults(options)


def images_needed(task: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of images that ``task`` needs in a step, over all processes, with the reason."""
    options = with_defaults(task)
    return task_class(options.pop("name")).images_needed(options)


def check_step_size(task: Mapping[str, Any], batch: int, n: int) -> None:
    """Raise an error if ``batch``, or the number ``n`` of training images, is less than ``task`` needs in a step."""
    least, why = images_needed(task)
    needs = f"{label(task['name'])} needs {least} or more images in a step, since {why}"
    if n < least:
        raise PatchloomError(
            f"{needs}, and only {n} of the training images can be read: add images, or repair those that "
            "patchloom check names"
        )
    if batch < least:
        raise PatchloomError(f"{needs}: give --batch_size {least} or more")


def build_task(task: Mapping[str, Any], encoder: Encoder) -> Task:
    """Build the pretext task with ``name`` and options as in ``task`` around ``encoder``."""
    options = with_defaults(task)
    return task_class(options.pop("name"))(encoder, **options)


def __getattr__(name: str) -> Any:
    """Import the class of a task when it is first used."""
    paths = ["patchloom.tasks.task.Task", *(entry.path for entry in TASKS.values())]
    path = next((one for one in paths if one.rpartition(".")[2] == name), None)
    if path is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = globals()[name] = getattr(importlib.import_module(path.rpartition(".")[0]), name)
    return found
