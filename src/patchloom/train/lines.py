"""Lines that fit a terminal: one whose parts give way as it gets narrower, and prose that is broken between words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# what belongs together: the number and its unit, and an interval
_TOGETHER = re.compile(r"\[[^][]{1,30}\]|(?<=[\d%]) (?=[%[])")
_TIE = "\x00"


class Part(NamedTuple):
    """A part of a line.

    Attributes:
        forms: texts for it, the longest first; an empty one leaves it out.
        gives_way: when it is cut back to each of the forms after the first; among all parts of a line, those with the
            lowest numbers go first.
    """

    forms: Sequence[str]
    gives_way: Sequence[int] = ()


class Line(NamedTuple):
    """A line of parts, in the order in which they are shown."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return self.fit(None)

    def fit(self, width: int | None) -> str:
        """The line in at most ``width`` columns: what matters least is shortened, then left out, then all is cut."""
        forms = [0] * len(self.parts)
        turns = sorted((when, number) for number, part in enumerate(self.parts) for when in part.gives_way)
        text = self._with(forms)
        for _, number in turns:
            if width is None or len(text) <= width:
                break
            forms[number] += 1
            text = self._with(forms)
        return text[:width]

    def _with(self, forms: Sequence[int]) -> str:
        return " · ".join(filter(None, (part.forms[form] for part, form in zip(self.parts, forms, strict=True))))


def wrapped(text: str, width: int) -> str:
    """Text broken between words into lines of at most ``width`` columns.

    What follows the first line stands two columns further in, or under the last column of a table. A number and its
    unit stay together, and so does an interval; a word that is longer than a line is left whole.
    """
    if len(text) <= width:
        return text
    columns = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}", text) if gap.end() <= width // 2]
    inside = columns[-1] if columns else len(text) - len(text.lstrip()) + 2
    tied = _TOGETHER.sub(lambda one: one[0].replace(" ", _TIE), text)
    lines, here = [], ""
    for gap, word in re.findall(r"( *)(\S+)", tied):
        if here.strip() and len(here) + len(gap) + len(word) > width:
            lines.append(here)
            here, gap = "", " " * inside
        here += gap + word
    return "\n".join([*lines, here]).replace(_TIE, " ")
