"""Comparison of encoders that were evaluated already, image by image, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchloom.compare.outcome import Comparison, Table, cell, cell_note, difference_cells, tables_of
from patchloom.data.sources.in_memory import DataLike, is_object
from patchloom.data.sources.open import split_names
from patchloom.display import TextTable
from patchloom.errors import PatchloomError, listing
from patchloom.results import store
from patchloom.results.evaluation import compare_results
from patchloom.results.newest import asked_of, newest
from patchloom.results.regression import MAE
from patchloom.results.result import Result
from patchloom.runs.past import is_comparison
from patchloom.system.files import distinct_names

_RUN = ("requested.yaml", "config.yaml")
_SHOWN = 3  # options in a title, of those that differ between evaluations by one protocol
_SCOPE = "The intervals are of these encoders on other test images: the same task may differ in another training."


def find_runs(data: DataLike) -> list[Path]:
    """Return the folders of runs and evaluated encoders that ``data`` names; [] if it names images."""
    if is_object(data):
        return []
    places = [Path(name) for name in split_names(data)]
    if whole := next(filter(is_comparison, places), None):
        raise PatchloomError(f"{whole} is a comparison: give runs in it, as in patchloom compare {whole}/mae-seed0 RUN")
    runs = [one for one in places if all((one / name).is_file() for name in _RUN) or (one / store.FILE).is_file()]
    if runs and len(runs) < len(places):
        other = next(place for place in places if place not in runs)
        raise PatchloomError(
            f"{runs[0]} is a run, and {other} is not: give runs only, to compare them, or images only, to train"
        )
    return runs


def compare_stored(runs: Sequence[Path]) -> Comparison:
    """Compare runs by the results that `patchloom.evaluate` stored in them; the first run is the reference.

    Two evaluations are compared if they have the same protocol, options and test images. Differences are paired by
    image; seeds are paired as far as all encoders have them.

    Args:
        runs: folders of runs, or of encoders that were evaluated.

    Raises:
        PatchloomError: fewer than two runs, or no evaluation in common.
    """
    if len({run.resolve() for run in runs}) < max(2, len(runs)):
        raise PatchloomError("a comparison of runs needs two different ones: patchloom compare RUN RUN")
    notes, tables, verdict, results = list[str](), list[Table](), list[str](), list[Result]()
    first, *_ = names = distinct_names(runs)
    found = {name: _evaluated(run, name, notes) for run, name in zip(runs, names, strict=True)}
    common = list[dict[str, list[Result]]]()
    for ours in found[first]:
        pairs = {first: {one.seed: one for one in ours}}
        for name in names[1:]:
            # the results of the others by the same options and images, seed by seed
            if alike := next(filter(None, (_pairs(ours, its) for its in found[name])), None):
                ours, pairs[name] = [one for one in ours if one.seed in alike], alike
        if len(pairs) > 1:
            common.append({name: [its[one.seed] for one in ours] for name, its in pairs.items()})
    for those in common:
        (ours, *each), last = those.values(), those[first][-1]
        # the options that tell this evaluation from others by its protocol
        rest = [_options(one) for others in common if (one := others[first][-1]).protocol == last.protocol]
        own = [name for name, value in _options(last).items() if any(one.get(name) != value for one in rest)]
        own.sort(key=lambda name: name != "recipe")
        told = [f"{name.replace('_', ' ')} {last.settings[name]}" for name in own[:_SHOWN]]
        way = ", ".join([last.protocol, *told, *[last.measure] * (last.unit != "%")])
        title = f"{way} on {last.n:,} test {last.noun} of {last.data}"
        trained = any(apart.trained for its in (ours, *each) for one in its for apart in one.against)
        rows = [(last.encoder, cell(ours), "", "")]
        results += ours
        for its in each:
            name, apart = its[-1].encoder, compare_results(its, ours, trained or "recipe" in last.settings)
            rows.append((name, cell(its), *difference_cells(apart)))
            verdict.append(f"By {way}, on {last.data}: {apart.sentence(name, last.measure)}")
            results += [*its[:-1], replace(its[-1], against=(apart,))]
        measure = f"{last.measure} ({last.unit})" if last.unit else last.measure
        heading = "encoder", measure, f"minus {last.encoder}, 95 % interval", "differs"
        tables.append((title, TextTable(heading, tuple(rows), names=frozenset({0})), cell_note(len(ours))))
        tables += tables_of(title, "encoder", {its[-1].encoder: {heading[1]: its} for its in (ours, *each)}, "")[1:]
        if lacking := [name for name in found if name not in those]:
            notes.append(f"{title}: no comparable result of {listing(lacking, 'and')}.")
    if not tables:
        raise PatchloomError(_nothing_in_common(found, runs[-1]))
    return Comparison(None, verdict, tables, None, (*notes, _SCOPE), results=tuple(results))


Evaluated = list[list[Result]]  # of each evaluation of an encoder, the number to quote by seed, with outcomes


def _evaluated(run: Path, name: str, notes: list[str]) -> Evaluated:
    """Return the newest evaluations of a run's encoder that can be compared image by image.

    Of a regression, the mean absolute error stands beside the number to quote.
    """
    found = Evaluated()
    for group in newest(store.load(run, notes, outcomes=True), name):
        by_measure: dict[str, list[Result]] = {}
        for each in group:
            own = next((one for one in each if one.quoted), None)
            # others are of an encoder from scratch or an ensemble, or of a task's own measure
            if own is None or not own.encoder.startswith(name) or not own.protocol:
                continue
            errors = [one for one in each if (one.measure, one.settings) == (MAE, own.settings)]
            for one in (own, *errors):
                # without outcomes, or if they are terms of neither a share nor a jackknife, no interval is known
                if one.outcomes is not None and (one.unit == "%" or one.outcomes.pseudo):
                    by_measure.setdefault(one.measure, []).append(one)
        found += by_measure.values()
    return found


def _options(one: Result) -> dict[str, Any]:
    """Return the options of an evaluation that must be equal; the pooling depends on the encoder."""
    return {name: value for name, value in asked_of(one).items() if name != "pooling"}


def _pairs(ours: Sequence[Result], theirs: Sequence[Result]) -> dict[int, Result]:
    """Return the others by our seed, if they are comparable: those of the same seed, or else of another one."""
    found, rest = dict[int, Result](), list(theirs)
    for one in ours:
        key = one.protocol, one.measure, _options(one), one.about
        same = [other for other in rest if (other.protocol, other.measure, _options(other), other.about) == key]
        if same:
            found[one.seed] = next((other for other in same if other.seed == one.seed), same[0])
            rest.remove(found[one.seed])
    return found


def _nothing_in_common(found: Mapping[str, Evaluated], run: Path) -> str:
    """Return a sentence on what each encoder has, and what differs."""
    said = []
    for name, its in found.items():
        has = dict.fromkeys(f"{one[-1].protocol} on {one[-1].n:,} {one[-1].noun} of {one[-1].data}" for one in its)
        said.append(f"{name} has {listing(has, 'and') or 'none with outcomes of images'}")
    reference, *rest = ([its[-1] for its in evaluated] for evaluated in found.values())
    others = [other for those in rest for other in those]
    same = [
        (_options(one), _options(other))
        for one in reference
        for other in others
        if (one.protocol, one.measure) == (other.protocol, other.measure)
    ]
    options = sorted({name for one, two in same for name in {**one, **two} if one.get(name) != two.get(name)})
    why = f" (options differ: {listing(options, 'and')})" if options else " (test images differ)" * bool(same)
    return (
        f"the runs have no evaluation in common: {'; '.join(said)}{why}. Evaluate each in the same way, such as by "
        f"patchloom evaluate knn {run} DATA"
    )
