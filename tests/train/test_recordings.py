"""Runs on recordings: resuming, repeating, wording, and refused options."""

import re
import shutil

import numpy as np
import pytest
import soundfile
import torch
from killing import SMALL, left_behind
from PIL import Image
from refusing import refusal
from running import killed, weights
from timm.layers.pos_embed_rel import RelPosBias

import patchloom
from patchloom.errors import PatchloomError
from patchloom.look import sheet
from patchloom.nets.checkpoints.format import load_encoder_file, read_encoder_card
from patchloom.nets.encode import patch_positions
from patchloom.nets.finetune import at_size, with_variant
from patchloom.patches.positions import sincos_1d
from patchloom.report.report import page_of
from patchloom.runs.folder import RunFolder
from patchloom.train.checkpointing import TrainState

pytestmark = pytest.mark.usefixtures("quick_probe")

TINY = {name: value for name, value in SMALL.items() if name not in ("img_size", "patch_size")} | {"epochs": 1}
MODEL = {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2, "proj_drop_rate": 0.1}
SHORT = {"model": MODEL, "seconds": 0.33, "bins": 20, "batch_size": 16, "workers": 0, "epochs": 1, "threads": 1}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Unlabelled recordings, which need no evaluation, of two sampling rates; one is too short."""
    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(0)
    for i in range(60):
        rate = 16_000 if i % 3 else 8_000
        wave = np.sin(2 * np.pi * np.arange(rate // (2 + i % 5)) * rng.uniform(200, 2000) / rate)
        soundfile.write(folder / f"{i}.wav", 0.3 * wave + 0.01 * rng.standard_normal(len(wave)), rate)
    return folder


@pytest.fixture(scope="module")
def run(recordings, tmp_path_factory):
    return patchloom.pretrain(recordings, "mae", out=tmp_path_factory.mktemp("runs") / "run", **SHORT).folder


def test_a_killed_run_resumes_to_the_same_result(recordings, tmp_path, monkeypatch):
    given = SHORT | {"task": "droppos", "epochs": 2}
    whole = patchloom.pretrain(recordings, out=tmp_path / "whole" / "run", **given).folder
    killed(monkeypatch, TrainState, "count", 4, recordings, out=tmp_path / "killed" / "run", **given)
    again = patchloom.pretrain(recordings, out=tmp_path / "killed" / "run", **given).folder
    assert left_behind(again) == left_behind(whole)


def test_a_seed_and_the_cache_give_the_same_weights_and_another_seed_others(recordings, run, tmp_path):
    def weights_with(name, **given):
        return weights(patchloom.pretrain(recordings, "mae", out=tmp_path / name, **SHORT, **given).folder)

    assert weights_with("cached", cache="whole") == weights(run) != weights_with("other", seed=1)


def test_statistics_are_kept_with_the_run_and_the_encoder(run):
    stats = RunFolder(run).read_stats()
    assert stats.sound.size == (20, 31) and len(stats.sound.mean) == 20 and min(stats.sound.std) > 0
    _, card = patchloom.load_encoder(run)
    assert card.sound == stats.sound and card.mean == (0.5,)
    assert "is an encoder of recordings, and digits holds images" in refusal(patchloom.evaluate, "knn", run, "digits")


def test_two_views_are_two_excerpts_and_a_broken_file_costs_itself_alone(recordings, tmp_path):
    folder = shutil.copytree(recordings, tmp_path / "some")
    (folder / "broken.wav").write_text("no sound")
    options = {"name": "extrema", "color": "none", "mask_ratio": 0.5, "masks": 2}
    found = patchloom.pretrain(folder, options, out=tmp_path / "run", **SHORT).folder
    assert (found / "encoder.safetensors").exists() and "broken.wav" in (found / "unreadable.txt").read_text()


@pytest.mark.parametrize(
    ("task", "given", "said"),
    [
        ("mae", {"img_size": (20, 31)}, "--img_size is for images, and .* holds recordings"),
        ("mae", {"cache": 64}, "--cache 64 is an image size, and .* holds recordings"),
        ("mae", {"seconds": 0.01}, "--seconds 0.01 is shorter than a frame"),
        ("mae", {"bins": 65, "patch_size": (65, 1)}, "--bins 65 are too many coefficients"),
        ("mae", {"patch_size": 16}, "patches of 16 rows do not divide the 20 rows"),
        ("extrema", {}, "recordings have no colours: give --task.color none"),
        ({"name": "restore", "degradation": "zoom_in"}, {}, "needs more of an image than its encoder is given"),
    ],
)
def test_options_for_images_are_refused(recordings, tmp_path, task, given, said):
    assert re.search(said, refusal(patchloom.pretrain, recordings, task, out=tmp_path / "run", **SHORT | given))
    assert not (tmp_path / "run").exists()


def test_settings_of_recordings_are_refused_for_images(tmp_path):
    with pytest.raises(PatchloomError, match="--rate is for recordings, and digits holds images"):
        patchloom.pretrain("digits", "mae", out=tmp_path / "run", rate=8000, epochs=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patch_size": 16}, "patches of 16 rows do not divide the 40 rows .*: give --bins 32"),
        ({"patch_size": 16, "bins": 64, "features": "logmel"}, "the 98 frames of 1 s: give --seconds 0.98 or 1.14"),
        ({"patch_size": (40, 16), "seconds": 0.15}, "the 13 frames of 0.15 s: give --seconds 0.18"),
    ],
)
def test_patches_that_do_not_divide_recordings_say_which_would(settings, said, tmp_path):
    assert re.search(said, refusal(patchloom.pretrain, "tones:24", out=tmp_path / "run", **TINY | settings))


@pytest.mark.parametrize("task", ["mp3", pytest.param("mae", marks=pytest.mark.slow)])
def test_no_text_of_a_run_of_recordings_speaks_of_images(recordings, tmp_path, monkeypatch, capsys, task):
    """Output, files, pictures and report of a run on recordings never mention images."""
    drawn, wrap = [], sheet.wrap
    monkeypatch.setattr(sheet, "wrap", lambda text, *given: drawn.append(text) or wrap(text, *given))
    run = patchloom.pretrain(recordings, task, out=tmp_path / "run", **SHORT)
    if task == "mae":
        print(patchloom.check(recordings, estimate=False))
        patchloom.look(run, what="attention,features,correlation,depth,neighbours", images=2)
    said = capsys.readouterr().out.replace(str(tmp_path), "").replace(str(recordings), "")
    folder = RunFolder(tmp_path / "run")
    written = [path.read_text("utf-8") for path in (folder.summary, folder.path / "verdict.yaml")]
    written += [line for line in folder.config.read_text("utf-8").splitlines() if line.startswith("#")]  # reasons
    written += [folder.metrics.read_text("utf-8").partition("\n")[0].replace("images,", "").replace("images:", "")]
    assert len(drawn) >= 5 and "recording" in said
    page = re.sub(r"data:[^'\"]*", "", repr(page_of([folder.path])))
    page = re.sub(r"@\w+\{.*?\\n\}", "", page)  # titles of papers
    for text in (said, *written, *drawn, page):
        found = re.search(r".{0,60}\b(images?|pixels?)\b.{0,40}", text, re.IGNORECASE)
        assert not found, found[0]


def test_a_dry_run_trains_nothing(tmp_path):
    planned = patchloom.pretrain("tones:48", dry_run=True, out=tmp_path / "run", **TINY).planned["settings"]
    sizes = planned["img_size"], planned["patch_size"], planned["task"]["name"]
    assert sizes == ([40, 98], [40, 7], "droppos") and not list(tmp_path.iterdir())


def test_a_tiny_run_its_pictures_and_its_export(tmp_path):
    run = patchloom.pretrain("tones:48", task="mp3", seconds=0.32, out=tmp_path / "run", **TINY).folder
    drawn = Image.open(run / "pictures" / "rebuilt.png")
    assert drawn.width > 3 * 300 and len(np.unique(np.asarray(drawn).reshape(-1, 3), axis=0)) > 100
    done = patchloom.export(run)
    assert done.compared_on == "recordings" and done.difference < 1e-4 and done.notes == ()


FRAMES = SMALL | {"img_size": (12, 20), "patch_size": (12, 1), "epochs": 1, "flip": False}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(24):
        Image.fromarray(rng.integers(0, 256, (12, 20), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def narrow(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "mae"
    return patchloom.pretrain(pictures, "mae", out=out, positions="learned", **FRAMES).folder


def test_patches_that_are_not_square_are_stored_and_exported(narrow, pictures, tmp_path, capsys):
    settings, spec = RunFolder(narrow).read_config(), read_encoder_card(narrow / "encoder.safetensors").spec
    assert settings.patch_size == spec.patch_size == (12, 1) and spec == settings.encoder_spec()
    vit, card = load_encoder_file(narrow)
    assert vit.patch_embed.proj.weight.shape == (32, 1, 12, 1) and vit.pos_embed.shape == (1, 21, 32)
    with pytest.raises(PatchloomError, match="patch_size: was 12x1, now 6x1"):
        patchloom.pretrain(pictures, "mae", out=narrow, positions="learned", **FRAMES | {"patch_size": (6, 1)})
    assert "patches of 12x1 pixels are not square" in refusal(at_size, vit, card, (24, 40))
    assert patchloom.export(narrow, data=pictures).difference < 1e-4
    longer = FRAMES | {"img_size": (12, 30), "patch_size": "auto", "from_run": narrow}
    patchloom.pretrain(pictures, "mae", out=tmp_path / "longer", **longer)
    printed = capsys.readouterr().out
    assert "12x1         (as in" in printed and "pos_embed: from a grid of 1x20 to 1x30" in printed


def test_patches_that_are_not_square_are_fine_tuned_with_other_positions(narrow):
    vit, card = load_encoder_file(narrow)
    table = patch_positions(with_variant(vit, card, "fixed"))
    assert torch.equal(table, sincos_1d(32, torch.arange(20)))
    biases = [one for one in with_variant(vit, card, "relative").modules() if isinstance(one, RelPosBias)]
    with torch.no_grad():
        table = biases[0].relative_position_bias_table.normal_()
    of_frames = biases[0].get_bias()[0, 0, 1:, 1:]
    assert torch.equal(of_frames[1:, 1:], of_frames[:-1, :-1]) and len(of_frames.unique()) == 39 <= len(table)
