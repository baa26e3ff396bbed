"""What a run remembers beside its tensors. Plain values, which JSON keeps to the last digit; and its best weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from patchloom.claims import MeasureResult, result_or_none
from patchloom.questions.question import Measure
from patchloom.runs.checkpoint import best_of, whole_weights
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.distributed import rank, smallest
from patchloom.tasks.task import Task
from patchloom.train.step import Update

# The weights of the best measure of a run, and when a run stops since it gets no better (``--patience``).


@dataclass
class BestMeasure:
    """The best held-out measure so far, and the weights that had it.

    Attributes:
        value: of the measure; None before the first one that is a number.
        step: steps that were done then.
        failed: measures since then, none of which was better.
        chosen: the training has ended, and these are the weights of the run; never where no measure was a number.
        weights: of the whole task by name, on the CPU; in the first process alone.
    """

    value: float | None = None
    step: int = 0
    failed: int = 0
    chosen: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BestMeasure:
        """From what a checkpoint keeps; as at the beginning, if it is of a run without ``--patience``."""
        found = about.get("best", {})
        return cls(**found, weights=best_of(tensors))

    def plain(self) -> dict[str, Any]:
        """All but the weights, as a checkpoint keeps it."""
        return {"value": self.value, "step": self.step, "failed": self.failed, "chosen": self.chosen}

    def compare(self, step: int, measure: Measure, task: Task) -> None:
        """Keep the weights after ``step`` steps, if their measure is better than all before; an equal one is not.

        Every process must call it, since each may have a part of the weights only. The first one's numbers decide: on
        several GPUs the last digits differ.
        """
        value = measure.value
        if smallest(0 if rank() == 0 and self._beaten_by(value, measure.higher_is_better) else 1):
            self.failed += 1
            return
        weights = whole_weights(task)
        self.value, self.step, self.failed = value, step, 0
        self.weights = weights if rank() == 0 else {}

    def choose(self, ended: bool) -> None:
        """Once the training has ended, the kept weights are those of the run, if any were kept.

        What every process knows decides, since the weights are in the first one alone.
        """
        self.chosen = ended and self.value is not None

    def hopeless(self, settings: ResolvedSettings) -> bool:
        """Whether so many measures were no better that the run is to stop."""
        return settings.patience is not None and self.failed >= settings.patience

    def _beaten_by(self, value: float, higher_is_better: bool) -> bool:
        if value != value:  # nan
            return False
        return self.value is None or (value > self.value if higher_is_better else value < self.value)


def describe_best(best: BestMeasure, step: int, steps: int, settings: ResolvedSettings) -> str:
    """A sentence on which weights a run with ``--patience`` ends with, and whether it stopped before its last step.

    Where no measure was a number, there is no best one, and they are the last weights.
    """
    epochs = f"{settings.epochs:,g}"
    if best.value is None:
        ended = f"{'stopped' if step < steps else 'ended'} after epoch {epoch_of(step, steps, settings)} of {epochs}"
        return (
            f"The run {ended}, and none of its held-out measures was a number, so that --patience {settings.patience} "
            "had no best one to keep: these are its last weights."
        )
    chosen = f"epoch {epoch_of(best.step, steps, settings)} of {epochs}"
    if best.step == 0:
        chosen += ", before the first step"
    if step < steps:
        count = "one measure was" if best.failed == 1 else f"{best.failed} measures in a row were"
        ended = epoch_of(step, steps, settings)
        return (
            f"The run stopped after epoch {ended} of {epochs}, since {count} not better (--patience "
            f"{settings.patience}); these are the weights of its best measure, at {chosen}."
        )
    last = "which was its last" if best.step == step else "not of its last step"
    return f"These are the weights of the run's best measure, at {chosen}, {last} (--patience {settings.patience})."


def epoch_of(step: int, steps: int, settings: ResolvedSettings) -> str:
    """When a step was done, in epochs."""
    return f"{settings.epochs * step / steps:.4g}"


_STEADY = 2000  # updates without an overflow after which the scale is doubled


@dataclass
class TrainState:
    """Where a run is.

    Attributes:
        step: steps done.
        seconds: that they took, all starts of the run together.
        rows: of ``metrics.csv``.
        sums: of the loss and of each metric, over the ``counted`` steps since the last row.
        counted: steps in ``sums``.
        skipped: updates since the last row that were not made, since loss or gradient were not finite.
        in_a_row: such updates up to now, without a good one between them.
        setbacks: how often the run went back to a checkpoint; each halves the learning rate.
        scale: by which losses are multiplied in float16.
        steady: updates since it last changed.
        steps: of the whole run; 0 in a checkpoint of an older version, which did not say.
        began: step at which the present schedule began: 0, or where the run had ended before it was trained on.
        pace: seconds that a step took of late; 0 if that is not known.
        measuring: seconds that the last held-out measures took.
        measured: the last one; None before the first, and in a checkpoint of an older version, which had words.
        results: of each measure, the result on each held-out image, by its step.
        best: the best measure and its weights, in a run with ``--patience``.
    """

    step: int = 0
    seconds: float = 0.0
    rows: list[dict[str, str]] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    counted: int = 0
    skipped: int = 0
    in_a_row: int = 0
    setbacks: int = 0
    scale: float = 2.0**16
    steady: int = 0
    steps: int = 0
    began: int = 0
    pace: float = 0.0
    measuring: float = 0.0
    measured: MeasureResult | None = None
    results: dict[str, list[float]] = field(default_factory=dict)
    best: BestMeasure = field(default_factory=BestMeasure)

    @classmethod
    def of(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TrainState:
        """From what a checkpoint keeps, beside its tensors and among them; what it does not know is at its default."""
        known = {one.name: about[one.name] for one in fields(cls) if one.name in about}
        measured = result_or_none(about.get("measured"))
        return cls(**known | {"best": BestMeasure.of(about, tensors), "measured": measured})

    def plain(self) -> dict[str, Any]:
        """As a checkpoint keeps it beside its tensors."""
        values = asdict(replace(self, best=BestMeasure(), measured=None))
        return values | {"best": self.best.plain(), "measured": self.measured and self.measured.plain()}

    def ended(self, steps: int, settings: ResolvedSettings) -> bool:
        """Whether the training has ended: after its last step, or by ``--patience``. A run that goes on asks it, too.

        At least one update is made, whatever the measure before it was.
        """
        return self.step >= steps or (self.step > 0 and self.best.hopeless(settings))

    def train_on(self, steps: int, earlier: bool) -> None:
        """Begin a new schedule here if the run has become longer since its checkpoint was written."""
        if (self.steps or (self.step if earlier else steps)) < steps:
            self.began, self.steps = self.step, steps
            self.best.failed, self.best.chosen = 0, False

    @property
    def factor(self) -> float:
        """By which the learning rate is multiplied."""
        return 0.5**self.setbacks

    def loss_scale(self, precision: str) -> float:
        """By which losses are multiplied in ``precision``: small gradients would be 0 in float16."""
        return self.scale if precision == "float16" else 1.0

    def adapt(self, overflow: bool) -> None:
        """Halve the scale after a gradient that was too large for float16, double it after 2,000 that were not.

        As `torch.amp.GradScaler` does (Micikevicius et al. 2018, section 3.2), but as a number that a checkpoint keeps.
        """
        self.steady = 0 if overflow else self.steady + 1
        if overflow:
            self.scale = max(1.0, self.scale / 2)
        elif self.steady == _STEADY:
            self.scale, self.steady = self.scale * 2, 0

    def count(self, update: Update, precision: str) -> bool:
        """Add the losses and metrics of an update to the sums, or count that it was not made."""
        scale = self.loss_scale(precision)
        if precision == "float16" and (update.good or update.overflow):
            self.adapt(update.overflow)
        if not update.good:
            if update.overflow and scale > 1:
                return True
            self.skipped += 1
            self.in_a_row += 1
            return False
        for row in update.values:
            for name, value in zip(update.names, row, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.counted += len(update.values)
        self.in_a_row = 0
        return True

    def mean_loss(self) -> float | None:
        """The mean loss since the last row; None if there was no update that was made."""
        return self.sums["loss"] / self.counted if self.counted else None

    def means(self) -> dict[str, float]:
        """Of the loss and each metric since the last row, which begins anew; nothing if all updates were skipped."""
        means = {name: value / self.counted for name, value in self.sums.items()}
        if self.skipped:
            means["skipped"] = self.skipped
        self.sums, self.counted, self.skipped = {}, 0, 0
        return means
