"""Verdict on a run, during training or at its end: its rules, their sentences, and the file that keeps it.

A verdict follows from `Signs`, which are results and numbers, and not from time: an interrupted run comes to the same
one. docs/explanation/verdict.md has the rules, and the measurements behind their thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError, listing, typed_fields
from patchloom.results.claims import MIN_VERDICT_IMAGES, START, UNTRAINED, control_name
from patchloom.results.result import Result
from patchloom.results.shares import Level, level_of
from patchloom.system.checksummed import read_checksummed, write_checksummed

_FILE = "verdict.yaml"
_LONGEST = 5000  # characters of all words in the file

HIGHER, LOWER, ANOTHER = "higher", "lower", "another"  # directions of an action that sets no value
Actions = dict[str, float | str]


class Verdict(StrEnum):
    """Verdict in a few words; the last one if the images are too few or nearly identical."""

    HEALTHY = "healthy"
    WEAK = "learning but weak"
    COLLAPSED = "collapsed"
    NOT_LEARNING = "not learning"
    EARLY = "too early to tell"
    UNKNOWN = "nothing can be told"


@dataclass(frozen=True)
class Health:
    """Verdict on a run, as its file has it.

    Attributes:
        verdict: verdict in a few words.
        why: reason, a sentence without its full stop.
        then: next steps, without a full stop; "" if there are none.
        epoch: epoch of the verdict.
        ended: whether the run had ended.
        rule: name of the rule that applied.
        measure: measure of the task on held-out images, with its baselines.
        actions: next steps as values: a value by option, or "higher", "lower" or "another".
    """

    verdict: Verdict
    why: str
    then: str
    epoch: float
    ended: bool
    rule: str = ""
    measure: Result | None = None
    actions: Actions = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}." + (f" Next: {self.then}." if self.then else "")

    def plain(self) -> dict[str, Any]:
        measure = None if self.measure is None else self.measure.plain()
        return vars(self) | {"verdict": self.verdict.value, "measure": measure}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Health:
        """Validate and read the result of `plain` from a file, which anybody may have written.

        Raises:
            ValueError: a value is missing, or of another type or range.
        """
        try:
            verdict, measure = Verdict(values["verdict"]), values["measure"]
            read = {"verdict": verdict, "measure": None if measure is None else Result.of(measure)}
            health = Health(**typed_fields(Health, {**values, **read}, {"epoch": (0, 2**53)}))
        except (KeyError, TypeError) as problem:
            raise ValueError(f"invalid verdict: {problem}") from problem
        texts = "".join((health.why, health.then, health.rule, *map(str, chain(*health.actions.items()))))
        if not texts.isprintable() or len(texts) > _LONGEST:
            raise ValueError("its words are too long, or have control characters")
        if health.measure is not None and not health.measure.baselines:
            raise ValueError("the measure has no baseline to beat")
        return health


def write_health(folder: Path, health: Health) -> None:
    """Store a verdict in a run's folder; it replaces the one before."""
    write_checksummed(folder / _FILE, health.plain())


def read_health(folder: Path) -> Health | None:
    """Return the last verdict on a run; None if there is none, or a damaged one."""
    try:
        return Health.of(read_checksummed(folder / _FILE))
    except (PatchloomError, ValueError, OSError):
        return None


# Images below this are nearly identical. Copies of one image with noise of ±3 grey values have 0.03, the images of
# `shapes` 0.99.
_APART = 0.05
_SOME = 16  # images; with fewer, the rank of the features is small anyway
# Below either of these the features have collapsed. A vector that all features share changes neither. 37 ordinary runs
# had 0.17 to 1.22 and 5.8 to 78; `mae` on small images of four kinds, whose kNN was far above the untrained one, 0.13
# and 0.24; encoders that were made to collapse 0.02 to 0.05.
_LEAST_DEVIATION, _LEAST_RANK = 0.05, 2.0
# Fewer updates say little about a task that is not learnt yet: position tasks stayed at chance for the first 250 to 350
# updates of our short runs, and improved after that.
_ENOUGH = 500
# A task is solved if this share of the way to perfect is reached, with an interval above the second one: the interval
# of 250 images that are all right begins at 98 %.
_SOLVED, _SURELY = 0.99, 0.95


@dataclass(frozen=True)
class Signs:
    """Signs of whether a run learns, at one of its measures. Unknown numbers are nan.

    Attributes:
        measure: measure of the task on held-out images, with its baselines.
        level: claim about its share of the way; clear if it was clear before and has not fallen since.
        epoch, epochs: epochs done, and of the whole run.
        updates: number of updates done.
        blr: base learning rate.
        ended: whether the run has ended.
        patience: measures without improvement after which the run was stopped; 0 if it was not.
        finite: whether measure and features are finite.
        setbacks: number of times the run went back to a checkpoint, because loss or weights were not finite.
        fell: measure before and after it got worse during training, beyond chance; None if it did not.
        gained: share of the way since halfway through the run, paired over images; None if unknown.
        improves: whether the last quarter of the run improved the measure, beyond chance.
        apart: deviation of the images from their mean, relative to that of all their values.
        rank: centred rank of the features.
        deviation: deviation of the features from their mean, relative to an untrained encoder's.
        same_targets: whether the outputs that the task predicts are nearly the same for all images.
        alike: whether they are so similar that agreement with them means little.
        remedies: settings of the task that keep its outputs apart.
        compares: whether the task compares the images of a batch.
        knn: accuracy of the features by kNN, with its controls as baselines; None without labels.
    """

    measure: Result
    level: Level
    epoch: float
    epochs: float
    updates: int
    blr: float
    ended: bool = False
    patience: int = 0
    finite: bool = True
    setbacks: int = 0
    fell: tuple[float, float] | None = None
    gained: Result | None = None
    improves: bool = False
    apart: float = math.nan
    rank: float = math.nan
    deviation: float = math.nan
    same_targets: bool = False
    alike: bool = False
    remedies: Actions = field(default_factory=dict)
    compares: bool = False
    knn: Result | None = None

    @property
    def trained(self) -> bool:
        """Whether there is something to judge: finite values after the first step."""
        return self.finite and self.epoch > 0

    @property
    def solved(self) -> bool:
        """Whether nothing is left to learn; outputs of a network, which have further figures, are no fixed goal."""
        share = self.measure.to_beat.share
        return not self.measure.also and share.value >= _SOLVED and share.low >= _SURELY

    @property
    def same_features(self) -> bool:
        """Whether the features of different images are nearly the same."""
        return self.measure.n >= _SOME and (self.rank < _LEAST_RANK or self.deviation < _LEAST_DEVIATION)

    @property
    def separates(self) -> bool:
        """Whether kNN is better than the best control or an untrained encoder: the features distinguish images."""
        controls = () if self.knn is None else self.knn.baselines
        return any(level_of(one.share).better for one in controls if one.to_beat or one.name == UNTRAINED)


def judge(signs: Signs) -> Health:
    """Return the verdict on a run by the first rule that applies."""
    rule, (claim, actions) = next((rule, said) for rule in RULES if (said := rule(signs)) is not None)
    share = signs.measure.to_beat.share
    way = f", {share.value:.0%} of the way to perfect" if signs.level.better else ""
    why = _beside(signs.measure) + way + (f"; {claim}" if claim else "")
    then = listing(_in_words(signs, option, to) for option, to in actions.items())
    return Health(RULES[rule], why, then, round(signs.epoch, 4), signs.ended, rule.__name__, signs.measure, actions)


# The rules: each returns its claim beside the measure, "" if the measure says it, and its advice, as the actions of
# `Health`; None if it does not apply.


Advice = tuple[str, Actions]


def same_images(s: Signs) -> Advice | None:
    if not (s.apart < _APART and s.measure.n >= MIN_VERDICT_IMAGES):
        return None
    found = f"their deviation from their mean is {s.apart:.1%} of that of all values"
    return f"the {s.measure.noun} are nearly identical: {found}", {"data": ANOTHER}


def collapsed(s: Signs) -> Advice | None:
    if not s.trained or s.separates or not (s.same_features or s.same_targets):
        return None
    if not s.same_features:
        return _same(s), {**s.remedies, **_slower(s)}
    deviation = "" if math.isnan(s.deviation) else f", deviation {s.deviation:.1%} of an untrained encoder's"
    alike = f"the encoder's features of different {s.measure.noun} are nearly the same"
    return f"{alike} (centred rank {s.rank:.1f}{deviation})", _slower(s)


def same_targets(s: Signs) -> Advice | None:
    if s.knn is None or not (s.trained and s.same_targets and s.separates):
        return None
    return f"{_same(s)}; yet the features separate classes: {_beside(s.knn)}", {**s.remedies, **_slower(s)}


def few_images(s: Signs) -> Advice | None:
    # where there are enough for a claim, more updates tell more than more images
    enough = s.updates >= _ENOUGH or s.measure.n < MIN_VERDICT_IMAGES
    if not (s.trained and s.level is Level.UNKNOWN and enough):
        return None
    return _open(s.measure, "whether the task is being learnt"), {"held_out": HIGHER, "images": HIGHER}


def unstable(s: Signs) -> Advice | None:
    if not s.finite:
        return "the measure or the features are not finite", _slower(s)
    if not s.trained or s.level.visible:
        return None
    if s.setbacks:
        times = "once" if s.setbacks == 1 else f"{s.setbacks} times"
        return f"the run went back to a checkpoint {times}, because loss or weights were not finite", _slower(s)
    if s.fell is not None:
        return "during training it got worse, from {} to {}".format(*map(s.measure.compact, s.fell)), _slower(s)
    return None


def early(s: Signs) -> Advice | None:
    if not s.epoch:
        return "nothing is trained yet", {}
    if s.level.visible:
        return None
    longer = _longer(s) if s.ended else {}
    first_half = not s.ended and s.epoch < s.epochs / 2
    if s.updates < _ENOUGH or first_half or s.gained is None:
        return (f"it had {_updates(s)}" if s.ended else f"it has had {_updates(s)} so far"), longer
    since = level_of(s.gained)
    if since is Level.UNKNOWN:
        return _open(s.measure, "whether it improved in the second half of the run"), {"held_out": HIGHER, **longer}
    return (
        (f"it is {s.gained.value:.0%} nearer to perfect than halfway through the run", longer)
        if since.visible
        else None
    )


def stands_still(s: Signs) -> Advice | None:
    if s.level.visible:
        return None
    advice: Actions = {"data": ANOTHER, "patch_size": LOWER, "blr": s.blr / 10, "task": ANOTHER}
    return f"after {_updates(s)} it is hardly nearer to perfect than halfway through the run", advice


def weak(s: Signs) -> Advice | None:
    if s.alike:
        return _ALIKE.format(s.measure.noun), {**s.remedies, **_slower(s)}
    if s.level is Level.CLEAR:
        return None
    if s.level is Level.UNSURE:
        return _open(s.measure, "how well it is learnt"), {"held_out": HIGHER, **_longer(s)}
    return "", {**_longer(s), **({"batch_size": HIGHER} if s.compares else {})}


def no_gain(s: Signs) -> Advice | None:
    # a kNN on the way is of few images and without their pairs: only the final evaluation judges
    if s.knn is None or not (s.ended and level_of(s.knn.to_beat.share).no_gain):
        return None
    control = s.knn.to_beat.name
    said = f"by kNN the features separate classes not clearly better than {control_name(control)} ({_beside(s.knn)})"
    if s.solved:
        return f"the task is solved, but {said}", _HARDER
    if control == START:
        return said, {"export": START, "adapt": "blocks", "anchor": 1}
    return said, {**_longer(s), "task": ANOTHER, "evaluate": "finetune"}


def healthy(s: Signs) -> Advice:
    labels: Actions = {"labels": HIGHER} if s.ended else {}
    if s.knn is None:
        return ("the task is solved, and more training adds little", _HARDER) if s.solved else ("", labels)
    if level_of(s.knn.to_beat.share) is Level.UNKNOWN:
        better = f"whether its features are better than {control_name(s.knn.to_beat.name)}"
        return f"{_open(s.knn, better)} ({_beside(s.knn)})", labels
    return (f"{_beside(s.knn)}; it was still improving", _longer(s)) if s.improves else (_beside(s.knn), {})


RULES = {  # in their order
    same_images: Verdict.UNKNOWN,
    collapsed: Verdict.COLLAPSED,
    same_targets: Verdict.WEAK,
    few_images: Verdict.UNKNOWN,
    unstable: Verdict.NOT_LEARNING,
    early: Verdict.EARLY,
    stands_still: Verdict.NOT_LEARNING,
    weak: Verdict.WEAK,
    no_gain: Verdict.WEAK,
    healthy: Verdict.HEALTHY,
}


# Words and advice of several rules.


_ALIKE = "the outputs for whole {} are so similar that agreement with them means little"
_HARDER: Actions = {"difficulty": HIGHER, "task": ANOTHER}


def _same(s: Signs) -> str:
    found = ", ".join(f"{name} {value:.2f}" for name, value in s.measure.also.items())
    whole = f"the outputs for whole {s.measure.noun} are nearly the same for all of them ({found})"
    return f"{whole}, so predicting them means little"


def _slower(s: Signs) -> Actions:
    return {"blr": s.blr / 10, "warmup_epochs": HIGHER}


def _longer(s: Signs) -> Actions:
    return {"patience": HIGHER} if s.patience else {"epochs": math.ceil(4 * s.epochs)}


def _in_words(s: Signs, option: str, to: float | str) -> str:
    """Return an action in words, with the present value of what it changes."""
    value, labelled = to if isinstance(to, str) else f"{to:g}", s.measure if s.knn is None else s.knn
    words = {
        "data": "look at your data (patchloom check)",
        "images": "add some",
        "held_out": f"hold out more {_units(s.measure)} (--held_out)",
        "labels": f"label more {_units(labelled)} to see what the features are good for (patchloom evaluate knn)",
        "blr": f"lower --blr (from {s.blr:g} to {value})",
        "epochs": f"train longer (--epochs {value})",
        "patience": f"train longer, in another --out with more --patience (now {s.patience})",
        "difficulty": "make the task harder by its options (patchloom pretrain --help all)",
        "export": "keep the start (patchloom export RUN --start)",
        "evaluate": f"fine-tune, which may tell more than kNN (patchloom evaluate {value})",
    }
    directions = {HIGHER: f"raise --{option}", LOWER: f"lower --{option}", ANOTHER: f"try another --{option}"}
    return words.get(option) or directions.get(value, f"use --{option} {value}")


# The closing sentence of a run.


_TASK = {
    Level.CLEAR: "The task is clearly being learnt",
    Level.WEAK: "The task is being learnt, but weakly so far",
    Level.HARDLY: "The task is hardly being learnt so far",
    Level.UNSURE: "The task is being learnt, but {few} how well",
    Level.NONE: "There is no clear sign that the task is being learnt",
    Level.WORSE: "The task is not learnt yet",
    Level.UNKNOWN: "{few} whether the task is being learnt",
}


def no_labels(noun: str = "images") -> str:
    """Return the sentence that is printed after the closing sentence of a run without labels."""
    without = f"The {noun} have no labels,"
    return f"{without} so this measures how well the pretext task is solved, not what the features are good for."


def closing_sentence(signs: Signs, images: str = "held-out images", doubt: bool = False) -> str:
    """Return the closing sentences of a run: whether its task is learnt, and by kNN what its features are good for.

    Args:
        signs: signs at the end of the run.
        images: name of the held-out images.
        doubt: whether the initial weights may have been trained on them.
    """
    measure, share, counted = signs.measure, signs.measure.to_beat.share, _counted(signs.measure.n, images)
    level = level_of(share)
    if signs.same_targets:
        task = f"The outputs for whole {measure.noun} have collapsed, so predicting them means little"
    elif level.better and signs.alike:
        task = _ALIKE.format(measure.noun).capitalize()
    else:
        task = _TASK[level].format(few=_few(measure.n, images))
        task += f", or these {measure.noun} are memorised" if level.better and doubt else ""
    found = f"{measure.measure} {measure.compact()}" + (f" on {counted}" if counted not in task else "")
    base = f"{measure.compact(measure.to_beat.value)} ({measure.to_beat.name})"
    if level is Level.WORSE:
        found += f", and {base} has to be beaten"
    elif share.low == -math.inf:  # too few for an interval
        found += f", against {base}"
    else:
        perfect = "0" if not measure.higher_is_better else "100%" if measure.unit == "%" else "1"
        found += f", {share.text()} of the way from {base} to {perfect}"
    said = [f"{task}: {found}{_others(measure)}."]
    if signs.knn is not None:
        called = "Accuracy by kNN" if signs.knn.measure == "kNN" else signs.knn.measure.capitalize()
        said += [f"{called}: {signs.knn.text()}.", *(one.sentence() for one in signs.knn.against)]
    return " ".join(said)


def _others(measure: Result) -> str:
    """Return the other baselines, in words where they disagree with the one to beat."""
    level, said = level_of(measure.to_beat.share), ""
    for one in measure.baselines:
        other, remark = level_of(one.share), ""
        if level.better and other is Level.WORSE:
            # an optional baseline may know what the network does not, such as each patch's true colour
            remark = ", which is better" + ("" if one.barred else ", but has information that the encoder lacks")
        elif level.no_gain and other.better:
            remark = ", which it beats"
        said += "" if one.to_beat else f"; {one.name} {measure.compact(one.value)}{remark}"
    return said


# Words of both.


def _beside(result: Result) -> str:
    """Format as "error 0.532, blurred copy 0.727", with the baseline to beat."""
    beat = result.to_beat
    return f"{result.measure} {result.compact()}, {control_name(beat.name)} {result.compact(beat.value)}"


def _counted(n: int, images: str) -> str:
    return f"{n:,} {images if n != 1 else images.replace('images', 'image').replace('recordings', 'recording')}"


def _few(n: int, images: str) -> str:
    """Return the beginning of a sentence such as "64 held-out images leave open whether ...".

    Below `MIN_VERDICT_IMAGES` they are too few for any claim. More of them can decide only about larger effects.
    """
    few = "leave open" if n >= MIN_VERDICT_IMAGES else f"{'is' if n == 1 else 'are'} too few to tell"
    return f"{_counted(n, images)} {few}"


def _open(result: Result, question: str) -> str:
    kind = "labelled" if result.protocol else "held-out"  # a task's own measure has no protocol
    return f"{_few(result.n, f'{kind} {result.noun}')} {question}"


def _updates(s: Signs) -> str:
    return f"{s.updates:,} update{'s' * (s.updates != 1)}"


def _units(result: Result) -> str:
    """Return what has to be more for a narrower interval: images, or their groups."""
    return f"groups of {result.noun} (now {result.groups:,})" if result.groups else result.noun
