"""Results of a protocol beside its controls, their confidence intervals, and their table on the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from patchloom.evaluate.tables import across_settings, by_row, fitting
from patchloom.shown import Grid, Shown, Verbatim
from patchloom.verdict import Difference, difference, difference_over_splits

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
        pseudo: [n] jackknife pseudo-values of test images, or of groups of them, for a value that is no mean over
            images; else None.
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
    pseudo: Tensor | None = field(default=None, compare=False, repr=False)

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


def compared(
    ours: Sequence[Row], theirs: Sequence[Row], trained: bool, n: int | None = None, noun: str = "images"
) -> Difference:
    """Difference between the results of an encoder and of a control, one row a seed, all tested on the same images.

    Args:
        ours, theirs: of the encoder and of the control, in the order of the seeds.
        trained: whether chance in a training moves the results.
        n: test images; as many as the rows have results of, if absent.
        noun: what was tested.
    """
    control, value = theirs[-1].encoder, _mean(ours) - _mean(theirs)
    own = [row.right if row.pseudo is None else row.pseudo for row in ours]
    other = [row.right if row.pseudo is None else row.pseudo for row in theirs]
    about = {"control": control, "trained": trained, "noun": noun}
    if any(one is None for one in (*own, *other)) or len({len(one) for one in (*own, *other) if one is not None}) > 1:
        return Difference(control, value, -1.0, 1.0, 0, len(ours), trained, noun=noun)
    sides = [torch.stack([one for one in side if one is not None]).double().numpy() for side in (own, other)]
    values = [row.value for row in ours], [row.value for row in theirs]
    return difference(*sides, values if ours[0].pseudo is not None else None, n=n, **about)


def _mean(rows: Sequence[Row]) -> float:
    return sum(row.value for row in rows) / len(rows)


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
        headline: one sentence with the numbers to quote; `conclusion` says what they mean.
        quoted: their rows: the encoder's, then its controls'.
        against: the encoder's differences from controls; with ``others``, over all seeds.
        pairs: places in ``quoted`` of the two rows of each difference.
        data, fingerprint: name of the test images, and 16 hex digits of their content.
        seed: of every split and of the untrained encoder.
        n_test: test images that could be read.
        date: ISO 8601, UTC.
        others: reports with other seeds, each with its own differences.
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
    against: tuple[Difference, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()

    def parts(self, width: int) -> list[str | Grid]:
        """See `Shown`."""
        said: list[str | Grid] = [self.headline]
        said += [self.spread()] * bool(self.others)
        said += [self.caution()] * bool(self.caution())
        said += [self.conclusion()] * bool(self.against)
        said += ["", self.table(width), "", self.protocol]
        return [*said, *(Verbatim(f"Picture: {drawing.out}") for drawing in self.drawings)]

    def conclusion(self) -> str:
        """Sentences on whether the encoder is better than its controls; "" if it has none."""
        return " ".join(one.sentence() for one in self.against)

    def beside(self, trained: bool, *pairs: tuple[int, int]) -> Report:
        """The report with the differences between quoted rows.

        Args:
            trained: whether chance in a training moves the results.
            pairs: places in ``quoted`` of an encoder's row and a control's; the first row beside each other one if
                none is given.
        """
        pairs = pairs or tuple((0, i) for i in range(1, len(self.quoted)))
        found = [compared([self.quoted[i]], [self.quoted[j]], trained, self.n_test, self.noun) for i, j in pairs]
        return replace(self, against=tuple(found), pairs=pairs)

    def over_seeds(self, others: Sequence[Report]) -> Report:
        """The report as the last one of several seeds, with its differences over all of them.

        Args:
            others: of the other seeds.
        """
        reports, found = (*others, self), []
        same = len({report.fingerprint for report in reports}) == 1
        for (i, j), one in zip(self.pairs, self.against, strict=True):
            ours, theirs = ([report.quoted[k] for report in reports] for k in (i, j))
            if same:
                found.append(compared(ours, theirs, one.trained, self.n_test, self.noun))
                continue
            values = [row.value for row in ours], [row.value for row in theirs]
            n = min(report.against[len(found)].n for report in reports)
            about = {"control": one.control, "trained": one.trained, "noun": self.noun}
            found.append(difference_over_splits(*values, n, **about))
        return replace(self, others=tuple(others), against=tuple(found))

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
