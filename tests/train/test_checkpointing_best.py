"""Early stopping: --patience keeps the weights of the best measure and stops without improvement."""

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from killing import SMALL, left_behind
from refusing import refusal
from running import column, each_update, killed, rows
from safetensors.torch import load_file
from torch import nn

from patchloom.nets.checkpoints.format import read_encoder_card
from patchloom.questions.question import Measure
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings
from patchloom.runs.task import load_task
from patchloom.tasks.mae import MAE
from patchloom.train.checkpointing import BestMeasure, TrainState, describe_best
from patchloom.train.clock import Piece
from patchloom.train.loop import pretrain
from patchloom.train.step import Update

pytestmark = pytest.mark.usefixtures("quick_probe")

OPTIONS = SMALL | {"task": "droppos", "patience": 2, "epochs": 8}


def measure(value: float, higher: bool = True) -> Measure:
    return Measure("accuracy", torch.tensor([value]), {"chance": torch.tensor([0.1])}, "chance", higher)


def compared(values, higher=True) -> tuple[BestMeasure, list[int]]:
    """Return the best of measures after 0, 1, 2, ... steps, and the number without improvement after each."""
    best, failed, layer = BestMeasure(), [], nn.Linear(1, 1)
    for step, value in enumerate(values):
        nn.init.constant_(layer.weight, step)
        best.compare(step, measure(value, higher), layer)
        failed.append(best.failed)
    return best, failed


@pytest.mark.parametrize(
    "values, higher, step, failed",
    [
        ([0.1, 0.2, 0.2, 0.15, 0.3, 0.3], True, 4, [0, 0, 1, 2, 0, 1]),  # an equal one is not better
        ([1.0, 1.1, 0.9, 0.9], False, 2, [0, 1, 0, 1]),
        ([0.5, 0.4, 0.3], True, 0, [0, 1, 2]),
        ([float("nan"), 0.1, float("nan"), float("inf")], False, 1, [1, 0, 1, 2]),
    ],
)
def test_the_best_is_by_the_measures_direction(values, higher, step, failed):
    best, found = compared(values, higher)
    assert (best.step, found, best.weights["weight"].item()) == (step, failed, step)


def test_measures_that_are_no_numbers_are_counted_through_a_checkpoint_and_never_chosen():
    best, _ = compared([float("nan"), float("nan")])
    best.choose(ended=True)
    again = TrainState.of(TrainState(best=best).plain(), {}).best
    assert again == best == BestMeasure(failed=2) and again.out_of_patience(Settings("", patience=2))
    kept, _ = compared([float("nan"), 0.1])
    kept.choose(ended=False)
    assert not kept.chosen
    kept.choose(ended=True)
    assert kept.chosen


@pytest.mark.parametrize(
    ("best", "step", "said"),
    [
        (BestMeasure(0.5, 30, 2), 50, "stopped early after epoch 10 of 20: .* in 2 evaluations .* epoch 6 of 20"),
        (BestMeasure(0.5, 0, 1), 100, "at epoch 0 of 20, before the first step, not of its last step"),
        (BestMeasure(0.5, 100, 0), 100, "at epoch 20 of 20, its last step"),
        (BestMeasure(failed=2), 50, "stopped after epoch 10 of 20. None of .* its last weights"),
        (BestMeasure(failed=1), 100, "ended after epoch 20 of 20. None of .* its last weights"),
    ],
)
def test_description_of_the_final_weights(best, step, said):
    assert re.search(said, describe_best(best, step, 100, Settings("", patience=2, epochs=20)))


def test_a_state_sums_updates_and_counts_those_that_are_skipped():
    made = Update(True, False, 1.0, ("loss", "accuracy"), [[1.0, 0.2], [3.0, 0.4]], [], None)
    lost, overflow = made._replace(good=False), made._replace(good=False, overflow=True, scaling=(2.0**15, 0))
    state = TrainState()
    assert state.count(made) and state.count(overflow) and (state.scale, state.steady) == (2.0**15, 0)
    assert (state.skipped, state.in_a_row) == (0, 0), "an overflow only halves the scale"
    assert not state.count(lost) and not state.count(lost) and (state.skipped, state.in_a_row) == (2, 2)
    state.scale = 1.0
    assert not state.count(overflow) and state.in_a_row == 3, "unless it is 1 already"
    assert state.count(made) and state.in_a_row == 0 and state.counted == 4
    assert state.means() == pytest.approx({"loss": 2, "accuracy": 0.3, "skipped": 3})
    assert (state.sums, state.counted, state.skipped, state.means()) == ({}, 0, 0, {})
    state.setbacks = 2
    assert state.factor == 0.25


def test_a_state_knows_when_training_ends_and_is_longer():
    settings = Settings("", patience=1)
    state = TrainState(step=10, steps=10, best=BestMeasure(0.5, 8, 1, True))
    assert TrainState(step=10).is_finished(10, Settings("")) and not TrainState(step=9).is_finished(10, Settings(""))
    assert state.is_finished(20, settings), "by early stopping"
    assert not TrainState(step=0, best=BestMeasure(0.5, 0, 1)).is_finished(20, settings), "not before an update"
    state.train_on(10)
    assert (state.began, state.best.failed) == (0, 1)
    state.train_on(20)
    assert (state.began, state.steps, state.best.failed, state.best.chosen) == (10, 20, 0, False)
    assert TrainState(pieces=[[0, 0.0, 9], [3, 0.5, 7]]).piece == Piece(3, 0.5, 7)
    assert TrainState(pieces=[[0, 0.0, 9]], began=4).piece is None
    assert "values that no run writes" in refusal(TrainState.of, {"step": -1}, {})


@pytest.fixture(scope="module")
def plain(unlabelled_images, tmp_path_factory):
    """Run that stops early."""
    out = pretrain(unlabelled_images, out=tmp_path_factory.mktemp("plain") / "run", **OPTIONS).folder
    return SimpleNamespace(out=out, about=RunFolder(out).checkpoints.about())


def test_it_stops_and_its_encoder_is_the_best_one(plain):
    best, done = plain.about["best"], plain.about["step"]
    assert done < plain.about["steps"] and best["chosen"] and best["failed"] == 2
    measured = {int(row["step"]): float(row["held_out"]) for row in rows(plain.out) if row["held_out"]}
    assert len(measured) >= 3 and max(measured) == done
    assert best["step"] == max(measured, key=measured.__getitem__) == [*measured][-3]  # max takes the first of equals
    tensors = load_file(plain.out / "checkpoints" / "last.safetensors")
    encoder = load_file(plain.out / "encoder.safetensors")
    assert all(torch.equal(value, tensors[f"best/encoder.{name}"]) for name, value in encoder.items())
    assert any(not torch.equal(value, tensors[f"encoder.{name}"]) for name, value in encoder.items())
    loaded = load_task(plain.out).task.state_dict()
    assert all(torch.equal(loaded[f"encoder.{name}"], value) for name, value in encoder.items())


def test_summary_and_card_report_early_stopping(plain):
    said, summary = "The run stopped early after epoch ", (plain.out / "summary.txt").read_text()
    assert said in summary and read_encoder_card(plain.out / "encoder.safetensors").note.startswith(said)
    best = plain.about["best"]["value"]
    assert f"position accuracy {best:.1%}" in summary, "the closing sentence is about the weights that are kept"


def test_killed_in_its_final_evaluation_it_is_called_by_the_step_of_its_weights(plain, tmp_path):
    run = shutil.copytree(plain.out, tmp_path / "run")
    for name in ("summary.txt", "encoder.safetensors"):
        (run / name).unlink()
    vit, card = load_encoder(run)
    whole = load_file(plain.out / "encoder.safetensors")
    assert all(torch.equal(value, whole[name]) for name, value in vit.state_dict().items())
    reached = f"step {plain.about['best']['step']} of {plain.about['steps']}"
    assert plain.about["best"]["step"] < plain.about["step"]
    assert card.name == f"run ({reached})" and card.note.endswith(f"the weights of its best measure, at {reached}.")


def test_a_killed_and_resumed_run_is_equal_and_trackers_have_each_row_once(
    unlabelled_images, plain, tmp_path, monkeypatch
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, given = tmp_path / "run", OPTIONS | {"log": "tensorboard"}
    for call in (2, 5):
        killed(monkeypatch, TrainState, "count", call, unlabelled_images, out=out, **given)
    pretrain(unlabelled_images, out=out, **given)
    assert left_behind(out) == left_behind(plain.out)
    found = EventAccumulator(str(out / "logs" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [one.step for one in found.Scalars("epoch")] == column(out, "step")
    assert "switched off" not in (out / "log.txt").read_text()


def test_measures_that_are_no_numbers_leave_the_weights_before_the_first_step(unlabelled_images, tmp_path, monkeypatch):
    measure, updated = MAE.measure, []

    def never(self, *given):
        found = measure(self, *given)
        return replace(found, values=found.values * float("nan")) if updated else found

    monkeypatch.setattr(MAE, "measure", never)
    each_update(monkeypatch, lambda *_: updated.append(True))
    out = pretrain(unlabelled_images, out=tmp_path / "run", **OPTIONS | {"task": "mae", "patience": 1}).folder
    about = RunFolder(out).checkpoints.about()
    assert about["best"].pop("value") > 0 and about["best"] == {"step": 0, "failed": 1, "chosen": True}
    assert 0 < about["step"] < about["steps"]
    assert "the weights of its best measure, at epoch 0 of 8" in " ".join((out / "log.txt").read_text().split())
