"""Results of a protocol beside its controls, their confidence intervals, and their table on the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from patchloom.evaluate.tables import across_settings, by_row, fitting
from patchloom.shown import Grid, Shown, Verbatim

_Z = 1.959963984540054  # standard normal quantile of a 95 % interval
_UNSURE = 0.07  # so far from a share its interval may reach before a sentence says that the images are few


def wilson(share: float, n: int, z: float = _Z) -> tuple[float, float]:
    """Wilson's score interval for a ``share`` in [0, 1] of ``n`` trials (Wilson 1927); ``z`` = 1.96 gives 95 %.

    It covers the variation over test images, not over seeds.

    Raises:
        ValueError: no trials.
    """
    if n < 1:
        raise ValueError("a share of no trials has no interval")
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, middle - reach), min(1.0, middle + reach)


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes:
        encoder: its name, or that of a control.
        pooling: of the features, "-" if that has no meaning.
        protocol: its name.
        settings: of the protocol.
        value: a share in [0, 1] if the unit is %.
        low, high: the 95 % interval of the value; equal to it if the value is exact, or has none.
        unit: of the value, "" if it has none.
        right: [n] whether each test image was classified rightly, to compare two rows by; None where that is unknown.
    """

    encoder: str
    pooling: str
    protocol: str
    settings: dict[str, Any]
    value: float
    low: float
    high: float
    unit: str = "%"
    right: Tensor | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(encoder: str, pooling: str, protocol: str, settings: dict[str, Any], value: float, n: int) -> Row:
        """A row whose interval is Wilson's for ``n`` test images."""
        return Row(encoder, pooling, protocol, settings, value, *wilson(value, n))

    @staticmethod
    def of_images(encoder: str, pooling: str, protocol: str, settings: dict[str, Any], right: Tensor) -> Row:
        """The accuracy where ``right`` [n] says which test images are classified rightly, with Wilson's interval."""
        row = Row.of(encoder, pooling, protocol, settings, right.double().mean().item(), len(right))
        return replace(row, right=right.cpu())

    @staticmethod
    def of_means(
        encoder: str, protocol: str, settings: dict[str, Any], values: Sequence[float], unit: str = "%"
    ) -> Row:
        """A mean over images with its normal interval; ``values`` [n], one per image, since patches are dependent."""
        n = len(values)
        mean = sum(values) / n
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else math.inf
        reach, top = _Z * spread / math.sqrt(n), 1.0 if unit == "%" else math.inf
        return Row(encoder, "-", protocol, settings, mean, max(0.0, mean - reach), min(top, mean + reach), unit)

    @staticmethod
    def exact(encoder: str, protocol: str, settings: dict[str, Any], value: float, unit: str = "%") -> Row:
        """A computed value, without an interval."""
        return Row(encoder, "-", protocol, settings, value, value, value, unit)

    def number(self, value: float | None = None) -> str:
        """Formatted as "61.2 %"; of another value with the same unit, if one is given."""
        value = self.value if value is None else value
        return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.2f} {self.unit}".rstrip()

    def text(self) -> str:
        """Formatted with its interval, as "61.2 % [59.0, 63.3]"."""
        if self.low == self.high:
            return self.number()
        low, high = (self.number(bound).partition(" ")[0] for bound in (self.low, self.high))
        return f"{self.number()} [{low}, {high}]"


def paired_difference(one: Tensor, other: Tensor) -> tuple[float, float, float]:
    """How much higher an accuracy is than another one on the same images, and the 95 % interval of that.

    What both classify rightly, or both wrongly, says nothing about the difference, so that the interval is narrower
    than two separate ones suggest. Half a case is added to each of the four outcomes (Agresti and Min 2005), which
    makes it hold for few images, too.

    Args:
        one, other: [n] whether each image was classified rightly.
    """
    n, more, fewer = len(one), int((one & ~other).sum()), int((other & ~one).sum())
    all_, gained, lost = n + 2, more + 0.5, fewer + 0.5
    middle = (gained - lost) / all_
    reach = _Z * math.sqrt(gained + lost - (gained - lost) ** 2 / all_) / all_
    return (more - fewer) / n, middle - reach, middle + reach


def compared(row: Row, control: Row, called: str) -> str:
    """A sentence on whether an encoder is better than a control, in words that the paired interval decides.

    Args:
        row: the encoder's.
        control: on the same test images.
        called: the control, such as "the untrained one".
    """
    if row.right is None or control.right is None or len(row.right) != len(control.right):
        return f"It cannot be compared with {called}, which was asked other images."
    return difference_in_words(paired_difference(row.right, control.right), called)


def difference_in_words(difference: tuple[float, float, float], called: str) -> str:
    """A sentence on whether an encoder is better than a control.

    Args:
        difference: how much higher its share is, and the interval of that: low, high.
        called: the control, such as "the untrained one".
    """
    points, low, high = (100 * share for share in difference)
    interval = f"[{low:+.1f}, {high:+.1f}]"
    if low <= 0 <= high:
        return f"The encoder is not told apart from {called} ({points:+.1f} points {interval})."
    return f"The encoder is {abs(points):.1f} points {'better' if points > 0 else 'worse'} than {called} {interval}."


@dataclass(frozen=True)
class Drawing:
    """A picture that `protocols.evaluate` is to draw.

    Attributes:
        function: path of the function that draws it: this package imports none.
        out: the file.
        content: its other arguments.
    """

    function: str
    out: Path
    content: dict[str, Any]


def lost_images(unreadable: Sequence[str], what: str = "images") -> list[str]:
    """A list with the sentence on ``unreadable`` images; empty if there are none."""
    if not unreadable:
        return []
    return [f"{len(unreadable):,} {what} could not be read and were left out, such as {unreadable[0]}."]


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """All rows of one evaluation and what they have in common.

    Attributes:
        rows: the encoder's, then its controls'.
        protocol: sentences on what was done.
        headline: one sentence with the numbers to quote.
        quoted: their rows: the encoder's, then its controls'.
        data, fingerprint: name of the test images, and 16 hex digits of their content.
        seed: of every split and of the untrained encoder.
        n_test: test images that could be read.
        date: ISO 8601, UTC.
        others: reports with other seeds.
        across: the setting whose values are the columns of the table.
        down: its values are the lines instead, and the encoders the columns.
        symbols: names of settings in the table, where they differ.
        short: leave intervals and units out of a large table.
        drawings: pictures to be drawn.
        noun: what was tested: images or recordings.
    """

    rows: list[Row]
    protocol: str
    headline: str
    quoted: tuple[Row, ...]
    data: str
    fingerprint: str
    seed: int
    n_test: int
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    others: tuple[Report, ...] = ()
    across: str = "k"
    down: bool = False
    symbols: Mapping[str, str] = field(default_factory=dict)
    short: bool = False
    drawings: tuple[Drawing, ...] = ()
    noun: str = "images"

    def parts(self, width: int) -> list[str | Grid]:
        """See `Shown`."""
        said: list[str | Grid] = [self.protocol, "", self.table(width), "", self.headline]
        said += [self.spread()] * bool(self.others)
        said += [self.caution()] * bool(self.caution())
        return [*said, *(Verbatim(f"Picture: {drawing.out}") for drawing in self.drawings)]

    def table(self, width: int) -> Grid:
        """All rows, in the form that fits into ``width`` characters."""
        if not any(self.across in row.settings for row in self.rows):
            return fitting([by_row(self.rows)], width)
        wide = across_settings(self.rows, self.across, down=self.down, short=self.short, symbols=self.symbols)
        return fitting([*wide, by_row(self.rows)], width)

    def print(self, console: Console) -> None:
        """Print it to a console of rich."""
        # names and paths may contain brackets, which rich would parse as markup
        console.print(self.text(console.width), markup=False, highlight=False, soft_wrap=True)

    def caution(self) -> str:
        """A sentence, if the test images are too few for the number that is quoted first; else nothing."""
        if not self.quoted or self.quoted[0].unit != "%":
            return ""
        first = self.quoted[0]
        reach = max(first.high - first.value, first.value - first.low)
        if first.low == first.high or reach <= _UNSURE:
            return ""
        return (
            f"The {self.n_test:,} test {self.noun} are few: others could have given {first.number(first.low)} as well "
            f"as {first.number(first.high)}."
        )

    def spread(self) -> str:
        """A sentence with mean and range over the seeds of the quoted numbers."""
        reports = (*self.others, self)
        # an encoder may be quoted several times, and the quoted setting may differ between seeds
        where = [
            dict.fromkeys(str(row.settings[self.across]) for row in same if self.across in row.settings)
            for same in zip(*(report.quoted for report in reports), strict=True)
        ]
        several = len({name for names in where for name in names}) > 1
        said = []
        for number, row in enumerate(self.quoted):
            values = [report.quoted[number].value for report in reports]
            mean, low, high = map(row.number, (sum(values) / len(values), min(values), max(values)))
            name = f"{row.encoder}, {' or '.join(where[number])}" if several and where[number] else row.encoder
            said.append(f"{name} {mean} ({low} to {high})")
        return f"Over {len(reports)} seeds, mean and range: {'; '.join(said)}."
