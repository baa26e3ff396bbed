"""A trained model comes back from its file as it was."""

from dataclasses import replace

import pytest
import torch
from dense_models import DETECTOR, SEGMENTER, a_model
from refusing import refusal

from patchloom.dense.checkpoint import load_dense, read_dense, save_dense
from patchloom.nets.checkpoints.format import save_encoder


@pytest.mark.parametrize(("kind", "size", "about"), [("segment", (32, 48), SEGMENTER), ("detect", (64, 64), DETECTOR)])
@torch.inference_mode()
def test_a_model_answers_as_before(tmp_path, kind, size, about):
    model, card = a_model(kind, size, **about)
    save_dense(model, card, tmp_path / "model.safetensors")
    torch.manual_seed(7)
    expected_draw = torch.rand(1)
    torch.manual_seed(7)
    again, same = load_dense(tmp_path / "model.safetensors")
    assert torch.rand(1) == expected_draw  # loading draws nothing of the caller's numbers
    before, after = model.state_dict(), again.state_dict()
    assert same == card and not again.training
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    images = torch.randn(1, 3, *size)
    if kind == "segment":
        assert torch.equal(again(images).main, model(images).main)
    else:
        (one,), (other,) = model(images, [size]), again(images, [size])
        assert torch.equal(one.boxes, other.boxes) and torch.equal(one.scores, other.scores)


def test_files_of_something_else_or_damaged_ones_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    assert "--save" in refusal(load_dense, path)
    model, card = a_model("segment", (32, 32), **SEGMENTER)
    save_encoder(model.maps.encoder, card.encoder, path)
    assert "is an encoder, not a segmenter or detector" in refusal(read_dense, path)
    save_dense(model, replace(card, classes=("a", "b")), path)
    assert "is not what patchloom wrote" in refusal(load_dense, path)
    save_dense(model, card, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "checksum" in refusal(load_dense, path)
