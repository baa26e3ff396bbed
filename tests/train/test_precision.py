"""Precisions of a run: TF32 and float32 of products and convolutions alike, and float16 with dynamic loss scaling."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from killing import SMALL
from pseudo_cuda import pseudo_cuda
from running import column, killed, weights

from patchloom.errors import PatchloomError
from patchloom.runs.folder import RunFolder
from patchloom.train import loop as training
from patchloom.train import step
from patchloom.train.checkpointing import TrainState
from patchloom.train.final_evaluation import FinalEvaluation
from patchloom.train.loop import pretrain
from patchloom.train.plan import Planner
from patchloom.train.step import Stepper, adapt_scale, clip_gradients

pytestmark = pytest.mark.usefixtures("quick_probe")

HALF = SMALL | {"precision": "float16", "epochs": 2}  # 6 steps


@pytest.mark.parametrize(("precision", "tf32"), [("tf32", True), ("bfloat16", False)])
def test_a_run_computes_what_is_not_autocast_in_one_precision(
    precision, tf32, unlabelled_images, tmp_path, monkeypatch
):
    seen, places, forward = [], (torch.backends.cuda.matmul, torch.backends.cudnn), Stepper.forward

    def noted(self, *rest):
        with self.autocast():
            half = torch.is_autocast_enabled("cpu")  # which pseudo tensors take for the GPU
        seen.append(([place.allow_tf32 for place in places], half))
        return forward(self, *rest)

    monkeypatch.setattr(Stepper, "forward", noted)
    monkeypatch.setattr(FinalEvaluation, "run", lambda *_: "")
    monkeypatch.setattr(Planner, "forecast", lambda *_, **__: SimpleNamespace(sentences=list))
    before = [place.allow_tf32 for place in places]
    with pseudo_cuda():
        short = SMALL | {"epochs": 1, "device": "cuda", "precision": precision}
        run = pretrain(unlabelled_images, "mae", out=tmp_path / "run", **short).folder
    assert seen == [([tf32, tf32], precision == "bfloat16")] * 3
    assert [place.allow_tf32 for place in places] == before
    assert RunFolder(run).read_config().precision == precision


def test_tf32_is_refused_where_it_is_not(images, tmp_path):
    with pytest.raises(PatchloomError, match="--precision tf32 needs an NVIDIA GPU .*: use --precision float32"):
        pretrain(images, "mae", out=tmp_path / "run", **SMALL | {"precision": "tf32"})
    assert not (tmp_path / "run").exists()


def test_the_scale_is_halved_by_an_overflow_and_doubled_after_two_thousand_updates():
    def adapted(scaling, *updates):
        for lost, unbounded in updates:
            scaling = adapt_scale(torch.tensor(scaling), torch.tensor(lost), torch.tensor(unbounded)).tolist()
        return scaling

    good, overflow, lost = (False, False), (False, True), (True, True)
    assert adapted([2.0**16, 7.0], overflow) == [2.0**15, 0]
    assert adapted([2.0**15, 0.0], *[good] * 1999) == [2.0**15, 1999]
    assert adapted([2.0**15, 1999.0], lost) == [2.0**15, 1999]
    assert adapted([2.0**15, 1999.0], good) == [2.0**16, 0]
    assert adapted([2.0**16, 0.0], *[overflow] * 40) == [1.0, 0]


def test_gradients_are_divided_by_the_scale_before_they_are_clipped():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for max_norm, clipped in ((0.0, 6.0), (3.0, 3.0), (100.0, 6.0)):
        weight.grad = torch.full((4,), 3.0 * 1024)
        assert clip_gradients(optimizer, max_norm, torch.tensor(1024.0)).item() == pytest.approx(6.0)
        assert weight.grad.norm().item() == pytest.approx(clipped, rel=1e-5)


def test_float16_learns_nearly_what_float32_does(unlabelled_images, tmp_path):
    for precision in ("float32", "float16"):
        pretrain(unlabelled_images, "extrema", out=tmp_path / precision, **HALF | {"precision": precision})
    exact, near = (column(tmp_path / precision, "loss") for precision in ("float32", "float16"))
    assert exact == pytest.approx(near, rel=0.02) and exact != near
    assert set(column(tmp_path / "float16", "loss_scale")) == {2.0**16}


def test_an_overflow_costs_an_update_and_nothing_else(unlabelled_images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "TrainState", partial(TrainState, scale=2.0**23))
    moves, update = [], Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda *a: moves.append((moved := update(*a)).read()) or moved)
    pretrain(unlabelled_images, "mae", out=tmp_path / "run", **HALF)
    overflows = sum(move.overflow for move in moves)
    assert 0 < overflows < 6 and all(move.good for move in moves[overflows:])
    assert column(tmp_path / "run", "loss_scale")[-1] == pytest.approx(2.0 ** (23 - overflows), rel=1e-5)
    assert "not finite" not in capsys.readouterr().out and not (tmp_path / "run" / "skipped.txt").exists()


def test_the_scale_is_resumed(unlabelled_images, tmp_path, monkeypatch):
    # an "overflow" after every fourth update
    monkeypatch.setattr(step, "adapt_scale", lambda scaling, lost, _: adapt_scale(scaling, lost, scaling[1] == 3))
    whole = pretrain(unlabelled_images, "mae", out=tmp_path / "whole", **HALF).folder
    killed(monkeypatch, TrainState, "count", 3, unlabelled_images, "mae", out=tmp_path / "run", **HALF)
    run = pretrain(unlabelled_images, "mae", out=tmp_path / "run", **HALF).folder
    assert column(run, "loss_scale") == column(whole, "loss_scale") == [2.0**16] * 3 + [2.0**15] * 3
    assert weights(run) == weights(whole)
