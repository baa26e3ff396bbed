"""What claims.md says already, so that claims that are not written anew stay as they were measured."""

from __future__ import annotations

from pathlib import Path

FIRST, LAST = "| measure |", "Measured "  # how the first and the last paragraph of what was measured begin


class Kept:
    """A page as it stands.

    Attributes:
        sections: each with its title, by its title.
        cells: the last two cells of the row of each claim: what was measured, and the verdict.
    """

    def __init__(self, page: Path) -> None:
        text = page.read_text() if page.exists() else ""
        parts = f"\n{text}".split("\n## ")[1:]
        self.sections = {part.splitlines()[0]: f"## {part}".strip() for part in parts}
        rows = [line.strip("| ").split(" | ") for line in self.sections.get("Verdicts", "").splitlines()]
        self.cells = {title: " | ".join(more[-2:]) for title, *more in rows if more}

    def measured(self, title: str) -> str:
        """The tables of a claim, and when and where they were measured."""
        found = self.sections[title].split("\n\n")
        first, last = (next(i for i, one in enumerate(found) if one.startswith(start)) for start in (FIRST, LAST))
        return "\n\n".join(found[first : last + 1])
