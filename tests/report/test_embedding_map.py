"""Tests of embedding maps: projections, thumbnails, and the smallest number of images."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from refusing import refusal

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.report import embedding_map
from patchloom.report.embedding_map import make_embedding_map, projections_of
from patchloom.report.pictures import images_of
from patchloom.runs.past import load_run


@pytest.mark.parametrize("n", [5, 31, 100])
def test_groups_stay_together(n):
    rng = np.random.default_rng(0)
    groups = np.arange(n) % 2
    features = rng.normal(size=(n, 16)) * 0.05 + np.where(groups[:, None], 1.0, -1.0)
    for name, points in projections_of(features).items():
        places = np.array(points).T
        assert places.shape == (n, 2) and places.min() >= 0 and places.max() <= 1 and np.isfinite(places).all()
        middles = [places[groups == group].mean(0) for group in (0, 1)]
        spread = max(places[groups == group].std() for group in (0, 1))
        assert n < 31 or np.linalg.norm(middles[0] - middles[1]) > 2 * spread, name
    assert projections_of(features) == projections_of(features)


def test_features_of_one_dimension_and_copies_of_images():
    line = projections_of(np.linspace(0, 1, 9)[:, None])
    assert np.isfinite(np.array(line["t-SNE"])).all() and np.ptp(line["PCA"][0]) == 1
    twins = projections_of(np.repeat(np.eye(6), 2, axis=0))
    assert np.isfinite(np.array(twins["t-SNE"])).all()
    assert "the same features" in refusal(projections_of, np.ones((9, 4)))


def test_a_map_of_the_held_out_images(run):
    found = load_run(run)
    images = images_of(found)
    cloud = make_embedding_map(run, images.shown, images.what)
    assert len(cloud.names) == 12 == len(cloud.labels) and cloud.classes == ["a", "b"]
    assert all(name.startswith("ab"[label]) for name, label in zip(cloud.names, cloud.labels, strict=True))
    assert set(cloud.projections) == {"PCA", "t-SNE"}
    for i, (others, cosines) in enumerate(zip(cloud.neighbours, cloud.similarities, strict=True)):
        assert len(others) == 8 == len(cosines) and i not in others and cosines == sorted(cosines, reverse=True)
    assert "held-out" in cloud.note.lower() and "12" in cloud.note
    for name in ("summary.txt", "encoder.safetensors"):  # as before the end of the run
        (run / name).unlink()
    assert "(step 6 of 6)" in make_embedding_map(run, images.shown, images.what).note


def test_thumbnails_are_those_of_the_images(finished, tmp_path):
    colours = np.random.default_rng(1).integers(0, 256, (7, 3))
    for i, colour in enumerate(colours):
        Image.new("RGB", (40, 40), tuple(map(int, colour))).save(tmp_path / f"{i}.png")
    cloud = make_embedding_map(finished, open_data(tmp_path).train, "images")
    sheet = np.asarray(Image.open(io.BytesIO(base64.b64decode(cloud.sprite.partition(",")[2]))).convert("RGB"))
    assert sheet.shape == (3 * cloud.side, 3 * cloud.side, 3) and cloud.columns == 3
    for i, name in enumerate(cloud.names):
        row, column = divmod(i, cloud.columns)
        middle = sheet[row * cloud.side + 20, column * cloud.side + 20].astype(int)
        assert np.abs(middle - colours[int(name.removesuffix(".png"))]).max() < 12
    assert cloud.classes == [] and set(cloud.labels) == {-1}


def test_many_images_are_thinned_and_slow_encoding_ends_early(finished, images, monkeypatch):
    cloud = make_embedding_map(finished, open_data(images).train, "images", most=20)
    assert len(cloud.names) == 20 and "(20 of 60)" in cloud.note
    monkeypatch.setattr(embedding_map, "_SECONDS", 0.0)
    cloud = make_embedding_map(finished, open_data(images).train, "images")
    assert len(set(cloud.names)) == 32 and set(cloud.labels) == {0, 1} and "(32 of 60)" in cloud.note


def test_few_images_and_a_diverged_encoder_have_no_map(finished, images, monkeypatch):
    source = open_data(images).train
    with pytest.raises(PatchloomError, match="needs 5 images or more, and there are 4"):
        make_embedding_map(finished, source.subset(range(4)), "images")
    monkeypatch.setattr(
        embedding_map, "pooled_tokens", lambda vit, images, head: {"mean": torch.full((len(images), 4), torch.nan)}
    )
    assert "not finite" in refusal(make_embedding_map, finished, source, "images")
