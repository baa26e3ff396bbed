"""What is on a page, before any of it is HTML: text is plain and escaped later, pictures and sounds are data URIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Tone = Literal["good", "fair", "bad", "plain"]


class Number(NamedTuple):
    """A key number.

    Attributes:
        label: what was measured, such as "kNN accuracy".
        value: in words, such as "50.7 %".
        interval: likewise, such as "[48.9, 52.5]"; "" where there is none.
        beside: the controls' names and numbers.
        note: a quieter line, such as on which images.
    """

    label: str
    value: str
    interval: str = ""
    beside: Sequence[tuple[str, str]] = ()
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
    """A line of a chart: its name, points [n] each, and whether it is a run's or what a run stands beside."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    baseline: bool = False


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
