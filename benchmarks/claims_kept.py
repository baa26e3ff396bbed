"""The text of claims.md, and what it says already, so that claims that are measured elsewhere stay on it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """What was measured of a claim, which a page keeps between two comments.

    Attributes:
        cells: of the row of its verdict: what was measured, and the verdict.
        tables: a row a comparison, what else was measured of its arms, the arms, and when and where.
    """

    cells: str
    tables: str

    @property
    def count(self) -> int:
        """Comparisons that are decided."""
        return len(re.findall(r"\| \*\*\w+\*\*", self.tables))

    def text(self, name: str) -> str:
        """As it stands on the page."""
        return f"<!-- measured {name}: {self.cells} -->\n\n{joined(self.tables)}\n\n<!-- end -->"


def kept_on(page: Path) -> dict[str, Part]:
    """What a page says is measured, by the names of the claims."""
    text = page.read_text() if page.exists() else ""
    parts = re.findall(r"<!-- measured (\S+): (.*?) -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
    return {name: Part(cells, tables) for name, cells, tables in parts}


def joined(*texts: str) -> str:
    """Texts with lines of at most 120 characters, but in tables, titles, comments and code; empty ones are left out."""
    parts = [part for text in texts if text for part in text.strip().split("\n\n")]
    plain = [part if part.startswith(("|", "#", "<!--", "```")) else " ".join(part.split()) for part in parts]
    alone = [part if "\n" in part or part.startswith("<!--") else textwrap.fill(part, 120) for part in plain]
    return "\n\n".join(alone)
