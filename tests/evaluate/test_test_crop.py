"""The test crop acts in every protocol that reads whole images, and nothing else changes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.claims import CONSTANT
from patchloom.errors import PatchloomError
from patchloom.evaluate import training
from patchloom.evaluate.features import cache_folder
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.recipes import PROBES, RECIPES, published_recipe, recipe_for
from patchloom.evaluate.results import Report
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder

SPEC = EncoderSpec("nano", (16, 16), 4, options={"depth": 1, "embed_dim": 32, "num_heads": 2})
INSIDE = 0.5  # of 40 pixels, the 20 at the centre


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("crop") / "encoder.safetensors"
    torch.manual_seed(1)
    save_encoder(build_encoder(SPEC), EncoderCard(SPEC, (0.5,) * 3, (0.25,) * 3, "mae", "tiny"), path)
    return path


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise in a frame of 6 pixels, which alone shows the class."""
    folder, rng = tmp_path_factory.mktemp("framed"), np.random.default_rng(0)
    for label, value in (("dark", 20), ("bright", 230)):
        for part, count in (("train", 24), ("test", 12)):
            (folder / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                frame = np.full_like(pixels, value)
                frame[6:-6, 6:-6] = pixels[6:-6, 6:-6]
                Image.fromarray(frame).save(folder / part / label / f"{i}.png")
    return folder


@pytest.mark.parametrize(
    "protocol, options",
    [("knn", {"ks": (5,)}), ("layers", {"k": 5}), ("linear", {}), ("few-shot", {"method": "linear", "labels": 0.5})],
)
def test_a_frame_that_the_test_crop_leaves_out_is_not_seen(
    encoder: Path, framed: Path, protocol: str, options: dict
) -> None:
    def measured(**more: float) -> Report:
        return evaluate(protocol, encoder, framed, device="cpu", **options, **more)

    # the second call of each finds the features of both crops in the cache
    for _ in range(2):
        whole, cut = measured(), measured(test_crop=INSIDE)
        (before,), (after,) = ([r.value for r in one.quoted if r.encoder == "raw pixels"] for one in (whole, cut))
        assert before == 1 and after < 0.8
    assert whole.quoted[0].value > cut.quoted[0].value
    assert {row.settings.get("test_crop") for row in cut.rows if row.encoder != CONSTANT and row.settings} == {INSIDE}
    assert not any("test_crop" in row.settings for row in whole.rows) and "--test_crop" not in whole.protocol
    assert "resized to cover 32x32, and their centre of 16x16 is cut" in cut.protocol
    assert len(list(cache_folder().iterdir())) >= 12
    with pytest.raises(PatchloomError, match="--test_crop must be"):
        measured(test_crop=0.0)


@pytest.fixture
def crops(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    own: Callable[..., Iterator] = training.plain_batches

    def recorded(*words: object, **options: object) -> Iterator:
        found.append(options["test_crop"])
        return own(*words, **options)

    monkeypatch.setattr(training, "plain_batches", recorded)
    return found


def test_a_recipe_has_it_and_an_ensemble_repeats_it(
    encoder: Path, framed: Path, crops: list[float], tmp_path: Path
) -> None:
    short = {"device": "cpu", "epochs": 1, "batch_size": 8}
    for seed, change in enumerate(({}, {"test_crop": 0.75})):
        out = str(tmp_path / f"{seed}.safetensors")
        evaluate("finetune", encoder, framed, recipe="mae", control=False, out=out, **short, **change)
    evaluate("finetune", encoder, framed, control=False, **short, validation=0.2)
    assert crops == [0.875, 0.75, 1.0, 1.0]  # small: validation images, too
    crops.clear()
    for change in ({}, {"test_crop": 0.5}):
        pair = tmp_path / "0.safetensors", str(tmp_path / "1.safetensors")
        evaluate("ensemble", pair[0], framed, others=pair[1], device="cpu", **change)
    assert crops == [0.875, 0.75, 0.5, 0.5]
    crops.clear()
    report = evaluate("linear", encoder, framed, recipe="mae", control=False, pooling="mean", **short)
    assert crops == [0.875] and report.rows[0].settings["test_crop"] == 0.875


def test_the_recipes_of_the_papers_have_it_up_to_224_pixels() -> None:
    small, large = (build_encoder(EncoderSpec("nano", (side, side), 16, options=SPEC.options)) for side in (224, 240))
    whole = {"small", "mp3-cifar100"}  # ours, and one of images of 32 pixels, which DeiT's program does not resize
    for known in (RECIPES, PROBES):
        for name in known:
            assert published_recipe(name, small, known).test_crop == (1.0 if name in whole else 0.875)
            assert published_recipe(name, large, known).test_crop == 1.0
    assert recipe_for("mae", large, {"test_crop": 0.9}).test_crop == 0.9
    assert recipe_for("mae", small, {}).for_recordings(noise=False).test_crop == 1.0
    with pytest.raises(PatchloomError, match="--test_crop must be above 0"):
        recipe_for("mae", small, {"test_crop": 0.0})
