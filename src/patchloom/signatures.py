"""What options there are: from signatures and docstrings, or from the list of them that comes with the package.

Signatures stand in modules that import torch, which takes seconds, and neither ``--help`` nor a slip of the keyboard
shall wait for it. So ``python docs/make_options.py`` writes ``options.json`` from them, and a test refuses it when it
is out of date. What is not in it, such as a task in a file of yours, is read from its signature.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring

LISTED = Path(__file__).with_name("options.json")
_PLAIN = (int, float, bool, str, Path, type(None))
_NAMES = {"Literal": Literal, "Path": Path, "Sequence": Sequence}


class Option(NamedTuple):
    """One option, or a word that is given by its place.

    Attributes:
        name: as in the signature.
        hint: its type, as far as words can be of it.
        default: None where there is none, too.
        about: its line in the docstring.
        positional: whether it is given by its place.
        required: whether it must be given.
        kind: what it takes, where that is to be said in other words than those of the hint.
    """

    name: str
    hint: Any
    default: Any = None
    about: str = ""
    positional: bool = False
    required: bool = False
    kind: str = ""

    def plain(self) -> dict[str, Any]:
        """As plain values for JSON; what is as usual is left out."""
        values = self._asdict() | {"hint": written(self.hint)}
        usual = Option("", None)._asdict()
        return {name: value for name, value in values.items() if value is not usual[name]}


class Listed(NamedTuple):
    """What takes options: a verb, a task or a protocol.

    Attributes:
        about: the first line of its docstring.
        options: in the order of the signature.
    """

    about: str
    options: tuple[Option, ...]

    def plain(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {"about": self.about, "options": [option.plain() for option in self.options]}


def listed(owner: Callable[..., Any], skip: Collection[str] = ()) -> Listed:
    """What a function, a class or the fields of a dataclass take, from signature and docstring.

    Parameters that may be given by position are so on the command line, too; those of classes never are. What no word
    can be, such as a function, is left out.
    """
    text = inspect.getdoc(owner) or ""
    described = {item.arg_name: item.description for item in parse_docstring(text).params}
    hints = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner)
    found = []
    for name, parameter in inspect.signature(owner).parameters.items():
        if name in skip or parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            continue
        required = parameter.default is Parameter.empty
        default = None if required else parameter.default
        hint = sayable(hints.get(name, str if default is None else type(default)))
        hint = str if name in ("data", "runs") else hint  # several words of it are joined by who reads them
        if hint is None:
            continue
        about = " ".join((described.get(name) or "").split())
        positional = not inspect.isclass(owner) and parameter.kind is not Parameter.KEYWORD_ONLY
        found.append(Option(name, hint, default, about, positional, required))
    return Listed((text.splitlines() or [""])[0], tuple(found))


def sayable(hint: Any) -> Any:
    """The part of a hint that can be said in words on a command line; None if there is none."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint in _PLAIN or origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        kept = [one for one in map(sayable, inside) if one is not None]
        return None if set(kept) <= {type(None)} else Union[tuple(kept)]  # noqa: UP007
    if origin in (list, tuple, dict, Sequence) and all(one in _PLAIN for one in inside if one is not ...):
        return hint
    return None


def written(hint: Any) -> str:
    """A hint as it is written in Python, the same by every version of it."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(written, inside))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inside))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if one is ... else written(one) for one in inside)}]"
    return "None" if hint is type(None) else hint.__name__


def shipped(part: str, name: str) -> Listed | None:
    """What the package's list says of a name in one of its parts (verbs, tasks by path, protocols), or None."""
    about = _file().get(part, {}).get(name)
    if about is None:
        return None
    options = (Option(**one | {"hint": eval(one["hint"], dict(_NAMES))}) for one in about["options"])
    return Listed(about["about"], tuple(options))


def shipped_names(part: str) -> list[str]:
    """The names in a part of the package's list."""
    return list(_file()[part])


def shipped_value(name: str) -> Any:
    """What else the package's list says, such as the default task."""
    return _file()[name]


@cache
def _file() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(LISTED.read_text("utf-8"))
    return found


def as_json(parts: Mapping[str, Mapping[str, Listed]], values: Mapping[str, Any]) -> str:
    """The contents of the package's list."""
    plain = {part: {name: one.plain() for name, one in found.items()} for part, found in parts.items()}
    return json.dumps({**values, **plain}, indent=1, ensure_ascii=False) + "\n"


def forget() -> None:
    """Read the list again when it is asked next."""
    _file.cache_clear()
