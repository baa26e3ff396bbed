"""Runs on recordings: resuming, repeating, wording, and refused options."""

import os
import re

import numpy as np
import pytest
import soundfile
from forked import Command
from safetensors.torch import load_file

import patchloom
from patchloom.errors import PatchloomError
from patchloom.look import image_grid
from patchloom.report.report import page_of
from patchloom.runs.folder import RunFolder

MODEL = {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2, "proj_drop_rate": 0.1}
SHORT = {"model": MODEL, "seconds": 0.33, "bins": 20, "batch_size": 16, "workers": 0}


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


def words(recordings, out, epochs=16):
    given = {"task": "droppos", "epochs": epochs, "accumulate": 2, "seconds": 0.33, "bins": 20, "batch_size": 16}
    given |= {"workers": 1, "out": out, "model": "nano", "model.embed_dim": 32, "model.depth": 1}
    given |= {"model.proj_drop_rate": 0.1}
    return ["pretrain", str(recordings), *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def test_a_resumed_run_equals_an_uninterrupted_one(recordings, tmp_path):
    whole = Command(words(recordings, tmp_path / "whole"))
    printed, told = whole.communicate()
    assert whole.returncode == 0, told
    assert "recordings to train on" in printed and "20x31" in printed and "20x1" in printed
    assert " recordings/s" in printed and "held-out recordings" in printed and not re.search(r"\bimages?\b", printed)
    other = Command(words(recordings, tmp_path / "stopped"))
    for line in other.stdout:
        if " · epoch 4.0/16 · " in line:
            os.kill(other.pid, 15)
            break
    _, told = other.communicate()
    assert other.returncode == 130 and told.startswith("patchloom: stopped, and a checkpoint was written"), told
    again = Command(words(recordings, tmp_path / "stopped"))
    printed, told = again.communicate()
    assert again.returncode == 0 and "Resuming after step" in printed, told
    one, two = (load_file(tmp_path / name / "encoder.safetensors") for name in ("whole", "stopped"))
    assert all(value.equal(two[name]) for name, value in one.items())


def test_a_seed_and_the_cache_give_the_same_weights_and_another_seed_others(recordings, tmp_path):
    def weights(name, **given):
        patchloom.pretrain(recordings, "mae", out=tmp_path / name, epochs=2, **SHORT, **given)
        return load_file(tmp_path / name / "encoder.safetensors")

    one, cached, other = weights("one"), weights("cached", cache="whole"), weights("other", seed=1)
    name = "blocks.0.mlp.fc1.weight"
    assert one[name].equal(cached[name]) and not one[name].equal(other[name])


def test_statistics_are_kept_with_the_run_and_the_encoder(recordings, tmp_path):
    run = patchloom.pretrain(recordings, "mae", out=tmp_path / "run", epochs=1, **SHORT)
    stats = RunFolder(tmp_path / "run").read_stats()
    assert stats.sound.size == (20, 31) and len(stats.sound.mean) == 20 and min(stats.sound.std) > 0
    _, card = patchloom.load_encoder(run)
    assert card.sound == stats.sound and card.mean == (0.5,)


def test_two_views_are_two_excerpts_and_a_broken_file_costs_itself_alone(recordings, tmp_path):
    folder = tmp_path / "some"
    folder.mkdir()
    for path in sorted(recordings.iterdir())[:40]:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "broken.wav").write_text("no sound")
    options = {"name": "extrema", "color": "none", "mask_ratio": 0.5, "masks": 2}
    patchloom.pretrain(folder, options, out=tmp_path / "run", epochs=2, **SHORT)
    assert (tmp_path / "run" / "encoder.safetensors").exists()
    assert "broken.wav" in (tmp_path / "run" / "unreadable.txt").read_text()


@pytest.mark.parametrize(
    ("task", "given", "said"),
    [
        ("mae", {"img_size": (20, 31)}, "--img_size is for images, and .* holds recordings"),
        ("mae", {"flip": False}, "--flip is for images"),
        ("mae", {"randaugment": 9.0}, "--randaugment is for images"),
        ("mae", {"cache": 64}, "--cache 64 is an image size"),
        ("mae", {"seconds": 0.01}, "--seconds 0.01 is shorter than a frame"),
        ("mae", {"bins": 65, "patch_size": (65, 1)}, "--bins 65 are too many coefficients"),
        ("mae", {"patch_size": 16}, "patches of 16 rows do not divide the 20 rows"),
        ("extrema", {}, "recordings have no colours: give --task.color none"),
        ({"name": "restore", "degradation": "zoom_in"}, {}, "needs more of an image than its encoder is given"),
    ],
)
def test_options_for_images_are_refused(recordings, tmp_path, task, given, said):
    with pytest.raises(PatchloomError, match=said):
        patchloom.pretrain(recordings, task, out=tmp_path / "run", epochs=1, **{**SHORT, **given})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["mae", "mp3", "lut", {"name": "extrema", "color": "none"}])
def test_no_text_of_a_run_of_recordings_speaks_of_images(recordings, tmp_path, monkeypatch, capsys, task):
    """Output, files, pictures and report of a run on recordings never mention images."""
    drawn, wrap = [], image_grid.wrap
    monkeypatch.setattr(image_grid, "wrap", lambda text, *given: drawn.append(text) or wrap(text, *given))
    run = patchloom.pretrain(recordings, task, out=tmp_path / "run", epochs=1, **SHORT)
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
    for text in (said, *written, *drawn, page):
        found = re.search(r".{0,60}\b(images?|pixels?)\b.{0,40}", text, re.IGNORECASE)
        assert not found, found[0]


def test_settings_of_recordings_are_refused_for_images(tmp_path):
    with pytest.raises(PatchloomError, match="--rate is for recordings, and digits holds images"):
        patchloom.pretrain("digits", "mae", out=tmp_path / "run", rate=8000, epochs=1)


def test_images_and_recordings_are_not_evaluated_by_each_others_encoders(recordings, tmp_path):
    run = patchloom.pretrain(recordings, "mae", out=tmp_path / "run", epochs=1, **SHORT)
    with pytest.raises(PatchloomError, match="is an encoder of recordings, and digits holds images"):
        patchloom.evaluate("knn", run, "digits")


def test_sizes_are_not_cached_of_recordings(recordings, tmp_path):
    with pytest.raises(PatchloomError, match="--cache 16 is an image size, and .* holds recordings"):
        patchloom.pretrain(recordings, "mae", out=tmp_path / "run", cache=16, **SHORT)
