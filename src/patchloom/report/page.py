"""Report pages as self-contained HTML files with style, scripts, pictures and sounds inside.

Text from users (names of files, classes and runs) is escaped by Jinja in HTML, and written in ASCII without ``<`` in
JSON. A content security policy in the head forbids every request, as a second line of defence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import jinja2
from markupsafe import Markup

from patchloom.look.charts import Panel
from patchloom.results.result import Result
from patchloom.system.templates import environment, render_page

# Contents of a page: text is plain and escaped when rendered; pictures and sounds are data URIs.


Tone = Literal["good", "fair", "bad", "plain"]


class Number(NamedTuple):
    """Key number.

    Attributes:
        label: name of the measure, such as "kNN accuracy".
        result: result of the encoder.
        beside: results of the controls.
        note: a sentence in small print, such as the images it was measured on.
    """

    label: str
    result: Result
    beside: Sequence[Result] = ()
    note: str = ""


class Picture(NamedTuple):
    """Picture with its caption.

    Attributes:
        title: a few words.
        caption: one or two sentences on what the picture shows and what to look for.
        alt: alternative text.
        uri: the picture as a data URI.
        width, height: size in pixels.
    """

    title: str
    caption: str
    alt: str
    uri: str
    width: int
    height: int


class Setting(NamedTuple):
    """Setting with its value and the reason for it; "" if the user gave it."""

    name: str
    value: str
    reason: str = ""


@dataclass(frozen=True)
class Cloud:
    """Embedding map: images as points, which are close if their features are similar.

    Attributes:
        projections: x and y [n], each in [0, 1], by name, such as "PCA" and "t-SNE".
        names: names [n] of the images.
        labels: indices [n] into ``classes``, -1 for none.
        classes: names of the classes; empty without labels.
        neighbours: [n k] the nearest other images by cosine similarity.
        similarities: [n k] cosine similarities of the neighbours.
        sprite: all thumbnails as one picture, a data URI, row by row.
        columns: number of thumbnails in a row.
        side: side of a thumbnail in pixels.
        note: a sentence on how the map was made and how to read it.
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
    """Recording: its spectrogram, and the sound as a data URI."""

    name: str
    caption: str
    picture: Picture
    sound: str


class Slider(NamedTuple):
    """Ground truth and prediction of equal size, between which a slider moves."""

    name: str
    caption: str
    truth: Picture
    answer: Picture


class Table(NamedTuple):
    """Table: a title, a heading, rows of cells, and a sentence below. The first column names the row."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class RunPart:
    """Contents of the page about one run.

    Attributes:
        name: name of its folder.
        state: progress, such as "finished" or "epoch 3.2 of 42, training".
        verdict: a few words, such as "healthy".
        tone: colour of the verdict.
        why: the figures behind the verdict.
        then: what to try next.
        summary: its closing sentence; "" while it trains.
        gains: differences from controls, which answer whether pre-training helped; None without any.
        numbers: key numbers, the most important first.
        settings, pictures, cloud, recordings, sliders, tables: further contents; empty or None without any.
        files: sentences on unreadable files, exact and near copies.
        about: pairs of a term and a text on the machine, versions, dates and data.
        command: the command that repeats the run.
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
    """Report page.

    Attributes:
        title: title of the page, such as "photos-mae".
        made: creation time, ISO 8601, UTC.
        version: version of patchloom.
        lead: sentences at the top, the most important first, such as the results of a comparison.
        tone: colour of the lead.
        tables: tables of a comparison; the first one supports the lead.
        charts: curves of all runs on common axes.
        runs: contents about each run, the most important first.
        methods: methods paragraphs, for a paper.
        bibtex: BibTeX entries of what was used; "" without paragraphs.
        notes: sentences on missing or damaged parts.
    """

    title: str
    made: str
    version: str
    lead: Sequence[str] = ()
    tone: Tone = "plain"
    tables: Sequence[Table] = ()
    charts: Sequence[Panel] = ()
    runs: Sequence[RunPart] = ()
    methods: Sequence[str] = ()
    bibtex: str = ""
    notes: Sequence[str] = field(default=())


_MOST_ROWS = 200  # of a chart's numbers as a table
# cells of numbers alone, such as "97.5 % (95.0-100.0)", which must not wrap
FIGURES = re.compile(r"(?=.*\d)[\d\s.,:;%()\[\]<>≈~=/x×+±−–-]{1,40}")
_NUMERIC = re.compile(r"[-+−±<>≈~]?\s?\d.{0,20}|[-–—]?")  # a number, or an empty cell


def render(page: Page) -> str:
    """Render a page as HTML, to be written as UTF-8."""
    return render_page(_templates(), "page.html", page=page)


@cache
def _templates() -> jinja2.Environment:
    templates = environment("patchloom.report", html=True)
    templates.globals["source"] = _source
    # JSON in ASCII, so without U+2028; Jinja escapes <, > and &, which would be unsafe inside <script>
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": True, "allow_nan": False, "separators": (",", ":")}
    templates.filters |= {
        "curves": chart_data,
        "line_numbers": line_numbers,
        "chart_rows": chart_rows,
        "bars": bars,
        "numeric": numeric_columns,
        "figures": FIGURES.fullmatch,
    }
    return templates


def _source(name: str) -> Markup:
    """Return a style sheet or script from the templates, unescaped."""
    return Markup(files("patchloom.report").joinpath("templates", name).read_text("utf-8"))


def line_numbers(charts: Sequence[Panel]) -> dict[tuple[str, bool], int]:
    """Number the lines by name and whether they are baselines, so that a run has the same colour in all charts.

    Baselines of the same kind, such as chance, share a number and are drawn alike for all runs.
    """
    lines = [line for chart in charts for line in chart.lines]
    runs = list(dict.fromkeys(line.name for line in lines if not line.dashed))
    kinds = list(dict.fromkeys(line.kind or line.name for line in lines if line.dashed))
    return {
        (line.name, line.dashed): kinds.index(line.kind or line.name) if line.dashed else runs.index(line.name)
        for line in lines
    }


def chart_data(chart: Panel, numbers: dict[tuple[str, bool], int]) -> dict[str, Any]:
    """Return the data of a chart for its script. Values that are not finite become gaps in the line."""
    return {
        "title": chart.title,
        "percent": chart.percent,
        "along": chart.axis,
        "lines": [
            {
                "name": line.name,
                "baseline": line.dashed,
                "number": numbers[line.name, line.dashed],
                "points": [
                    [float(x), float(y) if math.isfinite(y) else None]
                    for x, y in zip(line.x, line.y, strict=True)
                    if math.isfinite(x)
                ],
            }
            for line in chart.lines
        ],
    }


def chart_rows(chart: Panel) -> list[list[str]]:
    """Return the numbers of a chart as a table with a row for each position on the horizontal axis.

    At most 200 evenly spaced positions are listed, including both ends. A line without a point there has an empty cell.
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
    """Return the rows of each key number: the encoder's, then those of its controls.

    If all rows of a key number are percentages, each has the length of its bar and the ends of its interval, if any.
    Bars always range from 0 to 100 %, so that they can be compared between key numbers and runs.
    """
    found = []
    for number in numbers:
        those = (number.result, *number.beside)
        drawn = len(those) > 1 and all(one.unit == "%" and one.value >= 0 for one in those)
        rows = []
        for i, one in enumerate(those):
            bar = _within(one.value) if drawn else None
            reach = [_within(one.low), _within(one.high)] if drawn and one.interval() else None
            row = {"name": one.encoder, "value": one.text(), "bar": bar, "reach": reach}
            # the interval of the encoder stands above
            rows.append(row if i else row | {"name": "this run", "value": one.number()})
        found.append(rows)
    return found


def _within(share: float) -> float:
    """Convert a fraction to a percentage in [0, 100], rounded to one digit like the text."""
    return min(100.0, max(0.0, round(100 * share, 1)))


def numeric_columns(table: Table) -> list[bool]:
    """Return for each column whether it holds numbers and is right-aligned; the first one names the row."""
    columns = [[row[i] for row in table.rows if i < len(row)] for i in range(len(table.heading))]
    return [
        i > 0 and any(column) and all(_NUMERIC.fullmatch(one) for one in column) for i, column in enumerate(columns)
    ]
