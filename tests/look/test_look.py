"""Tests of the verb look: pictures of tasks and encoders, of runs and files."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from refusing import failed, refusal

from patchloom.audio.config import Sound
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.look.look import PICTURES, named_encoder, parse_blocks, parse_pictures, parse_points, untrained_encoder
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.nets.encode import grid_size, input_size

pytestmark = pytest.mark.usefixtures("quick_probe")


@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory):
    return shutil.copytree(small_run("mae"), tmp_path_factory.mktemp("runs") / "mae")


def test_all_draws_the_task_and_every_picture_of_the_encoder(run, images, tmp_path, capsys):
    assert main(["look", str(run), "--what", "all", "--images", "2", "--steps", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    names = {Path(file).name for file in printed.out.split()}
    assert {"recovered.png", "attention-1.png", "attention-2.png", "relative.png", "distances.png"} <= names
    assert {"components.png", "correlation.png", "depth.png", "nearest.png", "retrieval.png", "inversion.png"} <= names
    captions = {name.replace(".png", ".caption.json") for name in names if name.endswith(".png")}
    assert {path.name for path in tmp_path.iterdir()} == names | captions and "left out" not in printed.err
    assert all(min(Image.open(path).size) > 100 for path in tmp_path.glob("*.png"))


def test_an_encoder_of_a_file_is_looked_at_on_images_that_are_given(run, images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    encoder, words = str(run / "encoder.safetensors"), ["--what", "features", "--images", "2"]
    assert main(["look", encoder, str(images), *words]) == 0
    (file,) = capsys.readouterr().out.split()
    assert re.fullmatch(r"pictures-mae-\S+/components\.png", file)
    assert "has no images: give some" in failed(capsys, "look", encoder, *words)


def test_another_size_and_an_encoder_beside(run, tmp_path, capsys):
    given = ["look", str(run), "--what", "relative", "--images", "1", "--out", str(tmp_path)]
    twin = tmp_path / "elsewhere" / "mae"
    twin.mkdir(parents=True)
    shutil.copy(run / "encoder.safetensors", twin)
    assert main([*given, "--img_size", "64x32", "--beside", str(twin)]) == 0
    rows = (tmp_path / "relative.csv").read_text().splitlines()[1:]
    # one block of two heads of each
    assert [row.split(",")[0] for row in rows] == [*[str(run)] * 2, *["untrained"] * 2, *[str(twin)] * 2]
    assert "is given twice" in failed(capsys, *given, "--beside", run)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--query", "3,4"], "only for --what attention or correlation"),
        (["--what", "depth", "--steps", "9"], "only for --what inversion"),
        (["--what", "inversion", "--steps", "0"], "--steps must be 1 or more, not 0"),
        (["--img_size", "64"], "only for --what attention, relative"),
        (["--what", "depth", "--task", "a.py:B"], "--task has no effect on depth"),
        (["--what", "attention", "--blocks", "2"], "numbers from 1 to 1"),
    ],
)
def test_what_changes_nothing_is_refused(run, words, said, capsys):
    assert said in failed(capsys, "look", run, *words)


def test_all_leaves_out_the_task_of_a_run_without_checkpoints(run, images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("patchloom.look.look.PICTURES", {"features": PICTURES["features"]})
    light = tmp_path / "light"
    shutil.copytree(run, light, ignore=shutil.ignore_patterns("checkpoints", "pictures"))
    given = [str(images), "--images", "1", "--out", str(tmp_path / "out")]
    assert main(["look", str(light), *given, "--what", "features,all"]) == 0
    printed = capsys.readouterr()
    assert "task is left out: " in printed.err
    assert "components.png" in printed.out and "recovered.png" not in printed.out
    assert "is not the folder of a run" in failed(capsys, "look", run / "encoder.safetensors", *given, "--what", "task")


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
    assert "cannot be compared with mae" in capsys.readouterr().err


SPEC = EncoderSpec("nano", (32, 48), 8, 3, "sincos", {"embed_dim": 16, "depth": 3, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.5,) * 3, (0.25,) * 3, "mae", "photos-mae")
CPU = torch.device("cpu")


def test_names_of_pictures_and_numbers_of_blocks():
    assert parse_pictures("attention, depth") == parse_pictures(["attention", "depth", "depth"])
    assert parse_pictures("attention, depth") == ["attention", "depth"]
    assert parse_pictures("depth,all") == ["task", *PICTURES]
    for wrong, said in (("atention", "did you mean attention"), ("xyz", "choose from task, attention, .* or all")):
        assert re.search(said, refusal(parse_pictures, wrong))
    vit = build_encoder(SPEC)
    assert parse_blocks(None, vit) is None
    assert parse_blocks("3,1", vit) == (1, 3) == parse_blocks([1, 3], vit)
    assert parse_blocks(2, vit) == (2,)
    for wrong in ("0", "4", "1,x", "", [], "-1"):
        assert "numbers from 1 to 3, such as 1,3" in refusal(parse_blocks, wrong, vit)


def test_a_place_is_within_the_image():
    assert parse_points("47.5,31", (32, 48)) == ((47.5, 31),) and parse_points(None, (32, 48)) == ()
    assert parse_points([0, 0], (32, 48)) == ((0, 0),)
    assert parse_points("1,2; 3,4", (32, 48), 4) == parse_points([1, 2, 3, 4], (32, 48), 4) == ((1, 2), (3, 4))
    with pytest.raises(PatchloomError, match="2 points: give one.*--heads mean"):
        parse_points("1,2;3,4", (32, 48))
    assert "3 points: give 2 or fewer" in refusal(parse_points, "1,2;3,4;5,6", (32, 48), 2)
    for wrong in ("48,0", "0,32", "-1,0", "7", "1,2,3", "a,b", "nan,0", ";"):
        assert "48 wide and 32 high" in refusal(parse_points, wrong, (32, 48))


def test_an_encoder_at_another_size_keeps_its_weights(tmp_path):
    vit = build_encoder(SPEC)
    save_encoder(vit, CARD, tmp_path / "encoder.safetensors")
    found = named_encoder(tmp_path / "encoder.safetensors", None, (64, 32), CPU)
    assert input_size(found.vit) == (64, 32) and grid_size(found.vit) == (8, 4)
    assert torch.equal(found.vit.patch_embed.proj.weight, vit.patch_embed.proj.weight)
    twin = untrained_encoder(found, 0, CPU)
    assert twin.name == "untrained" and input_size(twin.vit) == (64, 32)
    assert not torch.equal(twin.vit.patch_embed.proj.weight, vit.patch_embed.proj.weight)
    with pytest.raises(PatchloomError, match="do not divide images of 30x32"):
        named_encoder(tmp_path / "encoder.safetensors", None, (30, 32), CPU)
