"""Values of options from the words that a user types, and from configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from patchloom.errors import (
    PatchloomError,
    check_type,
    conforms,
    describe_type,
    shorten_options,
    union_members,
)
from patchloom.options.declare import Option

TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MOST_DIGITS = 300  # more than a float, or a file's name, can have


def parse_value(option: Option, text: str) -> Any:
    """Return the value of an option that a user typed as ``text``.

    A text that fits several types of a union is the most special of them: ``12`` is a number where one is allowed.

    Raises:
        PatchloomError: the text fits none.
    """
    name = option.name.upper() if option.positional else shorten_options(f"--{option.name}")
    if re.fullmatch(rf"[-+]?[\d_]{{{_MOST_DIGITS},}}", text):
        raise PatchloomError(f"{name} cannot be a number of {len(text)} digits")
    try:
        return _read(text, option.hint)
    except ValueError:
        raise PatchloomError(f"{name} cannot be {text}: it takes {option.kind or describe_type(option.hint)}") from None


def convert_value(option: Option, value: Any, place: str) -> Any:
    """Return the value of an option from a configuration or recipe, named ``place`` in messages."""
    name = shorten_options(f"--{option.name}")[2:]
    if isinstance(value, str):
        return parse_value(option, value)
    if isinstance(value, dict) and all(get_origin(one) is not dict for one in union_members(option.hint)):
        raise PatchloomError(f"{name} in {place} must be a plain value: it contains further settings")
    if isinstance(value, list) and not conforms(value, option.hint):
        value = tuple(value)
    if isinstance(value, int) and not conforms(value, option.hint):  # the side of a square
        return parse_value(option, str(value).lower())
    if value is not None or type(None) in union_members(option.hint):
        check_type(name, value, option.hint)
    return value


def _read(text: str, hint: Any) -> Any:
    """Return the value of a type hint that a text stands for; raise ValueError if there is none."""
    members = union_members(hint)
    for one in sorted(members, key=lambda one: one in (str, Path)):  # which take any text
        if one in (str, Path):
            return one(text)
        if str in members and get_origin(one) is list:  # the function splits the text
            continue
        with suppress(ValueError):
            return _plain(text.strip(), one)
    raise ValueError


def _plain(text: str, hint: Any) -> Any:
    """Return the value of a hint that is no union; raise ValueError if there is none."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is type(None) and text == "null":
        return None
    if hint is bool and text.lower() in TRUTHS:
        return TRUTHS[text.lower()]
    if hint is int:
        return int(text)
    if hint is float and not isnan(number := float(re.sub(r"^([-+]?)\.inf", r"\1inf", text))):  # as YAML spells it
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else number
    if origin is Literal and text in map(str, inside):
        return next(one for one in inside if str(one) == text)
    if origin is dict and re.fullmatch(r"\{.*\}", text):
        pairs = [one.partition(":")[::2] for one in text[1:-1].split(",") if one.strip()]
        return {_read(key.strip(), inside[0]): _read(one.strip(), inside[1]) for key, one in pairs}
    if origin is tuple and inside == (int, int) and (size := re.fullmatch(r"(\d+)(?:x(\d+))?", text)):
        return int(size[1]), int(size[2] or size[1])
    if origin in (list, tuple, Sequence):
        words = [one for one in re.sub(r"^([\[(])(.*)[\])]$", r"\2", text).split(",") if one.strip()]
        fixed = origin is tuple and ... not in inside
        if fixed and len(words) != len(inside):
            raise ValueError
        values = [_read(one.strip(), inside[i if fixed else 0]) for i, one in enumerate(words)]
        return tuple(values) if origin is tuple else values
    raise ValueError


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted name: the name in ``task`` is ``task.name``."""
    found = dict[str, Any]()
    for name, value in values.items():
        inside = value if isinstance(value, Mapping) else {"name": value}
        found |= {f"{name}.{key}": one for key, one in inside.items()} if name in ("task", "model") else {name: value}
    return found


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Nest `dotted` settings again: ``task.name`` becomes the name in ``task``."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        part, _, inner = name.partition(".")
        if inner and part in ("task", "model"):
            found.setdefault(part, {})[inner] = value
        else:
            found[name] = value
    return found
