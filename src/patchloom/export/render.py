"""Generated text: code that uses an export without patchloom, and the model card, from Jinja templates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from textwrap import fill
from typing import Any

import jinja2

from patchloom.report.results import escape_markdown


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("patchloom.export"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # what users or files named becomes a literal, which cannot become code, or is escaped
    environment.filters |= {"literal": repr, "numbers": _numbers, "markdown": escape_markdown}
    return environment


def render(template: str, **values: Any) -> str:
    """Return a template of the folder ``templates`` with values filled in."""
    return _environment().get_template(template).render(values)


def _numbers(values: Sequence[float]) -> str:
    """Return the lines of a list with all digits of float32."""
    return fill(", ".join(f"{value:.9g}" for value in values), 100, initial_indent="    ", subsequent_indent="    ")
