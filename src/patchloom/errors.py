"""Exceptions for the user, type and range checks of options, and helpers for messages."""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# the repr of an open file in a message, which neither names the file nor helps
_FILE_OBJECT = re.compile(r"<(?:_io\.\w+|\w+(?:\.\w+)* object at) [^<>]*>")


class PatchloomError(Exception):
    """Error that the user can correct, as one sentence with the remedy.

    Attributes:
        exit_code: exit code of the command line.
    """

    exit_code = 2


class TemporaryError(PatchloomError):
    """Temporary fault, such as an unreachable host or a lost process: the same command may work later."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Stopped(PatchloomError):
    """Training was interrupted; its state is saved.

    Args:
        text: message.
        progress: plain values that say where a run stopped, for ``--json``; empty if there is no run.
    """

    exit_code = 130

    def __init__(self, text: str, progress: Mapping[str, Any] | None = None):
        super().__init__(text)
        self.progress = dict(progress or {})


class AlreadyReported(PatchloomError):
    """Error that another process of the same training has reported; the command line prints nothing.

    Args:
        text: the other process's message.
        exit_code: the other process's exit code.
    """

    def __init__(self, text: str, exit_code: int = PatchloomError.exit_code):
        super().__init__(text)
        self.exit_code = exit_code


def one_line(error: BaseException, path: str = "") -> str:
    """Return the message of an exception in one line, or its type; open files and ``path`` are replaced by "it"."""
    text = str(error).replace(f"'{path}'", "it").replace(path, "it") if path else str(error)
    return " ".join(_FILE_OBJECT.sub("it", text).split()) or type(error).__name__


# Checking plain values against type hints, so that a Python call is as strict as the command line.


# arguments of many types, which are checked where they are opened or built
OBJECTS = ("data", "task", "tasks")


def conforms(value: Any, hint: Any) -> bool:
    """Return whether ``value`` matches a type hint: plain types, unions, literals, and lists and tuples of them."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(conforms(value, one) for one in inside)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inside)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(conforms(one, inside[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            conforms(key, inside[0]) and conforms(one, inside[1]) for key, one in value.items()
        )
    if origin is tuple and Ellipsis in inside:
        return isinstance(value, tuple) and all(conforms(one, inside[0]) for one in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(inside) and all(map(conforms, value, inside))
    if hint is float:  # neither nan nor an integer that no float can hold
        return isinstance(value, int | float) and not isinstance(value, bool) and (value == inf or abs(value) < 2**1000)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, origin or hint)


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the single type of any other hint."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


_KINDS = {int: ("int",), float: ("float",), bool: ("true", "false"), str: ("text",), Path: ("path",), type(None): ()}


def describe_type(hint: Any) -> str:
    """Describe the values that a type hint allows, in help pages and messages, such as ``int or auto``."""
    names: dict[str, None] = {}
    for one in union_members(hint):
        origin, inside = get_origin(one), get_args(one)
        kinds = _KINDS.get(one, (getattr(one, "__name__", str(one)),))
        if origin is Literal:
            kinds = tuple(map(str, inside))
        elif inside == (int, int):
            kinds = ("HxW",)
        elif origin in (dict, Mapping):
            kinds = ("{NAME: float, ...}",)
        elif origin is os.PathLike:
            kinds = ("path",)
        elif origin is not None:
            kinds = (f"list of {describe_type(inside[0])}",)
        names |= dict.fromkeys(kinds)
    if "text" in names:  # kinds overlap: a list is typed as text, and a path is text, too
        names = dict.fromkeys(name for name in names if not name.startswith("list"))
    return listing(name for name in names if name != "text" or "path" not in names)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise if the value of an option does not match its type hint."""
    if conforms(value, hint):
        return
    shown = "so large" if isinstance(value, int) and abs(value) >= 2**63 else value
    problem = "needs a value" if value is None else f"cannot be {shown}"
    raise PatchloomError(f"--{name} {problem}: it takes {describe_type(hint)}")


_hints = cache(get_type_hints)  # evaluates the hints of a class, which takes longer than to check its fields


def typed_fields(cls: type, values: Any, ranges: Mapping[str, tuple[float, float]] | None = None) -> dict[str, Any]:
    """Check the fields of a dataclass that were read from a file, and turn lists into tuples if the class has these."""
    if not isinstance(values, Mapping):
        raise ValueError(f"a {type(values).__name__} stands where settings are expected")
    hints, found = _hints(cls), {}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"there is no setting {str(name)[:40]!r}")
        if isinstance(value, list) and not conforms(value, hints[name]):
            value = tuple(value)
        if not conforms(value, hints[name]):
            raise ValueError(f"{name} cannot be {str(value)[:40]!r}: it takes {describe_type(hints[name])}")
        check_range(name, value, *(ranges or {}).get(name, (-inf, inf)))
        found[name] = value
    return found


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Raise if a number, or one in a list, is below ``low`` or above ``high``; other values pass."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, int | float) and not isinstance(one, bool) and not low <= one <= high:
            raise ValueError(f"{name} must be {low} to {high}, not {str(one)[:40]}")


def listing(words: Iterable[Any], last: str = "or") -> str:
    """Join words for a sentence: ``a, b or c``."""
    texts = list(map(str, words))
    return f" {last} ".join([*[", ".join(texts[:-1])] * (len(texts) > 1), *texts[-1:]])


def suggestion(word: str, known: Iterable[str], end: str = ".") -> str:
    """Return the end of a message about an unknown word: ``; did you mean X?``, or ``end`` if no known word is similar.

    Case, hyphens and underscores are ignored.
    """
    near = closest_word(word, known)
    return f"; did you mean {near}?" if near else end


def closest_word(word: str, known: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the known word that is most similar to ``word``; None if no similarity reaches ``cutoff``."""
    bare = {normalize_word(one): one for one in known}
    found = get_close_matches(normalize_word(word), bare, n=1, cutoff=cutoff)
    return bare[found[0]] if found else None


def normalize_word(word: str) -> str:
    """Return a word in lower case, without hyphens and underscores."""
    return word.lower().replace("-", "").replace("_", "")


def pip_install(*extras: str) -> str:
    """Return the command that installs the packages of some extras of patchloom.

    It names the packages, not patchloom, which is not in a registry before its first release.
    """
    # a quarter of the time of --help, and only this message needs it
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires("patchloom") or []
    except PackageNotFoundError:  # a source tree that is not installed
        return f"pip install '.[{','.join(extras)}]' in the folder of patchloom's source"
    marked = (re.fullmatch(r"(.+?)\s*;\s*extra\s*==\s*['\"](.+)['\"]", one) for one in listed)
    packages = dict.fromkeys(one[1] for one in marked if one and one[2] in extras)
    return " ".join(["pip install", *(f"'{package}'" for package in packages)])


# Messages about unknown options and wrong words, each with a suggestion.


_WORDS = ("data", "dataset", "datapath", "datadir", "input", "images", "run")  # names of positional arguments


def shorten_options(text: str) -> str:
    """Replace the internal names of options, such as --task.name, by the names that users type, such as --task."""
    return re.sub(r"--(task|model|config|from)[._](name|file|run)\b", r"--\1", text)


def without_hyphens(word: str, known: Sequence[str]) -> str | None:
    """Return the message about an option without its two hyphens, or None if no option in ``known`` is similar."""
    name, equals, value = word.partition("=")
    bare = name.lstrip("-–—")
    meant = closest_word(bare, [one[2:] for one in known]) if equals or name != bare else None
    if meant is None:
        return None
    return f"{word} is no option: options begin with two hyphens; did you mean --{meant}{equals}{value}?"


def unknown_word_error(
    word: str, prog: str, places: Sequence[str], known: Sequence[str], owners: Callable[[str], Sequence[str]]
) -> PatchloomError:
    """Return the error about a word that is no option, or one too many.

    Args:
        word: the word, with the value of an option behind =.
        prog: the command.
        places: names of positional arguments, in capitals.
        known: options as the user types them.
        owners: function from an option to the commands that have it.
    """
    name = word.partition("=")[0]
    bare = name.lstrip("-")
    if not name.startswith("--"):
        return PatchloomError(
            without_hyphens(word, known)
            or f"{word} is one word too many; see {prog} --help (names of options begin with --, and a name with "
            "spaces needs quotes)"
        )
    if bare.startswith("task.") and "--tasks" in known:
        said = f"there is no option {name} for all tasks: write it behind a task, as in --tasks mae,mae:{bare}=VALUE"
    elif normalize_word(bare) in _WORDS and places:
        said = f"there is no option {name}: give {listing(places, 'and')} without a name, {prog} {' '.join(places)}"
    elif near := _mistyped(name, bare, known):
        said = near
    elif found := owners(name):
        said = f"{name} is an option of {listing(found, 'and')}; {prog} --help all shows its options"
    else:
        said = f"there is no option {name}; {prog} --help all lists them"
    return PatchloomError(said)


def _mistyped(name: str, bare: str, known: Sequence[str]) -> str | None:
    """Return the message about an option whose name is similar to a known one, or None."""
    switch = f"--{bare[3:].replace('-', '_')}"
    if bare.startswith(("no-", "no_")) and switch in known:
        return f"there is no option {name}; did you mean {switch} false?"
    inside = [one for one in known if one.endswith(f".{bare}")]
    if near := inside[0] if inside else closest_word(name, known):
        return f"there is no option {name}; did you mean {near if near.startswith('--') else f'--{near}'}?"
    return None


def unknown_option_error(name: str, known: Iterable[str], otherwise: str) -> PatchloomError:
    """Return the error about an unknown keyword of a Python call, in the words of the command line."""
    options = [f"--{one}" for one in known]
    return PatchloomError(_mistyped(f"--{name}", name, options) or f"there is no option --{name}; {otherwise}")
