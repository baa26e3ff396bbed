"""Training state that a checkpoint stores beside the tensors, as plain JSON values, and the best weights of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isnan
from typing import Any

from torch import Tensor

from patchloom.errors import PatchloomError, conforms, typed_fields
from patchloom.questions.question import Measure
from patchloom.results.result import Result
from patchloom.runs.checkpoint import best_of, whole_weights
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.distributed import rank, smallest
from patchloom.tasks.task import Task
from patchloom.train.clock import Piece
from patchloom.train.step import Update

# Early stopping (``--patience``) and the weights of the best held-out measure.


@dataclass
class BestMeasure:
    """Best held-out measure so far, with its weights.

    Attributes:
        value: best measure; None before the first one that is a number.
        step: number of steps at that measure.
        failed: number of measures since then, all without improvement.
        chosen: training has ended and these are the final weights of the run; never if no measure was a number.
        weights: weights of the whole task by name, on the CPU; only in the first process.
    """

    value: float | None = None
    step: int = 0
    failed: int = 0
    chosen: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BestMeasure:
        """Restore from a checkpoint; return the initial state for a run without ``--patience``."""
        found = about.get("best", {})
        return cls(**typed_fields(cls, found), weights=best_of(tensors))

    def plain(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "failed": self.failed, "chosen": self.chosen}

    def compare(self, step: int, measure: Measure, task: Task) -> None:
        """Keep the weights after ``step`` steps if their measure is the best so far; ties and NaN do not count.

        Every process must call this, because the weights may be sharded. The measure of the first process decides,
        because the last digits differ between GPUs.
        """
        value, sign = measure.value, 1 if measure.higher_is_better else -1
        beaten = not isnan(value) and (self.value is None or sign * value > sign * self.value)
        if smallest(0 if rank() == 0 and beaten else 1):
            self.failed += 1
            return
        weights = whole_weights(task)
        self.value, self.step, self.failed = value, step, 0
        self.weights = weights if rank() == 0 else {}

    def choose(self, ended: bool) -> None:
        """Make the best weights those of the run once training has ended, if there are any.

        Decided without looking at the weights, which only the first process has.
        """
        self.chosen = ended and self.value is not None

    def out_of_patience(self, settings: ResolvedSettings) -> bool:
        """Return whether ``--patience`` measures in a row brought no improvement."""
        return settings.patience is not None and self.failed >= settings.patience


def describe_best(best: BestMeasure, step: int, steps: int, settings: ResolvedSettings) -> str:
    """Describe the final weights of a run with ``--patience``, and whether it stopped early.

    Without any measure that is a number, these are the last weights.
    """
    epochs = f"{settings.epochs:,g}"
    if best.value is None:
        ended = f"{'stopped' if step < steps else 'ended'} after epoch {epoch_of(step, steps, settings)} of {epochs}"
        return (
            f"The run {ended}. None of its held-out measures was a number, so --patience {settings.patience} found no "
            "best one: these are its last weights."
        )
    chosen = f"epoch {epoch_of(best.step, steps, settings)} of {epochs}"
    if best.step == 0:
        chosen += ", before the first step"
    if step < steps:
        count = "1 evaluation" if best.failed == 1 else f"{best.failed} evaluations"
        ended = epoch_of(step, steps, settings)
        return (
            f"The run stopped early after epoch {ended} of {epochs}: no improvement in {count} (--patience "
            f"{settings.patience}). These are the weights of its best measure, at {chosen}."
        )
    last = "its last step" if best.step == step else "not of its last step"
    return f"These are the weights of the run's best measure, at {chosen}, {last} (--patience {settings.patience})."


def epoch_of(step: int, steps: int, settings: ResolvedSettings) -> str:
    return f"{settings.epochs * step / steps:.4g}"


_RANGES = {name: (0, inf) for name in "step seconds counted skipped in_a_row setbacks steady steps began pace".split()}


@dataclass
class TrainState:
    """Progress of a run.

    Attributes:
        step: number of steps done.
        seconds: training time, summed over all starts of the run.
        rows: rows of ``metrics.csv``.
        sums: sums of the loss and of each metric since the last row.
        counted: number of steps in ``sums``.
        skipped: number of updates skipped since the last row because loss or gradient were not finite.
        in_a_row: number of consecutive skipped updates up to now.
        setbacks: number of times the run went back to a checkpoint; each halves the learning rate.
        scale: loss scale for float16.
        steady: number of updates since the loss scale last changed.
        steps: number of steps of the whole run.
        began: first step of the present schedule: 0, or the previous end of a run that is trained longer.
        pieces: parts of the schedule of a run with ``--minutes``, as in `patchloom.train.clock.Piece`.
        passed: number of points behind at which such a run is planned anew.
        pace: recent seconds per step; 0 if unknown.
        measuring: duration of the last held-out evaluation, in seconds.
        measured: last held-out result; None before the first.
        results: result on each held-out image, by step of the evaluation.
        best: best measure and its weights, in a run with ``--patience``.
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
    pieces: list[list[float]] = field(default_factory=list)
    passed: int = 0
    pace: float = 0.0
    measuring: float = 0.0
    measured: Result | None = None
    results: dict[str, list[float]] = field(default_factory=dict)
    best: BestMeasure = field(default_factory=BestMeasure)

    @classmethod
    def of(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TrainState:
        """Restore from a checkpoint; values that it lacks get their defaults."""
        own = {one.name for one in fields(cls)} - {"best", "measured", "results"}
        try:
            known = typed_fields(cls, {name: value for name, value in about.items() if name in own}, _RANGES)
            results = about.get("results", {})
            if not conforms(results, dict[str, list[Any]]):  # of numbers, and NaN
                raise ValueError(f"results cannot be {str(results)[:40]!r}")
            best = BestMeasure.of(about, tensors)
            measured = None if about.get("measured") is None else Result.of(about["measured"])
        except (TypeError, ValueError) as problem:
            raise PatchloomError(
                f"the checkpoint holds values that no run writes ({problem}): restore it from a copy, or begin again "
                "with another --out"
            ) from problem
        return cls(**known | {"results": results, "best": best, "measured": measured})

    def plain(self) -> dict[str, Any]:
        values = asdict(replace(self, best=BestMeasure(), measured=None))
        return values | {"best": self.best.plain(), "measured": self.measured and self.measured.plain()}

    def is_finished(self, steps: int, settings: ResolvedSettings) -> bool:
        """Return whether training has ended: after its last step, or by early stopping after at least one update."""
        return self.step >= steps or (self.step > 0 and self.best.out_of_patience(settings))

    @property
    def piece(self) -> Piece | None:
        """Present part of the schedule of a run with ``--minutes``; None without, or once such a run is extended."""
        if not self.pieces or self.began:
            return None
        step, progress, steps = self.pieces[-1]
        return Piece(int(step), float(progress), int(steps))

    def train_on(self, steps: int) -> None:
        """Begin a new schedule at this step if the number of steps has grown since the checkpoint was written."""
        if self.steps < steps:
            self.began, self.steps = self.step, steps
            self.best.failed, self.best.chosen = 0, False

    @property
    def factor(self) -> float:
        return 0.5**self.setbacks

    def count(self, update: Update) -> bool:
        """Add the losses and metrics of an update to the sums, or count it as skipped."""
        scaled = update.scaling is not None and self.scale > 1
        if update.scaling is not None:
            self.scale, self.steady = update.scaling
        if not update.good:
            if update.overflow and scaled:
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

    def running_means(self) -> dict[str, float]:
        """Return the means of loss and metrics since the last row; {} if all updates were skipped."""
        return {name: value / self.counted for name, value in self.sums.items()}

    def means(self) -> dict[str, float]:
        """Return `running_means`, with the number of skipped updates, and reset the sums."""
        means = self.running_means()
        if self.skipped:
            means["skipped"] = self.skipped
        self.sums, self.counted, self.skipped = {}, 0, 0
        return means
