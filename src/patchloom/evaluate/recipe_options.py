"""A recipe's values as options of the protocols that train by it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, get_type_hints

from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.report import Report


def takes_recipe(protocol: Callable[..., Report], kind: type[Any] = Recipe) -> Callable[..., Report]:
    """Decorator that replaces the last parameter ``**changes`` of a protocol by the options of a kind of recipe.

    Signature and docstring follow from the fields and their descriptions, so that neither is written twice. A base
    learning rate may be a list, of which the best on held-out training images is chosen.

    Args:
        protocol: is given the options that were said.
        kind: a dataclass whose ``options`` are the names of fields.
    """
    own, names = signature(protocol), kind.options()
    hints = {name: hint | None for name, hint in get_type_hints(kind).items() if name in names}
    if "blr" in hints:
        hints["blr"] = float | list[float] | None
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hints[name]) for name in names]
    own_options = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    protocol.__signature__ = own.replace(parameters=[*own_options, *added])  # type: ignore[attr-defined]
    protocol.__annotations__ |= hints
    described = {name: text for one in reversed(kind.__mro__) for name, text in _descriptions(one).items()}
    if "blr" in hints:
        described["blr"] = described["blr"].replace("rate;", "rate, or a list to choose from;")
    lines = "".join(f"    {name}:{described[name]}" for name in names)
    protocol.__doc__ = re.sub(r"^    changes: .*\n", lambda _: lines, inspect.getdoc(protocol) + "\n", flags=re.M)
    return protocol


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """What a recipe's docstring says of each of its own fields, line breaks and all."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2] + "\n"
    return dict(re.findall(r"^    (\w+):(.*\n(?:     .*\n)*)", text, flags=re.M))
