"""Validation measures and their baselines."""

import csv

import numpy as np
import pytest
from killing import SMALL, draw_images

from patchloom.data.sources.open import open_data
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols.knn import knn_accuracies
from patchloom.nets.checkpoints.format import load_module_file, untrained_twin
from patchloom.runs.held_out import stored_held_out
from patchloom.runs.task import load_task
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

QUICK = SMALL | {"epochs": 1, "task": "mae", "blr": 0.05}


def test_the_untrained_knn_is_that_of_fresh_weights(tmp_path, monkeypatch):
    images, asked = draw_images(tmp_path / "images"), []
    monkeypatch.setattr(
        "patchloom.train.validation.untrained_twin",
        lambda card, head, seed: asked.append(seed) or untrained_twin(card, head, seed),
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


@pytest.mark.parametrize(
    ("kind", "pooling", "given"),
    [("cait", "instance", {}), ("vit", "class", {"knn_k": 3, "knn_gallery": 10}), ("mean", None, {})],
)
def test_knn_of_the_instance_representation(tmp_path, kind, pooling, given):
    """Over epochs, as in ExtreMA's Figures 4 and 5; if the pooling is the mean, only ``knn`` is measured."""
    images, asked = draw_images(tmp_path / "images"), {"name": "extrema", "class_token": kind, "masks": 2}
    run = pretrain(images, out=tmp_path / "run", **QUICK | {"task": asked, "blr": 0.01} | given).folder
    with open(run / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["knn"]]
    assert len(rows) > 1
    if pooling is None:
        assert "instance_knn" not in rows[0]
        return
    begun = float(rows[0]["instance_knn"])  # with fresh weights, which are their own control
    assert float(rows[0]["instance_knn:untrained"]) == begun and rows[0]["instance_knn:raw pixels"]
    loaded = load_task(run)
    source = open_data(images).train
    training, held_out = stored_held_out(loaded.folder, loaded.settings, source).parts(source)
    head = load_module_file(run, "pooling")
    gallery, queries = (
        extract(loaded.task.encoder, loaded.card, one, device="cpu", head=head) for one in (training, held_out)
    )
    if given:
        some = np.random.default_rng(0).permutation(len(training))[:10]
        gallery = extract(loaded.task.encoder, loaded.card, training.subset(some), device="cpu", head=head)
    k = given.get("knn_k", min(20, len(training)))
    pooled = gallery.tokens[pooling], gallery.labels, queries.tokens[pooling], queries.labels
    assert float(rows[-1]["instance_knn"]) == pytest.approx(knn_accuracies(*pooled, ks=(k,))[k], abs=1e-6)
