"""The pretext tasks, one file a paper. ``TASKS`` names them; adding one is one file and one line here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from patchloom.errors import PatchloomError, check_type, hint_of, listing, suggestion
from patchloom.tasks.custom import full_name, is_code, label, load

if TYPE_CHECKING:
    from patchloom.nets.swin import Encoder
    from patchloom.tasks.task import Task


class Entry(NamedTuple):
    """A task in the list.

    Attributes:
        path: of the class; not the class itself, since listing the tasks must not import torch.
        paper: where it comes from.
        withheld: what is withheld from the encoder.
        asked: what is asked of it.
        cost: seconds of a step over those of MAE, in bfloat16 on a CPU (`benchmarks/step_time.py tasks`): of nano with
            96 pixels and patches of 8, and of ViT-S/16 with 224 pixels; None where that depends on the options.
        needs: the option without which it cannot be built.
    """

    path: str
    paper: str = ""
    withheld: str = ""
    asked: str = ""
    cost: tuple[float, float] | None = None
    needs: str = ""


TASKS = {
    "mae": Entry("patchloom.tasks.mae.MAE", "He et al. 2022", "patches (removed)", "their pixels", (1.0, 1.0)),
    "simmim": Entry(
        "patchloom.tasks.simmim.SimMIM",
        "Xie et al. 2022",
        "patches (a mask token instead)",
        "their pixels",
        (1.6, 0.7),
    ),
    "droppos": Entry(
        "patchloom.tasks.droppos.DropPos",
        "Wang et al. 2023",
        "patches, and most visible patches' positions",
        "where each visible patch was",
        (1.1, 0.5),
    ),
    "mp3": Entry(
        "patchloom.tasks.mp3.MP3",
        "Zhai et al. 2022",
        "positions, and most keys and values",
        "where every patch was",
        (1.3, 0.6),
    ),
    "restore": Entry(
        "patchloom.tasks.restore.Restore",
        "Tian et al. 2022",
        "surroundings, geometry, sharpness or colour, and patches",
        "the original pixels",
        (1.5, 0.5),
    ),
    "extrema": Entry(
        "patchloom.tasks.extrema.ExtreMA",
        "Wu et al. 2023",
        "almost all patches, several times over",
        "agreement with a teacher that sees all",
        (2.0, 0.9),
    ),
    "lut": Entry(
        "patchloom.tasks.lut.LUT",
        "Kim et al. 2024",
        "patches, in two disjoint parts",
        "pixels, and agreement on the other view",
        (2.7, 1.6),
    ),
    "distill": Entry(
        "patchloom.tasks.distill.Distill",
        "Fang et al. 2023",
        "patches (a mask token instead)",
        "a frozen model's features of them",
        needs="features_of",
    ),
    "mixture": Entry("patchloom.tasks.mixture.Mixture", "your own", "any of these", "any of these, weighted"),
}


def ready_tasks() -> list[str]:
    """The names of the tasks that need no option."""
    return [name for name, entry in TASKS.items() if not entry.needs]


AUTO = "auto"  # the task of a run that names none


def usual_task(data: object, noun: str = "images") -> tuple[str, str]:
    """The task that ``auto`` becomes for images that the user calls ``data``, one name or several, and why."""
    if isinstance(data, list | tuple) and len(data) == 1:
        (data,) = data
    name = data.partition(":")[0] if isinstance(data, str) else ""
    if name == "shapes":
        return "droppos", "measured best on shapes within minutes"
    if name == "tones":
        return "droppos", "their classes differ by order alone, which it asks for"
    return "mae", f"it assumes least of the {noun}; patchloom tasks lists others"


def task_name(task: str | type | Mapping[str, Any]) -> str:
    """The name by which a run finds a task again: that of the list, or the place of its class with a digest."""
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
    """The class of a task by its name."""
    if name not in TASKS and is_code(name):
        return load(name)
    if name not in TASKS:
        own = "; or give FILE.py:CLASS for one of yours."
        raise PatchloomError(f"no task is called {name}{suggestion(name, TASKS)} Choose {listing(TASKS)}{own}")
    module, _, attribute = TASKS[name].path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def with_defaults(task: Mapping[str, Any]) -> dict[str, Any]:
    """All options of ``task`` (its ``name`` and some of them), checked against the signature of its class."""
    if "name" not in task:
        raise PatchloomError(f"the task has no name: give name, one of {', '.join(TASKS)}, beside its options")
    cls = task_class(task["name"])
    parameters = {name: one for name, one in inspect.signature(cls).parameters.items() if name != "encoder"}
    hints = get_type_hints(cls.__init__)
    for option, value in task.items():
        if option == "name":
            continue
        if option not in parameters:
            said = f"{label(task['name'])} has no option {option}{suggestion(option, parameters)}"
            raise PatchloomError(f"{said} Its options: {', '.join(parameters)}.")
        check_type(f"task.{option}", value, hint_of(parameters[option], hints))
    return {"name": task["name"]} | {name: task.get(name, one.default) for name, one in parameters.items()}


def encoder_defaults(task: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What ``task`` (``name`` and options) wants its encoder to be where the user leaves it open, with reasons."""
    options = with_defaults(task)
    return task_class(options.pop("name")).encoder_defaults(options)


def updates_needed(task: Mapping[str, Any]) -> tuple[int, str]:
    """How many updates a training of ``task`` (``name`` and options) should have, with the reason."""
    options = with_defaults(task)
    return task_class(options.pop("name")).updates_needed(options)


def training_defaults(task: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
    """What ``task`` (``name`` and options) wants a training of so many updates to be where the user leaves it open."""
    options = with_defaults(task)
    return task_class(options.pop("name")).training_defaults(options, updates)


def images_needed(task: Mapping[str, Any]) -> tuple[int, str]:
    """How many images a step of ``task`` (``name`` and options) needs, of all processes together, with the reason."""
    options = with_defaults(task)
    return task_class(options.pop("name")).images_needed(options)


def check_step_size(task: Mapping[str, Any], batch: int, n: int) -> None:
    """Refuse steps of ``batch`` images, or of all ``n`` where there are no more, of which ``task`` could not learn."""
    least, why = images_needed(task)
    needs = f"{label(task['name'])} needs {least} or more images in a step, since {why}"
    if n < least:
        raise PatchloomError(
            f"{needs}, and the images to train on that can be read are only {n}: add images, or mend what "
            "patchloom check names"
        )
    if batch < least:
        raise PatchloomError(f"{needs}: give --batch_size {least} or more")


def build_task(task: Mapping[str, Any], encoder: Encoder) -> Task:
    """The pretext task with ``name`` and options as in ``task``, around ``encoder``."""
    options = with_defaults(task)
    return task_class(options.pop("name"))(encoder, **options)
