"""Comparison of encoders without labels: measures on images that no run trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.compare.outcome import Comparison, health_tables
from patchloom.compare.scores import (
    PIXELS,
    TASK,
    UNTRAINED,
    Contender,
    file_of,
    load_or_compute,
    measurement_key,
)
from patchloom.data.source import Data, Source
from patchloom.display import Lines, StatusMessage, TextTable
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.label_free import MIN_LABEL_FREE_IMAGES, RANKME, label_free_rows
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import untrained_twin
from patchloom.results.result import Result
from patchloom.runs.encoder import load_encoder
from patchloom.runs.held_out import unchanged_held_out

NO_BEST_TASK = (
    "Without labels no task can be named the best: none of the measures below shows how useful the features are. "
    "A few hundred labelled images would (--labels FOLDER; finished runs are not trained again)."
)


def note_too_few_images(held_out: int, noun: str) -> str:
    """Return a sentence if the held-out images are too few for measures without labels; else ""."""
    if held_out >= MIN_LABEL_FREE_IMAGES:
        return ""
    return (
        f"The table of measures without labels is left out: each run holds out {held_out} {noun}, and neighbours "
        f"can be measured among {MIN_LABEL_FREE_IMAGES} or more."
    )


def held_out_of(opened: Data, run: Path) -> Source:
    """Return the images that a run held out; recordings with the settings of its encoder."""
    card = load_encoder(run)[1]
    source = with_encoder_sound(opened, card.sound, card.name).train
    return unchanged_held_out(run, source).parts(source)[1]


def compare_unlabelled(
    those: Sequence[Contender],
    opened: Data,
    run: Path,
    settings: EvalSettings,
    folder: Path,
    notes: Sequence[str],
) -> Comparison:
    """Return the comparison without labels."""
    held_out = held_out_of(opened, run)
    said = [few] if (few := note_too_few_images(len(held_out), held_out.noun)) else []
    found: dict[str, list[list[Result]]] = {}
    measured = [] if few else [one for one in those if one.name != PIXELS]  # these measures do not apply to pixels
    with StatusMessage("measuring encoders without labels", len(measured)) as waiting:
        for number, one in enumerate(measured):
            try:
                found.setdefault(one.name, []).append(_kept_rows(one, number, held_out, settings, folder))
            except PatchloomError as problem:  # diverged, or too few readable images
                said.append(f"{one.name}, seed {one.seed}, has no measures without labels: {problem}.")
            waiting.advance()
    found = {name: rows for name, rows in found.items() if rows}
    tasks = {one.name for one in those if one.kind == TASK}
    said += _by_rankme({name: rows for name, rows in found.items() if name in tasks})
    note = f"On {len(held_out):,} {held_out.noun} that no run trained on; mean over seeds (lowest to highest)."
    tables = [("Measures without labels", _table(found), note)] if found else []
    return Comparison(
        folder, [NO_BEST_TASK, *said], [*tables, *health_tables(those)], None, tuple(notes), (), _csv(found)
    )


def _by_rankme(found: dict[str, list[list[Result]]]) -> list[str]:
    """Rank tasks by RankMe, the only measure that agreed with kNN on both data sets of benchmarks/label_free.py."""
    ranks = {name: [row.value for row in _values(rows).get(RANKME, ())] for name, rows in found.items()}
    means = {name: sum(values) / len(values) for name, values in ranks.items() if values}
    if len(means) < 2:
        return []
    order = listing([f"{name} ({means[name]:.1f})" for name in sorted(means, key=lambda name: -means[name])], "and")
    return [
        f"A hint, not a verdict: by RankMe the order is {order}. Among equally long trainings, RankMe correlated with "
        "kNN on two data sets (Spearman's ρ 0.5 to 0.6), but not clearly with a linear probe."
    ]


def _kept_rows(one: Contender, number: int, source: Source, settings: EvalSettings, out: Path) -> list[Result]:
    key = measurement_key(one.place, [one.name, str(one.seed), "without labels"], [source])
    make = partial(_rows, one, source, settings)
    return load_or_compute(file_of(one, number, out, "-free"), key, make, _plain, _of_plain)


def _plain(rows: Sequence[Result]) -> list[dict[str, Any]]:
    return [row.plain() for row in rows]


def _of_plain(values: Sequence[dict[str, Any]]) -> list[Result]:
    return [*map(Result.of, values)]


def _rows(one: Contender, source: Source, settings: EvalSettings) -> list[Result]:
    vit, card = load_encoder(one.place)
    if one.name == UNTRAINED:
        vit = untrained_twin(card, None, one.seed)[0]
    return label_free_rows(one.name, vit, card, source, replace(settings, seed=0))


def _values(rows: Sequence[Sequence[Result]]) -> dict[str, list[Result]]:
    """Group rows by measure, one row per seed."""
    found: dict[str, list[Result]] = {}
    for seed in rows:
        for row in seed:
            found.setdefault(row.measure, []).append(row)
    return found


def _table(found: dict[str, list[list[Result]]]) -> TextTable:
    names = [*found]
    by = {name: _values(rows) for name, rows in found.items()}
    measures = list(dict.fromkeys(measure for values in by.values() for measure in values))
    rows = [(measure, *(_cell(by[name].get(measure, ())) for name in names)) for measure in measures]
    return TextTable(("measure", *names), tuple(rows), names=frozenset({0}))


def _cell(rows: Sequence[Result]) -> str:
    if not rows:
        return ""
    values = [row.value for row in rows]
    mean = rows[0].number(sum(values) / len(values))
    low, high = map(rows[0].amount, (min(values), max(values)))
    return mean if len(values) == 1 else Lines(f"{mean}\n({low}-{high})")


def _csv(found: dict[str, list[list[Result]]]) -> list[tuple[str | int | float | None, ...]]:
    rows: list[tuple[str | int | float | None, ...]] = []
    for name, seeds in found.items():
        for measure, its in _values(seeds).items():
            values = [float(row.value) for row in its]
            spread = sum(values) / len(values), min(values), max(values)
            # the interval over images belongs to one seed; a mean over several has a range instead
            interval = (float(its[0].low), float(its[0].high)) if len(its) == 1 else (None, None)
            about = measure, name, "without labels", len(values)
            rows.append((*about, *spread, *interval, None, None, None, its[0].unit))
    return rows
