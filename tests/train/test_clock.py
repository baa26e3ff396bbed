"""Trainings of so many minutes: the plan from the pace, and runs that follow it."""

import pytest
from killing import SMALL
from running import column, killed, weights

from patchloom import PatchloomError, pretrain
from patchloom.runs.folder import RunFolder
from patchloom.schedules import cosine_rate
from patchloom.train import loop as training
from patchloom.train import plan as planning
from patchloom.train.checkpointing import TrainState
from patchloom.train.clock import Piece, is_due, plan_anew, points_passed
from patchloom.train.estimate import rounded

pytestmark = pytest.mark.usefixtures("quick_probe")

ASKED = {name: value for name, value in SMALL.items() if name != "epochs"}


def test_a_plan_that_stays_is_the_usual_schedule():
    piece = Piece(0, 0.0, 40)
    for step in range(40):
        assert piece.at(step) == step / 40 and piece.rate(step, 4, 1e-3) == cosine_rate(step, 40, 4, 1e-3)


def test_the_progress_is_that_of_the_time():
    """Three steps were planned and take 1 s instead of 83: after the first, 239 of 240 s are left."""
    piece = plan_anew(Piece(0, 0.0, 3), 1, 1 / 240, 239.0, 1.0, 1)
    assert piece == Piece(1, 1 / 240, 240) and piece.at(1) == 1 / 240 and piece.at(240) == 1
    rates = [piece.rate(step, 24, 1e-3) for step in range(1, 240)]
    assert max(rates) == pytest.approx(1e-3, rel=0.01) and rates[0] < 1e-4 and rates[-1] < 1e-6
    slower = plan_anew(piece, 120, 0.75, 60.0, 2.0, 1)
    assert slower == Piece(120, 0.75, 150) and slower.at(135) == 0.875


def test_small_changes_and_an_unknown_pace_keep_the_plan():
    piece = Piece(0, 0.0, 1000)
    assert plan_anew(piece, 100, 0.1, 90.0, 0.0, 1) == piece
    assert plan_anew(piece, 100, 0.1, 90.0, 0.098, 1) == piece
    assert plan_anew(piece, 100, 0.1, 90.0, 0.05, 1).steps == 1900
    assert plan_anew(piece, 1000, 1.3, -30.0, 0.1, 1) == plan_anew(piece, 1000, 0.9, -1.0, 0.1, 1) == piece  # it ended
    assert plan_anew(piece, 900, 1.2, -20.0, 0.1, 4).steps == 904  # over time: one more update, with its measure


def test_it_is_due_at_fixed_points_of_time_or_progress():
    assert not is_due(0, 0.01, 0.02) and is_due(0, 0.01, 0.04) and is_due(0, 0.04, 0.01)
    passed = points_passed(0.26, 0.1)
    assert passed == 4 and not is_due(passed, 0.3, 0.4) and is_due(passed, 0.3, 0.5)
    assert is_due(9, 1.0, 0.98) and is_due(9, 0.8, 1.0) and not is_due(9, 0.99, 1.0) and not is_due(9, 1.01, 1.0)


def test_minutes_become_epochs_that_are_stored(unlabelled_images, tmp_path, capsys):
    given = ASKED | {"out": tmp_path / "run"}
    pretrain(unlabelled_images, "mae", minutes=0.01, **given)
    stored = RunFolder(tmp_path / "run").read_config()
    assert stored.epochs > 0 and stored.minutes is None
    assert "0.01 minutes of training" in capsys.readouterr().out
    pretrain(unlabelled_images, "mae", minutes=0.01, **given)
    assert "is finished" in capsys.readouterr().out
    pretrain(unlabelled_images, "mae", **given | {"epochs": stored.epochs + 1})
    assert RunFolder(tmp_path / "run").kept_end(stored.epochs).exists()
    with pytest.raises(PatchloomError, match="--minutes and --epochs"):
        pretrain(unlabelled_images, "mae", minutes=1, **given | {"epochs": 2, "out": tmp_path / "other"})


@pytest.mark.slow
def test_minutes_are_those_of_the_clock(unlabelled_images, tmp_path, capsys, monkeypatch):
    """As if steps had taken 30 times as long when they were timed, on a busy machine."""
    timed = planning.epochs_in

    def on_a_busy_machine(minutes, *about):
        epochs, why = timed(minutes, *about)
        return rounded(epochs / 30), why

    monkeypatch.setattr(planning, "epochs_in", on_a_busy_machine)
    out, minutes = tmp_path / "run", 0.1
    pretrain(unlabelled_images, "mae", minutes=minutes, out=out, **ASKED)
    said, folder = capsys.readouterr().out, RunFolder(out)
    assert "planned anew by the clock" in said
    _, state, _ = folder.checkpoints.read()
    first, *others = state["pieces"]
    assert first[:2] == [0, 0.0] and others and state["step"] == state["steps"] == others[-1][2] > 5 * first[2]
    assert abs(state["seconds"] - 60 * minutes) < 0.2 * 60 * minutes
    assert folder.read_config().epochs == pytest.approx(state["steps"] / 3, rel=1e-3)  # 48 images in batches of 16
    rates = column(out, "lr")
    assert rates[-1] < 0.1 * max(rates)  # the schedule ends with the training
    pretrain(unlabelled_images, "mae", minutes=minutes, out=out, **ASKED)
    assert "is finished" in capsys.readouterr().out


@pytest.fixture
def planned(monkeypatch):
    """Plan 24 steps of 3 an epoch, and anew after 6 of them; return a function that begins such a run or goes on."""
    monkeypatch.setattr(planning, "epochs_in", lambda *about: (8, "as it was timed"))
    monkeypatch.setattr(training, "is_due", lambda passed, time, progress: progress == 0.25)

    def plan_once(steps):
        plans = iter([Piece(6, 0.5, steps)])
        monkeypatch.setattr(training, "plan_anew", lambda now, *about: next(plans, now))

    return plan_once


@pytest.mark.parametrize("call", [7, 9])
def test_a_resumed_run_keeps_the_plan_of_its_clock(call, planned, unlabelled_images, tmp_path, monkeypatch, capsys):
    """The plan is in the checkpoint. The configuration has rounded epochs: 10 steps of 3 an epoch become 9 steps."""
    monkeypatch.setattr(training, "rounded", round)
    planned(10)
    whole = pretrain(unlabelled_images, "mae", out=tmp_path / "whole", minutes=1000.0, **ASKED).folder
    planned(10)
    out = tmp_path / "run"
    killed(monkeypatch, TrainState, "count", call, unlabelled_images, "mae", out=out, minutes=1000.0, **ASKED)
    capsys.readouterr()
    pretrain(unlabelled_images, "mae", out=out, minutes=1000.0, **ASKED)
    said, state = capsys.readouterr().out, RunFolder(out).checkpoints.read()[1]
    assert f"Resuming after step {call - 1} of 10" in said and "Training longer" not in said
    assert (state["step"], state["steps"], column(out, "step")[-1]) == (10, 10, 10)
    assert column(out, "held_out")[-1] == column(whole, "held_out")[-1] and weights(out) == weights(whole)


def test_a_training_that_ends_within_its_warm_up_can_be_read(unlabelled_images, tmp_path, planned):
    planned(7)
    run = pretrain(unlabelled_images, "mae", out=tmp_path / "run", minutes=1000.0, warmup_epochs=3, **ASKED).folder
    stored = RunFolder(run).read_config()
    assert stored.warmup_epochs == stored.epochs == rounded(7 / 3)
