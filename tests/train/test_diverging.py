"""Updates that are not finite are skipped; after several, the run goes back, and in the end it stops."""

import math
from dataclasses import replace

import pytest
import torch
from killing import SMALL
from noting import Noting
from refusing import refusal
from running import rows
from safetensors.torch import load_file

from patchloom.errors import PatchloomError
from patchloom.loggers import queue
from patchloom.loggers.queue import TrackerSet
from patchloom.runs.folder import RunFolder
from patchloom.runs.task import prepare_task
from patchloom.tasks import task_class
from patchloom.tasks.mae import MAE
from patchloom.train import loop as training
from patchloom.train import metrics
from patchloom.train.checkpointing import BestMeasure
from patchloom.train.loop import pretrain
from patchloom.train.step import Stepper

pytestmark = pytest.mark.usefixtures("quick_probe")

STEPS = 18  # 48 images to train on, in batches of 16, for 6 epochs


@pytest.fixture(autouse=True)
def saved_after_each_update(monkeypatch):
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)


def spoil(monkeypatch, name, which, how=math.nan):
    """Set a task's loss to ``how`` at the steps (from 0) where ``which`` is true, and return the list of steps."""
    seen = []
    whole = task_class(name).forward

    def forward(self, *views, progress, generator=None):
        step = round(progress * STEPS)
        seen.append(step)
        outcome = whole(self, *views, progress=progress, generator=generator)
        return outcome._replace(loss=outcome.loss * how) if which(step, len(seen)) else outcome

    monkeypatch.setattr(task_class(name), "forward", forward)
    return seen


def finite(run):
    saved = load_file(run / "checkpoints" / "last.safetensors")
    return all(value.isfinite().all() for value in saved.values() if value.is_floating_point())


@pytest.mark.parametrize(("name", "how"), [("mae", math.inf), ("lut", math.nan)])
def test_one_bad_step_is_skipped_and_named(unlabelled_images, tmp_path, monkeypatch, capsys, name, how):
    spoil(monkeypatch, name, lambda step, _: step == 7, how)
    run = pretrain(unlabelled_images, name, out=tmp_path / "run", **SMALL).folder
    (line,) = (run / "skipped.txt").read_text().splitlines()
    step, why, *names = line.split("\t")
    assert step == "step 8" and f"loss {how:g}" in why
    assert len(names) == len(set(names)) == 16 and all((unlabelled_images / name).is_file() for name in names)
    assert "skipped step 8: loss" in capsys.readouterr().out
    table = {row["step"]: row for row in rows(run)}
    assert [step for step, row in table.items() if row.get("skipped")] == ["8"]
    assert table["8"]["loss"] == "" and math.isfinite(float(table["9"]["loss"])) and finite(run)


def test_a_skipped_step_leaves_no_trace(unlabelled_images, tmp_path, monkeypatch):
    """The loss is changed after the forward pass, which has updated the running statistics by then."""
    spoil(monkeypatch, "lut", lambda step, _: step == 0)
    update, save, states = Stepper.update, training.save_checkpoint, []

    def noted_update(self, *arguments):
        moved = update(self, *arguments)
        states.append(copied(self.task))
        return moved

    def noted_save(folder, stepper, *given):
        if not states:  # before the first forward pass
            states.append(copied(stepper.task))
        return save(folder, stepper, *given)

    monkeypatch.setattr(Stepper, "update", noted_update)
    monkeypatch.setattr(training, "save_checkpoint", noted_save)
    pretrain(unlabelled_images, "lut", out=tmp_path / "run", **SMALL)
    start, skipped, made = states[:3]
    assert not [name for name in start if not torch.equal(start[name], skipped[name])]
    assert [name for name in start if "running_mean" in name and not torch.equal(start[name], made[name])]


def copied(task):
    return {name: value.detach().clone() for name, value in task.state_dict().items()}


def test_several_in_a_row_go_back_to_the_last_good_checkpoint_with_a_lower_rate(
    unlabelled_images, tmp_path, monkeypatch, capsys
):
    seen = spoil(monkeypatch, "mae", lambda step, count: step >= 9 and count <= 14)
    pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SMALL)
    assert seen == [*range(14), *range(9, STEPS)]
    told = capsys.readouterr().out
    assert "not finite at step 14: going back to step 9, with ×0.5 the learning rate" in told
    rates = {int(row["step"]): float(row["lr"]) for row in rows(tmp_path / "run") if row["lr"]}
    assert sorted(rates) == list(range(1, STEPS + 1))
    plain = pretrain(unlabelled_images, "mae", out=tmp_path / "plain", **SMALL).folder
    usual = {int(row["step"]): float(row["lr"]) for row in rows(plain) if row["lr"]}
    for step, rate in rates.items():
        assert rate == pytest.approx(usual[step] * (0.5 if step > 9 else 1), rel=1e-5)
    # the run never goes back to a checkpoint next to a skipped update
    assert len((tmp_path / "run" / "skipped.txt").read_text().splitlines()) == 5


def test_three_setbacks_end_the_run(unlabelled_images, tmp_path, monkeypatch):
    seen = spoil(monkeypatch, "mae", lambda step, count: step >= 9)
    with pytest.raises(PatchloomError, match="no longer finite after 14 steps, .* halved 3 times: .* --blr"):
        pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SMALL)
    assert seen == [*range(14), *[9, 10, 11, 12, 13] * 3]
    assert finite(tmp_path / "run")
    with pytest.raises(PatchloomError, match="no longer finite"):  # and a restart does not forget the setbacks
        pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SMALL)
    assert len(seen) == 14 + 15 + 5


def test_what_is_not_finite_before_the_first_step_stops_the_run(unlabelled_images, tmp_path, monkeypatch):
    measure = MAE.measure

    def unknown(self, *given):
        found = measure(self, *given)
        return replace(found, values=found.values * math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(MAE, "measure", unknown)
        with pytest.raises(PatchloomError, match="not finite for 12 of 12 held-out images before the first step"):
            pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SMALL)
    assert not RunFolder(tmp_path / "run").checkpoints.there()

    def spoilt(*args, **kwargs):
        task = prepare_task(*args, **kwargs)
        torch.nn.init.constant_(task.encoder.norm.weight, math.nan)
        return task

    monkeypatch.setattr(training, "prepare_task", spoilt)
    assert "initial weights" in refusal(pretrain, unlabelled_images, "mae", out=tmp_path / "weights", **SMALL)


FIRST_BAD, LAST = 8, 14  # steps done; after the last of them there is a measure


def test_trackers_after_a_setback_a_kill_an_early_stop_and_a_rejected_result(
    unlabelled_images, tmp_path, monkeypatch, capsys
):
    bad = training._MAX_IN_A_ROW
    seen = spoil(monkeypatch, "mae", lambda step, count: step >= FIRST_BAD and count <= FIRST_BAD + bad)
    Noting.forget()
    monkeypatch.setattr(queue, "tracker_class", {"tensorboard": Noting}.__getitem__)
    monkeypatch.setattr(metrics, "drawing_steps", lambda steps, measured, *_: {0, LAST} & {0, *measured})
    monkeypatch.setattr(BestMeasure, "out_of_patience", lambda self, settings: seen[-1] == LAST - 1)

    def train():
        Noting.calls = []
        pretrain(unlabelled_images, "mae", out=tmp_path / "run", log="tensorboard", patience=100, **SMALL)

    def received(name):
        return [one[1] for one in Noting.calls if one[0] == name]

    def kill(*given, rewind=TrackerSet.rewind):
        rewind(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(TrackerSet, "rewind", kill)
        train()
    assert received("row") == [*range(FIRST_BAD + bad)]  # the last of the bad ones has none
    assert received("back") == [FIRST_BAD]
    Noting.fails = {("result",): OSError("no network")}
    train()
    assert received("back") == [] and received("row") == [*range(FIRST_BAD + 1, LAST + 1)]
    assert received("pictures") == [LAST, LAST], "those on the way, and those of the weights that are kept"
    assert received("result") == []
    Noting.fails = {}
    train()
    assert "is finished" in capsys.readouterr().out
    assert received("result") == received("pictures") == [LAST] and received("row") == []
