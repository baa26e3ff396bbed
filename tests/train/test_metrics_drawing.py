"""Pictures during training: when they are drawn, and that they do not affect training."""

from pathlib import Path

import pytest
import torch
from killing import SMALL
from safetensors.torch import load_file
from small import small
from torch import nn

from patchloom.tasks.mae import MAE
from patchloom.train import metrics
from patchloom.train.loop import pretrain
from patchloom.train.metrics import drawing_steps, estimate_flops, event_steps, measuring_steps


@pytest.fixture
def priced(monkeypatch):
    """Set the number of operations per image of all tasks."""

    def price(each: float) -> nn.Module:
        monkeypatch.setattr(metrics, "estimate_flops", lambda task: each)
        return nn.Identity()

    return price


def measured(steps: int, images: int) -> set[int]:
    return measuring_steps(steps, event_steps(steps, 1 / 200) - {0}, images)


def test_drawings_are_far_apart_and_none_is_at_the_end(priced):
    found = drawing_steps(1554, measured(1554, 128), 128, priced(1.6e8))  # `pretrain shapes`
    assert found == {0, 388, 777, 1166}
    # of a larger model every measure is worth a picture
    assert drawing_steps(1554, measured(1554, 128), 128, priced(2e10)) == {0, *measured(1554, 128)} - {1554}
    # and a run that takes seconds has them at its end
    assert drawing_steps(18, measured(18, 16), 16, priced(2e6)) == set()


def test_pictures_come_before_the_first_step_and_change_nothing(unlabelled_images, tmp_path, monkeypatch, capsys):
    plain = pretrain(unlabelled_images, "droppos", out=tmp_path / "plain" / "run", **SMALL).folder
    assert "first pictures" not in capsys.readouterr().out
    monkeypatch.setattr(metrics, "_BETWEEN", 1.0)
    drawn, draw_run = [], metrics.draw_run

    def noted(validation, folder, settings, measure, place, device):
        torch.rand(3)  # as if drawing used the random numbers of all
        files = draw_run(validation, folder, settings, measure, place, device)
        drawn.append((place[0], sorted(one.name for one in folder.pictures.iterdir())))
        return files

    monkeypatch.setattr(metrics, "draw_run", noted)
    run = pretrain(unlabelled_images, "droppos", out=tmp_path / "drawn" / "run", **SMALL).folder
    told = capsys.readouterr().out
    assert [step for step, _ in drawn] == [0, 1, 4, 9, 14]
    assert "curves.png" not in drawn[0][1] and drawn[0][1], "there are no curves before the first step"
    assert "curves.png" in drawn[1][1]
    assert (
        told.index("before the first step: position accuracy")
        < told.index("first pictures: ")
        < told.index("epoch 0.3")
    )
    assert told.count("first pictures: ") == 1
    assert left_behind(run) == left_behind(plain)


def left_behind(run: Path) -> dict[str, bytes]:
    """Return weights, moments, pictures and texts of a finished run."""
    tensors = load_file(run / "checkpoints" / "last.safetensors")
    files = [*sorted(run.glob("pictures/*.png")), run / "summary.txt", run / "verdict.yaml"]
    assert len(files) > 3
    return {name: value.numpy().tobytes() for name, value in tensors.items()} | {
        path.name: path.read_bytes() for path in files
    }


def test_operations_grow_with_the_patches():
    few, many = (estimate_flops(small(MAE, p=p)) for p in (16, 8))
    assert many > few > 0
