"""Signs of a run for its verdict: from its measure, the rows of ``metrics.csv``, its settings and kNN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from patchloom.data.modality import IMAGES, Modality
from patchloom.options.refusals import GAUSSIAN
from patchloom.questions.question import Measure
from patchloom.results.claims import START, UNTRAINED
from patchloom.results.evaluation import Evaluation, compare_results
from patchloom.results.result import ACCURACY, Baseline, Result
from patchloom.results.shares import SMALL, Level, fell, level_of, share_of_way, share_over
from patchloom.results.verdict import HIGHER, Actions, Signs
from patchloom.runs.settings import ResolvedSettings

# Growth of the gap to perfect between two measures that counts as a jump, if it is also significant. Of five short runs
# at 100 times their learning rate four went up by 6 to 25 %, and none at its own rate by more than 1 %.
_JUMP = 0.05


class VerdictInputs(NamedTuple):
    """State of a run at one of its measures.

    Attributes:
        measure: measure of the task on held-out images.
        rows: rows of ``metrics.csv`` so far, beginning before the first step.
        each: [n] result on each held-out image, by the ``step`` of the row.
        settings: resolved settings.
        step, steps: number of steps done, and of the whole run.
        setbacks: number of times the run went back to a checkpoint, because loss or weights were not finite.
        knn: kNN on the features, from `final_knn` or `logged_knn`; None without labels.
        ended: whether the run has ended.
        stopped: whether it was stopped early.
        modality: kind of the data.
    """

    measure: Measure
    rows: Sequence[Mapping[str, str]]
    each: Mapping[str, Sequence[float]]
    settings: ResolvedSettings
    step: int
    steps: int
    setbacks: int = 0
    knn: Result | None = None
    ended: bool = False
    stopped: bool = False
    modality: Modality = IMAGES

    def signs(self) -> Signs:
        """Return the signs by which the run is judged."""
        measure, settings, late = self.measure, self.settings, self._gained_since(0.75 * self.steps)
        option = "agreement_loss" if "agreement_loss" in settings.task else "loss"
        loss = settings.task.get(option)
        negatives: Actions = {f"task.{option}": "infonce"} if loss == "byol" else {}
        noun = self.modality.noun
        baselines = tuple(one._replace(share=replace(one.share, noun=noun)) for one in measure.result.baselines)
        return Signs(
            replace(measure.result, noun=noun, baselines=baselines),
            self._level(),
            epoch=settings.epochs * self.step / self.steps,
            epochs=settings.epochs,
            updates=-(-self.step // settings.accumulate),  # the last update may have fewer steps
            blr=settings.blr,
            ended=self.ended,
            patience=(settings.patience or 0) if self.stopped else 0,
            finite=math.isfinite(measure.value) and math.isfinite(self._latest("features:spread", 0.0)),
            setbacks=self.setbacks,
            fell=self._fell(),
            gained=self._gained_since(self.step / 2),
            improves=self.ended and late is not None and level_of(late).visible,
            apart=self._latest("images:apart"),
            rank=self._latest("features:centred rank"),
            deviation=self._latest("features:deviation") / (self._latest("features:deviation:untrained") or math.nan),
            same_targets=measure.collapsed(),
            alike=measure.alike(),
            remedies={"task.gaussian_weight": HIGHER} if loss in GAUSSIAN else {**negatives, "task.momentum": HIGHER},
            # a teacher of hidden layers compares no images with one another
            compares=measure.outputs is not None and loss not in ("smooth_l1", "mse"),
            knn=self.knn,
        )

    def _level(self) -> Level:
        """Return the level of the share of the way; clear if it was clear and is not significantly lower now.

        An interval that widens a little would otherwise turn a healthy run into a weak one whose error still falls.
        """
        now = level_of(self.measure.result.to_beat.share)
        base = self.measure.baselines[self.measure.baseline_to_beat()].tolist()
        for row in self._measured():
            before, change = self.each.get(row["step"], ()), self._change(row["step"])
            if now.better and int(row["step"]) < self.step and change is not None and change.high >= 0:
                if level_of(share_of_way(before, base, self._perfect, self.measure.groups)) is Level.CLEAR:
                    return Level.CLEAR
        return now

    def _fell(self) -> tuple[float, float] | None:
        """Return a measure and a later one that is significantly worse: the first and the present, or two in a row."""
        rows = self._measured()
        if rows and level_of(self.measure.result.to_beat.share) is Level.WORSE:  # more epochs will not help
            change = self._change(rows[0]["step"])
            if change is not None and fell(change, SMALL):
                return float(rows[0]["held_out"]), self.measure.value
        for before, after in pairwise(rows):
            change = self._change(before["step"], self.each.get(after["step"], ()))
            if change is not None and fell(change, _JUMP):
                return float(before["held_out"]), float(after["held_out"])
        return None

    def _gained_since(self, step: float) -> Result | None:
        """Return the share of the way since the last measure up to ``step``; None if unknown."""
        before = [row["step"] for row in self._measured() if int(row["step"]) <= step]
        return self._change(before[-1]) if before else None

    def _change(self, before: str, after: Sequence[float] | None = None) -> Result | None:
        """Return the share of the way from a measure to a later one, paired over images; None if unknown."""
        first, last = self.each.get(before, ()), self.measure.values.tolist() if after is None else after
        known = first and len(first) == len(last)
        return share_of_way(last, first, self._perfect, self.measure.groups) if known else None

    def _measured(self) -> list[Mapping[str, str]]:
        return [row for row in self.rows if row.get("held_out")]

    def _latest(self, column: str, missing: float = math.nan) -> float:
        return next((float(row[column]) for row in reversed(self.rows) if row.get(column)), missing)

    @property
    def _perfect(self) -> float:
        return 1.0 if self.measure.higher_is_better else 0.0


def final_knn(knn: Evaluation) -> Result:
    """Return kNN of the final evaluation, with its controls as baselines."""
    trained, *controls = knn.quoted
    return _with_controls(trained, controls, trained.noun)


def logged_knn(rows: Sequence[Mapping[str, str]], images: int, modality: Modality = IMAGES) -> Result | None:
    """Return the last kNN of a run from its rows, of ``images`` queries; None without labels."""
    names = {"knn": "knn", "knn:untrained": UNTRAINED, "knn:raw pixels": modality.raw, f"knn:{START}": START}
    found = {called: float(row[name]) for row in rows for name, called in names.items() if row.get(name)}
    if len(found.keys() - {START}) < len(names) - 1 or not images:
        return None
    trained, *controls = (Result.of_share(name, "knn", {}, value, images) for name, value in found.items())
    return _with_controls(trained, controls, modality.noun)


def _with_controls(trained: Result, controls: Sequence[Result], noun: str) -> Result:
    """Return kNN with its controls as baselines, the best one first; before it the start of an adapted encoder."""
    ranked = sorted(controls, key=lambda row: (row.encoder != START, -row.value))
    against, baselines = [compare_results([trained], [one], trained=False) for one in ranked], list[Baseline]()
    for one, found in zip(ranked, against, strict=True):
        baselines.append(Baseline(one.encoder, one.value, share_over(trained, one, found), True, not baselines))
    measure = "kNN" if trained.measure == ACCURACY else f"{trained.measure} by kNN"
    return replace(trained, measure=measure, noun=noun, baselines=tuple(baselines), against=tuple(against))
