"""How what patchloom returns is shown: as text that fits the terminal, and as HTML in a notebook."""

from __future__ import annotations

import re
import shutil
import textwrap
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest

_GAP = "  "  # between two columns
_SHORTEST = 14  # characters that are left of a name: as many as "majority class" has
_NARROWEST = 16  # characters in a line of a text that may be broken
_TOGETHER = re.compile(r"\d %|\[[^\[\] ]+, [^\[\] ]+\]")  # a share, and an interval
_UNBROKEN = "\N{NO-BREAK SPACE}"
_WIDE = 10_000  # characters of a line in a notebook, in which nothing needs to be shortened


@dataclass(frozen=True)
class Grid:
    """A table of text. Cells may hold line breaks, and are broken nowhere else.

    Attributes:
        heading: a cell for each column.
        rows: the other lines; one of a single cell goes over all columns.
        names: columns whose cells may be shortened in the middle.
        texts: columns whose cells may be broken between words.
        ends: numbers of the rows after which a line is drawn.
    """

    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: frozenset[int] = frozenset()
    texts: frozenset[int] = frozenset()
    ends: frozenset[int] = field(default_factory=frozenset)

    @staticmethod
    def of(rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> Grid:
        """A heading and the rows below it."""
        heading, *others = (tuple(row) for row in rows)
        return Grid(heading, tuple(others), texts=frozenset(texts))

    def widths(self) -> list[int]:
        """Of the columns, if nothing is shortened or broken."""
        return [max(_width(cell) for cell in column) for column in zip(self.heading, *self._whole(), strict=True)]

    def _whole(self) -> list[tuple[str, ...]]:
        return [row for row in self.rows if len(row) == len(self.heading)]

    def least(self) -> int:
        """The narrowest that it can be."""
        return _total(self._narrowed(0))

    def text(self, width: int) -> str:
        """Lines of up to ``width`` characters, or more where it cannot be narrower."""
        widths = self._narrowed(width)
        heading = tuple("\n".join(textwrap.wrap(cell, w)) for cell, w in zip(self.heading, widths, strict=True))
        lines = [*_side_by_side([cell.split("\n") for cell in heading], widths), "─" * _total(widths)]
        for number, row in enumerate(self.rows):
            if len(row) < len(self.heading):
                lines.append(shortened(row[0], max(width, _SHORTEST)))
            else:
                lines += _side_by_side([self._cell(cell, i, widths[i]) for i, cell in enumerate(row)], widths)
            if number in self.ends and number + 1 < len(self.rows):
                lines.append("")
        return "\n".join(lines)

    def html(self) -> str:
        """A table element."""
        head = "".join(f"<th>{_html(cell)}</th>" for cell in self.heading)
        body = "".join(f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _narrowed(self, width: int) -> list[int]:
        widths = self.widths()
        for columns, least in ((self.texts, _NARROWEST), (self.names, _SHORTEST)):
            while _total(widths) > width:
                widest = max(columns, key=lambda column: widths[column], default=None)
                if widest is None or widths[widest] <= least:
                    break
                widths[widest] -= 1
        for column, heading in enumerate(self.heading):  # one may be longer than all that stands below it
            if column not in self.names | self.texts:
                cells = max((_width(row[column]) for row in self._whole()), default=0)
                least = max(cells, *map(len, heading.split()), 0)
                widths[column] = max(widths[column] - max(0, _total(widths) - width), min(widths[column], least))
        return widths

    def _cell(self, cell: str, column: int, width: int) -> list[str]:
        if column in self.names:
            return [shortened(cell, width)]
        if column in self.texts:
            return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]
        return cell.split("\n")


class Verbatim(str):
    """A line that is never broken, such as one with a path that is to be copied."""


class Shown:
    """What can be shown: by ``print``, at a prompt, and in a notebook."""

    @abstractmethod
    def parts(self, width: int) -> Sequence[str | Grid]:
        """Sentences and tables, in the order in which they are read, for lines of ``width`` characters."""

    def text(self, width: int | None = None) -> str:
        """For lines of ``width`` characters, or as wide as the terminal is."""
        width = width or shutil.get_terminal_size().columns
        return "\n".join(
            part.text(width)
            if isinstance(part, Grid)
            else part
            if isinstance(part, Verbatim)
            else _wrapped(part, width)
            for part in self.parts(width)
        )

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        parts = self.parts(_WIDE)
        return "\n".join(_element(part) for part in parts if part)


def _element(part: str | Grid) -> str:
    if isinstance(part, Grid):
        return part.html()
    return f"<pre>{escape(part)}</pre>" if isinstance(part, Verbatim) else f"<p>{_html(part)}</p>"


def shortened(name: str, width: int) -> str:
    """A name of up to ``width`` characters, of which beginning and end are left."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"


def _side_by_side(cells: Sequence[list[str]], widths: Sequence[int]) -> list[str]:
    """The lines of a row, of which each cell may have several."""
    padded = zip_longest(*cells, fillvalue="")
    return [_GAP.join(part.ljust(w) for part, w in zip(line, widths, strict=True)).rstrip() for line in padded]


def _wrapped(text: str, width: int) -> str:
    """Broken between words alone: a path can still be copied, and neither a number nor an interval is torn."""
    whole = _TOGETHER.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in whole.split("\n"))
    return "\n".join("\n".join(line) for line in lines).replace(_UNBROKEN, " ")


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _width(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)
