"""What ``embed`` says: before it starts, and of what it made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchloom.embed.card import Card
from patchloom.embed.near import Neighbour
from patchloom.files import size_in_words
from patchloom.nets.pooling import POOLED
from patchloom.shown import Grid, Shown, Verbatim
from patchloom.waiting import duration

_SCALE = "and how many pairs of rows are as near"
_WHICH = POOLED | {"patches": "the patch tokens"}


def planned(card: Card, file: Path, noun: str, size: int, seconds: float | None, at_most: bool) -> str:
    """How many images there are, what becomes of each, how large the file will be, and how long it takes.

    Args:
        card: how vectors are made.
        file: where they go.
        noun: images or recordings.
        size: about, of the file, in bytes.
        seconds: about; None: not known.
        at_most: processes that read will make it shorter.
    """
    n = sum(card["data"]["splits"].values())
    layer = "" if card["layer"] == "norm" else f" after {card['layer']}"
    takes = "" if seconds is None else f", and it takes {'at most ' * at_most}about {duration(seconds)}"
    return (
        f"{n:,} {noun}: of each, {_WHICH[card['pooling']]}{layer} by {card['encoder']['name']}, {in_numbers(card)}. "
        f"{file} will have about {size_in_words(size)}{takes}."
    )


def in_numbers(card: Card) -> str:
    """The size of a vector, such as "128 numbers in float32"."""
    *patches, width = card["shape"]
    return f"{f'{math.prod(patches):,} times ' if patches else ''}{width:,} numbers in {card['dtype']}"


@dataclass(frozen=True, repr=False)
class Embedded(Shown):
    """A file of vectors.

    Attributes:
        file: where it is.
        card: how they were made, and how many there are.
        size: of the file, in bytes.
        made: this call made it; else it was there already.
        notes: sentences on the encoder, and on what was left out.
        near: the image to which the nearest were asked for; "" for none.
        neighbours: the nearest, the nearest first.
    """

    file: Path
    card: Card
    size: int
    made: bool
    notes: tuple[str, ...] = ()
    near: str = ""
    neighbours: tuple[Neighbour, ...] = ()

    def parts(self, width: int) -> Sequence[str | Grid]:
        """See `Shown`."""
        shown: list[str | Grid] = [*self.notes, *map(Verbatim, self.sentences())]
        return [*shown, Grid.of(self.table())] if self.neighbours else shown

    def sentences(self) -> list[str]:
        """What is in the file; and to which image the nearest are."""
        holds = f"{self.card['rows']:,} vectors of {in_numbers(self.card)} ({size_in_words(self.size)})"
        said = [
            f"{self.file} has {holds}."
            if self.made
            else f"{self.file} is there already, made in this very way: {holds}. Nothing was computed again."
        ]
        if not self.neighbours:
            return said
        return [*said, f"Nearest to {self.near}, by the cosine of the vectors without their mean, {_SCALE}:"]

    def table(self) -> list[tuple[str, ...]]:
        """The nearest below a heading; without splits or labels where there are none."""
        columns = {
            "rank": [str(one.rank or "") for one in self.neighbours],
            "cosine": [f"{one.cosine:.4f}" for one in self.neighbours],
            "as near": ["" if one.itself else _one_in(one.as_near) for one in self.neighbours],
            "split": [one.split for one in self.neighbours],
            "label": [one.label or "" for one in self.neighbours],
            "path": [f"{one.path}{' (the image itself)' if one.itself else ''}" for one in self.neighbours],
        }
        if len(self.card["data"]["splits"]) == 1:
            del columns["split"]
        for name in ("as near", "label"):
            if not any(columns[name]):
                del columns[name]
        return [tuple(columns), *zip(*columns.values(), strict=True)]


def _one_in(share: float) -> str:
    """A fraction of pairs, such as "1 pair in 120"; "" if it is not known."""
    if math.isnan(share):
        return ""
    if not share:
        return "no pair"
    count = 1 / share
    return f"1 pair in {count:.1f}" if count < 10 else f"1 pair in {float(f'{count:.2g}'):,.0f}"
