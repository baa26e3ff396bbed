"""Tests of ONNX files with onnxruntime: features of any batch size."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exporting import an_encoder, photographs
from refusing import refusal

from patchloom.data.loader import plain_batches
from patchloom.data.sources.open import open_data
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.export import to_onnx
from patchloom.export.export import export
from patchloom.nets.checkpoints.format import load_encoder_file


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("colours") / "images")


@pytest.fixture(scope="module")
def encoder(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return an_encoder(tmp_path_factory.mktemp("encoder"), colours, depth=1)


@pytest.fixture(scope="module")
def done(encoder: Path, colours: Path):
    return export(encoder, to="onnx", data=str(colours))


def features(encoder: Path, colours: Path, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    vit, card = load_encoder_file(encoder)
    (images,) = next(plain_batches(open_data(str(colours)).train, (16, 16), count)).views
    with torch.inference_mode():
        tokens = vit.forward_features(normalize(images, card.mean, card.std))
    return (images.float() / 255).numpy(), tokens.numpy(), tokens[:, 1:].mean(1).numpy()


def test_a_session_gives_the_encoders_features_of_any_number_of_images(done, encoder, colours):
    assert done.weights == encoder.with_name("encoder.onnx")
    session = onnxruntime.InferenceSession(done.weights, providers=["CPUExecutionProvider"])
    for count in (1, 3, 10):
        images, tokens, vectors = features(encoder, colours, count)
        found = session.run(["tokens", "features"], {"images": images})
        assert [one.shape for one in found] == [tokens.shape, vectors.shape] and len(images) == count
        assert abs(found[0] - tokens).max() < 1e-5 and abs(found[1] - vectors).max() < 1e-5
    onnx.checker.check_model(onnx.load(done.weights))
    assert b".py" not in done.weights.read_bytes()  # nor paths of the machine that made it


def test_the_file_tells_what_it_takes(done, encoder):
    about = onnxruntime.InferenceSession(done.weights).get_modelmeta()
    _, card = load_encoder_file(encoder)
    assert about.producer_name == "patchloom" and about.custom_metadata_map["pooling"] == "mean"
    assert json.loads(about.custom_metadata_map["mean"]) == list(card.mean)
    assert "[batch 3 16 16]" in about.custom_metadata_map["input"]


def test_the_printed_code_embeds_files(done, encoder, colours, capsys):
    assert done.difference < 1e-5 and re.search(r"\(mean tokens\) differ by at most \S+e-0[6-9]", done.checks[0])
    pasted: dict = {}
    exec(done.snippet, pasted)
    assert "torch" not in done.snippet and capsys.readouterr() == ("", "")  # the exporter says nothing
    _, _, vectors = features(encoder, colours, 10)
    source = open_data(str(colours)).train
    made = np.stack([pasted["embed"](source.describe(i)) for i in range(10)])
    # Pillow may round a pixel otherwise than torch
    assert abs(made - vectors).max() < 0.05 * abs(vectors).max()


def test_class_token_and_registers_are_pooled_together(colours, tmp_path):
    path = an_encoder(tmp_path, colours, depth=1, reg_tokens=2)
    made = export(path, to="onnx", data=str(colours), pooling="prefix")
    images, tokens, _ = features(path, colours, 2)
    (found,) = onnxruntime.InferenceSession(made.weights).run(["features"], {"images": images})
    assert abs(found - tokens[:, :3].mean(1)).max() < 1e-5
    assert "--to hf has no prefix pooling" in refusal(export, path, to="hf", data=str(colours), pooling="prefix")


def test_half_precision_says_its_own_difference(encoder, colours):
    half = export(encoder, to="onnx", fp16=True, data=str(colours), pooling="both")
    assert half.weights.name == "encoder-fp16.onnx" and "half-precision features" in half.sentence()
    assert 1e-6 < half.difference < 0.1
    types = {one.data_type for one in onnx.load(half.weights).graph.initializer if np.prod(one.dims) > 512}
    assert types == {onnx.TensorProto.FLOAT16}
    images, _, vectors = features(encoder, colours, 2)
    session = onnxruntime.InferenceSession(half.weights, providers=["CPUExecutionProvider"])
    (found,) = session.run(["features"], {"images": images})
    assert found.dtype == np.float32 and found.shape == (2, 64) and abs(found[:, 32:] - vectors).max() < 0.1


def test_what_is_not_the_same_is_not_written(done, encoder, colours, tmp_path, monkeypatch):
    written = to_onnx.render
    changed = '"images": images', '"images": images * 0.9'
    monkeypatch.setattr(to_onnx, "render", lambda *given, **values: written(*given, **values).replace(*changed))
    whole = done.weights.read_bytes()
    monkeypatch.setattr(to_onnx._Graph, "write", lambda graph, file, *_: file.write_bytes(whole))
    with pytest.raises(PatchloomError, match="features by onnxruntime differ by"):
        export(encoder, to="onnx", data=str(colours), out=tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_a_graph_that_cannot_be_written_is_a_sentence(encoder, colours, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no such operator\nand a page of advice")

    monkeypatch.setattr(torch.onnx, "export", fails)
    assert "as ONNX (no such operator)" in refusal(export, encoder, to="onnx", data=str(colours))
    monkeypatch.setattr(to_onnx, "_LARGEST", 1000)
    assert "2 GiB" in refusal(export, encoder, to="onnx")
