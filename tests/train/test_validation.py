"""The measures of a run stand beside what needs no learning."""

import csv

import pytest
from killing import SMALL, draw_images

from patchloom.nets.weights import untrained_twin
from patchloom.train.pretrain import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

QUICK = SMALL | {"epochs": 1, "task": "mae", "blr": 0.05}


def test_the_untrained_knn_is_that_of_fresh_weights(tmp_path, monkeypatch):
    images, asked = draw_images(tmp_path / "images"), []
    monkeypatch.setattr(
        "patchloom.train.validation.untrained_twin",
        lambda card, seed: asked.append(seed) or untrained_twin(card, seed=seed),
    )
    runs = [pretrain(images, out=tmp_path / "fresh", **QUICK).folder]
    assert not asked, "the weights at the start are fresh ones: nothing is measured twice"
    runs.append(pretrain(images, from_run=str(runs[0]), out=tmp_path / "from", **QUICK).folder)
    runs.append(pretrain(images, init=str(runs[0]), out=tmp_path / "init", **QUICK).folder)
    assert asked == [0, 0]
    columns = []
    for run in runs:
        with open(run / "metrics.csv", newline="") as file:
            columns.append(next(csv.DictReader(file)))
    assert columns[0]["knn"] == columns[0]["knn:untrained"] != columns[1]["knn"], "else the test could not tell them"
    # the same seed and the same held-out images, so the same fresh weights are asked the same
    assert columns[1]["knn:untrained"] == columns[2]["knn:untrained"] == columns[0]["knn:untrained"]
