"""The verdict on a run: the first of a few rules that has something to say, the figure that says so, and what to try.

The rules, with the reasons of their thresholds, are a table in docs/pretrain.md. They need what a run knows at each of
its measures, and nothing of the time, so that a run that was stopped comes to the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from patchloom.claims import MIN_VERDICT_IMAGES, SMALL, Effect, Level, effect_between, effect_of, level_beside
from patchloom.data.modality import IMAGES, Modality
from patchloom.evaluate.frozen import UNTRAINED
from patchloom.evaluate.results import Report, Row, compare_rows
from patchloom.questions.question import Measure
from patchloom.runs.held_out import HeldOut
from patchloom.runs.settings import ResolvedSettings
from patchloom.runs.verdict import COLLAPSED, EARLY, HEALTHY, NOT_LEARNING, UNKNOWN, WEAK, Health, no_labels

# The closing sentence of a run: what its numbers allow to say, and what they do not.


_TASK = {
    Level.CLEAR: "The task is clearly being learnt",
    Level.WEAK: "The task is being learnt, but weakly so far",
    Level.HARDLY: "The task is hardly being learnt so far",
    Level.UNSURE: "The task is being learnt, though {images} too few to tell how well",
    Level.NONE: "There is no clear sign that the task is being learnt",
    Level.WORSE: "The task is not learnt yet",
    Level.UNKNOWN: "{images} too few to tell whether the task is being learnt",
}
_CLASSES = {
    Level.CLEAR: "its features tell classes clearly better than {other}",
    Level.WEAK: "its features tell classes somewhat better than {other}",
    Level.HARDLY: "its features tell classes hardly better than {other}",
    Level.UNSURE: "its features tell classes better than {other}, though {images} too few to tell by how much",
    Level.NONE: "in telling classes, its features show no clear gain over {other}",
    Level.WORSE: "its features tell classes worse than {other}",
    Level.UNKNOWN: "{images} too few to tell whether its features tell classes better than {other}",
}


def closing_sentence(measure: Measure, knn: Report | None, held_out: HeldOut, modality: Modality = IMAGES) -> str:
    """What the numbers of a run mean, by the rules of `patchloom.claims`."""
    text = _of_task(measure, held_out, modality)
    return f"{text}. {no_labels(modality.noun)}" if knn is None else f"{text}; and by kNN {_of_classes(knn, modality)}."


def _of_task(measure: Measure, held_out: HeldOut, modality: Modality) -> str:
    means, to_beat, effect = measure.means(), measure.baseline_to_beat(), measure.effect()
    noun = modality.noun
    images = _counted(effect.n, held_out.named(noun), modality)
    level, base = level_beside(effect, map(measure.effect, means)), f"{measure.show(means[to_beat])} ({to_beat})"
    if measure.collapsed():
        head = "The teacher's outputs have collapsed, so agreeing with them means little"
    elif level.better and measure.alike():
        head = f"The teacher's outputs are nearly the same for all {noun}, so agreeing with them says little"
    else:
        head = _TASK[level].format(images=_being(effect.n, images))
        head += f", or these {noun} are known by heart" if level.better and held_out.doubt else ""
    found = f"{measure.name} {measure.show(measure.value)}" + (f" on {images}" if images not in head else "")
    if level is Level.WORSE:
        found += f", and {base} has to be beaten"
    elif effect.low == -float("inf"):  # too few for an interval
        found += f", against {base}"
    else:
        found += f", {effect.text()} of the way from {base} to {_perfect(measure)}"
    return f"{head}: {found}{_others(measure, to_beat, level)}"


def _others(measure: Measure, to_beat: str, level: Level) -> str:
    """The other baselines; and where they do not say the same as the one to beat, that in words."""
    means = measure.means()
    said = ""
    for name in means:
        if name == to_beat:
            continue
        other, value = measure.effect(name).level, f"{name} ({measure.show(means[name])})"
        # what need not be beaten may know what the network does not, as each patch's true colour
        knows = "" if measure.has_to_be_beaten(name) else ", which knows what the encoder is not given"
        if level.better and other is Level.WORSE:
            said += f"; that beats {to_beat}, but not {value}{knows}"
        elif level is Level.WORSE and other.better:
            said += f"; that beats {value}, but not {to_beat}"
        else:
            said += f"; {name} {measure.show(means[name])}"
    return said


def _of_classes(knn: Report, modality: Modality) -> str:
    """How the encoder's features compare with the best control's; and with the other ones', where they differ."""
    trained, best, *rest = best_control_first(knn)
    level, images = (
        effect_over_control(trained, best, knn.n_test).level,
        _counted(knn.n_test, f"test {modality.noun}", modality),
    )
    meaning = _CLASSES[level].format(other=best.encoder, images=_being(knn.n_test, images))
    numbers = f"{trained.value:.1%}, {best.value:.1%}"
    for row in rest:
        other = effect_over_control(trained, row, knn.n_test).level
        if other.better and level in (Level.NONE, Level.WORSE):
            meaning += f" ({numbers}), but better than {row.encoder}"
            numbers = f"{row.value:.1%}"
    return f"{meaning} ({numbers})"


def best_control_first(knn: Report) -> list[Row]:
    """The encoder's row of a kNN, and those of its controls, the best one first."""
    trained, *controls = knn.quoted
    return [trained, *sorted(controls, key=lambda row: -row.value)]


def effect_over_control(row: Row, control: Row, n: int) -> Effect:
    """How far an encoder is beyond a control, by the interval of `patchloom.claims.Difference`, where there is one."""
    way = 1 - control.value
    found = compare_rows([row], [control], trained=False)
    if not found.n or way <= 0:
        return effect_between((row.value, row.low, row.high), (control.value, control.low, control.high), n)
    return Effect(found.value / way, found.low / way, found.high / way, n)


def _counted(n: int, images: str, modality: Modality) -> str:
    return f"{n:,} {images if n != 1 else images.replace(modality.noun, modality.item, 1)}"


def _being(n: int, images: str) -> str:
    return f"{images} {'is' if n == 1 else 'are'}"


def _perfect(measure: Measure) -> str:
    return ("100%" if "%" in measure.form else "1") if measure.higher_is_better else "0"


# What is known of a run when a verdict is to be found: its measure, its rows, and what its features are good for.


class ClassResult(NamedTuple):
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


class VerdictInputs(NamedTuple):
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
        modality: what the images are pictures of.
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
        """Return the means of the first two measures in a row of which the second is worse, by more than chance."""
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


def final_class_result(knn: Report) -> ClassResult:
    """What the final evaluation says of the features."""
    trained, *controls = best_control_first(knn)
    return _classes(trained, controls, knn.n_test)


def logged_class_result(rows: Sequence[Mapping[str, str]], images: int) -> ClassResult | None:
    """What the last measure of a run says of the features; None without labels."""
    found = {name: row[name] for row in rows for name in ("knn", "knn:untrained", "knn:raw pixels") if row.get(name)}
    if len(found) < 3 or not images:
        return None
    trained, *controls = (Row.of(name, "mean", "knn", {}, float(value), images) for name, value in found.items())
    return _classes(trained, sorted(controls, key=lambda row: -row.value), images)


def _classes(trained: Row, controls: Sequence[Row], images: int) -> ClassResult:
    """Of the encoder's row and its controls', the best one first."""
    levels = {row.encoder.removeprefix("knn:"): effect_over_control(trained, row, images).level for row in controls}
    best = next(iter(levels))
    return ClassResult(trained.value, best, controls[0].value, levels[best], levels[UNTRAINED], images)


# Below this the images are nearly the same: what sets one apart from another, as a share of all that their pixels
# differ by. Copies of one image with noise of ±3 grey values have 0.03, the images of `shapes` 0.99, CIFAR's 0.97.
_APART = 0.05
_SOME = 16  # images; features of fewer cannot differ in many directions
# Below these the encoder gives nearly the same features to all images, or such as lie on one line: their deviation from
# their mean as a share of an untrained encoder's, and the rank without that mean, which a vector that all features have
# in common does not move. 37 ordinary runs had 0.17 to 1.22 and 5.8 to 78; `mae` on small images of four kinds,
# whose kNN was far above the untrained, 0.13 and 0.24; encoders that were made to collapse 0.02 to 0.05.
_LEAST_DEVIATION, _LEAST_RANK = 0.05, 2.0
# Growth of the gap to perfect from one measure to the next that counts as a jump, if it is also more than chance. Of
# five short runs at 100 times their learning rate four went up by 6 to 25 %, and none at its own rate by more than 1 %.
_JUMP = 0.05
# Updates before which a task that is not learnt yet says little: position tasks stood at chance for the first 250 to
# 350 of them in our short runs, and left it then.
_ENOUGH = 500


class _Finding(NamedTuple):
    verdict: str
    why: str
    then: str = ""


def health_of(signs: VerdictInputs) -> Health:
    """The verdict on a run, by the first rule that speaks."""
    for rule in _RULES:
        if found := rule(signs):
            epoch = round(signs.settings.epochs * signs.step / signs.steps, 4)
            return Health(found.verdict, found.why, found.then, epoch, signs.ended)
    raise AssertionError("the last rule always speaks")


def _same_images(signs: VerdictInputs) -> _Finding | None:
    apart, n = signs.latest("images:apart"), len(signs.measure.values)
    if apart is None or not apart < _APART or n < MIN_VERDICT_IMAGES:
        return None
    noun = signs.modality.noun
    why = (
        f"the {n:,} held-out {noun} are nearly all the same: {apart:.1%} of what their {signs.modality.values} "
        "differ by sets them apart"
    )
    return _Finding(UNKNOWN, why, f"look at your data (patchloom check), and give {noun} that differ")


def _not_finite(signs: VerdictInputs) -> _Finding | None:
    spread = signs.latest("features:spread")  # as the other figures of features, nan where these are not finite
    if math.isfinite(signs.measure.value) and (spread is None or math.isfinite(spread)):
        return None
    return _Finding(NOT_LEARNING, f"{signs.figure()}: something is not finite any more", _slower(signs))


def _same_features(signs: VerdictInputs) -> _Finding | None:
    rank, now = signs.latest("features:centred rank"), signs.latest("features:deviation")
    if rank is None or now is None or len(signs.measure.values) < _SOME:
        return None
    untrained = signs.latest("features:deviation:untrained")
    share = None if not untrained else now / untrained
    if rank >= _LEAST_RANK and (share is None or share >= _LEAST_DEVIATION):
        return None
    if signs.tells_classes():  # then images are told apart, by however little
        return None
    differ = "" if share is None else f"they differ by {share:.1%} of what an untrained encoder's do, and "
    noun = signs.modality.noun
    why = f"the encoder's features of different {noun} are nearly the same ({differ}in {rank:.1f} directions)"
    return _Finding(COLLAPSED, why, _slower(signs))


def _same_outputs(signs: VerdictInputs) -> _Finding | None:
    if not signs.measure.collapsed():
        return None
    found = ", ".join(f"{name} {value:.2f}" for name, value in signs.measure.diversity.items())
    noun = signs.modality.noun
    why = f"the teacher gives all {noun} nearly the same output ({found}), so that agreement with it means little"
    if signs.classes is None or not signs.tells_classes():
        return _Finding(COLLAPSED, why, _for_teacher(signs))
    why += f"; yet by kNN the features tell classes better than an untrained encoder's ({_by_knn(signs.classes)})"
    return _Finding(WEAK, why, _for_teacher(signs))


def _few_images(signs: VerdictInputs) -> _Finding | None:
    if signs.level is not Level.UNKNOWN or not signs.step:
        return None
    n, (item, noun) = len(signs.measure.values), (signs.modality.item, signs.modality.noun)
    why = f"{signs.figure()}, on {n:,} held-out {item if n == 1 else noun}, which are too few"
    return _Finding(UNKNOWN, why, f"hold out more {noun} (--held_out), or give more of them")


def _not_begun(signs: VerdictInputs) -> _Finding | None:
    return None if signs.step else _Finding(EARLY, f"nothing is trained yet: {signs.figure()}")


def _went_back(signs: VerdictInputs) -> _Finding | None:
    if signs.learnt or not signs.setbacks:
        return None
    times = "once" if signs.setbacks == 1 else f"{signs.setbacks} times"
    return _Finding(NOT_LEARNING, f"the run went back {times}, as it was not finite; {signs.figure()}", _slower(signs))


def _got_worse(signs: VerdictInputs) -> _Finding | None:
    """Worse than the baseline, and by more than chance than before training: that is no matter of patience."""
    if signs.level is not Level.WORSE or not signs.worse_than_at_the_start():
        return None
    measure, start = signs.measure, next(float(row["held_out"]) for row in signs.rows if row.get("held_out"))
    why = f"{signs.figure()}: worse than before the first step ({measure.show(start)})"
    return _Finding(NOT_LEARNING, why, _slower(signs))


def _unstable(signs: VerdictInputs) -> _Finding | None:
    """The measure went up and down on the way, and is not better than the baseline yet."""
    if signs.learnt:
        return None
    found = signs.jump_back(_JUMP)
    if found is None:
        return None
    before, after = map(signs.measure.show, found)
    why = f"{signs.figure()}, and on the way it went from {before} back to {after}"
    return _Finding(NOT_LEARNING, why, _slower(signs))


def _not_better(signs: VerdictInputs) -> _Finding | None:
    if signs.learnt:
        return None
    if signs.updates < _ENOUGH:
        why = f"{signs.figure()}, after {signs.updates:,} {'update' if signs.updates == 1 else 'updates'}"
        return _Finding(EARLY, why, _longer(signs) if signs.ended else "")
    if not signs.ended and signs.step < signs.steps / 2:
        return _Finding(EARLY, f"{signs.figure()}, in the first half of the run")
    gained = signs.gained_since(signs.step / 2)
    if gained is None:
        return _Finding(EARLY, f"{signs.figure()}, after {signs.updates:,} updates", _longer(signs))
    if _grew(gained):
        why = f"{signs.figure()}, but {gained.share:.0%} nearer to perfect than halfway"
        return _Finding(EARLY, why, _longer(signs))
    if gained.level is Level.UNKNOWN:
        n, noun = len(signs.measure.values), signs.modality.noun
        why = (
            f"{signs.figure()}; {n:,} held-out {noun} are too few to tell whether it is nearer to perfect than halfway"
        )
        return _Finding(EARLY, why, f"hold out more {noun} (--held_out), or {_longer(signs)}")
    why = f"{signs.figure()}, after {signs.updates:,} updates, and no nearer to perfect than halfway"
    then = f"smaller patches (--patch_size), a lower --blr (now {signs.settings.blr:g}), or another --task"
    return _Finding(NOT_LEARNING, why, f"look at the pictures, and at your data; {then}")


def _alike(signs: VerdictInputs) -> _Finding | None:
    if not signs.measure.alike():
        return None
    why = f"{signs.figure()}: the teacher's outputs are so alike that agreeing with them says little"
    return _Finding(WEAK, why, _for_teacher(signs))


def _weak(signs: VerdictInputs) -> _Finding | None:
    if signs.level is Level.CLEAR:
        return None
    if signs.level is Level.UNSURE:
        n = len(signs.measure.values)
        why = f"{_share(signs)}, and {n:,} held-out {signs.modality.noun} are too few to tell how well it is learnt"
        return _Finding(WEAK, why, f"hold out more {signs.modality.noun} (--held_out), or {_longer(signs)}")
    batch = "" if signs.measure.outputs is None else ", or with a larger --batch_size"
    return _Finding(WEAK, _share(signs), f"{_longer(signs)}{batch}")


def _no_gain_in_classes(signs: VerdictInputs) -> _Finding | None:
    found = signs.classes
    if found is None or found.level not in (Level.WORSE, Level.NONE):
        return None
    why = f"{signs.figure()}; but by kNN its features tell classes no better than {found.control} ({_by_knn(found)})"
    return _Finding(WEAK, why, f"{_longer(signs)}, or try another --task; fine-tuning may tell more than kNN")


def _healthy(signs: VerdictInputs) -> _Finding:
    if signs.classes is None:
        then = "a few labels tell what the features are good for (patchloom evaluate knn)" if signs.ended else ""
        return _Finding(HEALTHY, _share(signs), then)
    if signs.classes.level is Level.UNKNOWN:
        n, control = signs.classes.images, signs.classes.control
        item, noun = signs.modality.item, signs.modality.noun
        few = f"{n:,} labelled {f'{item} is' if n == 1 else f'{noun} are'} too few to tell whether its features are"
        why = f"{_share(signs)}; {few} better than {control} (kNN {_by_knn(signs.classes)})"
        return _Finding(
            HEALTHY, why, f"label more {noun}, and ask again (patchloom evaluate knn)" if signs.ended else ""
        )
    why = f"{_share(signs)}; kNN {_by_knn(signs.classes)}"
    gained = signs.gained_since(0.75 * signs.steps) if signs.ended else None
    grows = gained is not None and _grew(gained)
    return _Finding(HEALTHY, why, f"{_longer(signs)}: it was still getting better" if grows else "")


_RULES = (
    *(_same_images, _not_finite, _not_begun, _same_features, _same_outputs, _few_images, _went_back),
    *(_got_worse, _unstable, _not_better, _alike, _weak, _no_gain_in_classes, _healthy),
)


def _grew(gained: Effect) -> bool:
    """Whether a measure came nearer to perfect by more than chance, and by more than nobody would see."""
    return gained.level.better and gained.share >= SMALL


def _share(signs: VerdictInputs) -> str:
    return f"{signs.figure()}, {signs.measure.effect().share:.0%} of the way to perfect"


def _by_knn(found: ClassResult) -> str:
    return f"{found.value:.1%}, {found.control} {found.other:.1%}"


def _longer(signs: VerdictInputs) -> str:
    if signs.stopped:
        return f"train longer, in another --out with more --patience (now {signs.settings.patience})"
    return f"train longer ({_more_epochs(signs)})"


def _more_epochs(signs: VerdictInputs) -> str:
    return f"--epochs {4 * signs.settings.epochs:g}"


def more_epochs(signs: VerdictInputs, health: Health) -> str:
    """Return the option by which a run is trained on, where its verdict says to; else ""."""
    return "" if signs.stopped or _longer(signs) not in health.then else _more_epochs(signs)


def _slower(signs: VerdictInputs) -> str:
    return f"lower --blr (from {signs.settings.blr:g} to {signs.settings.blr / 10:g}), or raise --warmup_epochs"


def _for_teacher(signs: VerdictInputs) -> str:
    return f"give extrema --task.loss infonce, raise --task.momentum, or {_slower(signs)}"
