"""The verdict on a run: the first of a few rules that has something to say, the figure that says so, and what to try.

The rules, with the reasons of their thresholds, are a table in docs/pretrain.md. They need what a run knows at each of
its measures, and nothing of the time, so that a run that was stopped comes to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from patchloom.evaluate import Report
from patchloom.evaluate.report import Row
from patchloom.questions.measure import Measure
from patchloom.runs.health import COLLAPSED, EARLY, HEALTHY, NOT_LEARNING, UNKNOWN, WEAK, Health
from patchloom.runs.settings import Settings
from patchloom.train.closing import beside, best_control_first
from patchloom.verdict import LEAST, SMALL, Level, level_beside

# Below this the images are nearly the same: what sets one apart from another, as a share of all that their pixels
# differ by. Copies of one image with noise of ±3 grey values have 0.03, the images of `shapes` 0.99, CIFAR's 0.97.
_APART = 0.05
_SOME = 16  # images; features of fewer cannot differ in many directions
# Below these the encoder gives nearly the same features to all images, or such as lie on one line. That features lose
# directions is no bad sign in itself: after 72 updates runs that learnt had 0.2 to 0.5 of the untrained rank.
_LEAST_SPREAD, _LEAST_RANK = 0.1, 2.0
# By so much the gap to perfect has to grow from one measure to the next before it counts as a jump. Of five short runs
# at 100 times their learning rate four went up by 6 to 25 %, and none at its own rate by more than 1 %.
_JUMP = 0.05
# Updates before which a task that is not learnt yet says little: position tasks stood at chance for the first 250 to
# 350 of them in our short runs, and left it then.
_ENOUGH = 500


class Classes(NamedTuple):
    """What kNN says of the features.

    Attributes:
        value: its accuracy.
        control, other: name and accuracy of the best control.
        level: what may be said of the difference.
    """

    value: float
    control: str
    other: float
    level: Level


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
    """

    measure: Measure
    rows: Sequence[Mapping[str, str]]
    settings: Settings
    step: int
    steps: int
    setbacks: int = 0
    classes: Classes | None = None
    ended: bool = False

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

    def gap(self, value: float) -> float:
        """How far a value of the measure is from perfect."""
        return (1 - value) if self.measure.higher_is_better else value

    def gained_since(self, step: float) -> float:
        """By which share the gap to perfect has become smaller since the last measure up to a step."""
        before = [row for row in self.rows if row.get("held_out") and int(row["step"]) <= step]
        if not before or self.gap(float(before[-1]["held_out"])) <= 0:
            return 0.0
        return 1 - self.gap(self.measure.value) / self.gap(float(before[-1]["held_out"]))


class _Found(NamedTuple):
    verdict: str
    why: str
    then: str = ""


def health_of(signs: Signs) -> Health:
    """The verdict on a run, by the first rule that speaks."""
    for rule in _RULES:
        if found := rule(signs):
            epoch = round(signs.settings.epochs * signs.step / signs.steps, 4)
            return Health(found.verdict, found.why, found.then, epoch, signs.ended)
    raise AssertionError("the last rule always speaks")


def classes_of(knn: Report) -> Classes:
    """What the final evaluation says of the features."""
    trained, best, *_ = best_control_first(knn)
    return Classes(trained.value, best.encoder, best.value, beside(trained, best, knn.n_test).level)


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
    best = max(controls, key=lambda row: row.value)
    level = beside(trained, best, images).level
    return Classes(trained.value, best.encoder.removeprefix("knn:"), best.value, level)


def _same_images(signs: Signs) -> _Found | None:
    apart, n = signs.latest("images:apart"), len(signs.measure.values)
    if apart is None or not apart < _APART or n < LEAST:
        return None
    why = (
        f"the {n:,} held-out images are nearly all the same: {apart:.1%} of what their pixels differ by sets them apart"
    )
    return _Found(UNKNOWN, why, "look at your data (patchloom check), and give images that differ")


def _not_finite(signs: Signs) -> _Found | None:
    spread = signs.latest("features:spread")
    if math.isfinite(signs.measure.value) and (spread is None or math.isfinite(spread)):
        return None
    return _Found(NOT_LEARNING, f"{signs.figure()}: something is not finite any more", _slower(signs))


def _same_features(signs: Signs) -> _Found | None:
    spread, rank = signs.latest("features:spread"), signs.latest("features:effective rank")
    if spread is None or rank is None or len(signs.measure.values) < _SOME:
        return None
    if spread >= _LEAST_SPREAD and rank >= _LEAST_RANK:
        return None
    untrained = signs.latest("features:effective rank:untrained")
    found = f"spread {spread:.2f}, effective rank {rank:.1f}"
    found += "" if untrained is None else f", that of an untrained encoder's {untrained:.1f}"
    why = f"the encoder's features of different images are nearly the same ({found})"
    return _Found(COLLAPSED, why, _slower(signs))


def _same_outputs(signs: Signs) -> _Found | None:
    if not signs.measure.collapsed():
        return None
    found = ", ".join(f"{name} {value:.2f}" for name, value in signs.measure.diversity.items())
    why = f"the teacher gives all images nearly the same output ({found}), so that agreement with it means little"
    return _Found(COLLAPSED, why, _for_teacher(signs))


def _few_images(signs: Signs) -> _Found | None:
    if signs.level not in (Level.UNKNOWN, Level.UNSURE) or not signs.step:
        return None
    n = len(signs.measure.values)
    why = f"{signs.figure()}, on {n:,} held-out {'image' if n == 1 else 'images'}, which are too few"
    return _Found(UNKNOWN, why, "hold out more images (--held_out), or give more of them")


def _not_begun(signs: Signs) -> _Found | None:
    return None if signs.step else _Found(EARLY, f"nothing is trained yet: {signs.figure()}")


def _went_back(signs: Signs) -> _Found | None:
    if signs.learnt or not signs.setbacks:
        return None
    times = "once" if signs.setbacks == 1 else f"{signs.setbacks} times"
    return _Found(NOT_LEARNING, f"the run went back {times}, as it was not finite; {signs.figure()}", _slower(signs))


def _got_worse(signs: Signs) -> _Found | None:
    """Worse than the baseline, and than before training: that is no matter of patience."""
    gained = signs.gained_since(0)
    if signs.level is not Level.WORSE or gained > -SMALL:
        return None
    measure, start = signs.measure, next(float(row["held_out"]) for row in signs.rows if row.get("held_out"))
    why = f"{signs.figure()}: worse than before the first step ({measure.show(start)})"
    return _Found(NOT_LEARNING, why, _slower(signs))


def _unstable(signs: Signs) -> _Found | None:
    """The measure went up and down on the way, and is not better than the baseline yet."""
    if signs.learnt:
        return None
    values = [float(row["held_out"]) for row in signs.rows if row.get("held_out")]
    show = signs.measure.show
    for before, after in pairwise(values):
        if signs.gap(after) > (1 + _JUMP) * signs.gap(before):
            why = f"{signs.figure()}, and on the way it went from {show(before)} back to {show(after)}"
            return _Found(NOT_LEARNING, why, _slower(signs))
    return None


def _not_better(signs: Signs) -> _Found | None:
    if signs.learnt:
        return None
    if signs.updates < _ENOUGH:
        why = f"{signs.figure()}, after {signs.updates:,} {'update' if signs.updates == 1 else 'updates'}"
        return _Found(EARLY, why, _longer(signs) if signs.ended else "")
    if not signs.ended and signs.step < signs.steps / 2:
        return _Found(EARLY, f"{signs.figure()}, in the first half of the run")
    if (gained := signs.gained_since(signs.step / 2)) >= SMALL:
        why = f"{signs.figure()}, but {gained:.0%} nearer to perfect than halfway"
        return _Found(EARLY, why, _longer(signs))
    why = f"{signs.figure()}, after {signs.updates:,} updates, and no nearer to perfect than halfway"
    then = f"smaller patches (--patch_size), a lower --blr (now {signs.settings.blr:g}), or another --task"
    return _Found(NOT_LEARNING, why, f"look at the pictures, and at your data; {then}")


def _alike(signs: Signs) -> _Found | None:
    if not signs.measure.alike():
        return None
    why = f"{signs.figure()}: the teacher's outputs are so alike that agreeing with them says little"
    return _Found(WEAK, why, _for_teacher(signs))


def _weak(signs: Signs) -> _Found | None:
    if signs.level is Level.CLEAR:
        return None
    batch = "" if signs.measure.outputs is None else ", or with a larger --batch_size"
    return _Found(WEAK, _share(signs), f"{_longer(signs)}{batch}")


def _no_gain_in_classes(signs: Signs) -> _Found | None:
    found = signs.classes
    if found is None or found.level not in (Level.WORSE, Level.NONE):
        return None
    why = f"{signs.figure()}; but by kNN its features tell classes no better than {found.control} ({_by_knn(found)})"
    return _Found(WEAK, why, f"{_longer(signs)}, or try another --task; fine-tuning may tell more than kNN")


def _healthy(signs: Signs) -> _Found:
    if signs.classes is None:
        then = "a few labels tell what the features are good for (patchloom evaluate knn)" if signs.ended else ""
        return _Found(HEALTHY, _share(signs), then)
    why = f"{_share(signs)}; kNN {_by_knn(signs.classes)}"
    grows = signs.ended and signs.gained_since(0.75 * signs.steps) >= SMALL
    return _Found(HEALTHY, why, f"{_longer(signs)}: it was still getting better" if grows else "")


_RULES = (
    *(_same_images, _not_finite, _not_begun, _same_features, _same_outputs, _few_images, _went_back),
    *(_got_worse, _unstable, _not_better, _alike, _weak, _no_gain_in_classes, _healthy),
)


def _share(signs: Signs) -> str:
    return f"{signs.figure()}, {signs.measure.effect().share:.0%} of the way to perfect"


def _by_knn(found: Classes) -> str:
    return f"{found.value:.1%}, {found.control} {found.other:.1%}"


def _longer(signs: Signs) -> str:
    return f"train longer (--epochs {4 * signs.settings.epochs:g})"


def _slower(signs: Signs) -> str:
    return f"lower --blr (from {signs.settings.blr:g} to {signs.settings.blr / 10:g}), or raise --warmup_epochs"


def _for_teacher(signs: Signs) -> str:
    return f"give extrema --task.loss infonce, raise --task.momentum, or {_slower(signs)}"
