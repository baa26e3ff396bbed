"""Verdict of a comparison in words, its tables, and the files that it writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from patchloom.compare.runner import TrainedRun, exact_duration
from patchloom.compare.scores import BESIDE, CONTROL, TASK, Contender, LabelledData, ResultsByWay
from patchloom.display import Displayable, Lines, TextTable, Verbatim
from patchloom.errors import listing
from patchloom.evaluate.features import known_labels
from patchloom.report.results import over_seeds
from patchloom.results import store
from patchloom.results.claims import (
    CONSTANT,
    MIN_VERDICT_IMAGES,
    UNTRAINED,
    Claim,
    Difference,
    constant_remark,
    raw_remark,
)
from patchloom.results.classes import explain_measure
from patchloom.results.evaluation import compare_results
from patchloom.results.intervals import student
from patchloom.results.result import ACCURACY, Result
from patchloom.results.verdict import read_health

# Ranking of encoders that were scored on the same images.


MOST_SEEDS = 20  # largest number of seeds that is advised
_MOST_STEPS = 73  # each adds a tenth of the images; at most a thousand times as many are advised


@dataclass(frozen=True)
class Ranking:
    """Ranking of tasks and controls by accuracy, or by balanced accuracy where classes are rare.

    Attributes:
        order: tasks from best to worst by their means over seeds.
        means: mean of each task and control, in [0, 1].
        against: difference of the first task from each other task, control and further encoder.
        winner: the first task, if it is better than all other tasks and all controls by `Difference.claim`; else "".
        level: tasks, then controls, that the first one does not beat, nor leads with a single seed.
    """

    order: tuple[str, ...]
    means: dict[str, float]
    against: dict[str, Difference]
    winner: str
    level: tuple[str, ...]


def rank_encoders(
    tasks: Mapping[str, Sequence[Result]],
    controls: Mapping[str, Sequence[Result]],
    others: Mapping[str, Sequence[Result]] | None = None,
) -> Ranking:
    """Rank the tasks, and name the best one the winner if it beats all others.

    A winner has to be better than every other task and every control, each by its own 95 % interval: if nothing could
    be learnt, all of these would have to be wrong at once. The variance over seeds is estimated for each task
    separately, since tasks that remain at chance level would make it too small for the others. A single seed has no
    such variance, so it names no winner.

    Args:
        tasks: results by name, one per seed, on the same images.
        controls: the same for the controls, with one or several seeds.
        others: the same for further encoders, which the winner need not beat.
    """
    means = {name: sum(one.value for one in its) / len(its) for name, its in {**controls, **tasks}.items()}
    order = tuple(sorted(tasks, key=lambda name: -means[name]))
    rivals = {**{name: tasks[name] for name in order[1:]}, **controls}
    compared = {name: compare_results(tasks[order[0]], its, True) for name, its in {**rivals, **(others or {})}.items()}
    against = {name: replace(one, control=name) for name, one in compared.items()}
    winner = order[0] if all(against[name].claim is Claim.BETTER for name in rivals) else ""
    return Ranking(order, means, against, winner, tuple(name for name in rivals if not against[name].ahead))


def sufficient_budget(found: Difference, images: int) -> str:
    """Return a clause on the budget that would separate two encoders with unchanged means; "" if none would.

    More seeds are advised first, since they need no labels; if they do not suffice, more test images, with as many
    seeds as reduce their share to half of the squared interval.
    """
    gap, seeds = abs(found.value), found.trainings
    budgets = range(seeds, MOST_SEEDS + 1)
    deviation = found.over_seeds / student(found.freedom) * math.sqrt(seeds) if found.freedom else 0.0
    parts = {
        more: student(found.freedom * (more - 1) / (seeds - 1)) * deviation / math.sqrt(more) if deviation else 0.0
        for more in budgets
    }

    def separates(more: int, n: int) -> bool:
        """Apply the criterion of `difference`, including its centre, which is drawn towards zero if images are few."""
        return gap * n / (n + 2) > math.hypot(found.over_images * math.sqrt(images / n), parts[more])

    more = next((more for more in budgets if separates(more, images)), 0)
    if more > seeds:
        return f"{more} seeds of each task"
    more = next((more for more in budgets if parts[more] <= gap / math.sqrt(2)), 0)
    sizes = (math.ceil(images * 1.1**step) for step in range(1, _MOST_STEPS))
    needed = next((n for n in sizes if more and separates(more, n)), 0)
    unit = 10 ** max(0, len(str(needed)) - 2)
    rounded = -(-needed // unit) * unit  # up, to two digits
    seeds_too = f" and {more} seeds of each task" * (more > seeds)
    return f"about {rounded:,} labelled test images{seeds_too}" * bool(needed)


_NEARLY_ALL = 0.98
_TOLERANCE = 0.05  # deviation from the requested time, as a fraction, from which a run is named
_CLAIMS = {Claim.BETTER: "yes, ahead", Claim.WORSE: "yes, behind", Claim.NONE: "no"}  # cells of the table


@dataclass(frozen=True, repr=False)
class Comparison(Displayable):
    """Result of `compare`.

    Attributes:
        folder: folder of the comparison; None if stored results of runs were compared.
        verdict: sentences, the most important first.
        tables: tables, each with a title and a note.
        winner: task that suits the images best; "" if there is none; None without a comparison by labels.
        notes: further remarks.
        about: settings, as pairs of a name and a text.
        results: results of all encoders. Of the best task, or of each run but the first, the one of the last seed has
            the differences from the others, or from the first, over all seeds.
        order: tasks from best to worst, if there are labels.
        verdict_by: protocol by which the winner is named and the tasks are ordered; "" without labels.
        planned: runs and their duration (`ComparisonPlan.plain`).
        trained: seconds, updates and images of each finished run (`TrainedRun`).
    """

    folder: Path | None
    verdict: list[str]
    tables: list[Table]
    winner: str | None
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()
    results: tuple[Result, ...] = ()
    order: tuple[str, ...] = ()
    verdict_by: str = ""
    planned: Mapping[str, Any] = field(default_factory=dict)
    trained: Sequence[Mapping[str, Any]] = ()

    def parts(self, width: int) -> list[str | TextTable]:
        said: list[str | TextTable] = []
        for title, table, note in self.tables:
            said += [title, "", table, *[note] * bool(note), ""]
        said += [*self.notes, "", *self.verdict]
        return [*said, *(Verbatim(f"{name}: {path}") for name, path in self._files())]

    def plain(self) -> dict[str, Any]:
        return {
            "folder": None if self.folder is None else str(self.folder),
            "winner": self.winner or None,
            "order": list(self.order),
            "verdict_by": self.verdict_by or None,
            "verdict": [*self.verdict],
            "notes": [*self.notes],
            "about": dict(self.about),
            "planned": dict(self.planned) or None,
            "trained": [dict(one) for one in self.trained],
            "results": [one.plain() for one in self.results],
            "files": [str(path) for _, path in self._files()],
        }

    def _files(self) -> list[tuple[str, Path]]:
        if self.folder is None or not self.tables:  # a dry run has none, even in a folder that has them
            return []
        named = [("Results", self.folder / store.FILE), ("Report", self.folder / "report.html")]
        return [(name, path) for name, path in named if path.exists()]


# Tables.

Table = tuple[str, TextTable, str]  # title, rows, note
Grid = Mapping[str, Mapping[str, Sequence[Result]]]  # results, one per seed, by row and column


def cell(results: Sequence[Result]) -> str:
    """Format results of several seeds as `patchloom.results` does, without the unit, with the interval below."""
    return Lines(over_seeds(results, "").text("\n"))


def cell_note(seeds: int, images: str = "test images") -> str:
    """Return a sentence on the numbers in a `cell`; ``images`` names the test images."""
    if seeds == 1:
        return f"In brackets: 95 % interval over {images}."
    over = "Mean ± standard deviation over seeds [Student's 95 % interval over seeds]"
    return f"{over}; without ±, [95 % interval over {images}]."


def tables_of(title: str, corner: str, grid: Grid, note: str, ends: Collection[int] = ()) -> list[Table]:
    """Return a table of means over seeds, and one of each seed if there are several; ``corner`` is above the rows."""
    columns = list(dict.fromkeys(column for its in grid.values() for column in its))
    means, rows, last = list[tuple[str, ...]](), list[tuple[str, ...]](), set[int]()
    for row, its in grid.items():
        means.append((row, *(cell(its[name]) if name in its else "" for name in columns)))
        by_seed: dict[int, dict[str, str]] = {}
        for name, results in its.items():
            for one in results:
                by_seed.setdefault(one.seed, {})[name] = cell([one])
        if len(by_seed) > 1:
            rows += [(row, str(seed), *(by_seed[seed].get(name, "") for name in columns)) for seed in sorted(by_seed)]
            last.add(len(rows) - 1)
    whole = TextTable((corner, *columns), tuple(means), names=frozenset({0}), ends=frozenset(ends))
    seeds = TextTable((corner, "seed", *columns), tuple(rows), names=frozenset({0}), ends=frozenset(last))
    return [(title, whole, note), *[(f"{title}, by seed", seeds, "")] * bool(rows)]


def difference_cells(one: Difference) -> tuple[str, str]:
    """Return the cells of a difference: its value with the interval, and whether it is significant."""
    return one.text(), _CLAIMS.get(one.claim, one.claim.value)


def compare_labelled(
    found: ResultsByWay, those: Sequence[Contender], on: LabelledData, folder: Path, notes: Sequence[str]
) -> Comparison:
    """Return the comparison by labels: the verdict by the first way of scoring, and tables of all of them."""
    kinds = {one.name: one.kind for one in those} | {CONSTANT: CONTROL}
    rankings = {}
    for way, scores in found.items():
        of_kind = (
            {name: its for name, its in scores.items() if kinds[name] == kind} for kind in (TASK, CONTROL, BESIDE)
        )
        rankings[way] = rank_encoders(*of_kind)
    first, main = next(iter(rankings.items()))
    best, n, noun = main.order[0], len(on.parts.test), on.parts.test.noun
    names = [*main.order, *(name for kind in (CONTROL, BESIDE) for name in kinds if kinds[name] == kind)]
    grid = {name: {way: scores[name] for way, scores in found.items() if name in scores} for name in names}
    note = f"{cell_note(len(found[first][best]), f'{n:,} test {noun}')} {on.parts.story}"
    note += f" The order and the verdict are by the first column, the {first} probe."
    if any(way.few is not None for way in on.ways):
        note += " Each seed has its own draw of few labels, the same for all encoders."
    if found[first][best][0].measure != ACCURACY:
        labels = known_labels(on.parts.test)
        note += f" {explain_measure(labels, on.parts.test.classes, noun)}"
    note += f" Untrained: the encoder of {next(one.name for one in those if one.kind == TASK)} with fresh weights."
    ends = {len(main.order) - 1, sum(kind != BESIDE for kind in kinds.values()) - 1}
    over = f"{noun} and seeds" if any(one.trainings > 1 for one in main.against.values()) else f"{noun} alone"
    differences = TextTable(
        ("encoder", f"difference, 95 % interval over {over}", "differs"),
        tuple((name, *difference_cells(one)) for name, one in main.against.items()),
    )
    tables = [
        *tables_of(f"{found[first][best][0].measure.capitalize()} by labels (%)", "encoder", grid, note, ends),
        (f"{best} minus each of these, by {first} probe", differences, ""),
        *health_tables(those),
    ]
    verdict = [*describe_ranking(main, first, n), *filter(None, map(raw_remark, main.against.values()))]
    if not main.against[CONSTANT].exceeds:
        answer = str(found[first][CONSTANT][0].settings.get("answer", ""))
        verdict.append(constant_remark([f"{best} ({main.means[best]:.1%})"], answer, f"{main.means[CONSTANT]:.1%}"))
    results = []
    for way, ranking in rankings.items():
        for name, (*rest, last) in found[way].items():
            against = tuple(ranking.against.values()) if name == ranking.order[0] else ()
            results += [*rest, replace(last, against=against)]
    return Comparison(
        folder, verdict, tables, main.winner, tuple(notes), (), tuple(results), main.order, on.ways[0].protocol
    )


def health_tables(those: Sequence[Contender]) -> list[Table]:
    """Return a table of the verdicts of the runs; empty if they have none."""
    own = tuple(
        (one.name, str(one.seed), health.verdict, health.why)
        for one in those
        if one.kind == TASK and (health := read_health(Path(one.place))) is not None
    )
    grid = TextTable(("task", "seed", "verdict", "its own measure"), own, texts=frozenset({3}))
    note = (
        "Each measure is of the task's own target. Compare it with its baseline, not with that of another task, which "
        "may have the same name for other pixels."
    )
    return [("How each task went", grid, note)] if own else []


def note_unequal(trained: Sequence[TrainedRun], minutes: float | None) -> list[str]:
    """Return a sentence on the runs whose time differs from the requested one; [] if there are none."""
    if minutes is None:
        return []
    off = [one for one in trained if abs(one.seconds - 60 * minutes) > _TOLERANCE * 60 * minutes]
    those = listing([f"{one.task}, seed {one.seed} ({one.text})" for one in off], "and")
    far = f"more than {_TOLERANCE:.0%} off the requested {exact_duration(60 * minutes)}"
    return [f"The times of training are not equal, since these are {far}: {those}."] if off else []


def training_table(trained: Sequence[TrainedRun]) -> Table:
    """Return a table of the training of each run, with its title and a note."""
    rows = [
        (one.task, str(one.seed), exact_duration(one.seconds), f"{one.updates:,}", f"{one.images:,}") for one in trained
    ]
    heading = ("task", "seed", "time", "updates", "images seen")
    note = "Time of the steps and the held-out measures during training."
    return "Training of each run", TextTable(heading, tuple(rows), names=frozenset({0})), note


def describe_ranking(main: Ranking, way: str, n: int) -> list[str]:
    """Return sentences on which task leads and whether its lead is significant."""
    first, means, against = main.order[0], main.means, main.against
    lead, controls = f"{first} {means[first]:.1%}", [name for name in means if name not in main.order]

    def of_claim(claim: Claim, names: Iterable[str]) -> list[str]:
        return [name for name in names if against[name].claim is claim]

    def named(names: Iterable[str]) -> str:
        return listing([f"{name} ({means[name]:.1%}; {against[name].text()})" for name in names], "and")

    if all(one.claim is Claim.FEW for one in against.values()):
        return [f"No winner: {n} test images are too few to compare encoders: label {MIN_VERDICT_IMAGES} or more."]
    if main.winner:
        second, over = main.order[1], listing([f"{name} ({means[name]:.1%})" for name in controls], "and")
        beside = of_claim(Claim.WORSE, (name for name in against if name not in means))
        return [
            f"{first} suits these images best of all compared: by {way} probe {lead}, {against[second].text()} ahead "
            f"of {second}, the second, and better than {over}.",
            *(
                f"But {one}, given by --beside, is better: {first} minus {one} is {against[one].text()}."
                for one in beside
            ),
        ]
    if not main.level:
        return [
            f"No winner: {lead} leads by {way} probe on these images, but each task was trained only once: "
            "compare with --seeds 3 to check whether that holds."
        ]
    best = f"No winner: the best task by {way} probe, {lead},"
    if ahead := of_claim(Claim.WORSE, controls):
        return [f"{best} is worse than controls without training: {named(ahead)}.", *_of_controls(main)]
    equal, behind = (of_claim(claim, main.level) for claim in (Claim.NONE, Claim.ONCE))
    said = [f"is indistinguishable from {named(equal)} with this budget"] * bool(equal)
    said += [f"is behind {named(behind)} in this one training"] * bool(behind)
    worse = of_claim(Claim.BETTER, main.order[1:])
    nearest = min(main.level, key=lambda name: abs(against[name].value))
    if against[nearest].trainings == 1:
        budget = "Each task was trained once: compare with --seeds 3 to check what holds."
    elif needed := sufficient_budget(against[nearest], n):
        budget = (
            f"If their means stay the same, {needed} would separate {first} from {nearest}; longer training may "
            "increase or reduce the difference."
        )
    else:
        budget = (
            f"If their means stay the same, separating {first} from {nearest} would need more than {MOST_SEEDS} seeds "
            "of each task or a thousand times as many labelled test images."
        )
    return [
        f"{best} {', and '.join(said)}.",
        *_of_controls(main),
        budget,
        *[f"{first} is better than {listing(worse, 'and')}."] * bool(worse),
    ]


def _of_controls(main: Ranking) -> list[str]:
    """Return a sentence on the meaning of an unbeaten control; none if all are beaten."""
    first = main.order[0]
    if {*main.level} <= {*main.order}:
        return []
    if max(main.means.values()) > _NEARLY_ALL:
        return ["Nearly all images are classified correctly: these labels are too easy to compare encoders by."]
    if UNTRAINED in main.means and main.against[UNTRAINED].claim is Claim.BETTER:
        return [
            f"{first} did learn features that help with these labels: {main.against[UNTRAINED].text()} over "
            f"untrained weights ({main.means[UNTRAINED]:.1%})."
        ]
    return ["It remains open whether pre-training learnt anything that helps with these labels."]
