"""Encoder files that a run keeps on its way (``--keep_every``)."""

import pytest
import torch
from killing import SMALL
from running import killed, rows
from safetensors.torch import load_file

import patchloom
from patchloom.nets.checkpoints.format import read_encoder_card
from patchloom.runs.folder import RunFolder
from patchloom.train.checkpointing import TrainState
from patchloom.train.loop import kept_epoch, pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

SHORT = SMALL | {"epochs": 3, "keep_every": 1}


@pytest.fixture(scope="module")
def images(unlabelled_images):
    return unlabelled_images


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "encoders").iterdir())}


def test_an_update_completes_the_epochs_at_whose_end_it_arrives():
    assert [kept_epoch(range(i, i + 1), 3, 2) for i in range(12)] == [0] * 5 + [2] + [0] * 5 + [4]
    assert [kept_epoch(range(i, i + 4), 3, 1) for i in (0, 4, 8)] == [1, 2, 4], "an update may end within an epoch"
    assert kept_epoch(range(2, 3), 3, None) == 0


def test_kept_encoders_are_those_of_their_epochs_and_change_nothing(images, tmp_path, monkeypatch):
    whole = pretrain(images, "mae", out=tmp_path / "whole" / "run", **SHORT).folder
    kept = bytes_of(whole)
    assert [*kept] == ["epoch-0001.safetensors", "epoch-0002.safetensors", "epoch-0003.safetensors"]
    last, final = (load_file(whole / name) for name in ("encoders/epoch-0003.safetensors", "encoder.safetensors"))
    first = load_file(whole / "encoders" / "epoch-0001.safetensors")
    assert last.keys() == final.keys() and all(torch.equal(last[name], final[name]) for name in final)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], final["blocks.0.attn.qkv.weight"])
    plain = pretrain(images, "mae", out=tmp_path / "plain" / "run", **SHORT | {"keep_every": None}).folder
    assert (plain / "encoder.safetensors").read_bytes() == (whole / "encoder.safetensors").read_bytes()
    assert rows(plain) == rows(whole) and not (plain / "encoders").exists()

    folder = RunFolder(whole)
    about, card = (read_encoder_card(path) for path in (folder.kept_encoder(2), folder.encoder))
    assert about.name == "run (epoch 2 of 3)" and (about.spec, about.trained_on) == (card.spec, card.trained_on)
    vit, found = patchloom.load_encoder(folder.kept_encoder(1))
    assert found.name == "run (epoch 1 of 3)"
    assert torch.equal(vit.blocks[0].attn.qkv.weight, first["blocks.0.attn.qkv.weight"])

    cut = tmp_path / "cut" / "run"
    killed(monkeypatch, TrainState, "count", 8, images, out=cut, task="mae", **SHORT)
    pretrain(images, "mae", out=cut, **SHORT)
    assert bytes_of(cut) == kept


def test_a_run_may_begin_to_keep_encoders_and_is_planned_with_their_bytes(images, tmp_path):
    given = SHORT | {"keep_every": None, "out": tmp_path / "run"}
    bytes_needed = [
        pretrain(images, "mae", dry_run=True, **given | {"keep_every": every}).planned["forecast"]["disc_bytes"]
        for every in (None, 1, 2)
    ]
    plain, each, second = bytes_needed
    assert each - plain == 3 * (second - plain) > 0
    pretrain(images, "mae", **given)
    longer = pretrain(images, "mae", **given | {"epochs": 4, "keep_every": 1}).folder
    assert [path.name for path in (longer / "encoders").iterdir()] == ["epoch-0004.safetensors"]
    pretrain(images, "mae", **given | {"epochs": 5})
    assert (longer / "encoders" / "epoch-0004.safetensors").is_file(), "training on keeps them"
