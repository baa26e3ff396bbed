"""The code that export prints computes the features of the encoder, also without the place of patches."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import SMALL, a_run, an_encoder, photographs, with_card
from PIL import Image
from refusing import refusal
from resolved import resolved_settings
from safetensors.torch import load_file
from spoken import encoder_of_sound

from patchloom.audio.augment import centre_excerpt
from patchloom.audio.config import Sound
from patchloom.audio.spectrogram import pictures
from patchloom.cli import main
from patchloom.data.loader import plain_batches
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize, statistics_of_recordings
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract, one_pass
from patchloom.export import to_timm
from patchloom.export.export import export
from patchloom.export.without_positions import remove_positions, turned
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder, save_extra_module
from patchloom.nets.heads import InstanceHead, pooled_tokens
from patchloom.runs.folder import RunFolder
from patchloom.system.checksummed import write_checksummed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "timm", "fp16": True}, "--fp16 is only for --to onnx"),
        ({"to": "hf", "fp16": True}, "--fp16 is only for --to onnx"),
        ({"to": "onnx", "license": "mit"}, "--license is only for --to hf"),
        ({"to": "onnx", "without_positions": True}, "--without_positions is only for --to timm"),
        ({"push": "me/it"}, "--push is only for --to hf"),
        ({"to": "hf", "public": True}, "--public needs --push"),
        ({"to": "hf", "license": "My own!"}, "--license My own! is not an identifier"),
        ({"to": "hf", "push": "a b"}, "--push a b is not a repository name"),
        ({"to": "keras"}, "--to keras is not a format"),
        ({"pooling": "max"}, "--pooling cannot be max"),
    ],
)
def test_options_of_another_form(options, said):
    assert said in refusal(export, "nowhere", **options)


@pytest.mark.parametrize(("to", "library"), [("hf", "transformers"), ("onnx", "onnxruntime"), ("onnx", "onnxscript")])
def test_a_missing_extra_is_a_sentence(to, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(PatchloomError, match=rf"--to {to} needs {library}: pip install '"):
        export("nowhere", to=to)


@pytest.mark.parametrize("to", ["hf", "onnx"])
def test_recordings_go_to_timm_alone(to, tmp_path):
    assert "only encoders of images: use --to timm" in refusal(export, encoder_of_sound(tmp_path), to=to)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dark")
    rng = np.random.default_rng(0)
    for i in range(20):
        blocks = np.kron(rng.integers(0, 30, (4, 4, 3)), np.ones((4, 4, 1), np.int64))
        np.save(folder / f"{i:02}.npy", blocks.astype(np.uint16))
    return folder


def pasted(snippet: str) -> dict:
    found: dict = {}
    exec(snippet, found)
    return found


def test_the_printed_code_gives_the_encoders_features_of_dark_images(photos, tmp_path, capsys):
    path = an_encoder(tmp_path / 'it\'s "here"', photos)
    assert main(["export", str(path), "--data", str(photos)]) == 0
    printed = capsys.readouterr().out
    features = pasted(printed[printed.index("import timm") :])["features"]
    vit, card = load_encoder_file(path)
    assert max(card.mean) < 3e-4  # four decimals of which are one digit
    (images,) = next(plain_batches(open_data(str(photos)).train, (16, 16), 16)).views
    with torch.inference_mode():
        assert (vit.forward_features(normalize(images, card.mean, card.std)) - features(images)).abs().max() < 1e-5
    assert float(re.search(r"timm's features differ by at most (\S+) on 16 images", printed)[1]) < 1e-5


def test_no_option_of_an_encoder_file_becomes_code(photos, tmp_path):
    touched = tmp_path / "touched"
    option = {f"qkv_bias=open({str(touched)!r}, 'w') and True, class_token": None}
    path = with_card(an_encoder(tmp_path / "here", photos), lambda card: card["spec"]["options"].update(option))
    assert "no option" in refusal(export, path, data=str(photos))
    assert not touched.exists()


def test_without_images_the_code_is_compared_on_noise(photos, tmp_path):
    path = an_encoder(tmp_path / "here", photos)
    done = export(path)
    assert done.compared_on == "images of noise" and done.images == 16 and done.difference < 1e-5
    assert "--data PHOTOS compares on images" in done.notes[0] and done.notes[0] in done.text(400)
    assert export(path, data=str(photos)).notes == ()
    with pytest.raises(PatchloomError, match="nowhere"):  # what is named must be there
        export(path, data="nowhere")


@pytest.mark.parametrize(("moved", "why"), [("gone", "are unavailable"), ("pipe:touch {}", "only if you type")])
def test_a_run_whose_images_have_moved_is_exported(photos, tmp_path, moved, why):
    run, touched = a_run(tmp_path / "run", photos), tmp_path / "touched"
    write_checksummed(RunFolder(run).config, resolved_settings(moved.format(touched)).plain())
    assert why in export(run).notes[0] and not touched.exists()


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
def test_the_printed_code_gives_an_encoders_features_of_waveforms(sound, tmp_path):
    path = of_recordings(tmp_path, sound)
    done = export(path, data="tones:20")
    assert done.compared_on == "recordings" and done.images == 16 and done.difference < 1e-4
    assert f"{sound.seconds:g} s at {sound.rate:,} samples per second" in done.text(400)
    assert "patchloom" not in done.snippet.replace(str(tmp_path), "")
    vit, card = load_encoder_file(path)
    source = open_data("tones:20").train.heard_as(sound)
    waves = torch.stack([centre_excerpt(source.read(i), sound) for i in range(4)])
    with torch.inference_mode():  # as the docstring of load_encoder has it
        ours = vit.forward_features(normalize(pictures(waves, card.sound), card.mean, card.std))
        theirs = pasted(done.snippet)["features"](waves.flatten(1) / 2**15)
    assert (ours - theirs).abs().max() < 1e-4 and ours.std() > 0.1


def test_an_encoder_of_recordings_and_its_head_are_compared_on_noise(tmp_path):
    path = of_recordings(tmp_path, Sound(), beside=True)
    done = export(path)
    assert done.compared_on == "recordings of noise" and done.difference < 1e-4
    assert "def represent(waves)" in done.snippet and "--data RECORDINGS" in done.notes[0]
    assert "is an encoder of recordings, and digits holds images" in refusal(export, path, data="digits")


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    photographs(folder / "one")
    photographs(folder / "two")
    return folder


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
    embed = pasted(done.snippet)["embed"]
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
    embed = pasted(done.snippet)["embed"]
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
    embed = pasted(done.snippet)["embed"]
    assert (embed(source.read(0)) - ours).abs().max() < 1e-5
    raw = torch.from_numpy(np.load(min(Path(photos).rglob("*.npy"))).transpose(2, 0, 1))
    for wrong in (raw, raw.float()):
        with pytest.raises(ValueError, match="divide those of 16 bits by 65535"):
            embed(wrong)
    assert "tifffile.imread" in done.snippet


@pytest.mark.parametrize(
    ("data", "right", "wrong", "what"),
    [
        ("photos", "mean = torch", "mean = 2e-5 + torch", "features"),
        ("tones:20", "1e-06)", "1e-03)", "features"),
        ("colours", "(width - w) // 2", "0", "vectors"),
    ],
    ids=["normalisation", "spectrogram", "crop"],
)
def test_other_code_is_not_exported(request, tmp_path, monkeypatch, data, right, wrong, what):
    folder = data if ":" in data else str(request.getfixturevalue(data))
    path = of_recordings(tmp_path, Sound()) if ":" in data else an_encoder(tmp_path, folder)
    written = to_timm.render

    def changed(*given, **values):
        code = written(*given, **values)
        assert right in code
        return code.replace(right, wrong)

    monkeypatch.setattr(to_timm, "render", changed)
    target = tmp_path / "timm.safetensors"
    target.write_bytes(b"what was exported before")
    assert f"{what} by the code that uses timm differ by" in refusal(export, path, data=folder)
    assert target.read_bytes() == b"what was exported before"


def test_a_run_is_compared_on_its_own_files(colours, tmp_path):
    run = a_run(tmp_path / "run", colours)
    (check,) = export(run, pooling="class").checks
    assert "(class tokens) differ by at most" in check and "4 of its files" in check
    assert "no instance vectors: use --pooling class, mean or both" in refusal(export, run, pooling="instance")


GRID, D = (4, 6), 16


def synthetic(seed, images=200):
    """Return tokens [2b n d] of content in all directions but two, and the place in those two.

    Each content is also there in reverse order, so that it does not covary with the place by accident.
    """
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(0))).Q
    index = torch.arange(GRID[0] * GRID[1])
    places = torch.stack([index // GRID[1], index % GRID[1]], 1).float()
    content = torch.randn(images, len(index), D - 2, generator=generator)
    return torch.cat([content, content.flip(1)]) @ basis[:, 2:].T + places @ basis[:, :2].T, basis


def test_a_place_in_two_known_directions_is_removed_exactly():
    tokens, basis = synthetic(1)
    others, _ = synthetic(2)
    found = remove_positions(iter(tokens.split(50)), others, GRID)
    assert (found.images, found.tested) == (400, 400)
    expected = torch.eye(D) - basis[:, :2] @ basis[:, :2].T
    torch.testing.assert_close(found.weight, expected, atol=1e-5, rtol=0)
    assert found.before.r2 == pytest.approx(1, abs=1e-4) and found.before.distance < 0.01
    assert abs(found.after.r2) < 1e-3 and found.after.distance == pytest.approx(found.chance.distance, rel=1e-3)
    assert found.before.accuracy == 1 and found.after.accuracy < 0.06  # chance 1/24
    middle = [((row - 1.5) ** 2 + (column - 2.5) ** 2) ** 0.5 for row in range(4) for column in range(6)]
    assert found.chance == pytest.approx((0, sum(middle) / 24, 1 / 24))


def test_a_place_that_is_not_row_or_column_stays():
    """A checkerboard does not covary with row or column: it is left, and only the classifier reads it."""
    content = torch.randn(400, 24, D, generator=torch.Generator().manual_seed(0))
    index = torch.arange(24)
    board = ((index // 6 + index % 6) % 2 * 2 - 1).float()
    tokens = content + 5 * board[:, None] * torch.eye(D)[0]
    found = remove_positions(iter([tokens]), tokens, GRID)
    assert abs(found.before.r2) < 0.05 and found.after.accuracy > 2 / 24


def test_grids_of_one_row_or_one_patch():
    tokens = synthetic(1)[0]
    row = remove_positions(iter([tokens]), synthetic(2)[0], (1, 24))  # one axis
    assert torch.linalg.matrix_rank(row.weight).item() == D - 1 and abs(row.after.r2) < 1e-3 < row.before.r2
    assert "a single patch has no place" in refusal(remove_positions, iter([tokens[:, :1]]), tokens[:, :1], (1, 1))


def squares_in(folder, count):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        squares = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(np.kron(squares, np.ones((4, 4, 1), np.uint8))).save(folder / f"{i:02}.png")
    return folder


def test_images_are_flipped_and_turned_but_not_bent():
    image = torch.arange(9.0).view(1, 1, 3, 3)
    made = turned(image.expand(200, -1, -1, -1), torch.Generator().manual_seed(0))
    assert len({tuple(one.flatten().tolist()) for one in made}) == 8  # all symmetries of a square
    wide = turned(torch.arange(6.0).view(1, 1, 2, 3).expand(50, -1, -1, -1), torch.Generator().manual_seed(0))
    assert len({tuple(one.flatten().tolist()) for one in wide}) == 4


@pytest.mark.parametrize("options", [{}, {"model": "nano", "class_token": False}, {"reg_tokens": 2}], ids=str)
def test_the_printed_code_applies_the_map_to_patch_tokens_only(options, tmp_path, capsys):
    photos = squares_in(tmp_path / "photos", 40)
    run = a_run(tmp_path / "run", photos, **options)
    assert main(["export", str(run), "--without_positions", "--data", str(photos), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["result"]
    weight = load_file(told["without_positions"]["file"])["weight"]
    assert weight.shape == (32, 32)
    code = pasted(told["snippet"])
    (images,) = next(plain_batches(open_data(str(photos)).train, (16, 16), 8)).views
    images = images.float() / 255
    before, after = code["features"](images), code["features_without_positions"](images)
    prefix = 0 if options.get("class_token") is False else 1 + options.get("reg_tokens", 0)
    assert torch.equal(before[:, :prefix], after[:, :prefix])
    torch.testing.assert_close(after[:, prefix:], before[:, prefix:] @ weight.T)
    torch.testing.assert_close(code["vectors"](images), after[:, prefix:].mean(1))
    scores = told["without_positions"]
    assert scores["before"]["r2"] > 0.5 and abs(scores["after"]["r2"]) < 0.1
    assert scores["after"]["distance"] > 0.9 * scores["chance"]["distance"] > scores["before"]["distance"]


def test_the_map_needs_images(tmp_path):
    run = a_run(tmp_path / "run", squares_in(tmp_path / "photos", 12))
    assert "--without_positions needs images" in refusal(export, run / "encoder.safetensors", without_positions=True)
    with pytest.raises(PatchloomError, match="needs 10 images or more"):
        export(run, data=str(squares_in(tmp_path / "few", 4)), without_positions=True)
