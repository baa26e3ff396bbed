"""Tests of the verb look: pictures of tasks and encoders, of runs and files."""

import re
import shutil

import pytest
import torch
from PIL import Image

from patchloom.audio.config import Sound
from patchloom.cli import main
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder

pytestmark = pytest.mark.usefixtures("quick_probe")


@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory):
    return shutil.copytree(small_run("mae"), tmp_path_factory.mktemp("runs") / "mae")


def test_all_draws_the_task_and_every_picture_of_the_encoder(run, images, tmp_path, capsys):
    assert main(["look", str(run), "--what", "all", "--images", "2", "--steps", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    files = printed.out.split()
    names = {file.rpartition("/")[2] for file in files}
    assert {"recovered.png", "attention-1.png", "attention-2.png", "relative.png", "distances.png"} <= names
    assert {"components.png", "correlation.png", "depth.png", "nearest.png", "retrieval.png", "inversion.png"} <= names
    assert {path.name for path in tmp_path.iterdir()} == names and "left out" not in printed.err
    for file in files:
        if file.endswith(".png"):
            assert min(Image.open(file).size) > 100


def test_an_encoder_of_a_file_is_looked_at_on_images_that_are_given(run, images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    encoder, words = str(run / "encoder.safetensors"), ["--what", "features", "--images", "2"]
    assert main(["look", encoder, str(images), *words]) == 0
    (file,) = capsys.readouterr().out.split()
    assert re.fullmatch(r"pictures-encoder-\S+/components\.png|pictures-mae-\S+/components\.png", file)
    assert main(["look", encoder, *words]) == 2
    assert "is not a run and has no images: give some, as in patchloom look" in capsys.readouterr().err


def test_another_size_and_an_encoder_beside(run, tmp_path, capsys):
    given = ["look", str(run), "--what", "relative", "--images", "2", "--img_size", "64x32", "--out", str(tmp_path)]
    assert main([*given, "--beside", str(run / "encoder.safetensors")]) == 0
    rows = (tmp_path / "relative.csv").read_text().splitlines()
    # one block of two heads, of the encoder, its untrained twin and the one beside
    assert len(rows) == 1 + 3 * 2
    assert main([*given[:-4], "--img_size", "30x32"]) == 2
    assert "do not divide images of 30x32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--query", "3,4"], "--query is only for --what attention or correlation: leave it out, or add one of them"),
        (["--what", "depth", "--steps", "9"], "--steps is only for --what inversion"),
        (["--what", "inversion", "--steps", "0"], "--steps must be 1 or more, not 0"),
        (["--img_size", "64"], "--img_size is only for --what attention, relative"),
        (["--what", "depth", "--task", "a.py:B"], "--task has no effect on depth"),
        (["--what", "dept"], "there is no such picture; did you mean depth"),
        (["--what", "attention", "--query", "32,0"], "--query 32,0 is not a point x,y in pixels"),
        (["--what", "attention", "--blocks", "2"], "--blocks takes numbers from 1 to 1"),
    ],
)
def test_what_changes_nothing_is_refused(run, words, said, capsys):
    assert main(["look", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_curves_tell_encoders_of_one_name_apart(run, tmp_path, capsys):
    twin = tmp_path / "elsewhere" / "mae"
    twin.mkdir(parents=True)
    shutil.copy(run / "encoder.safetensors", twin)
    given = ["look", str(run), "--what", "relative", "--images", "1", "--out", str(tmp_path)]
    assert main([*given, "--beside", str(twin)]) == 0
    names = {row.split(",")[0] for row in (tmp_path / "relative.csv").read_text().splitlines()[1:]}
    assert names == {str(run), "untrained", str(twin)}
    assert main([*given, "--beside", str(run)]) == 2
    assert f"{run} is given twice" in capsys.readouterr().err


def test_all_leaves_out_the_task_of_what_has_none(run, images, tmp_path, capsys):
    """A requested picture that cannot be drawn is reported, such as the task of a run without checkpoints."""
    light = tmp_path / "light"
    shutil.copytree(run, light, ignore=shutil.ignore_patterns("checkpoints", "pictures"))
    given = [str(images), "--images", "1", "--out", str(tmp_path / "out")]
    assert main(["look", str(light), *given, "--steps", "1", "--what", "features,all"]) == 0
    printed = capsys.readouterr()
    assert "task is left out: " in printed.err and "has no checkpoint yet" in printed.err
    assert "components.png" in printed.out and "recovered.png" not in printed.out
    assert main(["look", str(run / "encoder.safetensors"), *given, "--what", "task,features"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_all_of_what_has_diverged_is_a_failure(run, images, tmp_path, capsys):
    vit, card = load_encoder_file(run)
    torch.nn.init.constant_(vit.patch_embed.proj.weight, torch.nan)
    save_encoder(vit, card, tmp_path / "broken.safetensors")
    assert main(["look", str(tmp_path / "broken.safetensors"), str(images), "--what", "all"]) == 2
    said = capsys.readouterr().err
    assert said.count("is left out") == 9 and "no picture of mae could be drawn" in said


def test_an_encoder_of_recordings_does_not_stand_beside_one_of_images(run, tmp_path, capsys):
    heard, size = tmp_path / "heard.safetensors", {"embed_dim": 32, "depth": 1, "num_heads": 2}
    spec = EncoderSpec("nano", Sound().size, (40, 1), channels=1, options=size)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,), (0.2,), "mae", "heard", sound=Sound()), heard)
    assert main(["look", str(run), "--what", "depth", "--beside", str(heard), "--out", str(tmp_path)]) == 2
    assert "heard cannot be compared with mae: their inputs differ" in capsys.readouterr().err
