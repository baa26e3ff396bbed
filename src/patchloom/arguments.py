"""Arguments of public functions that are no verbs: checks against their signatures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

from patchloom.display import clear_status
from patchloom.errors import OBJECTS, PatchloomError, check_type
from patchloom.options.declare import to_plain_value
from patchloom.options.messages import unknown_option_error

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
    by_name: Callable[..., R] = function

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        values = {key: to_plain_value(value) for key, value in _by_name(name, takes, given, named).items()}
        hints = get_type_hints(function)
        for key, value in values.items():
            if key in hints and key in takes.parameters and key not in OBJECTS:
                check_type(key, value, hints[key])
        with clear_status():
            return by_name(**values)

    return call


def _by_name(verb: str, takes: Signature, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    kinds = {name: one.kind for name, one in takes.parameters.items()}
    places = [name for name, kind in kinds.items() if kind is Parameter.POSITIONAL_OR_KEYWORD]
    options = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    if len(given) > len(places):
        raise PatchloomError(f"{verb} takes {', '.join(places)} without a name: give all others as NAME=VALUE")
    values = dict(zip(places, given, strict=False))
    for name in named:
        if name in values:
            raise PatchloomError(f"{verb} is given {name} twice: give it once")
        if name not in kinds and Parameter.VAR_KEYWORD not in kinds.values():
            there = f"patchloom {verb} --help all lists them" if options else f"{verb} takes {', '.join(places)}"
            raise unknown_option_error(name, [*places, *options], there)
    values |= named
    needed = [name for name in places if takes.parameters[name].default is Parameter.empty]
    if missing := [name for name in needed if name not in values]:
        raise PatchloomError(f"{verb} needs {' and '.join(missing)}, as in patchloom.{verb}({', '.join(needed)})")
    return values
