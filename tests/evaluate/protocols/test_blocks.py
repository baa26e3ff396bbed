"""The non-linear probe trains nothing of the encoder."""

from pathlib import Path

import numpy as np
import pytest
import torch

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import training
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.protocols import blocks, evaluate
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder

QUICK = {"device": "cpu", "epochs": 2, "flip": False}


def test_the_encoder_stays_as_it_is(tiny_encoder: Path, record_reads, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fit = [], training.train_and_test

    class Watched(Classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append((self, {name: weight.clone() for name, weight in self.state_dict().items()}))

    monkeypatch.setattr(blocks, "Classifier", Watched)
    record = record_reads(48, 30)
    report = evaluate("blocks:2", tiny_encoder, "digits", **QUICK, blr=0.02)
    assert [row.encoder for row in report.rows] == [
        "tiny",
        "untrained",
        "best constant",
    ] and fit is training.train_and_test
    assert {row.protocol for row in report.rows} == {"blocks:2"} and report.headline.startswith("Probe of 2 blocks")
    assert set(record[: record.index("test")]) == {"train"} and record.count("test") == 60
    vit, _ = load_encoder_file(tiny_encoder)
    assert torch.equal(made[0][0].encoder.norm.weight, vit.norm.weight) and len(made) == 2
    for model, before in made:
        changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
        assert changed and not any(name.startswith("encoder.") for name in changed)
        assert {name.split(".")[0] for name in changed} == {"body", "norm", "head"}
        assert {name.split(".")[1] for name in changed if name.startswith("body")} == {"0", "1"}
    again = evaluate("blocks:2", tiny_encoder, "digits", **QUICK, blr=0.02)
    assert again.rows == report.rows


def test_it_tells_digits_apart(tiny_encoder: Path) -> None:
    report = evaluate(
        "blocks:1", tiny_encoder, "digits", max_train=300, blr=0.03, control=False, **QUICK | {"epochs": 15}
    )
    assert report.rows[0].value > 0.35 > 0.2 > report.rows[-1].value and len(report.rows) == 2


def test_test_labels_choose_nothing(tiny_encoder: Path, record_reads) -> None:
    record_reads(60, 40)
    options = {"blr": [1e-3, 0.03], "control": False} | QUICK
    honest = evaluate("blocks:1", tiny_encoder, "digits", **options)
    record_reads(60, 40, np.random.default_rng(0).permutation(open_data("digits").test.labels[:40]))
    assert evaluate("blocks:1", tiny_encoder, "digits", **options).rows[0].settings == honest.rows[0].settings


def test_refusals(tiny_encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchloomError, match="--layer_decay has no effect in blocks:2"):
        evaluate("blocks:2", tiny_encoder, "digits", layer_decay=0.5, **QUICK)
    with pytest.raises(PatchloomError, match="blocks:0 trains no block"):
        evaluate("blocks:0", tiny_encoder, "digits", **QUICK)
    spec = EncoderSpec("nano", (8, 8), 4, channels=1, options={"depth": 1, "embed_dim": 32, "class_token": False})
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.3,), (0.4,), "mp3", "bare"), tmp_path / "bare.safetensors")
    with pytest.raises(PatchloomError, match="no class token for class features: use --pooling mean"):
        evaluate("blocks:2", tmp_path / "bare.safetensors", "digits", pooling="class", **QUICK)
