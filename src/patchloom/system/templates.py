"""Jinja templates in the folder ``templates`` of a package: pages, and generated code and documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2


def environment(package: str, *, html: bool) -> jinja2.Environment:
    """Return the templates of a package; in ``html``, whatever users named is escaped. A missing value is an error."""
    import jinja2  # takes 0.1 s to import

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )


def render_page(templates: jinja2.Environment, name: str, **values: object) -> str:
    """Return a page of HTML, to be written as UTF-8."""
    text = templates.get_template(name).render(**values)
    # names of files that are not UTF-8 have lone surrogates, which cannot be encoded
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
