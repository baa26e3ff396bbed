"""Declarations of options: help, checks, Python's signature and the command line all come from one dataclass.

Each verb, protocol and task has a dataclass in this package, whose fields are made by `option` and `place`. The package
imports no torch, so that ``--help`` and typing errors do not wait for it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from functools import cache, wraps
from inspect import Parameter, Signature
from math import inf
from pathlib import Path
from sys import float_info
from typing import (
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from patchloom.display import clear_status
from patchloom.errors import OBJECTS, PatchloomError, check_type, unknown_option_error

# headings of help pages, under which options are declared
DATA, MODEL, TASK, TRAINING, MACHINE = "data", "model", "task", "training", "machine"

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")
E = TypeVar("E")
Auto = Literal["auto"]
AUTO: Auto = "auto"
_PLAIN = (int, float, bool, str, Path, type(None))
_MOST = 2**31 - 1  # of whole numbers: larger ones are typos
_JOINED = ("data", "runs")  # of Python's many types; on the command line words


class Bounds(NamedTuple):
    """Range of a number, or of each number in a list: least and most belong to it, above and below do not.

    Numbers are finite, unless ``most`` is infinite.
    """

    least: float = -inf
    above: float = -inf
    most: float = float_info.max
    below: float = inf

    def check(self, name: str, value: Any) -> None:
        """Raise if a number is outside, or if there is none in a list; other values, such as auto, pass."""
        if isinstance(value, list | tuple) and not value and self != Bounds():
            raise PatchloomError(f"--{name} is empty: give one number or more")
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, bool) or not isinstance(one, int | float):
                continue
            whole = isinstance(one, int) and one > _MOST >= self.least  # a typo, which would overload a machine
            if whole or one < self.least or one <= self.above or one > self.most or (one >= self.below < inf):
                shown = f"{one:g}" if isinstance(one, float) else one
                limit = f"at most {_MOST:,}" if whole else "finite" if one == inf else ""
                raise PatchloomError(f"--{name} must be {self.text(limit)}, not {shown}")

    def text(self, otherwise: str = "") -> str:
        """Return the range in words, such as ``above 0 and at most 1``; ``otherwise`` stands for an infinite limit."""
        low = f"{self.least:,} or more" if self.least > -inf else f"above {self.above:,}" if self.above > -inf else ""
        if self.below < inf:
            return f"{low} and below {self.below:,}" if low else f"below {self.below:,}"
        if self.most < float_info.max:
            if self.least > -inf:
                return f"{self.least:,} to {self.most:,}"
            return f"{low} and at most {self.most:,}" if low else f"{self.most:,} or less"
        return " and ".join(filter(None, (low, otherwise)))


class Option(NamedTuple):
    """Option or positional argument.

    Attributes:
        name: its name.
        hint: the part of its type that can be typed on a command line.
        default: default value; None if there is none.
        about: one or two lines of help.
        positional: whether it is positional.
        required: whether it is required.
        kind: name of its kind of value, if that of the hint does not fit.
        bounds: range of its numbers.
        group: heading under which help pages list it.
        rare: whether only ``--help all`` explains it.
    """

    name: str
    hint: Any
    default: Any = None
    about: str = ""
    positional: bool = False
    required: bool = False
    kind: str = ""
    bounds: Bounds = Bounds()
    group: str = ""
    rare: bool = False


class CommandSpec(NamedTuple):
    """Options of a verb, a task or a protocol.

    Attributes:
        about: first line of its docstring.
        options: its options, in the order of the declaration.
    """

    about: str
    options: tuple[Option, ...]


def option(
    default: Any,
    about: str,
    *,
    least: float = -inf,
    above: float = -inf,
    most: float = float_info.max,
    below: float = inf,
    kind: str = "",
    group: str = "",
    rare: bool = False,
) -> Any:
    """Declare an option as a field of a dataclass; the arguments are the attributes of `Bounds` and `Option`."""
    known = {"about": about, "kind": kind, "group": group, "rare": rare, "bounds": Bounds(least, above, most, below)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=known, kw_only=True)
    return field(default=default, metadata=known, kw_only=True)


def place(about: str, default: Any = MISSING, kind: str = "", group: str = "") -> Any:
    """Declare a positional argument as a field of a dataclass; without a default it is required."""
    return field(default=default, metadata={"about": about, "positional": True, "kind": kind, "group": group})


def as_in(kind: type[Any], name: str, default: Any = MISSING) -> Any:
    """Declare an option of the dataclass ``kind`` in another one, perhaps with another default."""
    one = kind.__dataclass_fields__[name]
    return field(default=one.default if default is MISSING else default, metadata=one.metadata, kw_only=True)


def _in_order(kind: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass, positional ones first: those of its base come before them."""
    return sorted(fields(kind), key=lambda one: "positional" not in one.metadata)


@cache
def declared(kind: type[Any]) -> CommandSpec:
    """Return the options that a dataclass declares, without those that cannot be typed."""
    hints, found = get_type_hints(kind), []
    for one in _in_order(kind):
        hint = str if one.name in _JOINED else command_line_hint(hints[one.name])
        if hint is None:
            continue
        default = one.default if one.default_factory is MISSING else one.default_factory()
        required = default is MISSING
        found.append(Option(one.name, hint, None if required else default, required=required, **one.metadata))
    return CommandSpec((inspect.getdoc(kind) or "").partition("\n")[0], tuple(found))


def read_signature(owner: Callable[..., Any]) -> CommandSpec:
    """Return the options of a user's own task, from the signature and the docstring of its class."""
    from docstring_parser import parse as parse_docstring  # which takes a tenth of the time of --help

    text = inspect.getdoc(owner) or ""
    described = {item.arg_name: item.description for item in parse_docstring(text).params}
    hints, found = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner), []
    for name, parameter in [*inspect.signature(owner).parameters.items()]:
        if name == "encoder" or parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            continue
        required = parameter.default is Parameter.empty
        default = None if required else parameter.default
        hint = command_line_hint(hints.get(name, str if default is None else type(default)))
        if hint is not None:
            about = " ".join((described.get(name) or "").split())
            found.append(Option(name, hint, default, about, required=required))
    return CommandSpec(text.partition("\n")[0], tuple(found))


def command_line_hint(hint: Any) -> Any:
    """Return the part of a type hint whose values can be typed on a command line; None if there is none."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint in _PLAIN or origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        kept = [one for one in map(command_line_hint, inside) if one is not None]
        return None if set(kept) <= {type(None)} else Union[tuple(kept)]  # noqa: UP007
    if origin in (list, tuple, dict, Sequence) and all(one in _PLAIN for one in inside if one is not ...):
        return hint
    return None


# Checks, which are the same for the command line, configurations and Python.


def check_declared(options: Any, prefix: str = "") -> None:
    """Raise if a value of a declared dataclass has another type, or is outside of its range; see `filled`."""
    hints = get_type_hints(type(options))
    for one in fields(options):
        if one.name in OBJECTS:
            continue
        value, name = getattr(options, one.name), f"{prefix}{one.name}"
        check_type(name, value, hints[one.name])
        # a class may narrow the type of a field whose bounds its base declares
        declared_in = [getattr(base, "__dataclass_fields__", {}).get(one.name) for base in type(options).__mro__]
        bounds = next((it.metadata["bounds"] for it in declared_in if it and "bounds" in it.metadata), Bounds())
        bounds.check(name, value)


def filled(kind: Callable[..., T], given: Mapping[str, Any], otherwise: str, prefix: str = "") -> T:
    """Return checked options from values by name.

    Args:
        kind: declared dataclass.
        given: values by name; the others keep their defaults.
        otherwise: end of the message about an unknown name without a similar one.
        prefix: "task." for options of tasks.

    Raises:
        PatchloomError: an unknown name, a wrong type, or a number outside of its range.
    """
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise unknown_option_error(f"{prefix}{name}", [f"{prefix}{one}" for one in known], otherwise)
    options = kind(**{name: to_plain_value(value) for name, value in given.items()})
    check_declared(options, prefix)
    return options


def filled_task(kind: Callable[..., T], given: Mapping[str, Any]) -> T:
    """Return the checked options of a task from values by name."""
    names = ", ".join(one.name for one in fields(kind))  # type: ignore[arg-type]
    return filled(kind, given, f"its options: {names}" if names else "it has none", "task.")


def to_plain_value(value: Any) -> Any:
    """Return a number of NumPy or torch as a Python number, and an object with `__fspath__` as a `Path`."""
    if hasattr(value, "__fspath__") and not isinstance(value, Path):
        return Path(value)
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def verb(kind: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Decorate a function of declared options: it takes them as arguments, checked, and has their signature."""
    return lambda function: _called_with(kind, function, lambda values: filled(kind, values, ""))


def named_arguments(kind: Callable[P, Any]) -> Callable[[Callable[[dict[str, Any]], R]], Callable[P, R]]:
    """Decorate a function of the arguments that were given, by name: a recipe sets the others. See `verb`."""
    return lambda function: _called_with(
        kind, function, lambda values: {name: to_plain_value(value) for name, value in values.items()}
    )


def _called_with(
    kind: Callable[P, Any], function: Callable[[T], R], options_of: Callable[[dict[str, Any]], T]
) -> Callable[P, R]:
    """Return a function that takes the arguments of ``kind``, and calls ``function`` with the options from them."""
    name = function.__name__

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        with clear_status():
            return function(options_of(by_name(name, inspect.signature(kind), given, named)))

    return _shown_as(call, kind, ())


def takes(kind: Callable[P, T]) -> Callable[[Callable[[S, E, T], None]], Callable[Concatenate[S, E, P], None]]:
    """Decorate the ``__init__`` of a task, whose declared options follow the encoder; see `verb`."""

    def decorate(function: Callable[[S, E, T], None]) -> Callable[Concatenate[S, E, P], None]:
        @wraps(function)
        def call(self: S, encoder: E, *given: P.args, **named: P.kwargs) -> None:
            name = type(self).__name__
            if given:
                raise PatchloomError(f"{name} takes the encoder without a name: give all others as NAME=VALUE")
            function(self, encoder, filled_task(kind, named))

        return _shown_as(call, kind, [*inspect.signature(function).parameters.values()][:2])

    return decorate


def _shown_as(call: Any, kind: Any, first: Sequence[Parameter]) -> Any:
    """Give a function the signature, the type hints and the docstring that a declaration describes."""
    own, returned = inspect.signature(kind), inspect.signature(call.__wrapped__).return_annotation
    call.__signature__ = own.replace(parameters=[*first, *own.parameters.values()], return_annotation=returned)
    call.__annotations__ = {one.name: one.annotation for one in first if one.annotation is not one.empty}
    call.__annotations__ |= get_type_hints(kind)
    what, returns, more = (inspect.getdoc(call) or inspect.getdoc(kind) or "").partition("\n\nReturns:")
    described = [one for one in _in_order(kind) if "about" in one.metadata]
    about = "".join(f"\n    {one.name}: {one.metadata['about']}." for one in described)
    call.__doc__ = f"{what}\n\nArgs:{about}{returns}{more}" if about else what + returns + more
    return call


def by_name(function: str, takes: Signature, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a Python call by name.

    Raises:
        PatchloomError: too many, unknown or missing arguments.
    """
    kinds = {name: one.kind for name, one in takes.parameters.items()}
    places = [name for name, kind in kinds.items() if kind is Parameter.POSITIONAL_OR_KEYWORD]
    options = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    if len(given) > len(places):
        raise PatchloomError(f"{function} takes {', '.join(places)} without a name: give all others as NAME=VALUE")
    values = dict(zip(places, given, strict=False))
    for name in named:
        if name in values:
            raise PatchloomError(f"{function} is given {name} twice: give it once")
        part, _, inner = name.partition(".")
        if inner and part in kinds:
            raise PatchloomError(f"--{name} is written in Python as {part}={{'name': ..., {inner!r}: ...}}")
        if name not in kinds and Parameter.VAR_KEYWORD not in kinds.values():
            there = (
                f"patchloom {function} --help all lists them" if options else f"{function} takes {', '.join(places)}"
            )
            raise unknown_option_error(name, [*places, *options], there)
    values |= named
    needed = [name for name in (*places, *options) if takes.parameters[name].default is Parameter.empty]
    if missing := [name for name in needed if name not in values]:
        shown = ", ".join(f"{name}=..." if name in options else name for name in needed)
        raise PatchloomError(f"{function} needs {' and '.join(missing)}, as in patchloom.{function}({shown})")
    return values
