"""Runs that start from the weights of another run, or from public ones."""

import numpy as np
import pytest
import torch
from golden import Oracle
from killing import SMALL
from running import column
from safetensors.torch import load_file

from patchloom.errors import PatchloomError
from patchloom.train import loop as training
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

OPEN = {name: value for name, value in SMALL.items() if name not in ("model", "img_size", "patch_size")}
OPEN |= {"epochs": 1}


@pytest.fixture(scope="module")
def images(unlabelled_images):
    return unlabelled_images


@pytest.fixture(scope="module")
def earlier(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("earlier") / "run"
    return pretrain(images, "lut", out=out, positions="learned", **SMALL | {"epochs": 2}).folder


@pytest.fixture
def begun(monkeypatch):
    """States of each run's task before its first step."""
    states, train = [], training.train

    def noted(fabric, task, *given):
        states.append({name: value.detach().clone() for name, value in task.state_dict().items()})
        return train(fabric, task, *given)

    monkeypatch.setattr(training, "train", noted)
    return states


def weights(run):
    saved = load_file(run / "checkpoints" / "last.safetensors")
    return {name: value for name, value in saved.items() if not name.startswith("optimizer.")}


def test_a_run_begins_where_another_one_is(images, earlier, begun, tmp_path, capsys):
    run = pretrain(images, "lut", from_run=str(earlier), out=tmp_path / "run", **OPEN).folder
    assert begun[0].keys() == weights(earlier).keys()
    assert all(torch.equal(value, weights(earlier)[name]) for name, value in begun[0].items())
    assert column(run, "held_out")[0] == column(earlier, "held_out")[-1]
    told = capsys.readouterr().out
    words = " ".join(told.split())
    assert f"model nano (as in {earlier})" in words and "positions learned" in words
    assert f"Weights from the encoder of {earlier}: 18 matched, 0 missing, 0 unexpected" in told
    assert f"Weights from the rest of {earlier}" in told
    # the same command goes on with its own weights, and reads the other run no more
    (run / "summary.txt").unlink()
    earlier.rename(earlier.with_name("moved"))
    try:
        pretrain(images, "lut", from_run=str(earlier), out=run, **OPEN)
    finally:
        earlier.with_name("moved").rename(earlier)
    assert not all(torch.equal(value, weights(earlier)[name]) for name, value in begun[1].items())


def test_colour_weights_begin_a_run_of_other_channels(earlier, begun, tmp_path, capsys):
    bands = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 5), dtype=np.uint8)
    run = pretrain(bands, "lut", init=str(earlier), out=tmp_path / "run", **OPEN).folder
    said = capsys.readouterr().out
    assert "from 3 channels to 5, repeated in turn, times 3/5" in said and "5            (as the images)" in said
    key = "encoder.patch_embed.proj.weight"
    assert torch.allclose(begun[0][key], weights(earlier)[key][:, [0, 1, 2, 0, 1]] * 3 / 5)
    assert load_file(run / "start.safetensors")["patch_embed.proj.weight"].shape[1] == 5  # the control
    with pytest.raises(PatchloomError, match="give --channels 5 and images of as many"):
        pretrain(bands[..., :4], "lut", init=str(run), out=tmp_path / "four", **OPEN)


def test_another_task_takes_the_encoder_and_its_teacher_follows(images, earlier, begun, tmp_path, capsys):
    pretrain(
        images, "extrema", from_run=str(earlier), positions="learned", out=tmp_path / "run", **SMALL | {"epochs": 0.3}
    )
    before = weights(earlier)
    mine = {name.removeprefix("encoder."): v for name, v in begun[0].items() if name.startswith("encoder.")}
    for name, value in mine.items():
        there = before[f"encoder.{name}"]
        # this task's encoder has no class token, and so no position for it
        assert torch.equal(value, there[:, 1:] if name == "pos_embed" else there), name
    followed = "questions.agreement.teacher.encoder."
    teacher = {name.removeprefix(followed): v for name, v in begun[0].items() if name.startswith(followed)}
    assert teacher.keys() == mine.keys() and all(torch.equal(value, mine[name]) for name, value in teacher.items())


def test_a_papers_own_file_is_gone_on_with(images, begun, tmp_path, capsys):
    oracle = Oracle("mae")
    torch.save(oracle.saved(), tmp_path / "mae.pth")
    c = oracle.config
    model = {"name": "vit_tiny_patch16_224", "embed_dim": c["dim"], "depth": c["depth"], "num_heads": c["heads"]}
    settings = SMALL | {"model": model, "img_size": (c["img"], c["img"]), "patch_size": c["patch"], "epochs": 1}
    task = {"name": "mae"} | oracle.decoder_options()
    pretrain(images, task, init=str(tmp_path / "mae.pth"), out=tmp_path / "run", **settings)
    expected = oracle.under("w.")
    assert begun[0].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in begun[0].items())
    told = " ".join(capsys.readouterr().out.split())
    assert f"positions sincos (as in {tmp_path / 'mae.pth'})" in told and "Also loaded, from MAE: pixel decoder" in told
    assert "(model, of MAE): 30 matched, 0 missing, 1 unexpected" in told


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"from_run": "nowhere"}, "nowhere is not the folder of a run"),
        ({"init": "nowhere.pth"}, "there is no encoder at nowhere.pth"),
        ({"init": "timm:vit_tiny_patch16_999"}, "timm has no model called"),
    ],
)
def test_weights_that_are_not_there_are_told_and_nothing_is_begun(wrong, said, images, tmp_path):
    with pytest.raises(PatchloomError, match=said):
        pretrain(images, "mae", out=tmp_path / "run", **OPEN | wrong)
    assert not (tmp_path / "run").exists()


def test_weights_of_another_width_are_refused_before_anything_is_written(images, earlier, tmp_path):
    other = SMALL | {"model": {"name": "nano", "embed_dim": 64, "depth": 1, "num_heads": 2}}
    with pytest.raises(PatchloomError, match="does not fit this encoder.* the width there is 32, here 64"):
        pretrain(images, "mae", from_run=str(earlier), positions="learned", out=tmp_path / "run", **other)
    assert not (tmp_path / "run").exists()
