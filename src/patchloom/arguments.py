"""Arguments of public functions that are no verbs: checks against their signatures."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import ParamSpec, TypeVar, get_type_hints

from patchloom.display import clear_status
from patchloom.errors import OBJECTS, check_type
from patchloom.options.declare import by_name, to_plain_value

P = ParamSpec("P")
R = TypeVar("R")

# a path, or an object with `__fspath__`, such as a run
PathLike = str | Path | os.PathLike[str]


def plain_path(path: PathLike) -> str | Path:
    """Return a string unchanged, and any other path, such as a run, as a `Path`."""
    return path if isinstance(path, str) else Path(path)


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that checks the arguments of a public function against its signature.

    Wrong arguments raise `PatchloomError`, with the message of the command line, and never a TypeError from inside.
    """
    name = getattr(function, "__name__", "")
    takes = signature(function)
    called: Callable[..., R] = function

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        values = {key: to_plain_value(value) for key, value in by_name(name, takes, given, named).items()}
        hints = get_type_hints(function)
        for key, value in values.items():
            if key in hints and key in takes.parameters and key not in OBJECTS:
                check_type(key, value, hints[key])
        with clear_status():
            return called(**values)

    return call
