"""Verdict on a run, during training or at its end: stored values, and sentences made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.results.claims import START, control_name
from patchloom.results.result import Result, finite_or_none, number_of, text_of
from patchloom.results.shares import leave_open
from patchloom.runs.checksummed import read_checksummed, write_checksummed

_FILE = "verdict.yaml"


_NO_LABELS = "The {} have no labels,"


def no_labels(noun: str = "images") -> str:
    """Return the end of the closing sentence of a run without labels."""
    without = _NO_LABELS.format(noun)
    return f"{without} so this measures how well the pretext task is solved, not what the features are good for."


def drop_no_labels(summary: str, noun: str = "images") -> str:
    """Return a closing sentence without its end on missing labels, which older versions worded differently."""
    return summary.partition(_NO_LABELS.format(noun))[0].strip()


class Verdict(StrEnum):
    """Verdict in a few words; the last one if the images are too few or nearly identical."""

    HEALTHY = "healthy"
    WEAK = "learning but weak"
    COLLAPSED = "collapsed"
    NOT_LEARNING = "not learning"
    EARLY = "too early to tell"
    UNKNOWN = "nothing can be told"


class Rule(StrEnum):
    """Rule of a verdict; docs/explanation/verdict.md has a table of them with their thresholds."""

    SAME_IMAGES = "same_images"
    NOT_FINITE = "not_finite"
    NOT_BEGUN = "not_begun"
    SAME_FEATURES = "same_features"
    SAME_OUTPUTS = "same_outputs"
    FEW_IMAGES = "few_images"
    WENT_BACK = "went_back"
    GOT_WORSE = "got_worse"
    JUMPED_BACK = "jumped_back"
    FEW_UPDATES = "few_updates"
    FIRST_HALF = "first_half"
    NO_HALFWAY = "no_halfway"
    NEARER = "nearer"
    FEW_IMAGES_SINCE_HALFWAY = "few_images_since_halfway"
    STANDS_STILL = "stands_still"
    AGREES_WITH_ALL = "agrees_with_all"
    FEW_IMAGES_FOR_SIZE = "few_images_for_size"
    NOT_CLEAR = "not_clear"
    SOLVED = "solved"
    NO_GAIN_IN_CLASSES = "no_gain_in_classes"
    HEALTHY = "healthy"


# directions of an action that sets no value
HIGHER, LOWER, ANOTHER = "higher", "lower", "another"


@dataclass(frozen=True)
class Health:
    """Verdict on a run as values, with `why` and `then` as words.

    Attributes:
        verdict: verdict in a few words.
        epoch: epoch of the verdict.
        ended: whether the run had ended.
        rule: rule that applied; None for files of older versions, which stored only words.
        measure: measure of the task on held-out images.
        figures: inputs of the rule by name: numbers, and the name of a control.
        actions: next steps: value by option, or "higher", "lower" or "another".
        noun: "images" or "recordings".
        words: `why` and `then` of an older version.
    """

    verdict: Verdict
    epoch: float
    ended: bool
    rule: Rule | None = None
    measure: Result | None = None
    figures: Mapping[str, float | str] = field(default_factory=dict)
    actions: Mapping[str, float | str] = field(default_factory=dict)
    noun: str = "images"
    words: tuple[str, str] = ("", "")

    @property
    def why(self) -> str:
        """Reason for the verdict, in words."""
        return self.words[0] if self.rule is None or self.measure is None else _why(self, self.rule, self.measure)

    @property
    def then(self) -> str:
        """Next step, in words; "" if there is none."""
        return self.words[1] if self.rule is None else _then(self, self.rule) if self.actions else ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}." + (f" Next: {self.then}." if self.then else "")

    def plain(self) -> dict[str, Any]:
        """Return values for JSON, with the words for readers and for older versions."""
        figures = {name: one if isinstance(one, str) else finite_or_none(one) for name, one in self.figures.items()}
        return {
            "verdict": self.verdict.value, "why": self.why, "then": self.then, "epoch": self.epoch, "ended": self.ended,
            "rule": None if self.rule is None else self.rule.value,
            "measure": None if self.measure is None else self.measure.plain(),
            "figures": figures, "actions": dict(self.actions), "noun": self.noun,
        }  # fmt: skip

    @staticmethod
    def of(values: Mapping[str, Any]) -> Health:
        """Validate and read the result of `plain`; words are read only from files of older versions."""
        try:
            verdict, words = Verdict(values["verdict"]), (values["why"], values["then"])
            if not all(isinstance(one, str) for one in words) or not isinstance(values["ended"], bool):
                raise ValueError("why, then or ended are of another type")
            health = Health(verdict, number_of(values["epoch"], 0.0), values["ended"], words=words)
            if values.get("rule") is None:
                return health
            noun = text_of(values["noun"])
            if noun not in ("images", "recordings"):
                raise ValueError(f"{noun!r} is neither images nor recordings")
            health = replace(
                health,
                rule=Rule(values["rule"]),
                measure=Result.of(values["measure"]),
                figures=_values(values["figures"]),
                actions=_values(values["actions"]),
                noun=noun,
            )
            str(health)  # raises if its words lack a value
            return replace(health, words=("", ""))
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"invalid verdict: {problem}") from problem


def _values(found: Mapping[str, Any]) -> dict[str, float | str]:
    return {
        text_of(name): text_of(one) if isinstance(one, str) else number_of(one, float("nan"))
        for name, one in found.items()
    }


def write_health(folder: Path, health: Health) -> None:
    """Store a verdict in a run's folder; it replaces the one before."""
    write_checksummed(folder / _FILE, health.plain())


def read_health(folder: Path) -> Health | None:
    """Return the last verdict on a run; None if there is none, or a damaged one."""
    try:
        return Health.of(read_checksummed(folder / _FILE))
    except (PatchloomError, ValueError, OSError):
        return None


# Sentences, from the figures and actions of `patchloom.train.verdict`.


def _why(health: Health, rule: Rule, measure: Result) -> str:
    f, beside = health.figures, _beside(measure)
    share = f"{beside}, {measure.to_beat.share.value:.0%} of the way to perfect"
    held_out = _counted(measure.n, f"held-out {health.noun}")
    match rule:
        case Rule.SAME_IMAGES:
            return (
                f"the {held_out} are nearly identical: their deviation from their mean is only "
                f"{f['apart']:.1%} of that of all their {f['values']}"
            )
        case Rule.NOT_FINITE:
            return f"{beside}: the measure or the features are not finite"
        case Rule.NOT_BEGUN:
            return f"nothing is trained yet: {beside}"
        case Rule.SAME_FEATURES:
            differ = f"their deviation is {f['share']:.1%} of an untrained encoder's, " if "share" in f else ""
            return (
                f"the encoder's features of different {health.noun} are nearly the same ({differ}centred rank "
                f"{f['rank']:.1f})"
            )
        case Rule.SAME_OUTPUTS:
            found = ", ".join(f"{name} {value:.2f}" for name, value in measure.also.items())
            said = (
                f"the outputs for whole {health.noun} are nearly the same for all of them ({found}), so predicting "
                "them means little"
            )
            better = "yet by kNN the features do separate classes"
            return f"{said}; {better} ({_by_knn(health)})" if "knn" in f else said
        case Rule.FEW_IMAGES:
            way = (
                f", {measure.to_beat.share.text()} of the way to perfect"
                if math.isfinite(measure.to_beat.share.low)
                else ""
            )
            return f"{beside}{way}: {leave_open(measure.n, held_out)} whether the task is being learnt"
        case Rule.WENT_BACK:
            times = "once" if f["times"] == 1 else f"{f['times']:.0f} times"
            return f"the run went back to a checkpoint {times}, because loss or weights were not finite; {beside}"
        case Rule.GOT_WORSE:
            return f"{beside}: worse than before the first step ({measure.compact(_number(f['start']))})"
        case Rule.JUMPED_BACK:
            before, after = (measure.compact(_number(f[name])) for name in ("before", "after"))
            return f"{beside}, and during training it fell back from {before} to {after}"
        case Rule.FEW_UPDATES | Rule.NO_HALFWAY:
            return f"{beside}, after {f['updates']:,.0f} {'update' if f['updates'] == 1 else 'updates'}"
        case Rule.FIRST_HALF:
            return f"{beside}, in the first half of the run"
        case Rule.NEARER:
            return f"{beside}, but {f['gained']:.0%} nearer to perfect than halfway through the run"
        case Rule.FEW_IMAGES_SINCE_HALFWAY:
            return f"{beside}; {leave_open(measure.n, held_out)} whether it improved in the second half of the run"
        case Rule.STANDS_STILL:
            updates = f"{f['updates']:,.0f} updates"
            return f"{beside}, after {updates}, and hardly nearer to perfect than halfway through the run"
        case Rule.AGREES_WITH_ALL:
            return f"{beside}: the outputs for whole {health.noun} are so similar that agreement with them means little"
        case Rule.FEW_IMAGES_FOR_SIZE:
            return f"{share}, and {leave_open(measure.n, held_out)} how well it is learnt"
        case Rule.NOT_CLEAR:
            return share
        case Rule.SOLVED:
            but = ""
            if "knn" in f:
                but = (
                    f", but by kNN its features separate classes not clearly better than {_control(health)} "
                    f"({_by_knn(health)})"
                )
            return f"{beside}: the task is solved, and more training adds little{but}"
        case Rule.NO_GAIN_IN_CLASSES:
            return (
                f"{beside}; but by kNN its features separate classes not clearly better than {_control(health)} "
                f"({_by_knn(health)})"
            )
        case Rule.HEALTHY if "labelled" in f:
            n = int(_number(f["labelled"]))
            open_yet = leave_open(n, _counted(n, f"labelled {health.noun}"))
            few = f"{open_yet} whether its features are better than {_control(health)}"
            return f"{share}; {few} (kNN {_by_knn(health)})"
        case Rule.HEALTHY:
            return f"{share}; kNN {_by_knn(health)}" if "knn" in f else share


def _then(health: Health, rule: Rule) -> str:
    f, a = health.figures, health.actions
    match rule:
        case Rule.SAME_IMAGES:
            return f"look at your data (patchloom check), and use {health.noun} that differ"
        case Rule.NOT_FINITE | Rule.SAME_FEATURES | Rule.WENT_BACK | Rule.GOT_WORSE | Rule.JUMPED_BACK:
            return _slower(health)
        case Rule.SAME_OUTPUTS | Rule.AGREES_WITH_ALL if "task.gaussian_weight" in a:
            return f"raise --task.gaussian_weight, or {_slower(health)}"
        case Rule.SAME_OUTPUTS | Rule.AGREES_WITH_ALL:
            losses = [f"use --{name} {a[name]}, " for name in ("task.loss", "task.agreement_loss") if name in a]
            return f"{''.join(losses)}raise --task.momentum, or {_slower(health)}"
        case Rule.FEW_IMAGES:
            return f"hold out more {_counted_for_intervals(health)} (--held_out), or add more of them"
        case Rule.FEW_IMAGES_SINCE_HALFWAY | Rule.FEW_IMAGES_FOR_SIZE:
            return f"hold out more {_counted_for_intervals(health)} (--held_out), or {_longer(health)}"
        case Rule.STANDS_STILL:
            now = f"smaller patches (--patch_size), a lower --blr (now {f['blr']:g}), or another --task"
            return f"look at the pictures and at your data; try {now}"
        case Rule.NOT_CLEAR if "batch_size" in a:
            return f"{_longer(health)}, or with a larger --batch_size"
        case Rule.SOLVED:
            return "make the task harder by its options (patchloom pretrain --help all), or try another --task"
        case Rule.NO_GAIN_IN_CLASSES if f.get("control") == START:
            return "keep the start (patchloom export RUN --start), or adapt less (--adapt blocks, --anchor 1)"
        case Rule.NO_GAIN_IN_CLASSES:
            return f"{_longer(health)}, or try another --task; fine-tuning may tell more than kNN"
        case Rule.HEALTHY if "labels" in a and "labelled" in f:
            more = f"{health.noun} of more groups (now {f['groups']:g})" if "groups" in f else f"more {health.noun}"
            return f"label {more}, and evaluate again (patchloom evaluate knn)"
        case Rule.HEALTHY if "labels" in a:
            return f"label a few {health.noun} to see what the features are good for (patchloom evaluate knn)"
        case Rule.HEALTHY:
            return f"{_longer(health)}: it was still improving"
        case _:
            return _longer(health)


def _counted_for_intervals(health: Health) -> str:
    """Return what has to be more for a narrower interval: images, or their groups."""
    groups = health.figures.get("groups")
    return health.noun if groups is None else f"groups of {health.noun} (now {groups:g})"


def _longer(health: Health) -> str:
    if "patience" in health.actions:
        return f"train longer, in another --out with more --patience (now {health.figures['patience']:g})"
    return f"train longer (--epochs {health.actions['epochs']:g})"


def _slower(health: Health) -> str:
    return f"lower --blr (from {health.figures['blr']:g} to {health.actions['blr']:g}), or raise --warmup_epochs"


def _by_knn(health: Health) -> str:
    f = health.figures
    return f"{f['knn']:.1%}, {_control(health)} {f['knn of it']:.1%}"


def _control(health: Health) -> str:
    return control_name(str(health.figures["control"]))


def _counted(n: int, items: str) -> str:
    return f"{n:,} {items.removesuffix('s') if n == 1 else items}"


def _number(value: float | str) -> float:
    if isinstance(value, str):
        raise ValueError(f"{value!r} is not a number")
    return value


def _beside(measure: Result) -> str:
    """Format as "error 0.532, blurred copy 0.727", with the baseline to beat."""
    beat = measure.to_beat
    return f"{measure.measure} {measure.compact()}, {beat.name} {measure.compact(beat.value)}"
