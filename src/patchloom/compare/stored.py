"""Comparison of encoders that were evaluated already, image by image, without training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from patchloom.compare.outcome import CLAIMS, Comparison, Table, over_seeds, tables_of
from patchloom.data.sources.in_memory import DataLike, is_object
from patchloom.data.sources.open import split_names
from patchloom.display import TextTable
from patchloom.errors import PatchloomError, listing
from patchloom.results import store
from patchloom.results.evaluation import compare_results
from patchloom.results.result import Result

_RUN = ("requested.yaml", "config.yaml")
# settings that were measured, that follow from the encoder, or that held-out training images selected
_CHOSEN = {"pooling", "l2", "held_out", "held_out_accuracy", "best_epoch", "best_step", "agreement"}
_CHOSEN |= {"validation_accuracy", "validation_score", "validation_images"}
_SELECTED = {"layer", "blr", "lr"}
_SHOWN = 3  # options in a title, of those that differ between evaluations by one protocol
_SCOPE = "The intervals are of these encoders on other test images: the same task may differ in another training."


class Request(NamedTuple):
    """Request of an evaluation, which must be equal to compare two."""

    protocol: str
    measure: str
    settings: frozenset[tuple[str, str]]


Cell = tuple[int, str, int]  # seed, content and number of the test images
Evaluated = Mapping[Request, Mapping[Cell, Result]]  # quoted results of an encoder, the oldest first


def find_runs(data: DataLike) -> list[Path]:
    """Return the folders of runs and evaluated encoders that ``data`` names; [] if it names images."""
    if is_object(data):
        return []
    places = [Path(name) for name in split_names(data)]
    runs = [place for place in places if _is_run(place)]
    if runs and len(runs) < len(places):
        other = next(place for place in places if place not in runs)
        raise PatchloomError(
            f"{runs[0]} is a run, and {other} is not: give runs only, to compare them, or images only, to train"
        )
    return runs


def _is_run(place: Path) -> bool:
    there = {name for name in (*_RUN, store.FILE, "compare.yaml") if os.path.isfile(place / name)}
    return {*_RUN} <= there or (store.FILE in there and "compare.yaml" not in there)


def compare_stored(runs: Sequence[Path]) -> Comparison:
    """Compare runs by the results that `patchloom.evaluate` stored in them; the first run is the reference.

    Two evaluations are compared if they have the same protocol, options and test images. Differences are paired by
    image; seeds are paired as far as both encoders have them.

    Args:
        runs: folders of runs, or of encoders that were evaluated.

    Raises:
        PatchloomError: fewer than two runs, or no evaluation in common.
    """
    if len({run.resolve() for run in runs}) < max(2, len(runs)):
        raise PatchloomError("a comparison of runs needs two different ones: patchloom compare RUN RUN")
    notes, tables, verdict, results = list[str](), list[Table](), list[str](), list[Result]()
    names = [run.name if [one.name for one in runs].count(run.name) == 1 else str(run) for run in runs]
    found = {name: _evaluated(run, name, notes) for name, run in zip(names, runs, strict=True)}
    common = [*_in_common(found)]
    for request, (reference, *others) in common:
        alike = frozenset.intersection(*(one.settings for one, _ in common if one.protocol == request.protocol))
        own = sorted(request.settings - alike, key=lambda pair: (pair[0] != "recipe", pair))[:_SHOWN]
        way = ", ".join([request.protocol, *(f"{name.replace('_', ' ')} {value}" for name, value in own)])
        first, ours = reference[0], reference[0].encoder
        trained = any(one.trained for its in (reference, *others) for one in its[0].against)
        rows = [(ours, over_seeds(reference), "", "")]
        results += reference
        for its in others:
            name = its[0].encoder
            apart = compare_results(its, reference, trained or "recipe" in first.settings)
            rows.append((name, over_seeds(its), apart.text(), CLAIMS.get(apart.claim, apart.claim.value)))
            verdict.append(f"By {way}, on {first.data}: {apart.sentence(name)}")
            results += [*its[:-1], replace(its[-1], against=(apart,))]
        heading = "encoder", f"{request.measure}, 95 % interval", f"minus {ours}", "differs"
        title = f"{way} on {first.n:,} test {first.noun} of {first.data}"
        tables.append((title, TextTable(heading, tuple(rows), names=frozenset({0})), ""))
        grid = {its[0].encoder: {request.measure: its} for its in (reference, *others)}
        tables += tables_of(title, "encoder", grid, "")[1:]
        if lacking := [name for name in names if name not in grid]:
            notes.append(f"{title}: no comparable result of {listing(lacking, 'and')}.")
    if not tables:
        raise PatchloomError(_nothing_in_common(found))
    return Comparison(None, verdict, tables, None, (*notes, _SCOPE), results=tuple(results))


def _evaluated(run: Path, name: str, notes: list[str]) -> Evaluated:
    """Return the first quoted result of each evaluation, which is the encoder's, with the outcomes of images."""
    found: dict[Request, dict[Cell, Result]] = {}
    for evaluation in store.evaluations(store.load(run, notes, outcomes=True)):
        own = next((one for one in evaluation if one.quoted and one.protocol), None)
        if own is None or own.outcomes is None or own.unit != "%":
            continue
        chosen = _CHOSEN | (_SELECTED if "held_out_accuracy" in own.settings else set())
        settings = frozenset((key, str(value)) for key, value in own.settings.items() if key not in chosen)
        cells = found.setdefault(Request(own.protocol, own.measure, settings), {})
        cell = own.seed, own.fingerprint, own.n
        cells.pop(cell, None)  # a repeated evaluation replaces the earlier one
        cells[cell] = replace(own, encoder=name)
    return found


def _in_common(found: Mapping[str, Evaluated]) -> Iterator[tuple[Request, list[list[Result]]]]:
    """Yield what was asked of the first encoder and of others on the same images, with the results by seed of each."""
    (_, reference), *others = found.items()
    for asked, cells in reference.items():
        for data in dict.fromkeys(one.data for one in cells.values()):
            common = {cell: one for cell, one in cells.items() if one.data == data}
            there = [common]
            for _, other in others:
                if matching := _matching(common, other.get(asked, {})):
                    common, there = {cell: common[cell] for cell in matching}, [*there, matching]
            by_seed = {cell[0]: cell for cell in common}  # of the same seed, the newest images
            if len(there) > 1:
                yield asked, [[its[by_seed[seed]] for seed in sorted(by_seed)] for its in there]


def _matching(cells: Mapping[Cell, Result], other: Mapping[Cell, Result]) -> dict[Cell, Result]:
    """Return the other's results on the same images by cell: those of the same seed, or else of another one."""
    found = {cell: other[cell] for cell in cells if cell in other}
    rest = [cell for cell in other if cell not in found]
    for cell in cells:
        same = next((one for one in rest if one[1:] == cell[1:]), None)
        if cell not in found and same is not None:
            found[cell] = other[same]
            rest.remove(same)
    return {cell: found[cell] for cell in cells if cell in found}


def _nothing_in_common(found: Mapping[str, Evaluated]) -> str:
    """Return a sentence on what each encoder has, and what differs."""
    said = []
    for name, its in found.items():
        has = [
            f"{asked.protocol} on {one.n:,} {one.noun} of {one.data}" for asked in its for one in its[asked].values()
        ]
        said.append(f"{name} has {listing(dict.fromkeys(has), 'and') or 'none with outcomes of images'}")
    first, *others = found.values()
    pairs = [(one, two) for one in first for other in others for two in other if one[:2] == two[:2]]
    options = sorted({name for one, two in pairs for name, _ in one.settings ^ two.settings})
    why = f" (options differ: {listing(options, 'and')})" if options else " (test images differ)" * bool(pairs)
    return (
        f"the runs have no evaluation in common: {'; '.join(said)}{why}. Evaluate each in the same way, such as by "
        f"patchloom evaluate knn {[*found][-1]} DATA"
    )
