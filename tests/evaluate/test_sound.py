"""Every protocol takes recordings, and calls them so; what is for images only is refused, or said not to act."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from spoken import SOUND, Tones, encoder_of_sound, speech_commands

from patchloom.audio.augment import excerpt_at
from patchloom.data.loader import training_batches
from patchloom.data.source import Data
from patchloom.data.sources import open
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.order import ShuffledPatches
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.results import Report
from patchloom.evaluate.training import Views

pytestmark = pytest.mark.usefixtures("quick_probe")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_of_sound(tmp_path_factory.mktemp("ear"))


@pytest.fixture
def tones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Tones(20), Tones(8, first=1000)))


SWEPT = {
    "knn": {"ks": (1, 5)},
    "linear": {},
    "linear, the papers'": {"recipe": "mae", "epochs": 1},
    "layers": {"k": 5},
    "order": {"k": 5},
    "position-sensitivity": {"steps": 2},
    "finetune": {"epochs": 2},
    "finetune, by a paper": {"recipe": "mp3-speech", "updates": 3, "batch_size": 8},
    "blocks:1": {"epochs": 1},
    "few-shot": {"per_class": 3, "epochs": 1},
}
FROZEN = ("knn", "linear", "layers", "order")  # of these, what has raw features beside the encoder


@pytest.mark.parametrize("name", SWEPT)
def test_every_protocol_takes_recordings(run: Path, tones: None, name: str) -> None:
    report = evaluate(name.split(",")[0], run, "tones", device="cpu", **SWEPT[name])
    said = " ".join(report.text(200).split())
    assert report.n_test == 24 and "24 test recordings" in said
    assert not re.search(r"\bimages\b|pixels", re.sub("What recipes do to images|raw features pixels", "", said)), said
    raw = [row for row in report.rows if row.encoder == "raw features"]
    assert all(row.value > 0.8 for row in raw if row.settings.get("test_images") != "patches shuffled")
    assert bool(raw) == (name in FROZEN)


def test_an_ensemble_of_two_that_hear(run: Path, tones: None, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{name}.safetensors") for name in "ab"]
    for file, blr in zip(files, (0.01, 0.02), strict=True):
        evaluate("finetune", run, "tones", device="cpu", epochs=1, blr=blr, control=False, out=file)
    report = evaluate("ensemble", files[0], "tones", others=files[1], device="cpu")
    assert "on 24 test recordings" in report.headline and len(report.quoted) == 3


def test_the_patches_of_a_picture_are_shuffled(run: Path) -> None:
    source = Tones(2)
    shuffled = ShuffledPatches(source, SOUND.size, (8, 1), seed=0)
    from patchloom.data.loader import plain_batches

    whole = next(plain_batches(source, SOUND.size, 6, channels=1)).views[0]
    apart = next(plain_batches(shuffled, SOUND.size, 6, channels=1)).views[0]
    assert whole.shape == apart.shape and not torch.allclose(whole, apart)
    for one, other in zip(whole[:, 0], apart[:, 0], strict=True):
        columns = [sorted(map(tuple, picture.T.round(decimals=4).tolist())) for picture in (one, other)]
        assert columns[0] == columns[1]


def test_shift_and_noise_reach_the_batches_and_follow_from_the_generator_alone() -> None:
    noise = (torch.full((1, 1, 800), 10_000, dtype=torch.int16),)
    wave = torch.arange(1, SOUND.samples + 1, dtype=torch.int16)[None, None]
    source, noisy = Tones(4), Tones(4)
    noisy.noise = noise
    shifting = Views(SOUND.size, Recipe(shift=0.01, repeats=2).for_recordings(noise=False), (0.5,), source)
    most = round(0.01 * SOUND.rate)
    found = {int((view[0, 0] == 0).sum()) for seed in range(40) for view in shifting(wave, np.random.default_rng(seed))}
    assert max(found) == most and len(found) > most // 2
    first = shifting(wave, np.random.default_rng(3))
    torch.manual_seed(5)
    assert all(map(torch.equal, first, shifting(wave, np.random.default_rng(3))))
    assert not torch.equal(*first)

    loud = Recipe(shift=0, noise_share=0.5, noise_volume=0.1).for_recordings(noise=True)
    mixing = Views(SOUND.size, loud, (0.5,), noisy)
    added = [(mixing(wave, np.random.default_rng(seed))[0] - wave).unique().tolist() for seed in range(200)]
    assert all(len(each) == 1 and 0 <= each[0] <= 1000 for each in added)
    assert 60 < sum(each != [0] for each in added) < 140 and max(each[0] for each in added) > 900
    plain = Views(SOUND.size, Recipe(shift=0).for_recordings(noise=False), (0.5,), source)
    assert torch.equal(plain(wave, np.random.default_rng(0))[0], excerpt_at(wave, 0, SOUND.samples))

    with_noise, without = (
        next(training_batches(source, views, 6, 0, 0, 1, channels=1)).views[0] for views in (mixing, plain)
    )
    assert with_noise.shape == (6, 1, *SOUND.size)
    changed = (with_noise - without).abs().flatten(1).amax(1) > 1e-3
    assert 0 < changed.sum() < 6


def test_what_is_for_images_is_refused_and_what_does_not_act_is_said(run: Path, tones: None) -> None:
    for name, value in {"flip": True, "crop_scale": 0.5, "randaugment": 5.0, "erasing": 0.1, "cutmix": 1.0}.items():
        with pytest.raises(PatchloomError, match=f"--{name} is for images, and tones holds recordings: leave it out"):
            evaluate("finetune", run, "tones", device="cpu", **{name: value})
    with pytest.raises(PatchloomError, match="--noise_volume needs recordings of noise: evaluate keywords takes them"):
        evaluate("finetune", run, "tones", device="cpu", noise_volume=0.2)
    report = _finetuned(run, recipe="mae", shift=0.02, epochs=1, batch_size=8)
    assert "Image augmentation (crops, mirroring, RandAugment, erasing, cutmix) does not apply" in report.protocol
    assert "; no noise was added" in report.protocol and "shift 0.02" in report.protocol
    assert "mixup 0.8" in report.protocol
    acting = report.protocol.partition("by the recipe")[2].partition("What recipes")[0]
    assert not re.search("flip|crop scale|randaugment|erasing|cutmix|noise", acting)
    with pytest.raises(PatchloomError, match="ear is an encoder of recordings, and digits holds images"):
        evaluate("finetune", run, "digits", device="cpu") if open.open_data is None else _digits(run)


def _digits(run: Path) -> None:
    from patchloom.audio.compatibility import with_encoder_sound
    from patchloom.data.sources.open import open_data

    with_encoder_sound(open_data("digits"), SOUND, "ear")


def _finetuned(run: Path, **options) -> Report:
    return evaluate("finetune", run, "tones", device="cpu", control=False, **options)


def test_shift_is_for_recordings(tiny_encoder: Path) -> None:
    with pytest.raises(PatchloomError, match="--shift is for recordings, and digits holds images: leave it out"):
        evaluate("finetune", tiny_encoder, "digits", device="cpu", shift=0.1)


def test_a_folder_of_words_is_fine_tuned_on(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    report = evaluate("finetune", run, speech_commands(tmp_path / "spoken"), device="cpu", epochs=1, control=False)
    assert report.n_test == 15 and "on 15 test recordings" in report.headline
