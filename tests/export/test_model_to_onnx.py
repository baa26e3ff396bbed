"""Classifiers, segmenters and detectors as ONNX, and the code beside them, which has no torch."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from dense_models import CLASSES, DETECTOR, SEGMENTER, SIZES, a_model
from PIL import Image
from refusing import refusal

from patchloom import predict
from patchloom.data.decode import read_image
from patchloom.dense.answers import detect_images, segment_image
from patchloom.dense.checkpoint import load_dense, save_dense
from patchloom.evaluate.classifier import Calibration, Classifier, ClassifierCard, save_classifier
from patchloom.export.export import export
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((70, 90), Image.Resampling.BICUBIC).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def run_code(done) -> dict:
    code = done.weights.with_suffix(".py").read_text()
    assert code == done.snippet and "torch" not in code and "patchloom" not in code.replace(str(done.weights), "")
    names: dict = {}
    exec(code, names)
    return names


@pytest.mark.parametrize("test_crop", [1.0, 0.875])
def test_a_classifier_gives_predicts_probabilities(photo, tmp_path, test_crop):
    torch.manual_seed(0)
    card = EncoderCard(EncoderSpec("nano", (32, 32), 8, options=SIZES), (0.5,) * 3, (0.25,) * 3, "mae", "small")
    model = Classifier(build_encoder(card.spec), 3, "mean")
    torch.nn.init.normal_(model.head.weight)
    about = ("keep", "mean", CLASSES, "photos", "0" * 16, 0, {"test_crop": test_crop})
    calibration = Calibration(2.0, 30, 0.5, 0.4, 0.2, 0.1).plain()
    path = tmp_path / "model.safetensors"
    save_classifier(model, ClassifierCard(card, *about, calibration=calibration), path)
    done = export(path, to="onnx", data=str(photo.parent))
    assert done.weights == tmp_path / "model.onnx" and done.difference < 1e-5
    session = onnxruntime.InferenceSession(done.weights)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)
    assert [len(one) for one in session.run(None, {"images": np.zeros((5, 3, 32, 32), np.float32)})] == [5]
    predict(path, photo, out=tmp_path / "out", pictures=0)
    theirs = [float(one) for one in (tmp_path / "out" / "predictions.csv").read_text().splitlines()[1].split(",")[3:]]
    assert [*run_code(done)["predict"](photo).values()] == pytest.approx(theirs, abs=0.02)
    assert "exported as a whole to ONNX only" in refusal(export, path)
    assert "--fp16 is for encoders" in refusal(export, path, to="onnx", fp16=True)


def test_a_segmenter_is_a_window_that_its_code_moves(photo, tmp_path):
    path = tmp_path / "maps.safetensors"
    save_dense(*a_model("segment", (32, 32), **SEGMENTER), path)
    done = export(path, to="onnx")
    assert done.difference < 1e-5 and "images of noise" in done.sentence()
    model, card = load_dense(path)
    ours = segment_image(model, read_image(photo), card.encoder.mean, card.encoder.std, card.side).numpy()
    theirs = run_code(done)["segment"](photo)
    assert theirs.shape == ours.shape == (90, 70) and (theirs == ours).mean() > 0.97
    small = tmp_path / "small.png"
    Image.open(photo).crop((0, 0, 40, 20)).save(small)
    ours = segment_image(model, read_image(small), card.encoder.mean, card.encoder.std, card.side).numpy()
    assert (run_code(done)["segment"](small) == ours).mean() > 0.97


def test_a_detector_is_one_graph_with_its_heads(photo, tmp_path):
    path = tmp_path / "boxes.safetensors"
    save_dense(*a_model("detect", (64, 64), **DETECTOR), path)
    done = export(path, to="onnx", out=tmp_path / "other.onnx")
    assert any(one.startswith("Its scores differ") for one in done.checks) and done.difference < 1e-3
    Image.open(photo).crop((0, 0, 70, 70)).save(tmp_path / "square.png")
    model, card = load_dense(path)
    image = read_image(tmp_path / "square.png")
    ((found, fit),) = detect_images(model, [image], card.encoder.mean, card.encoder.std, score=0.05)
    ours = fit.detected(found, 0.05)
    theirs = run_code(done)["detect"](tmp_path / "square.png", score=0.05)
    assert len(theirs) == len(ours.scores) > 0
    assert [one[1] for one in theirs] == pytest.approx(ours.scores.tolist(), abs=0.01)
    assert theirs[0][2] == pytest.approx(ours.boxes[0].tolist(), abs=1)
    assert "ends in .onnx" in refusal(export, path, to="onnx", out=tmp_path / "other.pt")
