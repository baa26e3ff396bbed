"""The weights of the best measure of a run, and when a run stops since it gets no better (``--patience``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from patchloom.processes import rank, smallest
from patchloom.questions.measure import Measure
from patchloom.runs.checkpoint import best_of, whole_weights
from patchloom.runs.settings import Settings
from patchloom.tasks.task import Task


@dataclass
class Best:
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
    def of(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Best:
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

    def hopeless(self, settings: Settings) -> bool:
        """Whether so many measures were no better that the run is to stop."""
        return settings.patience is not None and self.failed >= settings.patience

    def _beaten_by(self, value: float, higher_is_better: bool) -> bool:
        if value != value:  # nan
            return False
        return self.value is None or (value > self.value if higher_is_better else value < self.value)


def said_of(best: Best, step: int, steps: int, settings: Settings) -> str:
    """A sentence on which weights a run with ``--patience`` ends with, and whether it stopped before its last step.

    Where no measure was a number, there is no best one, and they are the last weights.

    Args:
        best: at the end of the training.
        step: the last one that was done.
        steps: of the whole run, had it not been stopped.
        settings: resolved.
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


def epoch_of(step: int, steps: int, settings: Settings) -> str:
    """When a step was done, in epochs."""
    return f"{settings.epochs * step / steps:.4g}"
