"""The code that ``export`` prints is what is compared, and it gives the encoder's features of images as they come."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import patchloom.export
from patchloom.cli import main
from patchloom.data import (
    channels_of,
    normalize,
    open_data,
    plain_batches,
    statistics_of,
    statistics_of_recordings,
)
from patchloom.data.sound.excerpts import centre_excerpt
from patchloom.data.sound.features import pictures
from patchloom.errors import PatchloomError
from patchloom.export import export
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.extra_modules import save_extra_module
from patchloom.nets.heads import InstanceHead
from patchloom.nets.weights import EncoderCard, load_encoder, save_encoder
from patchloom.runs.folder import RunFolder
from patchloom.runs.sealed import write_sealed
from patchloom.runs.settings import Settings
from patchloom.sound import Sound

SMALL = {"embed_dim": 32, "depth": 2}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 bits, of which the darkest five hundredths of a hundredth are used."""
    folder = tmp_path_factory.mktemp("dark")
    rng = np.random.default_rng(0)
    for i in range(20):
        blocks = np.kron(rng.integers(0, 30, (4, 4, 3)), np.ones((4, 4, 1), np.int64))
        np.save(folder / f"{i:02}.npy", blocks.astype(np.uint16))
    return folder


def an_encoder(folder: Path, photos: Path, **options) -> Path:
    """The file of an encoder with the statistics of those images."""
    source = open_data(str(photos)).train
    stats = statistics_of(source, channels_of(source))
    spec = EncoderSpec("nano", (16, 16), 4, options=SMALL | options)
    torch.manual_seed(0)
    folder.mkdir()
    save_encoder(build_encoder(spec), EncoderCard(spec, stats.mean, stats.std, "mae", "dark"), folder / "e.safetensors")
    return folder / "e.safetensors"


def test_the_printed_code_gives_the_encoders_features_of_dark_images(photos, tmp_path, capsys):
    path = an_encoder(tmp_path / 'it\'s "here"', photos)
    assert main(["export", str(path), "--data", str(photos)]) == 0
    printed = capsys.readouterr().out
    pasted: dict = {}
    exec(printed[printed.index("import timm") :], pasted)

    vit, card = load_encoder(path)
    assert max(card.mean) < 3e-4  # four decimals of which are one digit
    (images,) = next(plain_batches(open_data(str(photos)).train, (16, 16), 16)).views
    with torch.inference_mode():
        ours, theirs = vit.forward_features(normalize(images, card.mean, card.std)), pasted["features"](images)
    assert (ours - theirs).abs().max() < 1e-5
    assert float(re.search(r"timm's features differ by at most (\S+) on 16 images", printed)[1]) < 1e-5


@pytest.mark.parametrize("digits", [3, 4])
def test_what_the_printed_code_computes_is_compared(photos, tmp_path, monkeypatch, digits):
    """Not what the file holds: code that normalises otherwise does not pass."""
    path, written = an_encoder(tmp_path / "here", photos), patchloom.export._snippet

    def rounded(arguments, path, mean, std):
        return written(arguments, path, tuple(round(value, digits) for value in mean), std)

    monkeypatch.setattr(patchloom.export, "_snippet", rounded)
    target = tmp_path / "here" / "timm.safetensors"
    target.write_bytes(b"what was exported before")
    with pytest.raises(PatchloomError, match="features by the code that uses timm differ by"):
        export(path, data=str(photos))
    assert target.read_bytes() == b"what was exported before"


def test_no_option_of_an_encoder_file_becomes_code(photos, tmp_path):
    """timm leaves out what is None, whatever it is called."""
    touched = tmp_path / "touched"
    path = an_encoder(
        tmp_path / "here", photos, **{f"qkv_bias=open({str(touched)!r}, 'w') and True, class_token": None}
    )
    assert "open(" not in export(path, data=str(photos)).snippet and not touched.exists()


def test_without_images_the_code_is_compared_on_noise(photos, tmp_path, capsys):
    path = an_encoder(tmp_path / "here", photos)
    done = export(path)
    assert done.compared_on == "images of noise" and done.images == 16 and done.difference < 1e-5
    assert done.notes[0].startswith("Compared on noise, since") and "--data PHOTOS compares on images" in done.notes[0]
    assert main(["export", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "on 16 images of noise." in printed and "does not tell which images it was trained on" in printed
    assert "on 16 images of noise." in done.text(400) and done.notes[0] in done.text(400)
    assert export(path, data=str(photos)).notes == ()
    with pytest.raises(PatchloomError, match="nowhere"):  # what is named must be there
        export(path, data="nowhere")


@pytest.mark.parametrize("moved", ["gone", "pipe:touch {}"])
def test_a_run_whose_images_have_moved_is_exported(photos, tmp_path, moved):
    path, touched = an_encoder(tmp_path / "run", photos), tmp_path / "touched"
    folder = RunFolder(path.parent)
    path.rename(folder.encoder)
    settings = Settings(moved.format(touched), {"name": "mae"}, {"name": "nano"}, img_size=(16, 16), patch_size=4)
    write_sealed(folder.config, settings.plain())
    done = export(folder.path)
    why = "not to be had" if moved == "gone" else "only run for who types it"
    assert why in done.notes[0] and not touched.exists()


def of_recordings(folder: Path, sound: Sound, beside: bool = False) -> Path:
    """The file of an encoder with the statistics of those tones, perhaps with an instance head beside it."""
    stats = statistics_of_recordings(open_data("tones:20").train.heard_as(sound), sound)
    spec = EncoderSpec("nano", sound.size, (sound.bins, 1), 1, options=SMALL)
    torch.manual_seed(0)
    uses = {"instance_head": "pooling"} if beside else {}
    card = EncoderCard(spec, stats.mean, stats.std, "mae", "tones", extra_modules=uses, sound=stats.sound)
    save_encoder(build_encoder(spec), card, folder / "encoder.safetensors")
    if beside:
        save_extra_module(InstanceHead(32, 4, 1), folder / "instance_head.safetensors")
    return folder / "encoder.safetensors"


@pytest.mark.parametrize(
    "sound", [Sound(), Sound(8000, 0.95, "logmel", 32), Sound(11_025)], ids=["mfcc", "logmel", "odd"]
)
def test_the_printed_code_gives_an_encoders_features_of_waveforms(sound, tmp_path, capsys, monkeypatch):
    path = of_recordings(tmp_path, sound)
    assert main(["export", str(path), "--data", "tones:20"]) == 0
    printed = capsys.readouterr().out
    assert float(re.search(r"timm's features differ by at most (\S+) on 16 recordings\.", printed)[1]) < 1e-4
    assert f"It takes {sound.seconds:g} s at {sound.rate:,} samples a second, one channel." in printed
    code = printed[printed.index("import timm") :]
    assert "patchloom" not in code.replace(str(tmp_path), "")
    pasted: dict = {}
    exec(code, pasted)

    vit, card = load_encoder(path)
    source = open_data("tones:20").train.heard_as(sound)
    waves = torch.stack([centre_excerpt(source.read(i), sound) for i in range(4)])
    with torch.inference_mode():  # as the docstring of load_encoder has it
        ours = vit.forward_features(normalize(pictures(waves, card.sound), card.mean, card.std))
        theirs = pasted["features"](waves.flatten(1) / 2**15)
    assert (ours - theirs).abs().max() < 1e-4 and ours.std() > 0.1


def test_other_features_than_an_encoders_do_not_pass(tmp_path, monkeypatch):
    path, written = of_recordings(tmp_path, Sound()), patchloom.export.code_of_pictures
    monkeypatch.setattr(patchloom.export, "code_of_pictures", lambda sound: written(sound).replace("1e-06", "1e-03"))
    with pytest.raises(PatchloomError, match="features by the code that uses timm differ by"):
        export(path, data="tones:20")


def test_an_encoder_of_recordings_and_its_head_are_compared_on_noise(tmp_path):
    path = of_recordings(tmp_path, Sound(), beside=True)
    done = export(path)
    assert done.compared_on == "recordings of noise" and done.difference < 1e-4
    assert "def represent(waves)" in done.snippet
    assert "--data RECORDINGS compares on recordings" in done.notes[0]
    with pytest.raises(PatchloomError, match="is an encoder of recordings, and digits holds images"):
        export(path, data="digits")
