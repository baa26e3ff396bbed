"""Tables and weights of small runs, and stops on their way."""

import csv
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from patchloom.train import loop as training
from patchloom.train.loop import pretrain
from patchloom.train.step import Stepper


def csv_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without their times."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in csv_rows(run / "metrics.csv")]


def column(run: Path, name: str) -> list[float]:
    """Return the values of a column where it has some."""
    return [float(row[name]) for row in rows(run) if row.get(name)]


def weights(run: Path) -> dict[str, bytes]:
    """Return all tensors of the last checkpoint: weights and moments."""
    tensors = load_file(run / "checkpoints" / "last.safetensors")
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def each_update(patch: pytest.MonkeyPatch, before: Callable[[Stepper, int], None]) -> None:
    """Call ``before`` with the stepper and the number of steps done, before each update is made."""
    update = Stepper.update

    def noted(self: Stepper, done: int, *rest: Any) -> Any:
        before(self, done)
        return update(self, done, *rest)

    patch.setattr(Stepper, "update", noted)


def stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Stop a run after ``step`` steps by SIGTERM, which comes during the update before and is noticed by the next."""
    each_update(patch, lambda _, done: os.kill(os.getpid(), signal.SIGTERM) if done == step - 1 else None)


class Killed(BaseException):
    """Exception that nothing handles, like SIGKILL."""


def killed(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *given: Any, **settings: Any) -> None:
    """Run `pretrain`, with a checkpoint after every update, until a call of a function, counted from 1."""
    method, seen = getattr(owner, name), []

    def dies(*arguments: Any, **named: Any) -> Any:
        seen.append(name)
        if len(seen) == call:
            raise Killed
        return method(*arguments, **named)

    with patch.context() as until, pytest.raises(Killed):
        until.setattr(training, "_SAVE_EVERY", 0.0)
        until.setattr(owner, name, dies)
        pretrain(*given, **settings)
