"""A page as one HTML file that needs nothing besides itself: style, programs, pictures and sounds are inside.

Text of users (names of files, classes and runs) is escaped by Jinja where it stands as HTML, and written in ASCII
without ``<`` where a program reads it as JSON. A content security policy in the head forbids every request, so that a
browser would not follow what slipped through.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import jinja2
from markupsafe import Markup

# What is on a page, before any of it is HTML: text is plain and escaped later, pictures and sounds are data URIs.


Tone = Literal["good", "fair", "bad", "plain"]


class Quantity(NamedTuple):
    """A value of an encoder or of what it stands beside.

    Attributes:
        value: a share in [0, 1] if ``percent``.
        percent: it is written as a percentage.
        low, high: its 95 % interval; None where there is none.
        name: of the control; "" of the encoder itself.
    """

    value: float
    percent: bool = True
    low: float | None = None
    high: float | None = None
    name: str = ""

    def text(self) -> str:
        """Formatted as "50.7 %" or "0.412"."""
        if self.percent:
            return f"{100 * self.value:.1f} %"
        return f"{self.value:.3f}" if 1e-3 <= abs(self.value) < 10 else f"{self.value:.3g}"

    def interval(self) -> str:
        """Formatted as "[48.9, 52.5]", in the unit of the value; "" where there is none."""
        if self.low is None or self.high is None:
            return ""
        return (
            f"[{100 * self.low:.1f}, {100 * self.high:.1f}]" if self.percent else f"[{self.low:.3g}, {self.high:.3g}]"
        )


class Number(NamedTuple):
    """A key number.

    Attributes:
        label: what was measured, such as "kNN accuracy".
        quantity: the encoder's.
        beside: the controls'.
        note: a quieter line, such as on which images.
    """

    label: str
    quantity: Quantity
    beside: Sequence[Quantity] = ()
    note: str = ""


class Picture(NamedTuple):
    """A picture sheet.

    Attributes:
        title: a few words.
        caption: what is seen, and what to look for.
        alt: for whom cannot see it.
        uri: the picture as a data URI.
        width, height: in pixels.
    """

    title: str
    caption: str
    alt: str
    uri: str
    width: int
    height: int


class Setting(NamedTuple):
    """A setting, its value, and why ``auto`` became that; "" where somebody gave it."""

    name: str
    value: str
    reason: str = ""


class Curve(NamedTuple):
    """A line of a chart: its name, points [n] each, and whether it is a run's or what a run stands beside.

    ``kind`` is the name of a baseline without that of its run, where the line's own name has both.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    baseline: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves on common axes.

    Attributes:
        title, note: what is drawn, and a quieter line.
        lines: of one run or of several.
        percent: values are shares, written as percentages.
        along: what the horizontal axis counts.
    """

    title: str
    note: str
    lines: Sequence[Curve]
    percent: bool = False
    along: str = "epochs"


@dataclass(frozen=True)
class Cloud:
    """A map of embeddings: images as points, near each other where the encoder finds them alike.

    Attributes:
        projections: x and y [n] each in [0, 1] by name, such as "PCA" and "t-SNE".
        names: [n] of the images.
        labels: [n] into ``classes``, -1 for none.
        classes: names of the classes; empty without labels.
        neighbours: [n k] the nearest images by cosine similarity, the image itself left out.
        similarities: [n k] of these.
        sprite: all thumbnails as one picture, a data URI, row by row.
        columns: thumbnails in a row of it.
        side: of a thumbnail, in pixels.
        note: how it was made, and what may not be read from it.
    """

    projections: dict[str, tuple[Sequence[float], Sequence[float]]]
    names: Sequence[str]
    labels: Sequence[int]
    classes: Sequence[str]
    neighbours: Sequence[Sequence[int]]
    similarities: Sequence[Sequence[float]]
    sprite: str
    columns: int
    side: int
    note: str


class Recording(NamedTuple):
    """A recording: its picture, and the sound as a data URI."""

    name: str
    caption: str
    picture: Picture
    sound: str


class Slider(NamedTuple):
    """An image, and over it truth and answer of equal size, between which a slider moves."""

    name: str
    caption: str
    truth: Picture
    answer: Picture


class Table(NamedTuple):
    """A table: a title, a heading, rows of cells, and a sentence below. The first column names the row."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class RunPart:
    """What the page has of one run.

    Attributes:
        name: of its folder.
        state: such as "finished" or "epoch 3.2 of 42, on the way".
        verdict: a word or a few, such as "healthy"; tone: how it is coloured.
        why: the figures that say so; then: what to try next.
        summary: its closing sentence, "" while it trains.
        gains: differences from controls, which answer whether pre-training helped; None without any.
        numbers: key numbers, the most telling first.
        settings, pictures, cloud, recordings, sliders, tables: as their classes say; empty or None without any.
        files: sentences on broken files, exact and near copies.
        about: machine, versions, time, data and the like, as terms and texts.
        command: a line that repeats the run.
    """

    name: str
    state: str
    verdict: str = ""
    tone: Tone = "plain"
    why: str = ""
    then: str = ""
    summary: str = ""
    gains: Table | None = None
    numbers: Sequence[Number] = ()
    settings: Sequence[Setting] = ()
    pictures: Sequence[Picture] = ()
    cloud: Cloud | None = None
    recordings: Sequence[Recording] = ()
    sliders: Sequence[Slider] = ()
    tables: Sequence[Table] = ()
    files: Sequence[str] = ()
    about: Sequence[tuple[str, str]] = ()
    command: str = ""


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        title: of the page, such as "photos-mae".
        lead: sentences at its head, the most important first: of a comparison what it found.
        tone: of the lead.
        tables: of a comparison; the first one is what the lead rests on.
        charts: curves, of all runs on common axes.
        runs: the most important first.
        made: when, ISO 8601, UTC.
        version: of patchloom.
    """

    title: str
    made: str
    version: str
    lead: Sequence[str] = ()
    tone: Tone = "plain"
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    runs: Sequence[RunPart] = ()
    notes: Sequence[str] = field(default=())


_MOST_ROWS = 200  # of a chart's numbers as a table: more are no help to a reader
_FIGURES = re.compile(r"(?=.*\d)[\d\s.,:;%()\[\]<>≈~=/x×+±−–-]{1,40}")
_NUMERIC = re.compile(r"[-+−±<>≈~]?\s?\d.{0,20}|[-–—]?")  # what is read down a column, and a place where nothing is


def render(page: Page) -> str:
    """The whole HTML file, to be written as UTF-8."""
    text = _environment().get_template("page.html").render(page=page)
    # names of files that are no UTF-8 hold lone surrogates, which no file can
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("patchloom.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["source"] = _source
    environment.filters |= {
        "json": script_json,
        "curves": chart_data,
        "line_numbers": line_numbers,
        "points": map_data,
        "chart_rows": chart_rows,
        "bars": bars,
        "numeric": numeric_columns,
        "figures": is_figures,
    }
    return environment


def _source(name: str) -> Markup:
    """A style sheet or program of ours as it is, to stand inside the page."""
    return Markup(files("patchloom.report").joinpath("templates", name).read_text("utf-8"))


def script_json(value: Any) -> Markup:
    """JSON that may stand inside ``<script>``: in ASCII, so without U+2028, and without a ``<`` that could end it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def line_numbers(charts: Sequence[Chart]) -> dict[tuple[str, bool], int]:
    """A number for each line by its name and whether it is a baseline, so that a run has one colour in all charts.

    Baselines of one kind, such as chance, have one number, whichever runs they are of: they are drawn alike.
    """
    lines = [line for chart in charts for line in chart.lines]
    runs = list(dict.fromkeys(line.name for line in lines if not line.baseline))
    kinds = list(dict.fromkeys(line.kind or line.name for line in lines if line.baseline))
    return {
        (line.name, line.baseline): kinds.index(line.kind or line.name) if line.baseline else runs.index(line.name)
        for line in lines
    }


def chart_data(chart: Chart, numbers: dict[tuple[str, bool], int]) -> dict[str, Any]:
    """What the chart's program reads. Points that are not finite are left out: a line has a gap there."""
    return {
        "title": chart.title,
        "percent": chart.percent,
        "along": chart.along,
        "lines": [
            {
                "name": line.name,
                "baseline": line.baseline,
                "number": numbers[line.name, line.baseline],
                "points": [
                    [float(x), float(y) if math.isfinite(y) else None]
                    for x, y in zip(line.x, line.y, strict=True)
                    if math.isfinite(x)
                ],
            }
            for line in chart.lines
        ],
    }


def map_data(cloud: Cloud) -> dict[str, Any]:
    """What the map's program reads, without the thumbnails, which are in the page as a picture."""
    return {
        "projections": {
            name: [[round(float(one), 4) for one in axis] for axis in axes] for name, axes in cloud.projections.items()
        },
        "names": list(cloud.names),
        "labels": [int(label) for label in cloud.labels],
        "classes": list(cloud.classes),
        "neighbours": [[int(one) for one in nearest] for nearest in cloud.neighbours],
        "similarities": [[round(float(one), 3) for one in row] for row in cloud.similarities],
        "columns": cloud.columns,
        "side": cloud.side,
    }


def chart_rows(chart: Chart) -> list[list[str]]:
    """The numbers of a chart as a table: a row for each place on the horizontal axis, the first and the last included.

    Of more than 200 places, so many are taken evenly. A line that has no point at a place has an empty cell there.
    """
    places = sorted({float(x) for line in chart.lines for x in line.x if math.isfinite(x)})
    if len(places) > _MOST_ROWS:
        places = [places[round(i * (len(places) - 1) / (_MOST_ROWS - 1))] for i in range(_MOST_ROWS)]
    lines = [dict(zip(map(float, line.x), line.y, strict=True)) for line in chart.lines]
    return [[f"{x:g}", *(_cell(line.get(x), chart.percent) for line in lines)] for x in places]


def _cell(value: float | None, percent: bool) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{100 * value:.1f} %" if percent else f"{value:.4g}"


def bars(numbers: Sequence[Number]) -> list[list[dict[str, Any]]]:
    """For each key number the rows of its little table: its own, then its controls'.

    Where all rows of a key number are percentages, each has the length of its bar and the ends of its interval, if it
    has one. A track is 0 to 100 %, whatever other key numbers there are: lengths can be compared, also between runs.
    """
    found = [_rows_of(number) for number in numbers]
    for rows in found:
        if len(rows) < 2 or any(row["bar"] is None for row in rows):
            for row in rows:
                row["bar"] = row["reach"] = None
    return found


def _rows_of(number: Number) -> list[dict[str, Any]]:
    rows = []
    for one in (number.quantity, *number.beside):
        drawn = one.percent and math.isfinite(one.value) and one.value >= 0
        reach = None if one.low is None or one.high is None or not drawn else [_within(one.low), _within(one.high)]
        value = f"{one.text()} {one.interval()}".strip() if one.name else one.text()
        rows.append({"name": one.name, "value": value, "bar": _within(one.value) if drawn else None, "reach": reach})
    return rows


def _within(share: float) -> float:
    """A share as a percentage within the track, as exactly as it is written."""
    return min(100.0, max(0.0, round(100 * share, 1)))


def is_figures(cell: str) -> bool:
    """Whether a cell of a table is of numbers alone, such as "97.5 % (95.0-100.0)", and is not to be broken."""
    return _FIGURES.fullmatch(cell) is not None


def numeric_columns(table: Table) -> list[bool]:
    """Which columns hold numbers, so that they stand on the right; the first one names the row."""
    columns = [[row[i] for row in table.rows if i < len(row)] for i in range(len(table.heading))]
    return [
        i > 0 and any(column) and all(_NUMERIC.fullmatch(one) for one in column) for i, column in enumerate(columns)
    ]
