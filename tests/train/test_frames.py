"""Runs with patches one pixel wide: storing, loading, exporting, and starting from them."""

import numpy as np
import pytest
import torch
from killing import SMALL
from PIL import Image
from timm.layers.pos_embed_rel import RelPosBias

from patchloom import pretrain
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import load_encoder_file, read_encoder_card
from patchloom.nets.encode import patch_positions
from patchloom.nets.finetune import at_size, with_variant
from patchloom.patches.positions import sincos_1d
from patchloom.runs.folder import RunFolder
from patchloom.train.estimate import refuse_too_large

pytestmark = pytest.mark.usefixtures("quick_probe")

FRAMES = SMALL | {"img_size": (12, 20), "patch_size": (12, 1), "epochs": 1, "flip": False}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(24):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 20), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory):
    return pretrain(pictures, "mae", out=tmp_path_factory.mktemp("runs") / "mae", positions="learned", **FRAMES).folder


def test_what_is_stored_is_read_again(run, pictures, capsys):
    settings, spec = RunFolder(run).read_config(), read_encoder_card(run / "encoder.safetensors").spec
    assert settings.patch_size == spec.patch_size == (12, 1) and spec == settings.encoder_spec()
    vit, _ = load_encoder_file(run)
    assert vit.patch_embed.proj.weight.shape == (32, 1, 12, 1) and vit.pos_embed.shape == (1, 21, 32)
    pretrain(pictures, "mae", out=run, positions="learned", **FRAMES)
    assert "is finished" in capsys.readouterr().out
    with pytest.raises(PatchloomError, match="patch_size: was 12x1, now 6x1"):
        pretrain(pictures, "mae", out=run, positions="learned", **FRAMES | {"patch_size": (6, 1)})


def test_the_export_builds_it_with_timm(run, pictures, capsys):
    assert main(["export", str(run), "--data", str(pictures)]) == 0
    assert "patch_size=(12, 1)," in capsys.readouterr().out


def test_another_length_begins_with_its_weights(run, pictures, tmp_path, capsys):
    longer = FRAMES | {"img_size": (12, 30), "patch_size": "auto", "from_run": run}
    pretrain(pictures, "mae", out=tmp_path / "longer", **longer)
    printed = capsys.readouterr().out
    assert "patch_size           12x1         (as in" in printed
    assert "pos_embed: from a grid of 1x20 to 1x30" in printed


def test_it_is_fine_tuned_with_other_positions(run):
    vit, card = load_encoder_file(run)
    table = patch_positions(with_variant(vit, card, "fixed"))
    assert torch.equal(table, sincos_1d(32, torch.arange(20)))
    biases = [one for one in with_variant(vit, card, "relative").modules() if isinstance(one, RelPosBias)]
    with torch.no_grad():
        table = biases[0].relative_position_bias_table.normal_()
    of_frames = biases[0].get_bias()[0, 0, 1:, 1:]
    assert torch.equal(of_frames[1:, 1:], of_frames[:-1, :-1]) and len(of_frames.unique()) == 39 <= len(table)


def test_dense_predictions_are_refused(run):
    vit, card = load_encoder_file(run)
    with pytest.raises(PatchloomError, match="patches of 12x1 pixels are not square"):
        at_size(vit, card, (24, 40))


def test_a_step_is_counted(run):
    assert refuse_too_large(RunFolder(run).read_config(), 8) is None
