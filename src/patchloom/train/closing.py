"""The closing sentence of a run: what its numbers allow to say, and what they do not."""

from __future__ import annotations

from patchloom.evaluate import Report
from patchloom.evaluate.report import Row, compared
from patchloom.questions.measure import Measure
from patchloom.runs.health import NO_LABELS
from patchloom.runs.held_out import HeldOut
from patchloom.verdict import Effect, Level, effect_between, level_beside

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


def closing_sentence(measure: Measure, knn: Report | None, held_out: HeldOut) -> str:
    """What the numbers of a run mean, by the rules of `patchloom.verdict`.

    Args:
        measure: the task's measure at the end, on the held-out images.
        knn: the final evaluation, or None without labels.
        held_out: what is known of those images.
    """
    text = _of_task(measure, held_out)
    return f"{text}. {NO_LABELS}" if knn is None else f"{text}; and by kNN {_of_classes(knn)}."


def _of_task(measure: Measure, held_out: HeldOut) -> str:
    means, to_beat, effect = measure.means(), measure.baseline_to_beat(), measure.effect()
    images = _counted(effect.n, held_out.named)
    level, base = level_beside(effect, map(measure.effect, means)), f"{measure.show(means[to_beat])} ({to_beat})"
    if measure.collapsed():
        head = "The teacher's outputs have collapsed, so agreeing with them means little"
    elif level.better and measure.alike():
        head = "The teacher's outputs are nearly the same for all images, so agreeing with them says little"
    else:
        head = _TASK[level].format(images=_being(effect.n, images))
        head += ", or these images are known by heart" if level.better and held_out.doubt else ""
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


def _of_classes(knn: Report) -> str:
    """How the encoder's features compare with the best control's; and with the other ones', where they differ."""
    trained, best, *rest = best_control_first(knn)
    level, images = beside(trained, best, knn.n_test).level, _counted(knn.n_test, "test images")
    meaning = _CLASSES[level].format(other=best.encoder, images=_being(knn.n_test, images))
    numbers = f"{trained.value:.1%}, {best.value:.1%}"
    for row in rest:
        other = beside(trained, row, knn.n_test).level
        if other.better and level in (Level.NONE, Level.WORSE):
            meaning += f" ({numbers}), but better than {row.encoder}"
            numbers = f"{row.value:.1%}"
    return f"{meaning} ({numbers})"


def best_control_first(knn: Report) -> list[Row]:
    """The encoder's row of a kNN, and those of its controls, the best one first."""
    trained, *controls = knn.quoted
    return [trained, *sorted(controls, key=lambda row: -row.value)]


def beside(row: Row, control: Row, n: int) -> Effect:
    """How far an encoder is beyond a control, by the interval of `patchloom.verdict.Difference`, where there is one."""
    way = 1 - control.value
    found = compared([row], [control], trained=False)
    if not found.n or way <= 0:
        return effect_between((row.value, row.low, row.high), (control.value, control.low, control.high), n)
    return Effect(found.value / way, found.low / way, found.high / way, n)


def _counted(n: int, images: str) -> str:
    return f"{n:,} {images if n != 1 else images.replace('images', 'image', 1)}"


def _being(n: int, images: str) -> str:
    return f"{images} {'is' if n == 1 else 'are'}"


def _perfect(measure: Measure) -> str:
    return ("100%" if "%" in measure.form else "1") if measure.higher_is_better else "0"
