"""Verdict of a comparison in words, its tables, and the files that it writes."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.compare.scores import BESIDE, CONTROL, TASK, UNTRAINED, Contender, LabelledData, Scores, Way
from patchloom.display import Displayable, Lines, TextTable, Verbatim
from patchloom.errors import listing
from patchloom.results.claims import (
    CONSTANT,
    MIN_VERDICT_IMAGES,
    Claim,
    Difference,
    constant_remark,
    difference,
    raw_remark,
)
from patchloom.results.intervals import accuracy_interval, student
from patchloom.runs.verdict import read_health
from patchloom.system.files import write_whole

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
    tasks: Mapping[str, Tensor],
    controls: Mapping[str, Tensor],
    others: Mapping[str, Tensor] | None = None,
    groups: Tensor | None = None,
) -> Ranking:
    """Rank the tasks, and name the best one the winner if it beats all others.

    A winner has to be better than every other task and every control, each by its own 95 % interval: if nothing could
    be learnt, all of these would have to be wrong at once. The variance over seeds is estimated for each task
    separately, since tasks that remain at chance level would make it too small for the others. A single seed has no
    such variance, so it names no winner.

    Args:
        tasks: [s n] by name: whether the encoder of each seed classifies each test image correctly.
        controls: the same for the controls, with one or several seeds.
        others: the same for further encoders, which the winner need not beat.
        groups: [n] groups of the test images; None: no groups.
    """
    everyone = {**controls, **tasks}
    means = {name: right.double().mean().item() for name, right in everyone.items()}
    order = tuple(sorted(tasks, key=lambda name: -means[name]))
    first = tasks[order[0]]
    against = {
        name: difference(first, right, control=name, groups=groups)
        for name, right in {**{name: tasks[name] for name in order[1:]}, **controls, **(others or {})}.items()
    }
    level = tuple(name for name in order[1:] if not against[name].ahead)
    unbeaten = tuple(name for name in controls if not against[name].ahead)
    compared = [one.claim for name, one in against.items() if name in everyone]
    winner = order[0] if all(claim is Claim.BETTER for claim in compared) else ""
    return Ranking(order, means, against, winner, level, unbeaten, len(first))


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


HEADING = (
    *("way", "encoder", "kind", "seeds", "mean", "lowest", "highest", "low", "high"),
    *("behind", "behind_low", "behind_high", "about"),
)
_NEARLY_ALL = 0.98
_TOLD = {Claim.BETTER: "yes, ahead", Claim.WORSE: "yes, behind", Claim.NONE: "no"}  # cells of the table


@dataclass(frozen=True, repr=False)
class Comparison(Displayable):
    """Result of `compare`.

    Attributes:
        folder: folder of the comparison.
        verdict: sentences, the most important first.
        tables: results, each with a title and a note.
        winner: task that suits the images best; "" if there is none; None without a comparison by labels.
        notes: further remarks.
        about: settings, as pairs of a name and a text.
        rows: rows of ``comparison.csv`` below `HEADING`; None is an empty cell.
        order: tasks from best to worst, if there are labels.
        planned: runs and their duration (`ComparisonPlan.plain`).
        trained: seconds, updates and images of each finished run (`TrainedRun`).
    """

    folder: Path
    verdict: list[str]
    tables: list[tuple[str, TextTable, str]]
    winner: str | None
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()
    rows: list[tuple[str | int | float | None, ...]] = field(default_factory=list)
    order: tuple[str, ...] = ()
    planned: Mapping[str, Any] = field(default_factory=dict)
    trained: Sequence[Mapping[str, Any]] = ()

    def parts(self, width: int) -> list[str | TextTable]:
        """See `Displayable`."""
        said: list[str | TextTable] = []
        for title, table, note in self.tables:
            said += [title, "", table, *[note] * bool(note), ""]
        said += [*self.notes, "", *self.verdict]
        files = self._files() if self.tables else []  # a dry run has none, even in a folder that has them
        return [*said, *(Verbatim(f"{name}: {self.folder / file}") for name, file in files)]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        return {
            "folder": str(self.folder),
            "winner": self.winner or None,
            "order": list(self.order),
            "verdict": [*self.verdict],
            "notes": [*self.notes],
            "about": dict(self.about),
            "planned": dict(self.planned),
            "trained": [dict(one) for one in self.trained],
            "rows": [dict(zip(HEADING, row, strict=True)) for row in self.rows],
            "files": [str(self.folder / file) for _, file in self._files()] if self.tables else [],
        }

    def _files(self) -> list[tuple[str, str]]:
        named = [("Table", "comparison.csv"), ("Report", "report.html")]
        return [(name, file) for name, file in named if (self.folder / file).exists()]

    def write(self) -> None:
        """Write the table and the verdict to the comparison's folder."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        cells = ([f"{one:.6f}" if isinstance(one, float) else one for one in row] for row in self.rows)
        writer.writerows([HEADING, *cells])
        write_whole(self.folder / "comparison.csv", text.getvalue())
        write_whole(self.folder / "summary.txt", "\n".join(self.verdict) + "\n")


def compare_labelled(
    found: Sequence[tuple[Contender, Scores]], on: LabelledData, folder: Path, notes: Sequence[str]
) -> Comparison:
    """Return the comparison by labels: the verdict by a linear probe with all of them, and tables of all probes."""
    any_scores = found[0][1]
    same = dict.fromkeys((way.name for way in on.ways), any_scores.constant)
    constant = replace(any_scores, right=same, about=dict.fromkeys(same, f"always {any_scores.answer}"))
    found = [*found, (Contender(CONSTANT, 0, CONTROL, ""), constant)]
    tasks, controls, others = (_grouped(found, kind) for kind in (TASK, CONTROL, BESIDE))
    rows: list[tuple[str | int | float | None, ...]] = []
    standings = {}
    in_groups = found[0][1].groups  # the same for all encoders, as the test images are
    for way in on.ways:
        of_tasks, of_controls, of_others = (_of_way(part, way) for part in (tasks, controls, others))
        standings[way.name] = found_way = rank_encoders(of_tasks, of_controls, of_others, in_groups)
        rows += _rows(way, found_way, of_tasks, of_controls, of_others, found, in_groups)
    first = on.ways[0]
    main = standings[first.name]
    n = len(on.parts.test)
    grid = _table(on.ways, tasks, controls, others, main.order, in_groups)
    note = f"Mean over seeds (lowest to highest), 95 % interval over {n:,} test {on.parts.test.noun}. {on.parts.story}"
    if any(way.few is not None for way in on.ways):
        note += " Each seed has its own draw of few labels, the same for all encoders."
    shape = next(one.name for one, _ in found if one.kind == TASK)
    note += f" Untrained: the encoder of {shape} with fresh weights."
    said = [
        ("Accuracy by labels", grid, note),
        (f"{main.order[0]} minus each of these, by {first.name} probe", _behind(main), ""),
        *health_tables([one for one, _ in found]),
    ]
    verdict = [*describe_ranking(main, first.name, n), *_remarks(main, any_scores.answer)]
    return Comparison(folder, verdict, said, main.winner, tuple(notes), (), rows, main.order)


def _remarks(main: Ranking, answer: str) -> list[str]:
    """Return sentences on tasks no better than a constant answer, and on raw pixels that are far better."""
    best, said = main.order[0], [raw_remark(found) for found in main.against.values()]
    if not main.against[CONSTANT].exceeds:
        said.append(constant_remark([f"{best} ({main.means[best]:.1%})"], answer, f"{main.means[CONSTANT]:.1%}"))
    return [*filter(None, said)]


def health_tables(those: Sequence[Contender]) -> list[tuple[str, TextTable, str]]:
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
    first, means = main.order[0], main.means
    lead = f"{first} {means[first]:.1%}"
    if all(one.claim is Claim.FEW for one in main.against.values()):
        return [f"No winner: {n} test images are too few to compare encoders: label {MIN_VERDICT_IMAGES} or more."]
    if main.winner:
        second = main.order[1]
        over = listing([f"{name} ({means[name]:.1%})" for name in means if name not in main.order], "and")
        return [
            f"{first} suits these images best of all compared: by {way} probe {lead}, "
            f"{main.against[second].text()} ahead of {second}, the second, and better than {over}.",
            *(
                f"But {name}, given by --beside, is better: {first} minus {name} is {found.text()}."
                for name, found in main.against.items()
                if name not in means and found.claim is Claim.WORSE
            ),
        ]
    if better := [name for name in main.unbeaten if main.against[name].claim is Claim.WORSE]:
        ahead = listing([f"{name} ({means[name]:.1%}; {main.against[name].text()})" for name in better], "and")
        return [
            f"No winner: the best task by {way} probe, {lead}, is worse than controls without training: {ahead}.",
            *_of_controls(main),
        ]
    level = (*main.unbeaten, *main.level_with)
    if not level:
        return [
            f"No winner: {lead} leads by {way} probe on these images, but each task was trained only once: "
            "compare with --seeds 3 to check whether that holds."
        ]
    said = []
    for claim, words in (
        (Claim.NONE, "is indistinguishable from {} with this budget"),
        (Claim.ONCE, "is behind {} in this one training"),
    ):
        names = [name for name in level if main.against[name].claim is claim]
        if names := [f"{name} ({means[name]:.1%}; {main.against[name].text()})" for name in names]:
            said.append(words.format(listing(names, "and")))
    said = [f"No winner: the best task by {way} probe, {lead}, {', and '.join(said)}."]
    said += [*_of_controls(main), _budget(main, level, n)]
    if worse := [name for name in main.order[1:] if main.against[name].claim is Claim.BETTER]:
        said.append(f"{first} is better than {listing(worse, 'and')}.")
    return said


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


def _grouped(found: Sequence[tuple[Contender, Scores]], kind: str) -> dict[str, list[Scores]]:
    """Group the scores of a kind by encoder, as lists over seeds."""
    groups: dict[str, list[Scores]] = {}
    for one, scores in found:
        if one.kind == kind:
            groups.setdefault(one.name, []).append(scores)
    return groups


def _of_way(groups: Mapping[str, Sequence[Scores]], way: Way) -> dict[str, Tensor]:
    """Return correctness [s n] by encoder."""
    found = {name: scores for name, scores in groups.items() if way.name in scores[0].right}
    return {name: torch.stack([one.right[way.name] for one in scores]) for name, scores in found.items()}


def _table(
    ways: Sequence[Way],
    tasks: Mapping[str, Sequence[Scores]],
    controls: Mapping[str, Sequence[Scores]],
    others: Mapping[str, Sequence[Scores]],
    order: Sequence[str],
    in_groups: Tensor | None,
) -> TextTable:
    rows = []
    for names, group in ((order, tasks), ([*controls], controls), ([*others], others)):
        for name in names:
            found = [_of_way({name: group[name]}, way).get(name) for way in ways]
            rows.append((name, *("" if right is None else _cell(right, in_groups) for right in found)))
    ends = frozenset({len(tasks) - 1, len(tasks) + len(controls) - 1})
    return TextTable(("encoder", *(way.name for way in ways)), tuple(rows), names=frozenset({0}), ends=ends)


def _cell(right: Tensor, groups: Tensor | None) -> str:
    """Format the mean over seeds (range) and, below, the interval over images."""
    means = right.double().mean(1)
    mean = means.mean().item()
    low, high = accuracy_interval(right.double().mean(0), groups)
    spread = "" if len(means) == 1 else f" ({100 * means.min():.1f}-{100 * means.max():.1f})"
    return Lines(f"{100 * mean:.1f} %{spread}\n[{100 * low:.1f}, {100 * high:.1f}]")


def _behind(main: Ranking) -> TextTable:
    rows = []
    for name, found in main.against.items():
        rows.append((name, found.text(), _TOLD.get(found.claim, found.claim.value)))
    over = "images and seeds" if main.seeds > 1 else "images alone"
    return TextTable(("encoder", f"difference, 95 % interval over {over}", "differs"), tuple(rows))


def _rows(
    way: Way,
    found: Ranking,
    tasks: Mapping[str, Tensor],
    controls: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    scores: Sequence[tuple[Contender, Scores]],
    in_groups: Tensor | None,
) -> list[tuple[str | int | float | None, ...]]:
    about = {one.name: its.about.get(way.name, "") for one, its in scores}
    rows: list[tuple[str | int | float | None, ...]] = []
    for kind, group in ((TASK, tasks), (CONTROL, controls), (BESIDE, others)):
        for name in found.order if kind == TASK else group:
            right = group[name]
            means = right.double().mean(1)
            mean = means.mean().item()
            ends = accuracy_interval(right.double().mean(0), in_groups)
            numbers = [mean, means.min().item(), means.max().item(), *ends]
            apart = found.against.get(name)
            behind = (None,) * 3 if apart is None else (apart.value, apart.low, apart.high)
            rows.append((way.name, name, kind, len(right), *numbers, *behind, about[name]))
    return rows
