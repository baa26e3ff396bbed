"""Text of claims.md, and the results that it already has, so that results from other machines are kept."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """Results of a claim, which the page keeps between two comments.

    Attributes:
        cells: cells of the row in the summary: results and verdict.
        tables: comparisons, other measures of the arms, the arms, dates and machines.
    """

    cells: str
    tables: str

    @property
    def count(self) -> int:
        """Number of decided comparisons."""
        return len(re.findall(r"\| \*\*\w+\*\*", self.tables))

    def text(self, name: str) -> str:
        """Return the text on the page."""
        return f"<!-- measured {name}: {self.cells} -->\n\n{joined(self.tables)}\n\n<!-- end -->"


def kept_on(page: Path) -> dict[str, Part]:
    """Return the results on a page, by the names of the claims."""
    text = page.read_text() if page.exists() else ""
    parts = re.findall(r"<!-- measured (\S+): (.*?) -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
    return {name: Part(cells, tables) for name, cells, tables in parts}


def joined(*texts: str) -> str:
    """Join texts that are not empty, and wrap prose, but not tables, titles, comments and code, at 120 characters."""
    parts = [part for text in texts if text for part in text.strip().split("\n\n")]
    plain = [part if part.startswith(("|", "#", "<!--", "```")) else " ".join(part.split()) for part in parts]
    alone = [part if "\n" in part or part.startswith("<!--") else textwrap.fill(part, 120) for part in plain]
    return "\n\n".join(alone)
