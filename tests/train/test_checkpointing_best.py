"""Early stopping: --patience keeps the weights of the best measure and stops without improvement."""

import csv
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from killing import SMALL, Kill, start
from safetensors.torch import load_file
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.look.look import look
from patchloom.nets.checkpoints.format import read_encoder_card
from patchloom.questions.question import Measure
from patchloom.runs.checkpoint import as_best
from patchloom.runs.encoder import load_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings
from patchloom.runs.task import load_task
from patchloom.train.checkpointing import BestMeasure, TrainState, describe_best
from patchloom.train.loop import pretrain

NEVER = '''
"""MAE, of which no measure is a number."""

from dataclasses import replace

from patchloom.tasks.mae import MAE


class Never(MAE):
    """MAE with a measure that cannot be taken after the first update."""

    updated = False

    def after_step(self, progress):
        super().after_step(progress)
        self.updated = True

    def measure(self, *given):
        found = super().measure(*given)
        return replace(found, values=found.values * float("nan")) if self.updated else found
'''
OPTIONS = {"task": "droppos", "patience": 2, "epochs": 8}


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


def test_round_trip_through_a_checkpoint():
    best, _ = compared([0.1, 0.3, 0.2])
    tensors = {"weight": torch.zeros(1), "optimizer.exp_avg.weight": torch.zeros(1)} | as_best(best.weights)
    again = BestMeasure.of({"best": best.plain()}, tensors)
    assert again == best and again.weights.keys() == {"weight", "bias"}
    assert BestMeasure.of({}, {"weight": torch.zeros(1)}) == BestMeasure()


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


def test_patience_counts_measures_in_a_row():
    best, _ = compared([0.3, 0.2, 0.1])
    assert best.out_of_patience(Settings("", patience=2)) and not best.out_of_patience(Settings("", patience=3))
    assert not best.out_of_patience(Settings(""))


def test_description_of_the_final_weights():
    settings = Settings("", patience=2, epochs=20)
    assert describe_best(BestMeasure(0.5, 30, 2), 50, 100, settings) == (
        "The run stopped early after epoch 10 of 20: no improvement in 2 evaluations (--patience 2). These are the "
        "weights of its best measure, at epoch 6 of 20."
    )
    assert "at epoch 0 of 20, before the first step, not of its last step (" in describe_best(
        BestMeasure(0.5, 0, 1), 100, 100, settings
    )
    assert "at epoch 20 of 20, its last step (" in describe_best(BestMeasure(0.5, 100, 0), 100, 100, settings)
    assert describe_best(BestMeasure(failed=2), 50, 100, settings) == (
        "The run stopped after epoch 10 of 20. None of its held-out measures was a number, so --patience 2 found no "
        "best one: these are its last weights."
    )
    assert "The run ended after epoch 20 of 20. None " in describe_best(BestMeasure(failed=1), 100, 100, settings)


def test_a_patience_of_none_is_refused(tmp_path):
    with pytest.raises(PatchloomError, match="--patience must be 1 or more, not 0"):
        pretrain("shapes:100", patience=0, out=tmp_path / "run")


@pytest.fixture(scope="module")
def plain(unlabelled_images, tmp_path_factory):
    """Run that stops early, with the number of file events."""
    out = tmp_path_factory.mktemp("plain") / "run"
    killed, events = start(unlabelled_images, out, OPTIONS, Kill())
    assert not killed
    return SimpleNamespace(out=out, events=events, about=RunFolder(out).checkpoints.about())


def results_of(run: Path) -> dict[str, Any]:
    """Return the contents of a finished run without labels: tensors, rows without times, pictures and texts."""
    tensors = load_file(run / "checkpoints" / "last.safetensors")
    with open(run / "metrics.csv", newline="") as file:
        rows = [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]
    files = [*sorted(run.glob("pictures/*.png")), *(run / name for name in ("summary.txt", "verdict.yaml"))]
    found = {path.name: path.read_bytes() for path in [*files, run / "encoder.safetensors"]}
    return {name: value.numpy().tobytes() for name, value in tensors.items()} | found | {"rows": rows}


def test_it_stops_and_its_encoder_is_the_best_one(plain):
    best, done = plain.about["best"], plain.about["step"]
    assert done < plain.about["steps"] and best["chosen"] and best["failed"] == 2
    with open(plain.out / "metrics.csv", newline="") as file:
        measured = {int(row["step"]): float(row["held_out"]) for row in csv.DictReader(file) if row["held_out"]}
    assert len(measured) >= 3 and max(measured) == done
    assert best["step"] == max(measured, key=measured.__getitem__) == [*measured][-3]  # max takes the first of equals
    tensors = load_file(plain.out / "checkpoints" / "last.safetensors")
    encoder = load_file(plain.out / "encoder.safetensors")
    assert all(torch.equal(value, tensors[f"best/encoder.{name}"]) for name, value in encoder.items())
    assert any(not torch.equal(value, tensors[f"encoder.{name}"]) for name, value in encoder.items())
    loaded = load_task(plain.out).task.state_dict()
    assert all(torch.equal(loaded[f"encoder.{name}"], value) for name, value in encoder.items())


def test_summary_and_card_report_early_stopping(plain):
    said = re.compile(r"The run stopped early after epoch [\d.]+ of 8: no improvement in 2 evaluations")
    assert said.search((plain.out / "summary.txt").read_text())
    assert said.match(read_encoder_card(plain.out / "encoder.safetensors").note)
    held_out = (plain.out / "summary.txt").read_text()
    best = plain.about["best"]["value"]
    assert f"position accuracy {best:.1%}" in held_out, "the closing sentence is about the weights that are kept"


@pytest.fixture
def unfinished(plain, tmp_path):
    """Run that was killed in its final evaluation, before it wrote its encoder."""
    folder = tmp_path / "run"
    shutil.copytree(plain.out, folder)
    for name in ("summary.txt", "encoder.safetensors"):
        (folder / name).unlink()
    return folder


def test_killed_in_its_final_evaluation_it_is_called_by_the_step_of_its_weights(plain, unfinished):
    vit, card = load_encoder(unfinished)
    whole = load_file(plain.out / "encoder.safetensors")
    assert all(torch.equal(value, whole[name]) for name, value in vit.state_dict().items())
    reached = f"step {plain.about['best']['step']} of {plain.about['steps']}"
    assert plain.about["best"]["step"] < plain.about["step"]
    assert card.name == f"run ({reached})"
    assert card.note == (
        f"The run {unfinished} is not finished: this is its newest checkpoint, with the weights of its best measure, "
        f"at {reached}."
    )


def test_its_pictures_are_called_by_the_epoch_and_the_measure_of_its_weights(plain, monkeypatch):
    titles = []

    def noted(*given, title, **options):
        titles.append(title(measure(0.5)).result)
        return []

    monkeypatch.setattr("patchloom.look.look.draw_task", noted)
    look(plain.out)
    best = plain.about["best"]
    epoch = f"{8 * best['step'] / plain.about['steps']:.4g}"
    (said,) = titles
    assert said.startswith(f"Epoch {epoch} of 8; on held-out images: accuracy {best['value']:.1%}, chance ")


def test_a_killed_and_resumed_run_is_equal_and_trackers_have_each_row_once(unlabelled_images, plain, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, options = tmp_path / "run", OPTIONS | {"log": "tensorboard"}
    at = [Kill(event=round(share * plain.events)) for share in (0.3, 0.5, 0.6)]
    kills = [start(unlabelled_images, out, options, kill)[0] for kill in at]
    while start(unlabelled_images, out, options, Kill())[0]:
        pass
    assert any(kills)
    assert results_of(out) == results_of(plain.out)
    with open(out / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    found = EventAccumulator(str(out / "logs" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [one.step for one in found.Scalars("epoch")] == steps
    assert "switched off" not in (out / "log.txt").read_text()


def test_measures_that_are_no_numbers_leave_the_weights_before_the_first_step(unlabelled_images, tmp_path):
    (tmp_path / "never.py").write_text(NEVER)
    out, options = tmp_path / "run", SMALL | OPTIONS | {"task": f"{tmp_path}/never.py:Never", "patience": 1}
    pretrain(unlabelled_images, out=out, **options)
    about = RunFolder(out).checkpoints.about()
    assert about["best"].pop("value") > 0 and about["best"] == {"step": 0, "failed": 1, "chosen": True}
    assert 0 < about["step"] < about["steps"]
    assert "the weights of its best measure, at epoch 0 of 8" in " ".join((out / "log.txt").read_text().split())


def test_it_goes_on_only_with_the_same_patience_and_with_any_tracker(unlabelled_images, plain, capsys):
    with pytest.raises(PatchloomError, match="patience: was 2, now 3"):
        pretrain(unlabelled_images, out=plain.out, **SMALL | OPTIONS | {"patience": 3})
    assert pretrain(unlabelled_images, out=plain.out, log="tensorboard", **SMALL | OPTIONS).folder == plain.out
    assert "is finished" in capsys.readouterr().out
