"""What is known of a run when a verdict is to be found: its measure, its rows, and what its features are good for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from patchloom.evaluate import Report
from patchloom.evaluate.frozen import UNTRAINED
from patchloom.evaluate.report import Row
from patchloom.questions.measure import Measure
from patchloom.runs.settings import Settings
from patchloom.train.closing import beside, best_control_first
from patchloom.verdict import SMALL, Effect, Level, effect_of, level_beside


class Classes(NamedTuple):
    """What kNN says of the features.

    Attributes:
        value: its accuracy.
        control, other: name and accuracy of the best control.
        level: what may be said of the difference.
        untrained: what may be said of the difference to an untrained encoder.
        images: labelled ones that were asked.
    """

    value: float
    control: str
    other: float
    level: Level
    untrained: Level
    images: int = 0


class Signs(NamedTuple):
    """What is known of a run at one of its measures.

    Attributes:
        measure: of the task, on held-out images.
        rows: of ``metrics.csv`` up to there, the first of them before the first step.
        settings: resolved.
        step, steps: that are done, and of the whole run.
        setbacks: how often the run went back to a checkpoint, since its loss was not finite.
        classes: by kNN, where there are labels.
        ended: the run has.
        stopped: it has, before its last step, since it got no better.
        results: [n] of the measure on each held-out image, by the ``step`` of the row; those of an older version's
            rows are missing.
    """

    measure: Measure
    rows: Sequence[Mapping[str, str]]
    settings: Settings
    step: int
    steps: int
    setbacks: int = 0
    classes: Classes | None = None
    ended: bool = False
    stopped: bool = False
    results: Mapping[str, Sequence[float]] = {}

    @property
    def updates(self) -> int:
        """How many there were."""
        return self.step // self.settings.accumulate

    @property
    def level(self) -> Level:
        """What may be said of the task, as in the closing sentence."""
        return level_beside(self.measure.effect(), map(self.measure.effect, self.measure.means()))

    @property
    def learnt(self) -> bool:
        """Whether the baseline is beaten by more than nobody would see, such as 0.5 % by which noise can be learnt."""
        return self.level.better and self.level is not Level.HARDLY

    def latest(self, column: str) -> float | None:
        """The last value of a column; None if there is none, as in a run of an older version."""
        return next((float(row[column]) for row in reversed(self.rows) if row.get(column)), None)

    def figure(self) -> str:
        """The measure beside the baseline that has to be beaten."""
        measure, to_beat = self.measure, self.measure.baseline_to_beat()
        return f"{measure.name} {measure.show(measure.value)}, {to_beat} {measure.show(measure.means()[to_beat])}"

    def gained_since(self, step: float) -> Effect | None:
        """Effect of the training since the last measure up to a step, image by image; None if that is not known."""
        before = [row for row in self._measured() if int(row["step"]) <= step]
        return self._change(before[-1]["step"], self.measure.values.tolist()) if before else None

    def worse_than_at_the_start(self) -> bool:
        """Whether the measure is worse than before the first step, by more than chance."""
        start = next((row["step"] for row in self._measured()), "")
        return _fell(self._change(start, self.measure.values.tolist()), SMALL)

    def jump_back(self, least: float) -> tuple[float, float] | None:
        """Return the means of the first two measures in a row of which the second is worse, by more than chance.

        Args:
            least: growth of the gap to perfect that counts.
        """
        for before, after in pairwise(self._measured()):
            if _fell(self._change(before["step"], self.results.get(after["step"], ())), least):
                return float(before["held_out"]), float(after["held_out"])
        return None

    def _measured(self) -> list[Mapping[str, str]]:
        """Rows with a held-out measure."""
        return [row for row in self.rows if row.get("held_out")]

    def _change(self, before: str, after: Sequence[float]) -> Effect | None:
        """Effect of the training between two measures, paired over the held-out images; None if they are not known."""
        first = self.results.get(before, ())
        if not first or len(first) != len(after):
            return None
        return effect_of(after, first, 1.0 if self.measure.higher_is_better else 0.0)

    def tells_classes(self) -> bool:
        """Whether labels say that the features are better than an untrained encoder's."""
        return self.classes is not None and (self.classes.level.better or self.classes.untrained.better)


def _fell(change: Effect | None, least: float) -> bool:
    """Whether a measure got worse by at least a share of its way to perfect, and by more than chance.

    The interval is √2 times the 95 % one, which is 99.4 %: a run is asked at half a dozen measures.
    """
    if change is None or change.share > -least:
        return False
    return change.share + math.sqrt(2) * (change.high - change.share) < 0


def classes_of(knn: Report) -> Classes:
    """What the final evaluation says of the features."""
    trained, *controls = best_control_first(knn)
    return _classes(trained, controls, knn.n_test)


def classes_in(rows: Sequence[Mapping[str, str]], images: int) -> Classes | None:
    """What the last measure of a run says of the features; None without labels.

    Args:
        rows: of ``metrics.csv``.
        images: held-out ones with a label.
    """
    found = {name: row[name] for row in rows for name in ("knn", "knn:untrained", "knn:raw pixels") if row.get(name)}
    if len(found) < 3 or not images:
        return None
    trained, *controls = (Row.of(name, "mean", "knn", {}, float(value), images) for name, value in found.items())
    return _classes(trained, sorted(controls, key=lambda row: -row.value), images)


def _classes(trained: Row, controls: Sequence[Row], images: int) -> Classes:
    """Of the encoder's row and its controls', the best one first."""
    levels = {row.encoder.removeprefix("knn:"): beside(trained, row, images).level for row in controls}
    best = next(iter(levels))
    return Classes(trained.value, best, controls[0].value, levels[best], levels[UNTRAINED], images)
