"""Pretext tasks: one module per paper; ``TASKS`` has one entry per task.

The classes are imported when they are first used, as in ``from patchloom.tasks import DropPos``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from patchloom.errors import PatchloomError, check_type, hint_of, listing, suggestion
from patchloom.options.declare import AUTO, filled_task
from patchloom.options.messages import unknown_option_error
from patchloom.options.tasks import (
    CrossMAEOptions,
    DIETOptions,
    DistillOptions,
    DropPosOptions,
    ExtreMAOptions,
    JigsawOptions,
    LatentOptions,
    LOCAOptions,
    LUTOptions,
    MAEOptions,
    MixtureOptions,
    MP3Options,
    NEPAOptions,
    PARTOptions,
    RestoreOptions,
    SimMIMOptions,
)
from patchloom.tasks.custom import full_name, is_code, label, load

if TYPE_CHECKING:
    from patchloom.nets.swin import Encoder
    from patchloom.tasks.crossmae import CrossMAE
    from patchloom.tasks.diet import DIET
    from patchloom.tasks.distill import Distill
    from patchloom.tasks.droppos import DropPos
    from patchloom.tasks.extrema import ExtreMA
    from patchloom.tasks.jigsaw import Jigsaw
    from patchloom.tasks.latent import Latent
    from patchloom.tasks.loca import LOCA
    from patchloom.tasks.lut import LUT
    from patchloom.tasks.mae import MAE
    from patchloom.tasks.mixture import Mixture
    from patchloom.tasks.mp3 import MP3
    from patchloom.tasks.nepa import NEPA
    from patchloom.tasks.part import PART
    from patchloom.tasks.restore import Restore
    from patchloom.tasks.simmim import SimMIM
    from patchloom.tasks.task import Task

__all__ = [
    "AUTO",
    "DIET",
    "LOCA",
    "LUT",
    "MAE",
    "MP3",
    "NEPA",
    "PART",
    "TASKS",
    "CrossMAE",
    "Distill",
    "DropPos",
    "Entry",
    "ExtreMA",
    "Jigsaw",
    "Latent",
    "Mixture",
    "Restore",
    "SimMIM",
    "Task",
    "build_task",
    "check_step_size",
    "data_defaults",
    "encoder_defaults",
    "images_needed",
    "ready_tasks",
    "task_class",
    "task_name",
    "training_defaults",
    "updates_needed",
    "usual_task",
    "with_defaults",
]


class Entry(NamedTuple):
    """Registry entry of a task.

    Attributes:
        path: import path of the class; a string, so that listing the tasks does not import torch.
        options: dataclass that declares the options; None for a class whose signature has them.
        paper: authors and year.
        withheld: what the encoder does not see.
        asked: what has to be predicted.
        cost: time of a step relative to MAE's, in bfloat16 on a CPU (`benchmarks/step_time.py tasks`): for nano with
            96 pixels and patches of 8, and for ViT-S/16 with 224 pixels; None if it depends on the options.
        needs: the required option, "" if there is none.
    """

    path: str
    options: type | None = None
    paper: str = ""
    withheld: str = ""
    asked: str = ""
    cost: tuple[float, float] | None = None
    needs: str = ""


TASKS = {
    "mae": Entry(
        "patchloom.tasks.mae.MAE", MAEOptions, "He et al. 2022", "patches (removed)", "their pixels", (1.0, 1.0)
    ),
    "crossmae": Entry(
        "patchloom.tasks.crossmae.CrossMAE",
        CrossMAEOptions,
        "Fu et al. 2024",
        "patches (removed)",
        "the pixels of a third of them",
        (0.6, 0.6),
    ),
    "simmim": Entry(
        "patchloom.tasks.simmim.SimMIM",
        SimMIMOptions,
        "Xie et al. 2022",
        "patches (a mask token instead)",
        "their pixels",
        (1.6, 0.7),
    ),
    "droppos": Entry(
        "patchloom.tasks.droppos.DropPos",
        DropPosOptions,
        "Wang et al. 2023",
        "patches, and most visible patches' positions",
        "where each visible patch was",
        (1.1, 0.5),
    ),
    "mp3": Entry(
        "patchloom.tasks.mp3.MP3",
        MP3Options,
        "Zhai et al. 2022",
        "positions, and most keys and values",
        "where every patch was",
        (1.3, 0.6),
    ),
    "restore": Entry(
        "patchloom.tasks.restore.Restore",
        RestoreOptions,
        "Tian et al. 2022",
        "surroundings, geometry, sharpness or colour, and patches",
        "the original pixels",
        (1.5, 0.5),
    ),
    "extrema": Entry(
        "patchloom.tasks.extrema.ExtreMA",
        ExtreMAOptions,
        "Wu et al. 2023",
        "almost all patches, several times over",
        "agreement with a teacher that sees all",
        (2.0, 0.9),
    ),
    "lut": Entry(
        "patchloom.tasks.lut.LUT",
        LUTOptions,
        "Kim et al. 2024",
        "patches, in two disjoint parts",
        "pixels, and agreement on the other view",
        (2.7, 1.6),
    ),
    "distill": Entry(
        "patchloom.tasks.distill.Distill",
        DistillOptions,
        "Fang et al. 2023",
        "patches (a mask token instead)",
        "a frozen model's features of them",
        needs="features_of",
    ),
    "latent": Entry(
        "patchloom.tasks.latent.Latent",
        LatentOptions,
        "I-JEPA, data2vec 2.0, Bootleg",
        "patches (removed)",
        "a teacher's hidden layers there",
        (2.0, 1.1),
    ),
    "diet": Entry(
        "patchloom.tasks.diet.DIET",
        DIETOptions,
        "Balestriero 2023",
        "surroundings and colours, by a random view",
        "which training image it is",
        (1.9, 0.8),
    ),
    "jigsaw": Entry(
        "patchloom.tasks.jigsaw.Jigsaw",
        JigsawOptions,
        "Chen et al. 2022",
        "half of the patches, and all positions",
        "where each visible patch was",
        (0.9, 0.4),
    ),
    "part": Entry(
        "patchloom.tasks.part.PART",
        PARTOptions,
        "Ayoughi et al. 2025",
        "the grid, and all positions",
        "how far one patch is from another",
        (2.3, 0.8),
    ),
    "loca": Entry(
        "patchloom.tasks.loca.LOCA",
        LOCAOptions,
        "Caron et al. 2022",
        "a crop's positions, and most of its patches",
        "where each patch is in another crop",
        (1.4, 0.6),
    ),
    "nepa": Entry(
        "patchloom.tasks.nepa.NEPA",
        NEPAOptions,
        "NEPA 2025",
        "all later patches, in raster order",
        "the next patch's embedding",
        (2.2, 0.8),
    ),
    "mixture": Entry(
        "patchloom.tasks.mixture.Mixture", MixtureOptions, "your own", "any of these", "any of these, weighted"
    ),
}


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
    kind = TASKS[name].options if name in TASKS else None
    if kind is not None:
        return {"name": name} | vars(filled_task(kind, given))
    cls = task_class(name)
    parameters = {name: one for name, one in inspect.signature(cls).parameters.items() if name != "encoder"}
    hints = get_type_hints(cls.__init__)
    for option, value in given.items():
        if option not in parameters:
            names = ", ".join(parameters)
            known = [f"task.{one}" for one in parameters]
            raise unknown_option_error(f"task.{option}", known, f"its options: {names}" if names else "it has none")
        check_type(f"task.{option}", value, hint_of(parameters[option], hints))
    return {"name": name} | {option: given.get(option, one.default) for option, one in parameters.items()}


def encoder_defaults(task: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the encoder settings that ``task`` (``name`` and options) uses unless the user sets them, with reasons."""
    options = with_defaults(task)
    return task_class(options.pop("name")).encoder_defaults(options)


def updates_needed(task: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of updates that ``task`` (``name`` and options) should train for, with the reason."""
    options = with_defaults(task)
    return task_class(options.pop("name")).updates_needed(options)


def training_defaults(task: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
    """Return the settings that ``task`` uses in a training of ``updates`` unless the user sets them, with reasons."""
    options = with_defaults(task)
    return task_class(options.pop("name")).training_defaults(options, updates)


def data_defaults(task: Mapping[str, Any], n: int, noun: str) -> dict[str, tuple[Any, str]]:
    """Return options that ``task`` (``name`` and options) takes from a training set of ``n`` images, with reasons."""
    options = with_defaults(task)
    return task_class(options.pop("name")).data_defaults(options, n, noun)


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
