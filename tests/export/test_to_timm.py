"""Tests of the code that ``export`` prints: it computes the encoder's features."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import SMALL, a_run, an_encoder, photographs, with_card
from PIL import Image
from resolved import resolved_settings

from patchloom.audio.augment import centre_excerpt
from patchloom.audio.config import Sound
from patchloom.audio.spectrogram import pictures
from patchloom.cli import main
from patchloom.data.loader import plain_batches
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize, statistics_of_recordings
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract, one_pass
from patchloom.export import preprocessing, to_timm
from patchloom.export.export import export
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, save_extra_module
from patchloom.nets.heads import InstanceHead, pooled_tokens
from patchloom.runs.checksummed import write_checksummed
from patchloom.runs.folder import RunFolder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 16-bit images that use only the darkest 0.05 % of the range."""
    folder = tmp_path_factory.mktemp("dark")
    rng = np.random.default_rng(0)
    for i in range(20):
        blocks = np.kron(rng.integers(0, 30, (4, 4, 3)), np.ones((4, 4, 1), np.int64))
        np.save(folder / f"{i:02}.npy", blocks.astype(np.uint16))
    return folder


def test_the_printed_code_gives_the_encoders_features_of_dark_images(photos, tmp_path, capsys):
    path = an_encoder(tmp_path / 'it\'s "here"', photos)
    assert main(["export", str(path), "--data", str(photos)]) == 0
    printed = capsys.readouterr().out
    pasted: dict = {}
    exec(printed[printed.index("import timm") :], pasted)

    vit, card = load_encoder_file(path)
    assert max(card.mean) < 3e-4  # four decimals of which are one digit
    (images,) = next(plain_batches(open_data(str(photos)).train, (16, 16), 16)).views
    with torch.inference_mode():
        ours, theirs = vit.forward_features(normalize(images, card.mean, card.std)), pasted["features"](images)
    assert (ours - theirs).abs().max() < 1e-5
    assert float(re.search(r"timm's features differ by at most (\S+) on 16 images", printed)[1]) < 1e-5


@pytest.mark.parametrize("digits", [3, 4])
def test_what_the_printed_code_computes_is_compared(photos, tmp_path, monkeypatch, digits):
    """The printed code is checked: another normalisation fails."""
    path, written = an_encoder(tmp_path / "here", photos), to_timm.features_of_images

    def rounded(arguments, path, mean, *others):
        return written(arguments, path, tuple(round(value, digits) for value in mean), *others)

    monkeypatch.setattr(to_timm, "features_of_images", rounded)
    target = tmp_path / "here" / "timm.safetensors"
    target.write_bytes(b"what was exported before")
    with pytest.raises(PatchloomError, match="features by the code that uses timm differ by"):
        export(path, data=str(photos))
    assert target.read_bytes() == b"what was exported before"


def test_no_option_of_an_encoder_file_becomes_code(photos, tmp_path):
    touched = tmp_path / "touched"
    path = with_card(
        an_encoder(tmp_path / "here", photos),
        lambda card: card["spec"]["options"].update(
            {f"qkv_bias=open({str(touched)!r}, 'w') and True, class_token": None}
        ),
    )
    with pytest.raises(PatchloomError, match="no option"):
        export(path, data=str(photos))
    assert not touched.exists()


def test_without_images_the_code_is_compared_on_noise(photos, tmp_path, capsys):
    path = an_encoder(tmp_path / "here", photos)
    done = export(path)
    assert done.compared_on == "images of noise" and done.images == 16 and done.difference < 1e-5
    assert (
        done.notes[0].startswith("Compared on noise, because") and "--data PHOTOS compares on images" in done.notes[0]
    )
    assert main(["export", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "on 16 images of noise." in printed and "does not record which images it was trained on" in printed
    assert "on 16 images of noise." in done.text(400) and done.notes[0] in done.text(400)
    assert export(path, data=str(photos)).notes == ()
    with pytest.raises(PatchloomError, match="nowhere"):  # what is named must be there
        export(path, data="nowhere")


@pytest.mark.parametrize("moved", ["gone", "pipe:touch {}"])
def test_a_run_whose_images_have_moved_is_exported(photos, tmp_path, moved):
    path, touched = an_encoder(tmp_path / "run", photos), tmp_path / "touched"
    folder = RunFolder(path.parent)
    path.rename(folder.encoder)
    settings = resolved_settings(moved.format(touched))
    write_checksummed(folder.config, settings.plain())
    done = export(folder.path)
    why = "are unavailable" if moved == "gone" else "only if you type"
    assert why in done.notes[0] and not touched.exists()


def of_recordings(folder: Path, sound: Sound, beside: bool = False) -> Path:
    """Write an encoder with the statistics of those tones, optionally with an instance head."""
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
    assert f"Its input is {sound.seconds:g} s at {sound.rate:,} samples per second, one channel." in printed
    code = printed[printed.index("import timm") :]
    assert "patchloom" not in code.replace(str(tmp_path), "")
    pasted: dict = {}
    exec(code, pasted)

    vit, card = load_encoder_file(path)
    source = open_data("tones:20").train.heard_as(sound)
    waves = torch.stack([centre_excerpt(source.read(i), sound) for i in range(4)])
    with torch.inference_mode():  # as the docstring of load_encoder has it
        ours = vit.forward_features(normalize(pictures(waves, card.sound), card.mean, card.std))
        theirs = pasted["features"](waves.flatten(1) / 2**15)
    assert (ours - theirs).abs().max() < 1e-4 and ours.std() > 0.1


def test_other_features_than_an_encoders_do_not_pass(tmp_path, monkeypatch):
    path, written = of_recordings(tmp_path, Sound()), preprocessing.code_of_pictures
    monkeypatch.setattr(to_timm, "code_of_pictures", lambda sound: written(sound).replace("1e-06", "1e-03"))
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


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images in two classes, which evaluations need."""
    folder = tmp_path_factory.mktemp("colours")
    photographs(folder / "one")
    photographs(folder / "two")
    return folder


def pasted(done) -> dict:
    found: dict = {}
    exec(done.snippet, found)
    return found


@pytest.mark.parametrize("pooling", ["mean", "class", "both", "prefix"])
@pytest.mark.parametrize("size", [(16, 16), (16, 24)], ids=str)
def test_the_printed_code_goes_from_a_file_to_what_evaluations_see(colours, tmp_path, size, pooling):
    """Rotated, transparent, grey, long and small images are read, cropped and resized identically."""
    path = an_encoder(tmp_path, colours, size, reg_tokens=2 if pooling == "prefix" else 0)
    done = export(path, data=str(colours), pooling=pooling)
    assert re.search(rf"embed\(file\) \({pooling} tokens\) differ by at most \S+ on 4 of its files", done.checks[0])
    vit, card = load_encoder_file(path)
    source = open_data(str(colours)).train
    seen = extract(vit, card, source, device="cpu").pooled(pooling)
    embed = pasted(done)["embed"]
    made = torch.stack([embed(source.describe(i)) for i in range(len(source))])
    assert made.shape == (20, 64 if pooling == "both" else 32) and seen.std() > 0.1
    assert (made - seen).abs().max() < 1e-5


def test_of_grey_images_and_of_a_swin(colours, tmp_path):
    grey = tmp_path / "grey" / "a"
    grey.mkdir(parents=True)
    for i in range(4):
        Image.open(colours / "one" / "5.jpg").convert("L").rotate(90 * i, expand=True).save(grey / f"{i}.png")
    swin = {"model": "swin-nano", "p": 2, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    path = an_encoder(tmp_path / "run", grey.parent, (16, 16), **swin)
    done = export(path, data=str(grey.parent))
    vit, card = load_encoder_file(path)
    source = open_data(str(grey.parent)).train
    seen = one_pass(vit, card, source, partial(pooled_tokens, vit), torch.device("cpu")).pooled("mean")
    embed = pasted(done)["embed"]
    assert (torch.stack([embed(grey / f"{i}.png") for i in range(4)]) - seen).abs().max() < 1e-5
    # an image in colour is made grey as patchloom does it
    both = [export(path, data=str(colours)).checks[0], done.checks[0]]
    assert all(float(re.search(r"at most (\S+) on", one)[1]) < 1e-5 for one in both)


def test_deep_images_are_taken_as_arrays(photos, tmp_path):
    path = an_encoder(tmp_path, photos)
    done = export(path, data=str(photos))
    assert "embed(image) (mean tokens)" in done.checks[0] and "Image.open" not in done.snippet
    vit, card = load_encoder_file(path)
    source = open_data(str(photos)).train
    (images,) = next(plain_batches(source, (16, 16), 16)).views
    with torch.inference_mode():
        ours = vit.forward_features(normalize(images, card.mean, card.std))[0, 1:].mean(0)
    embed = pasted(done)["embed"]
    assert (embed(source.read(0)) - ours).abs().max() < 1e-5
    raw = np.load(sorted(Path(photos).rglob("*.npy"))[0])
    raw = raw.reshape(source.read(0).shape) if raw.ndim == 2 else raw.transpose(2, 0, 1)
    for wrong in (torch.from_numpy(raw), torch.from_numpy(raw.astype("float32"))):
        with pytest.raises(ValueError, match="divide those of 16 bits by 65535"):
            embed(wrong)
    assert "tifffile.imread" in done.snippet


def test_vectors_by_code_that_crops_otherwise_do_not_pass(colours, tmp_path, monkeypatch):
    path = an_encoder(tmp_path, colours)
    written = preprocessing.preparing_by_torch
    monkeypatch.setattr(to_timm, "preparing_by_torch", lambda *given: written(*given).replace("(width - w) // 2", "0"))
    with pytest.raises(PatchloomError, match="vectors by the code that uses timm differ by"):
        export(path, data=str(colours))


def test_a_run_is_compared_on_its_own_files(colours, tmp_path, capsys):
    run = a_run(tmp_path / "run", colours)
    assert main(["export", str(run), "--pooling", "class"]) == 0
    assert "(class tokens) differ by at most" in (said := capsys.readouterr().out) and "4 of its files" in said
    assert main(["export", str(run), "--pooling", "instance"]) == 2
    assert "has no instance vectors: use --pooling class, mean or both" in capsys.readouterr().err
