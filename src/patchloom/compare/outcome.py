"""Verdict of a comparison in words, its tables, and the files that it writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.compare.scores import BESIDE, CONTROL, TASK, UNTRAINED, Contender, LabelledData, ResultsByWay
from patchloom.display import Displayable, Lines, TextTable, Verbatim
from patchloom.errors import listing
from patchloom.results import store
from patchloom.results.claims import CONSTANT, MIN_VERDICT_IMAGES, Claim, Difference, constant_remark, raw_remark
from patchloom.results.evaluation import compare_results
from patchloom.results.intervals import student
from patchloom.results.result import Result
from patchloom.results.verdict import read_health

# Ranking of encoders that were scored on the same images.


MOST_SEEDS = 20  # largest number of seeds that is advised
_MOST_STEPS = 73  # each adds a tenth of the images; at most a thousand times as many are advised


@dataclass(frozen=True)
class Ranking:
    """Ranking of tasks and controls by accuracy.

    Attributes:
        order: tasks from best to worst by their means over seeds.
        means: accuracy of each task and control, in [0, 1].
        against: difference of the first task from each other task, control and further encoder.
        winner: the first task, if it is better than all other tasks and all controls by `Difference.claim`; else "".
        level_with: tasks that the first one does not beat, nor leads with a single seed.
        unbeaten: controls that the first one does not beat, nor leads with a single seed.
        seeds: number of seeds of each task.
    """

    order: tuple[str, ...]
    means: dict[str, float]
    against: dict[str, Difference]
    winner: str
    level_with: tuple[str, ...]
    unbeaten: tuple[str, ...]
    seeds: int


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
    everyone = {**controls, **tasks}
    means = {name: _mean(results) for name, results in everyone.items()}
    order = tuple(sorted(tasks, key=lambda name: -means[name]))
    first = tasks[order[0]]
    compared = {**{name: tasks[name] for name in order[1:]}, **controls, **(others or {})}
    against = {name: replace(compare_results(first, its, True), control=name) for name, its in compared.items()}
    level = tuple(name for name in order[1:] if not against[name].ahead)
    unbeaten = tuple(name for name in controls if not against[name].ahead)
    claims = {against[name].claim for name in compared if name in everyone}
    winner = order[0] if claims == {Claim.BETTER} else ""
    return Ranking(order, means, against, winner, level, unbeaten, len(first))


def _mean(results: Sequence[Result]) -> float:
    return sum(one.value for one in results) / len(results)


def sufficient_budget(found: Difference, seeds: int, images: int) -> str:
    """Return a clause on the budget that would separate two encoders with unchanged means; "" if none would.

    More seeds are advised first, since they need no labels; if they do not suffice, more test images, with as many
    seeds as reduce their share to half of the squared interval.
    """
    gap = abs(found.value)
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
    if not needed:
        return ""
    return f"about {_two_digits(needed):,} labelled test images" + (f" and {more} seeds of each task" * (more > seeds))


def _two_digits(number: int) -> int:
    """Round up to two digits."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return -(-number // unit) * unit


_NEARLY_ALL = 0.98
CLAIMS = {Claim.BETTER: "yes, ahead", Claim.WORSE: "yes, behind", Claim.NONE: "no"}  # cells of the table


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
    planned: Mapping[str, Any] = field(default_factory=dict)
    trained: Sequence[Mapping[str, Any]] = ()

    def parts(self, width: int) -> list[str | TextTable]:
        """See `Displayable`."""
        said: list[str | TextTable] = []
        for title, table, note in self.tables:
            said += [title, "", table, *[note] * bool(note), ""]
        said += [*self.notes, "", *self.verdict]
        return [*said, *(Verbatim(f"{name}: {path}") for name, path in self._files())]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        return {
            "folder": None if self.folder is None else str(self.folder),
            "winner": self.winner or None,
            "order": list(self.order),
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


def over_seeds(results: Sequence[Result]) -> str:
    """Format, in lines, mean ± standard deviation over seeds, their range, and the 95 % interval over images."""
    first, values = results[0], [one.value for one in results]
    if len(set(values)) == 1:
        return Lines(first.text("\n"))
    shown = [f"{first.amount(_mean(results))} ± {first.number(float(np.std(values, ddof=1)))}"]
    shown.append(f"{first.amount(min(values))} to {first.amount(max(values))}")
    known = [one.outcomes for one in results if one.outcomes is not None and not one.outcomes.pseudo]
    if len(known) == len(results) and len({len(one.values) for one in known}) == 1:
        mean = Result.of_images("", "", {}, np.mean([one.values for one in known], 0), known[0].groups)
        shown.append(mean.interval())
    return Lines("\n".join(shown))


def tables_of(title: str, corner: str, grid: Grid, note: str, ends: Collection[int] = ()) -> list[Table]:
    """Return a table of means over seeds, and one of each seed if there are several; ``corner`` is above the rows."""
    columns = list(dict.fromkeys(column for its in grid.values() for column in its))
    means = [(row, *(over_seeds(its[name]) if name in its else "" for name in columns)) for row, its in grid.items()]
    found = [(title, TextTable((corner, *columns), tuple(means), names=frozenset({0}), ends=frozenset(ends)), note)]
    rows: list[tuple[str, ...]] = []
    last = set()
    for row, its in grid.items():
        seeds = sorted({one.seed for results in its.values() for one in results})
        for seed in seeds if len(seeds) > 1 else ():
            cells = [" ".join(one.number() for one in its.get(name, ()) if one.seed == seed) for name in columns]
            rows.append((row, str(seed), *cells))
        last.add(len(rows) - 1)
    by_seed = TextTable((corner, "seed", *columns), tuple(rows), names=frozenset({0}), ends=frozenset(last))
    return [*found, (f"{title}, by seed", by_seed, "")] if rows else found


def difference_table(found: Mapping[str, Difference]) -> TextTable:
    """Return the differences of an encoder from others, by the names of these."""
    rows = [(name, one.text(), CLAIMS.get(one.claim, one.claim.value)) for name, one in found.items()]
    over = "images and seeds" if any(one.trainings > 1 for one in found.values()) else "images alone"
    return TextTable(("encoder", f"difference, 95 % interval over {over}", "differs"), tuple(rows))


def compare_labelled(
    found: ResultsByWay, those: Sequence[Contender], on: LabelledData, folder: Path, notes: Sequence[str]
) -> Comparison:
    """Return the comparison by labels: the verdict by a linear probe with all of them, and tables of all probes."""
    kinds = {one.name: one.kind for one in those} | {CONSTANT: CONTROL}
    rankings = {}
    for way, scores in found.items():
        of_kind = (
            {name: its for name, its in scores.items() if kinds[name] == kind} for kind in (TASK, CONTROL, BESIDE)
        )
        rankings[way] = rank_encoders(*of_kind)
    first, main = next(iter(rankings.items()))
    best = main.order[0]
    names = [*main.order, *(name for kind in (CONTROL, BESIDE) for name in kinds if kinds[name] == kind)]
    grid = {name: {way: scores[name] for way, scores in found.items() if name in scores} for name in names}
    n, test = len(on.parts.test), on.parts.test
    note = "Mean ± standard deviation over seeds, lowest to highest, " * (main.seeds > 1)
    note += f"95 % interval over {n:,} test {test.noun}. {on.parts.story}"
    if any(way.few is not None for way in on.ways):
        note += " Each seed has its own draw of few labels, the same for all encoders."
    note += f" Untrained: the encoder of {next(one.name for one in those if one.kind == TASK)} with fresh weights."
    ends = {len(main.order) - 1, sum(kind != BESIDE for kind in kinds.values()) - 1}
    tables = [
        *tables_of("Accuracy by labels", "encoder", grid, note, ends),
        (f"{best} minus each of these, by {first} probe", difference_table(main.against), ""),
        *health_tables(those),
    ]
    answer = found[first][CONSTANT][0].settings.get("answer", "")
    verdict = [*describe_ranking(main, first, n), *_remarks(main, str(answer))]
    results = []
    for way, ranking in rankings.items():
        *rest, last = found[way][ranking.order[0]]
        scores = found[way] | {ranking.order[0]: [*rest, replace(last, against=tuple(ranking.against.values()))]}
        results += [one for its in scores.values() for one in its]
    return Comparison(folder, verdict, tables, main.winner, tuple(notes), (), tuple(results), main.order)


def _remarks(main: Ranking, answer: str) -> list[str]:
    """Return sentences on tasks no better than a constant answer, and on raw pixels that are far better."""
    best, said = main.order[0], [raw_remark(found) for found in main.against.values()]
    if not main.against[CONSTANT].exceeds:
        said.append(constant_remark([f"{best} ({main.means[best]:.1%})"], answer, f"{main.means[CONSTANT]:.1%}"))
    return [*filter(None, said)]


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


def describe_ranking(main: Ranking, way: str, n: int) -> list[str]:
    """Return sentences on which task leads and whether its lead is significant."""
    first, means, against = main.order[0], main.means, main.against
    lead = f"{first} {means[first]:.1%}"

    def named(names: Sequence[str]) -> str:
        return listing([f"{name} ({means[name]:.1%}; {against[name].text()})" for name in names], "and")

    if all(one.claim is Claim.FEW for one in against.values()):
        return [f"No winner: {n} test images are too few to compare encoders: label {MIN_VERDICT_IMAGES} or more."]
    if main.winner:
        second = main.order[1]
        over = listing([f"{name} ({means[name]:.1%})" for name in means if name not in main.order], "and")
        better = [name for name, one in against.items() if name not in means and one.claim is Claim.WORSE]
        return [
            f"{first} suits these images best of all compared: by {way} probe {lead}, {against[second].text()} ahead "
            f"of {second}, the second, and better than {over}.",
            *(
                f"But {name}, given by --beside, is better: {first} minus {name} is {against[name].text()}."
                for name in better
            ),
        ]
    best = f"No winner: the best task by {way} probe, {lead},"
    if ahead := [name for name in main.unbeaten if against[name].claim is Claim.WORSE]:
        return [f"{best} is worse than controls without training: {named(ahead)}.", *_of_controls(main)]
    level = (*main.unbeaten, *main.level_with)
    if not level:
        return [
            f"No winner: {lead} leads by {way} probe on these images, but each task was trained only once: "
            "compare with --seeds 3 to check whether that holds."
        ]
    equal, behind = ([name for name in level if against[name].claim is one] for one in (Claim.NONE, Claim.ONCE))
    said = [f"is indistinguishable from {named(equal)} with this budget"] * bool(equal)
    said += [f"is behind {named(behind)} in this one training"] * bool(behind)
    worse = [name for name in main.order[1:] if against[name].claim is Claim.BETTER]
    return [
        f"{best} {', and '.join(said)}.",
        *_of_controls(main),
        _budget(main, level, n),
        *[f"{first} is better than {listing(worse, 'and')}."] * bool(worse),
    ]


def _of_controls(main: Ranking) -> list[str]:
    """Return a sentence on the meaning of an unbeaten control; none if all are beaten."""
    first = main.order[0]
    if not main.unbeaten:
        return []
    if max(main.means.values()) > _NEARLY_ALL:
        return ["Nearly all images are classified correctly: these labels are too easy to compare encoders by."]
    if UNTRAINED in main.means and main.against[UNTRAINED].claim is Claim.BETTER:
        return [
            f"{first} did learn features that help with these labels: {main.against[UNTRAINED].text()} over "
            f"untrained weights ({main.means[UNTRAINED]:.1%})."
        ]
    return ["It remains open whether pre-training learnt anything that helps with these labels."]


def _budget(main: Ranking, level: Sequence[str], n: int) -> str:
    """Return a sentence on the budget that would separate the first task from the nearest unbeaten encoder."""
    first = main.order[0]
    nearest = min(level, key=lambda name: abs(main.against[name].value))
    if main.seeds == 1:
        return "Each task was trained once: compare with --seeds 3 to check what holds."
    needed = sufficient_budget(main.against[nearest], main.seeds, n)
    if not needed:
        return (
            f"If their means stay the same, separating {first} from {nearest} would need more than {MOST_SEEDS} seeds "
            "of each task or a thousand times as many labelled test images."
        )
    return (
        f"If their means stay the same, {needed} would separate {first} from {nearest}; longer training may increase "
        "or reduce the difference."
    )
