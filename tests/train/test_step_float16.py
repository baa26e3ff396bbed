"""float16 training for GPUs without bfloat16, with dynamic loss scaling."""

import csv
from dataclasses import dataclass

import pytest
import torch
from killing import SMALL
from safetensors.torch import load_file

from patchloom.tasks import task_class
from patchloom.train import loop as training
from patchloom.train import resolve
from patchloom.train.checkpointing import TrainState
from patchloom.train.loop import pretrain
from patchloom.train.step import Stepper, clip_gradients

pytestmark = pytest.mark.usefixtures("quick_probe")

HALF = SMALL | {"precision": "float16"}


def rows(run, column):
    with open(run / "metrics.csv", newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def test_the_scale_is_halved_by_an_overflow_and_doubled_after_two_thousand_updates():
    state = TrainState()
    state.adapt(overflow=True)
    assert (state.scale, state.steady) == (2.0**15, 0)
    for _ in range(1999):
        state.adapt(overflow=False)
    assert (state.scale, state.steady) == (2.0**15, 1999)
    state.adapt(overflow=False)
    assert (state.scale, state.steady) == (2.0**16, 0)
    for _ in range(40):
        state.adapt(overflow=True)
    assert state.scale == 1.0


def test_gradients_are_divided_by_the_scale_before_they_are_clipped():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for max_norm, clipped in ((0.0, 6.0), (3.0, 3.0), (100.0, 6.0)):
        weight.grad = torch.full((4,), 3.0 * 1024)
        assert clip_gradients(optimizer, max_norm, 1024.0).item() == pytest.approx(6.0)
        assert weight.grad.norm().item() == pytest.approx(clipped, rel=1e-5)


@pytest.mark.parametrize("name", ["mae", "extrema"])
def test_float16_learns_nearly_what_float32_does(name, images, tmp_path):
    for precision in ("float32", "float16"):
        pretrain(images, name, out=tmp_path / precision, **SMALL | {"precision": precision})
    exact, near = (rows(tmp_path / precision, "loss") for precision in ("float32", "float16"))
    assert exact == pytest.approx(near, rel=0.02) and exact != near
    assert set(rows(tmp_path / "float16", "loss_scale")) == {2.0**16}


def test_small_gradients_survive(images, tmp_path, monkeypatch):
    # without a scale, a loss of a millionth has gradients below float16's smallest number
    forward = task_class("mae").forward

    def faint(*given, **more):
        outcome = forward(*given, **more)
        return outcome._replace(loss=outcome.loss * 1e-6)

    monkeypatch.setattr(task_class("mae"), "forward", faint)
    norms, update = [], Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda *a: norms.append((moved := update(*a)).norm) or moved)
    pretrain(images, "mae", out=tmp_path / "scaled", **HALF)
    monkeypatch.setattr(TrainState, "loss_scale", lambda self, precision: 1.0)
    pretrain(images, "mae", out=tmp_path / "plain", **HALF)
    with_scale, without = norms[:18], norms[18:]
    assert min(with_scale) > 1.5 * max(without)


def test_an_overflow_costs_an_update_and_nothing_else(images, tmp_path, monkeypatch, capsys):
    @dataclass
    class Bold(TrainState):
        scale: float = 2.0**26

    monkeypatch.setattr(training, "TrainState", Bold)
    moves, update = [], Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda *a: moves.append(moved := update(*a)) or moved)
    pretrain(images, "mae", out=tmp_path / "run", **HALF)
    overflows = sum(move.overflow for move in moves)
    assert 0 < overflows < 18 and all(move.good for move in moves[overflows:])
    assert rows(tmp_path / "run", "loss_scale")[-1] == pytest.approx(2.0 ** (26 - overflows), rel=1e-5)
    assert "not finite" not in capsys.readouterr().out and not (tmp_path / "run" / "skipped.txt").exists()


def test_the_scale_is_resumed(images, tmp_path, monkeypatch):
    pretrain(images, "mae", out=tmp_path / "whole", **HALF)
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)
    adapt, update = TrainState.adapt, Stepper.update
    monkeypatch.setattr(
        TrainState, "adapt", lambda self, overflow: adapt(self, self.steady == 5)
    )  # an "overflow" at times

    class Killed(Exception):
        pass

    def dying(self, done, *rest):
        if done == 10:
            raise Killed
        return update(self, done, *rest)

    pretrain(images, "mae", out=tmp_path / "alone", **HALF)
    monkeypatch.setattr(Stepper, "update", dying)
    with pytest.raises(Killed):
        pretrain(images, "mae", out=tmp_path / "run", **HALF)
    monkeypatch.setattr(Stepper, "update", update)
    pretrain(images, "mae", out=tmp_path / "run", **HALF)
    assert rows(tmp_path / "run", "loss_scale") == rows(tmp_path / "alone", "loss_scale")
    assert rows(tmp_path / "run", "loss_scale")[-1] < 2.0**16
    one, two = (load_file(tmp_path / run / "encoder.safetensors") for run in ("run", "alone"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_gpu_without_bfloat16_trains_in_float16(monkeypatch):
    for has, chosen in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, has=has: has)
        assert resolve.default_precision("cuda")[0] == chosen
