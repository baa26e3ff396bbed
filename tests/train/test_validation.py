"""Validation measures and their baselines."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from killing import SMALL, left_behind
from running import killed, rows

from patchloom.data.sources.open import open_data
from patchloom.data.workers import living_workers
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols.knn import knn_accuracies
from patchloom.results import store
from patchloom.runs.encoder import load_extra_module
from patchloom.runs.held_out import stored_held_out
from patchloom.runs.task import load_task
from patchloom.system import signals
from patchloom.train.loop import pretrain
from patchloom.train.step import Stepper
from patchloom.train.validation import Validation

pytestmark = pytest.mark.usefixtures("quick_probe")

QUICK = SMALL | {"epochs": 1, "blr": 0.05}


def test_the_untrained_knn_is_that_of_fresh_weights(images, tmp_path):
    fresh = pretrain(images, "mae", out=tmp_path / "fresh", **QUICK).folder
    other = pretrain(images, "mae", init=str(fresh), out=tmp_path / "init", **QUICK).folder
    first, second = (rows(run)[0] for run in (fresh, other))
    assert first["knn"] == first["knn:untrained"] != second["knn"], "else the test could not tell them"
    # the same seed and the same held-out images, so the same fresh weights are asked the same
    assert second["knn:untrained"] == first["knn:untrained"] and second["knn:raw pixels"] == first["knn:raw pixels"]
    assert second["features:deviation:untrained"] == first["features:deviation"] != second["features:deviation"]
    assert float(first["share:low"]) < float(first["share"]) < float(first["share:high"])


@pytest.mark.parametrize("place", [(Stepper, "update"), (Validation, "baselines")], ids=["before", "after"])
def test_a_run_that_is_killed_at_its_first_update_ends_with_the_same_knn(
    place, images, small_run, tmp_path, monkeypatch
):
    """The first update does not wait for kNN."""
    run = tmp_path / "mae"
    killed(monkeypatch, *place, 1, images, "mae", out=run, **SMALL | {"epochs": 2})
    assert "held_out" in rows(run)[0] and "knn" not in rows(run)[0]
    pretrain(images, "mae", out=run, **SMALL | {"epochs": 2})
    assert left_behind(run) == left_behind(small_run("mae"))


@pytest.mark.parametrize(
    ("kind", "pooling", "given"),
    [("cait", "instance", {}), ("vit", "class", {"knn_k": 3, "knn_gallery": 10}), ("mean", None, {})],
)
def test_knn_of_the_instance_representation(images, tmp_path, kind, pooling, given):
    """Over epochs, as in ExtreMA's Figures 4 and 5; if the pooling is the mean, only ``knn`` is measured."""
    asked = {"name": "extrema", "class_token": kind, "masks": 2}
    run = pretrain(images, asked, out=tmp_path / "run", **QUICK | {"blr": 0.01} | given).folder
    measured = [row for row in rows(run) if row["knn"]]
    assert len(measured) > 1
    if pooling is None:
        assert "instance_knn" not in measured[0]
        return
    begun = float(measured[0]["instance_knn"])  # with fresh weights, which are their own control
    assert float(measured[0]["instance_knn:untrained"]) == begun and measured[0]["instance_knn:raw pixels"]
    loaded, source = load_task(run), open_data(images).train
    training, held_out = stored_held_out(loaded.folder, loaded.settings, source).parts(source)
    some = np.random.default_rng(0).permutation(len(training))[: given.get("knn_gallery", len(training))]
    head = load_extra_module(run, "pooling")
    gallery, queries = (
        extract(loaded.task.encoder, loaded.card, one, device="cpu", head=head)
        for one in (training.subset(some), held_out)
    )
    k = given.get("knn_k", 20)
    pooled = gallery.tokens[pooling], gallery.labels, queries.tokens[pooling], queries.labels
    assert float(measured[-1]["instance_knn"]) == pytest.approx(knn_accuracies(*pooled, ks=(k,))[k], abs=1e-6)


def test_final_scores_of_a_run_whose_images_lie_in_groups_say_so(images, tmp_path):
    run = pretrain(images, "mae", out=tmp_path / "run", group=r"(\d)\.png", **QUICK).folder
    assert {one.settings["group"] for one in store.load(run)} == {r"(\d)\.png"}


def test_what_a_validation_reads(images, small_run):
    loaded, source = load_task(small_run("mae")), open_data(images).train
    training, held_out = stored_held_out(loaded.folder, loaded.settings, source).parts(source)

    def validation(**given):
        settings = replace(loaded.settings, **given)
        return Validation(loaded.task, loaded.card, held_out, training, settings)

    usual = validation()
    assert (len(usual.gallery), usual.labelled, len(usual.featured)) == (48, 12, 12)
    assert (usual.batch_size, usual.precision, usual.fresh) == (32, "auto", True)
    other = validation(knn_gallery=10, batch_size=200, precision="bfloat16", init="timm:x")
    assert (len(other.gallery), other.batch_size, other.precision, other.fresh) == (10, 250, "bfloat16", False)
    assert len(Validation(loaded.task, loaded.card, source.subset(np.arange(0)), source, loaded.settings).held_out) == 0
    many = open_data("shapes:1100").train
    assert len(Validation(loaded.task, loaded.card, many, training, loaded.settings).featured) == 500


def test_a_pass_starts_processes_once_and_only_where_they_can_read_ahead(images, small_run, monkeypatch):
    started, start = [], signals._Worker.start
    monkeypatch.setattr(signals._Worker, "start", lambda self: started.append(self) or start(self))
    loaded, source = load_task(small_run("mae")), open_data(images).train
    settings = replace(loaded.settings, workers=1)

    def passed(validation):
        row = validation.run(torch.device("cpu"), nullcontext)[1]
        return row, len(started)

    with living_workers():
        assert passed(Validation(loaded.task, loaded.card, open_data("shapes:40").train, source, settings))[1] <= 1
        started.clear()
        validation = Validation(loaded.task, loaded.card, source, source, settings)
        first = passed(validation)
        assert passed(validation) == first and first[1] > 0
