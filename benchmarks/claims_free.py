"""Correlation of measures without labels with accuracy, over the encoders of `claims.py` with equal training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from claims_arms import ARMS, EPOCHS, SEEDS
from claims_judge import Scores, verdict_by
from claims_runs import Study
from label_free import by_tasks, spearman

from patchloom.evaluate.protocols.label_free import MEASURES as FIGURES
from patchloom.evaluate.protocols.label_free import RANKME

MEASURES = ("knn", "linear", "few")
LEAST_TASKS = 4
TITLE = "RankMe, which needs no labels, correlates with kNN"
SECTION = "Which figure without labels predicts quality"
SAID = (
    "The [study of `compare`](README.md#without-labels-which-measure-predicts-the-ranking-by-labels): ρ +0.5 to +0.6."
)


class Rank(NamedTuple):
    """Spearman's ρ of a measure with an accuracy: over encoders with its 95 % interval, and over the tasks' means."""

    rho: float
    low: float
    high: float
    of_tasks: float

    def text(self) -> str:
        """Format it as "+0.53 [+0.05, +0.80], +0.41"."""
        return f"{self.rho:+.2f} [{self.low:+.2f}, {self.high:+.2f}], {self.of_tasks:+.2f}"


def rank(study: Study, figure: str, found: Scores) -> Rank | None:
    """Return ρ of one measure without labels with one accuracy; None if there are too few tasks."""
    equal = [arm for arm in found if ARMS[arm].task and ARMS[arm].times == 1 and not ARMS[arm].time_of]
    places = [(arm, seed) for arm in equal for seed in range(SEEDS)]
    files = {place: study.result_path(*place, "label-free.json") for place in places}
    places = [place for place in places if files[place].exists()]
    tasks = [ARMS[arm].task["name"] for arm, _ in places]
    if len(set(tasks)) < LEAST_TASKS:
        return None
    x = np.array([json.loads(files[place].read_text())[figure] for place in places])
    y = np.array([found[arm][seed].mean() for arm, seed in places])
    low, high = by_tasks(x, y, [np.arange(len(places))], tasks, np.random.default_rng(0))
    means = np.array([[one[np.array(tasks) == task].mean() for task in dict.fromkeys(tasks)] for one in (x, y)])
    return Rank(float(spearman(x, y)), low, high, float(spearman(*means)))


def free_summary(study: Study, scores: Mapping[str, Scores]) -> str:
    """Return two cells of the row of the claim that was declared beforehand: the result and the verdict."""
    its = rank(study, RANKME, scores["knn"])
    if its is None:
        return ""
    measured = f"ρ {its.rho:+.2f} [{its.low:+.2f}, {its.high:+.2f}]; of the means of the tasks {its.of_tasks:+.2f}"
    return f"{measured} | **{verdict_by(its.low, its.high)}**"


def free_table(study: Study, scores: Mapping[str, Scores]) -> str:
    """Return the table of every measure with every accuracy; empty if there are too few tasks."""
    lines = [f"| Spearman's ρ | {' | '.join(MEASURES)} |", f"| --- |{' --- |' * len(MEASURES)}"]
    for figure in FIGURES:
        found = [rank(study, figure, scores[measure]) for measure in MEASURES]
        if None in found:
            return ""
        lines.append(f"| {figure} | {' | '.join(one.text() for one in found if one)} |")
    return "\n".join(lines)


def how(table: str) -> str:
    """Return the text above a table of measures."""
    searched = len(MEASURES) * (len(table.splitlines()) - 2) - 1
    return HOW.format(searched=searched, epochs=EPOCHS, rankme=RANKME)


HOW = """Measured on 500 test images of every encoder of this page that was trained for {epochs} epochs
(`patchloom evaluate label-free`). Encoders trained longer or shorter are left out, because many measures change
together with the length. (At first these were included; a review removed them.) Each cell has ρ over the encoders, its
interval from draws of tasks with all their arms and seeds, because the arms of one task are similar, and ρ over the
means of the tasks. There are seven tasks, so the intervals are rather too narrow, and ρ of the means would have to be
0.79. Only the correlation of {rankme} with kNN was declared beforehand. Everything else is a search among
{searched} intervals, one or more of which exclude zero by chance alone."""
