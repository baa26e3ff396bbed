"""Verdict on a run: the first rule that applies, with its figures and the next actions; and the closing sentence.

docs/explanation/verdict.md has a table of the rules with the reasons for their thresholds. They depend on the results
of a run only, not on time, so an interrupted run comes to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from patchloom.data.modality import IMAGES, Modality
from patchloom.evaluate.frozen import UNTRAINED
from patchloom.questions.agreement import GAUSSIAN
from patchloom.questions.question import Measure
from patchloom.results.claims import MIN_VERDICT_IMAGES, START, control_name
from patchloom.results.evaluation import Evaluation, compare_results
from patchloom.results.result import Result
from patchloom.results.shares import SMALL, Level, fell, leave_open, level_of, share_between, share_of, share_of_way
from patchloom.runs.held_out import HeldOut
from patchloom.runs.settings import ResolvedSettings
from patchloom.runs.verdict import ANOTHER, HIGHER, LOWER, Health, Rule, Verdict, no_labels

# The closing sentence of a run.


_TASK = {
    Level.CLEAR: "The task is clearly being learnt",
    Level.WEAK: "The task is being learnt, but weakly so far",
    Level.HARDLY: "The task is hardly being learnt so far",
    Level.UNSURE: "The task is being learnt, but {images} how well",
    Level.NONE: "There is no clear sign that the task is being learnt",
    Level.WORSE: "The task is not learnt yet",
    Level.UNKNOWN: "{images} whether the task is being learnt",
}
_CLASSES = {
    Level.CLEAR: "its features separate classes clearly better than {other}",
    Level.WEAK: "its features separate classes somewhat better than {other}",
    Level.HARDLY: "its features separate classes hardly better than {other}",
    Level.UNSURE: "its features separate classes better than {other}, but {images} by how much",
    Level.NONE: "its features do not separate classes clearly better than {other}",
    Level.WORSE: "its features separate classes worse than {other}",
    Level.UNKNOWN: "{images} whether its features separate classes better than {other}",
}


def closing_sentence(measure: Measure, knn: Evaluation | None, held_out: HeldOut, modality: Modality = IMAGES) -> str:
    """Return the closing sentence of a run, by the rules of `patchloom.results.claims`."""
    text = _of_task(measure, held_out, modality)
    return f"{text}. {no_labels(modality.noun)}" if knn is None else f"{text}; and by kNN {_of_classes(knn, modality)}."


def _of_task(measure: Measure, held_out: HeldOut, modality: Modality) -> str:
    result, noun = measure.result, modality.noun
    effect, to_beat = result.to_beat.share, result.to_beat.name
    level = level_of(effect)
    images = _counted(effect.n, held_out.named(noun), modality)
    base = f"{result.compact(result.to_beat.value)} ({to_beat})"
    if measure.collapsed():
        head = "The outputs for whole images have collapsed, so predicting them means little"
    elif level.better and measure.alike():
        head = f"The outputs for whole {noun} are nearly the same for all of them, so agreement with them means little"
    else:
        head = _TASK[level].format(images=leave_open(effect.n, images))
        head += f", or these {noun} are memorised" if level.better and held_out.doubt else ""
    found = f"{result.measure} {result.compact()}" + (f" on {images}" if images not in head else "")
    if level is Level.WORSE:
        found += f", and {base} has to be beaten"
    elif effect.low == -float("inf"):  # too few for an interval
        found += f", against {base}"
    else:
        found += f", {effect.text()} of the way from {base} to {_perfect(result)}"
    return f"{head}: {found}{_others(result)}"


def _others(result: Result) -> str:
    """Return the other baselines, in words where they disagree with the one to beat."""
    level, to_beat, said = level_of(result.to_beat.share), result.to_beat.name, ""
    for name, mean, share, barred, beats in result.baselines:
        if beats:
            continue
        other, value = level_of(share), f"{name} ({result.compact(mean)})"
        # an optional baseline may know what the network does not, such as each patch's true colour
        knows = "" if barred else ", which has information that the encoder lacks"
        if level.better and other is Level.WORSE:
            said += f"; that beats {to_beat}, but not {value}{knows}"
        elif level is Level.WORSE and other.better:
            said += f"; that beats {value}, but not {to_beat}"
        else:
            said += f"; {name} {result.compact(mean)}"
    return said


def _of_classes(knn: Evaluation, modality: Modality) -> str:
    """Compare the encoder's features with the best control, and with the others where the result differs."""
    trained, best, *rest = best_control_first(knn)
    level, images = (
        level_of(effect_over_control(trained, best, knn.n_test)),
        _counted(knn.n_test, f"test {modality.noun}", modality),
    )
    meaning = _CLASSES[level].format(other=control_name(best.encoder), images=leave_open(knn.n_test, images))
    numbers = f"{trained.value:.1%}, {best.value:.1%}"
    for row in rest:
        other = level_of(effect_over_control(trained, row, knn.n_test))
        if (other.better and level.no_gain) or (other is Level.WORSE and level.better):
            meaning += f" ({numbers}), but {'better' if other.better else 'worse'} than {row.encoder}"
            numbers = f"{row.value:.1%}"
    return f"{meaning} ({numbers})"


def best_control_first(knn: Evaluation) -> list[Result]:
    """Return the encoder's row of a kNN, then its controls, the best one first.

    The start of an adapted encoder comes before the others, because it is what the run must improve on.
    """
    trained, *controls = knn.quoted
    return [trained, *_best_first(controls)]


def _best_first(controls: Iterable[Result]) -> list[Result]:
    return sorted(controls, key=lambda row: (row.encoder != START, -row.value))


def effect_over_control(row: Result, control: Result, n: int) -> Result:
    """Return the share of the way from a control to perfect, by `patchloom.results.claims.Difference` if known."""
    found = share_of(compare_results([row], [control], trained=False), control.value)
    return found or share_between((row.value, row.low, row.high), (control.value, control.low, control.high), n)


def _counted(n: int, images: str, modality: Modality) -> str:
    return f"{n:,} {images if n != 1 else images.replace(modality.noun, modality.item, 1)}"


def _perfect(result: Result) -> str:
    return ("100%" if result.unit == "%" else "1") if result.higher_is_better else "0"


# The inputs of the rules: the measure, the rows, and the kNN result.


class ClassResult(NamedTuple):
    """kNN result of the features.

    Attributes:
        value: accuracy.
        control, other: name and accuracy of the best control.
        level: level of the difference to the best control.
        untrained: level of the difference to an untrained encoder.
        images: number of labelled queries.
        groups: number of their groups, over which the interval is; 0: no groups.
    """

    value: float
    control: str
    other: float
    level: Level
    untrained: Level
    images: int = 0
    groups: int = 0


class VerdictInputs(NamedTuple):
    """State of a run at one of its measures.

    Attributes:
        measure: measure of the task on held-out images.
        rows: rows of ``metrics.csv`` so far, beginning before the first step.
        settings: resolved settings.
        step, steps: number of steps done, and of the whole run.
        setbacks: number of times the run went back to a checkpoint because loss or weights were not finite.
        classes: kNN result, if there are labels.
        ended: whether the run has ended.
        stopped: whether it was stopped early.
        results: [n] result on each held-out image, by the ``step`` of the row; missing for rows of older versions.
        modality: kind of the data.
    """

    measure: Measure
    rows: Sequence[Mapping[str, str]]
    settings: ResolvedSettings
    step: int
    steps: int
    setbacks: int = 0
    classes: ClassResult | None = None
    ended: bool = False
    stopped: bool = False
    results: Mapping[str, Sequence[float]] = {}
    modality: Modality = IMAGES

    @property
    def updates(self) -> int:
        """Number of updates done."""
        return -(-self.step // self.settings.accumulate)  # the last update may have fewer steps

    @property
    def level(self) -> Level:
        """Level of the task's effect, as in the closing sentence; clear if it was clear and has not fallen since.

        An interval that widens a little would otherwise turn a healthy run into a weak one whose error still falls.
        """
        now = level_of(self.measure.result.to_beat.share)
        return Level.CLEAR if now.better and now is not Level.CLEAR and self._was_clear() else now

    def _was_clear(self) -> bool:
        """Return whether the effect was clear at an earlier measure and is not significantly lower now."""
        perfect = 1.0 if self.measure.higher_is_better else 0.0
        base = self.measure.baselines[self.measure.baseline_to_beat()].tolist()
        for row in self._measured():
            values = self.results.get(row["step"], ())
            if int(row["step"]) >= self.step or len(values) != len(base):
                continue
            change = self._change(row["step"], self.measure.values.tolist())
            if change is None or change.high < 0:
                continue
            if level_of(share_of_way(values, base, perfect, self.measure.groups)) is Level.CLEAR:
                return True
        return False

    @property
    def groups(self) -> dict[str, float | str]:
        """Number of groups of the held-out images, as a figure; empty without groups."""
        found = self.measure.groups
        return {} if found is None else {"groups": len(found.unique())}

    @property
    def learnt(self) -> bool:
        """Whether the baseline is beaten by more than `SMALL`."""
        return self.level.visible

    def latest(self, column: str) -> float | None:
        """Return the last value of a column; None if there is none, as in runs of older versions."""
        return next((float(row[column]) for row in reversed(self.rows) if row.get(column)), None)

    def gained_since(self, step: float) -> Result | None:
        """Return the effect of training since the last measure up to ``step``, paired over images; None if unknown."""
        before = [row for row in self._measured() if int(row["step"]) <= step]
        return self._change(before[-1]["step"], self.measure.values.tolist()) if before else None

    def worse_than_at_the_start(self) -> bool:
        """Return whether the measure is significantly worse than before the first step."""
        start = next((row["step"] for row in self._measured()), "")
        change = self._change(start, self.measure.values.tolist())
        return change is not None and fell(change, SMALL)

    def jump_back(self, least: float) -> tuple[float, float] | None:
        """Return the first two consecutive measures whose second one is significantly worse; None if there are none."""
        for before, after in pairwise(self._measured()):
            change = self._change(before["step"], self.results.get(after["step"], ()))
            if change is not None and fell(change, least):
                return float(before["held_out"]), float(after["held_out"])
        return None

    def _measured(self) -> list[Mapping[str, str]]:
        """Return the rows with a held-out measure."""
        return [row for row in self.rows if row.get("held_out")]

    def _change(self, before: str, after: Sequence[float]) -> Result | None:
        """Return the effect of training between two measures, paired over held-out images; None if unknown."""
        first = self.results.get(before, ())
        if not first or len(first) != len(after):
            return None
        return share_of_way(after, first, 1.0 if self.measure.higher_is_better else 0.0, self.measure.groups)

    def separates_classes(self) -> bool:
        """Return whether kNN is better than the best control or an untrained encoder."""
        return self.classes is not None and (self.classes.level.better or self.classes.untrained.better)


def final_class_result(knn: Evaluation) -> ClassResult:
    """Return the kNN result of the final evaluation."""
    trained, *controls = best_control_first(knn)
    return _classes(trained, controls, knn.n_test)


def logged_class_result(
    rows: Sequence[Mapping[str, str]], images: int, modality: Modality = IMAGES
) -> ClassResult | None:
    """Return the last kNN result of a run from its rows; None without labels."""
    names = {"knn": "knn", "knn:untrained": UNTRAINED, "knn:raw pixels": modality.raw, f"knn:{START}": START}
    found = {called: row[name] for row in rows for name, called in names.items() if row.get(name)}
    if len(found.keys() - {START}) < len(names) - 1 or not images:
        return None
    trained, *controls = (
        Result.of_share(name, "knn", {"pooling": "mean"}, float(value), images) for name, value in found.items()
    )
    return _classes(trained, _best_first(controls), images)


def _classes(trained: Result, controls: Sequence[Result], images: int) -> ClassResult:
    """Return the kNN result of an encoder's row and its controls, the best one first."""
    levels = {row.encoder: level_of(effect_over_control(trained, row, images)) for row in controls}
    best = next(iter(levels))
    groups = trained.groups
    return ClassResult(trained.value, best, controls[0].value, levels[best], levels[UNTRAINED], images, groups)


# Images below this are nearly identical: deviation from their mean image, relative to that of all their pixels. Copies
# of one image with noise of ±3 grey values have 0.03, the images of `shapes` 0.99.
_APART = 0.05
_SOME = 16  # images; with fewer, the rank of the features is small anyway
# Below either of these the features have collapsed: their deviation from their mean relative to an untrained encoder,
# and their centred rank. A vector that all features share changes neither. 37 ordinary runs had 0.17 to 1.22 and 5.8 to
# 78; `mae` on small images of four kinds, whose kNN was far above the untrained one, 0.13 and 0.24; encoders that were
# made to collapse 0.02 to 0.05.
_LEAST_DEVIATION, _LEAST_RANK = 0.05, 2.0
# Growth of the gap to perfect between two measures that counts as a jump, if it is also significant. Of five short runs
# at 100 times their learning rate four went up by 6 to 25 %, and none at its own rate by more than 1 %.
_JUMP = 0.05
# Fewer updates say little about a task that is not learnt yet: position tasks stayed at chance for the first 250 to 350
# updates of our short runs, and improved after that.
_ENOUGH = 500
# A task is solved if this share of the way to perfect is reached, with an interval above the second one: the interval
# of 250 images that are all right begins at 98 %.
_SOLVED, _SURELY = 0.99, 0.95


class _Finding(NamedTuple):
    """Verdict of a rule with its figures and next actions; `patchloom.runs.verdict` words it."""

    verdict: Verdict
    rule: Rule
    figures: Mapping[str, float | str] = {}
    actions: Mapping[str, float | str] = {}


def health_of(signs: VerdictInputs) -> Health:
    """Return the verdict on a run by the first rule that applies."""
    for find in _RULES:
        if found := find(signs):
            epoch = round(signs.settings.epochs * signs.step / signs.steps, 4)
            # present values of the settings that the actions change
            now: dict[str, float | str] = {"blr": signs.settings.blr} if "blr" in found.actions else {}
            if "patience" in found.actions:
                now["patience"] = signs.settings.patience or 0
            of_all = signs.measure.result, {**found.figures, **now}, found.actions, signs.modality.noun
            return Health(found.verdict, epoch, signs.ended, found.rule, *of_all)
    raise AssertionError("the last rule always applies")


def _same_images(signs: VerdictInputs) -> _Finding | None:
    apart, n = signs.latest("images:apart"), signs.measure.result.n
    if apart is None or not apart < _APART or n < MIN_VERDICT_IMAGES:
        return None
    figures: dict[str, float | str] = {"apart": apart, "values": signs.modality.values}
    return _Finding(Verdict.UNKNOWN, Rule.SAME_IMAGES, figures, {"data": ANOTHER})


def _not_finite(signs: VerdictInputs) -> _Finding | None:
    spread = signs.latest("features:spread")  # nan if the features are not finite
    if math.isfinite(signs.measure.result.value) and (spread is None or math.isfinite(spread)):
        return None
    return _Finding(Verdict.NOT_LEARNING, Rule.NOT_FINITE, {}, _slower(signs))


def _same_features(signs: VerdictInputs) -> _Finding | None:
    rank, now = signs.latest("features:centred rank"), signs.latest("features:deviation")
    if rank is None or now is None or signs.measure.result.n < _SOME:
        return None
    untrained = signs.latest("features:deviation:untrained")
    share = None if not untrained else now / untrained
    if rank >= _LEAST_RANK and (share is None or share >= _LEAST_DEVIATION):
        return None
    if signs.separates_classes():  # the features distinguish images, by however little
        return None
    figures = {"rank": rank} | ({} if share is None else {"share": share})
    return _Finding(Verdict.COLLAPSED, Rule.SAME_FEATURES, figures, _slower(signs))


def _same_outputs(signs: VerdictInputs) -> _Finding | None:
    if not signs.measure.collapsed():
        return None
    if signs.classes is None or not signs.separates_classes():
        return _Finding(Verdict.COLLAPSED, Rule.SAME_OUTPUTS, {}, _for_teacher(signs))
    return _Finding(Verdict.WEAK, Rule.SAME_OUTPUTS, _by_knn(signs.classes), _for_teacher(signs))


def _few_images(signs: VerdictInputs) -> _Finding | None:
    if signs.level is not Level.UNKNOWN or not signs.step:
        return None
    if signs.updates < _ENOUGH and signs.measure.result.n >= MIN_VERDICT_IMAGES:
        return None  # more updates tell more than more images: `_not_better`
    return _Finding(Verdict.UNKNOWN, Rule.FEW_IMAGES, signs.groups, {"held_out": HIGHER})


def _not_begun(signs: VerdictInputs) -> _Finding | None:
    return None if signs.step else _Finding(Verdict.EARLY, Rule.NOT_BEGUN)


def _went_back(signs: VerdictInputs) -> _Finding | None:
    if signs.learnt or not signs.setbacks:
        return None
    return _Finding(Verdict.NOT_LEARNING, Rule.WENT_BACK, {"times": signs.setbacks}, _slower(signs))


def _got_worse(signs: VerdictInputs) -> _Finding | None:
    """Worse than the baseline and significantly worse than before training: more epochs will not help."""
    if signs.level is not Level.WORSE or not signs.worse_than_at_the_start():
        return None
    start = next(float(row["held_out"]) for row in signs.rows if row.get("held_out"))
    return _Finding(Verdict.NOT_LEARNING, Rule.GOT_WORSE, {"start": start}, _slower(signs))


def _jumped_back(signs: VerdictInputs) -> _Finding | None:
    """The measure improved and fell back during training, and does not beat the baseline yet."""
    if signs.learnt:
        return None
    found = signs.jump_back(_JUMP)
    if found is None:
        return None
    figures = dict(zip(("before", "after"), found, strict=True))
    return _Finding(Verdict.NOT_LEARNING, Rule.JUMPED_BACK, figures, _slower(signs))


def _not_better(signs: VerdictInputs) -> _Finding | None:
    if signs.learnt:
        return None
    updates = {"updates": signs.updates}
    if signs.updates < _ENOUGH:
        return _Finding(Verdict.EARLY, Rule.FEW_UPDATES, updates, _longer(signs) if signs.ended else {})
    if not signs.ended and signs.step < signs.steps / 2:
        return _Finding(Verdict.EARLY, Rule.FIRST_HALF)
    gained = signs.gained_since(signs.step / 2)
    if gained is None:
        return _Finding(Verdict.EARLY, Rule.NO_HALFWAY, updates, _longer(signs))
    if level_of(gained).visible:
        return _Finding(Verdict.EARLY, Rule.NEARER, {"gained": gained.value}, _longer(signs))
    if level_of(gained) is Level.UNKNOWN:
        actions = {"held_out": HIGHER, **_longer(signs)}
        return _Finding(Verdict.EARLY, Rule.FEW_IMAGES_SINCE_HALFWAY, signs.groups, actions)
    actions = {"patch_size": LOWER, "blr": LOWER, "task": ANOTHER}
    return _Finding(Verdict.NOT_LEARNING, Rule.STANDS_STILL, updates, actions)


def _alike(signs: VerdictInputs) -> _Finding | None:
    if not signs.measure.alike():
        return None
    return _Finding(Verdict.WEAK, Rule.AGREES_WITH_ALL, {}, _for_teacher(signs))


def _weak(signs: VerdictInputs) -> _Finding | None:
    if signs.level is Level.CLEAR:
        return None
    if signs.level is Level.UNSURE:
        return _Finding(Verdict.WEAK, Rule.FEW_IMAGES_FOR_SIZE, signs.groups, {"held_out": HIGHER, **_longer(signs)})
    # a teacher of hidden layers compares no images with one another
    agreement = signs.measure.outputs is not None and _loss_of(signs) not in ("smooth_l1", "mse")
    batch = {"batch_size": HIGHER} if agreement else {}
    return _Finding(Verdict.WEAK, Rule.NOT_CLEAR, {}, _longer(signs) | batch)


def _solved(signs: VerdictInputs) -> _Finding | None:
    """The task is too easy, and labels show no gain or are missing."""
    effect, found = signs.measure.result.to_beat.share, signs.classes
    if signs.measure.outputs is not None or effect.value < _SOLVED or effect.low < _SURELY:
        return None
    if found is None:
        return _Finding(Verdict.HEALTHY, Rule.SOLVED, {}, {"task": ANOTHER})
    if not signs.ended or not found.level.no_gain:
        return None
    return _Finding(Verdict.WEAK, Rule.SOLVED, _by_knn(found), {"task": ANOTHER})


def _no_gain_in_classes(signs: VerdictInputs) -> _Finding | None:
    # a kNN on the way is of few images and without their pairs: only the final evaluation judges, by `Difference`
    found = signs.classes if signs.ended else None
    if found is None or not found.level.no_gain:
        return None
    actions = _longer(signs) | {"task": ANOTHER}
    return _Finding(Verdict.WEAK, Rule.NO_GAIN_IN_CLASSES, _by_knn(found), actions)


def _healthy(signs: VerdictInputs) -> _Finding:
    labels = {"labels": HIGHER} if signs.ended else {}
    if signs.classes is None:
        return _Finding(Verdict.HEALTHY, Rule.HEALTHY, {}, labels)
    figures = _by_knn(signs.classes)
    if signs.classes.level is Level.UNKNOWN:
        figures |= {"labelled": signs.classes.images} | (
            {"groups": signs.classes.groups} if signs.classes.groups else {}
        )
        return _Finding(Verdict.HEALTHY, Rule.HEALTHY, figures, labels)
    gained = signs.gained_since(0.75 * signs.steps) if signs.ended else None
    grows = gained is not None and level_of(gained).visible
    return _Finding(Verdict.HEALTHY, Rule.HEALTHY, figures, _longer(signs) if grows else {})


_RULES = (
    *(_same_images, _not_finite, _not_begun, _same_features, _same_outputs, _few_images, _went_back),
    *(_got_worse, _jumped_back, _not_better, _alike, _weak, _solved, _no_gain_in_classes, _healthy),
)


def _by_knn(found: ClassResult) -> dict[str, float | str]:
    return {"knn": found.value, "control": found.control, "knn of it": found.other}


def _longer(signs: VerdictInputs) -> dict[str, float | str]:
    return {"out": ANOTHER, "patience": HIGHER} if signs.stopped else {"epochs": math.ceil(4 * signs.settings.epochs)}


def _slower(signs: VerdictInputs) -> dict[str, float | str]:
    return {"blr": signs.settings.blr / 10, "warmup_epochs": HIGHER}


def _loss_of(signs: VerdictInputs) -> object:
    """Return the loss of agreement, or None."""
    return signs.settings.task.get(_name_of_loss(signs))


def _name_of_loss(signs: VerdictInputs) -> str:
    return "agreement_loss" if "agreement_loss" in signs.settings.task else "loss"


def _for_teacher(signs: VerdictInputs) -> dict[str, float | str]:
    if _loss_of(signs) in GAUSSIAN:
        return {"task.gaussian_weight": HIGHER, **_slower(signs)}
    loss = {f"task.{_name_of_loss(signs)}": "infonce"} if _loss_of(signs) == "byol" else {}
    return {**loss, "task.momentum": HIGHER, **_slower(signs)}
