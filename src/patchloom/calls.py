"""A Python call is as strict as the command line: a slip in it is the same sentence, and never a TypeError."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

from patchloom.errors import PatchloomError
from patchloom.hints import OBJECTS, check
from patchloom.typos import no_option
from patchloom.waiting import none_left

P = ParamSpec("P")
R = TypeVar("R")

# a path, or whatever stands for one, such as a run
PathLike = str | Path | os.PathLike[str]


def plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's own, and whatever stands for a path, such as a run, as a `Path`."""
    if isinstance(value, os.PathLike) and not isinstance(value, Path):
        return Path(value)
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A verb, or another function of the public API, that refuses in a sentence what its signature does not take.

    So a slip is a `PatchloomError` in Python, too, and no TypeError from somewhere inside.
    """
    name = getattr(function, "__name__", "")
    takes = signature(function)

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        values = {key: plain(value) for key, value in _by_name(name, takes, given, named).items()}
        hints = get_type_hints(function)
        for key, value in values.items():
            if key in hints and key in takes.parameters and key not in OBJECTS:
                check(key, value, hints[key])
        with none_left():
            return function(**values)

    return call


def _by_name(verb: str, takes: Signature, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, of a function whose positional parameters have names."""
    kinds = {name: one.kind for name, one in takes.parameters.items()}
    places = [name for name, kind in kinds.items() if kind is Parameter.POSITIONAL_OR_KEYWORD]
    options = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    if len(given) > len(places):
        raise PatchloomError(f"{verb} takes {', '.join(places)} without a name: give all else as NAME=VALUE")
    values = dict(zip(places, given, strict=False))
    for name in named:
        if name in values:
            raise PatchloomError(f"{verb} is given {name} twice: give it once")
        if name not in kinds and Parameter.VAR_KEYWORD not in kinds.values():
            there = f"patchloom {verb} --help all lists them" if options else f"{verb} takes {', '.join(places)}"
            raise no_option(name, [*places, *options], there)
    values |= named
    needed = [name for name in places if takes.parameters[name].default is Parameter.empty]
    if missing := [name for name in needed if name not in values]:
        raise PatchloomError(f"{verb} needs {' and '.join(missing)}, as in patchloom.{verb}({', '.join(needed)})")
    return values
