"""Tests of the pictures of a run's task: number of images, and titles."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiling import tiles

from patchloom.cli import main
from patchloom.look import sheet, task_pictures
from patchloom.look.task_pictures import title_of
from patchloom.questions.question import Measure
from patchloom.runs.settings import Settings

pytestmark = pytest.mark.usefixtures("quick_probe")

SETTINGS = Settings("photos/", {"name": "droppos"}, epochs=60)
MEASURE = Measure("position accuracy", torch.tensor([0.9]), {"chance": torch.tensor([0.5])}, "chance", True)


def test_a_title_has_run_task_epoch_and_the_last_measure():
    rows = [
        {"epoch": "0.0", "held_out": "0.01", "baseline:chance": "0.05"},
        {"epoch": "30.0", "held_out": "0.25", "baseline:chance": "0.0833"},
        {"epoch": "45.0", "loss": "2.5"},
    ]
    title = title_of("photos", SETTINGS, (450, 600), rows, "", MEASURE)
    assert title.name == "photos: droppos"
    said = "Epoch 45 of 60; on held-out images (at epoch 30): position accuracy 25.0%, chance 8.3%"
    assert title.result == said
    now = title_of("photos", SETTINGS, (300, 600), rows, "", MEASURE).result
    assert now == said.replace("45 of 60; on held-out images (at epoch 30)", "30 of 60; on held-out images")
    doubtful = title_of("photos", SETTINGS, (300, 600), rows, "trained", MEASURE).result
    assert "may have seen" in doubtful and "held-out" not in doubtful
    assert title_of("photos", SETTINGS, (0, 0), [], "", MEASURE).result == "Epoch 0 of 60"


def test_of_several_baselines_the_one_to_beat_is_named():
    baselines = {"flat": torch.tensor([0.0]), "blurred": torch.tensor([0.0])}
    measure = replace(
        MEASURE, name="error", baselines=baselines, to_beat=("flat", "blurred"), higher_is_better=False, unit=""
    )
    row = {"epoch": 60, "held_out": 0.25, "baseline:flat": 0.5, "baseline:blurred": 0.125}
    assert title_of("a", SETTINGS, (1, 1), [row], "", measure).result.endswith("error 0.250, blurred 0.125")


@pytest.fixture(scope="module", params=["mae", "extrema"])
def run(request, small_run, tmp_path_factory):
    return shutil.copytree(small_run(request.param), tmp_path_factory.mktemp("runs") / "one")


def rows_of(path) -> int:
    return len(tiles(np.asarray(Image.open(path))))


def test_four_images_are_four_rows(run, tmp_path, monkeypatch, capsys):
    titles, draw = [], sheet.draw_sheet
    monkeypatch.setattr(task_pictures, "draw_sheet", lambda *given: titles.append(given[4]) or draw(*given))
    assert main(["look", str(run), "--images", "4", "--out", str(tmp_path)]) == 0
    drawn = capsys.readouterr().out.split()
    assert drawn and [rows_of(path) for path in drawn] == [4] * len(drawn)
    assert {title.name.partition(":")[0] for title in titles} == {"one"}
    assert all(title.result.startswith("Epoch 2 of 2; on held-out images: ") for title in titles)
    assert [rows_of(path) for path in (run / "pictures").glob("*.png") if path.stem != "curves"] == [8] * len(drawn)
    assert main(["look", str(run), "--images", "9"]) == 2 and "1 to 8" in capsys.readouterr().err
