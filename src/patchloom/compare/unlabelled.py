"""Comparison of encoders without labels: measures on images that no run trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.compare.outcome import Comparison, cell_note, health_tables, tables_of
from patchloom.compare.scores import TASK, Contender, ResultCache, measurement_key
from patchloom.data.source import Data
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.protocols.label_free import MIN_LABEL_FREE_IMAGES, RANKME, label_free_rows
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import untrained_twin
from patchloom.results.claims import PIXELS, UNTRAINED
from patchloom.results.result import Result
from patchloom.runs.encoder import load_encoder
from patchloom.runs.held_out import unchanged_held_out

NO_BEST_TASK = (
    "Without labels no task can be named the best: no measure without labels shows how useful the features are. "
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


def compare_unlabelled(
    those: Sequence[Contender],
    opened: Data,
    run: Path,
    settings: EvalSettings,
    folder: Path,
    notes: Sequence[str],
) -> Comparison:
    """Return the comparison without labels."""
    card, cache = load_encoder(run)[1], ResultCache(folder)
    source = with_encoder_sound(opened, card.sound, card.name).train
    held_out = unchanged_held_out(run, source).parts(source)[1]
    said = [few] if (few := note_too_few_images(len(held_out), held_out.noun)) else []
    found: dict[str, dict[str, list[Result]]] = {}  # by measure and encoder, one per seed
    measured = [] if few else [one for one in those if one.name != PIXELS]  # these measures do not apply to pixels
    with StatusMessage("measuring encoders without labels", len(measured)) as waiting:
        for one in measured:
            try:
                key = measurement_key(one, [held_out], "without labels")
                if key not in cache.by_key:
                    vit, card = load_encoder(one.place)
                    if one.name == UNTRAINED:
                        vit = untrained_twin(card, None, one.seed)[0]
                    rows = label_free_rows(one.name, vit, card, held_out, replace(settings, seed=0))
                    cache.add(one.name, one.seed, held_out, [(key, result) for result in rows])
                for result in cache.by_key[key]:
                    found.setdefault(result.measure, {}).setdefault(one.name, []).append(result)
            except PatchloomError as problem:  # diverged, or too few readable images
                said.append(f"{one.name}, seed {one.seed}, has no measures without labels: {problem}.")
            waiting.advance()
    tasks = {one.name for one in those if one.kind == TASK}
    said += rank_by_rankme({name: its for name, its in found.get(RANKME, {}).items() if name in tasks})
    results = tuple(one for its in found.values() for seeds in its.values() for one in seeds)
    units = {one.measure: f" ({one.unit})" * bool(one.unit) for one in results}
    grid = {f"{measure}{units[measure]}": its for measure, its in found.items()}
    note = cell_note(len({one.seed for one in results}), f"{len(held_out):,} {held_out.noun} that no run trained on")
    tables = tables_of("Measures without labels", "measure", grid, note) if grid else []
    return Comparison(
        folder, [NO_BEST_TASK, *said], [*tables, *health_tables(those)], None, tuple(notes), results=results
    )


def rank_by_rankme(found: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return a sentence on the order of tasks by RankMe; [] for a single task.

    It is the only measure that agreed with kNN on both data sets of benchmarks/label_free.py.

    Args:
        found: RankMe of each task, one result per seed.
    """
    means = {name: sum(one.value for one in its) / len(its) for name, its in found.items()}
    if len(means) < 2:
        return []
    order = listing([f"{name} ({means[name]:.1f})" for name in sorted(means, key=lambda name: -means[name])], "and")
    return [
        f"A hint, not a verdict: by RankMe the order is {order}. Among equally long trainings, RankMe correlated with "
        "kNN on two data sets (Spearman's ρ 0.5 to 0.6), but not clearly with a linear probe."
    ]
