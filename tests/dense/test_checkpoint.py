"""A trained model comes back from its file as it was."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_models import DETECTOR, SEGMENTER, a_model

from patchloom.dense.checkpoint import load_dense, read_dense, save_dense
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import save_encoder


@torch.inference_mode()
def test_a_segmenter_answers_as_before(tmp_path: Path) -> None:
    model, card = a_model("segment", (32, 48), **SEGMENTER)
    save_dense(model, card, tmp_path / "model.safetensors")
    torch.manual_seed(7)
    expected_draw = torch.rand(1)
    torch.manual_seed(7)
    again, same = load_dense(tmp_path / "model.safetensors")
    assert torch.rand(1) == expected_draw  # loading draws nothing of the caller's numbers
    images = torch.randn(2, 3, 32, 48)
    assert same == card and not again.training and torch.equal(again(images).main, model(images).main)


@torch.inference_mode()
def test_a_detector_answers_as_before(tmp_path: Path) -> None:
    model, card = a_model("detect", (64, 64), **DETECTOR)
    save_dense(model, card, tmp_path / "model.safetensors")
    again, same = load_dense(tmp_path / "model.safetensors")
    assert same == card and not again.training
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    images = torch.randn(1, 3, 64, 64)
    (one,), (other,) = model(images, [(64, 64)]), again(images, [(64, 64)])
    assert torch.equal(one.boxes, other.boxes) and torch.equal(one.scores, other.scores)


def test_what_is_no_such_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="--save"):
        load_dense(tmp_path / "none.safetensors")
    model, card = a_model("segment", (32, 32), **SEGMENTER)
    path = tmp_path / "encoder.safetensors"
    save_encoder(model.maps.encoder, card.encoder, path)
    with pytest.raises(PatchloomError, match="but is not a segmenter or detector"):
        read_dense(path)
    save_dense(model, replace(card, classes=("a", "b")), tmp_path / "model.safetensors")
    with pytest.raises(PatchloomError, match="is not what patchloom wrote"):
        load_dense(tmp_path / "model.safetensors")
    save_dense(model, card, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(PatchloomError, match="checksum"):
        load_dense(tmp_path / "model.safetensors")
