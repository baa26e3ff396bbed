"""Generated text: code that uses an export without patchloom, and the model card, from Jinja templates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from textwrap import fill
from typing import Any

import jinja2

from patchloom.report.results import escape_markdown
from patchloom.system.templates import environment


@cache
def _templates() -> jinja2.Environment:
    templates = environment("patchloom.export", html=False)
    # what users or files named becomes a literal, which cannot become code, or is escaped
    templates.filters |= {"literal": repr, "numbers": _numbers, "markdown": escape_markdown}
    return templates


def render(template: str, **values: Any) -> str:
    """Return a template of the folder ``templates`` with values filled in."""
    return _templates().get_template(template).render(values)


def _numbers(values: Sequence[float]) -> str:
    """Return the lines of a list with all digits of float32."""
    return fill(", ".join(f"{value:.9g}" for value in values), 100, initial_indent="    ", subsequent_indent="    ")
