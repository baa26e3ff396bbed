"""Ensembles are of classifiers that may be compared, and average what they say."""

from pathlib import Path

import numpy as np
import pytest
import torch

from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.classifier import Classifier, ClassifierCard, save_classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.ensemble import agreement_of, average
from patchloom.evaluate.training import ClassPredictions
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard

SPEC = EncoderSpec("nano", (8, 8), 4, channels=1, options={"depth": 1, "embed_dim": 32, "num_heads": 2})
DIGITS = open_data("digits")
NAMES = DIGITS.train.classes


def saved(path: Path, draw: int, classes: tuple[str, ...] = NAMES, test: str = "", **about) -> Path:
    torch.manual_seed(draw)
    model = Classifier(build_encoder(SPEC), len(classes), "mean")
    torch.nn.init.normal_(model.head.weight)
    card = EncoderCard(SPEC, (0.3,), (0.37,), "mae", f"mae{draw}")
    about = {"data": "digits", "seed": 0, "settings": {}} | about
    save_classifier(
        model,
        ClassifierCard(card, "keep", "mean", classes, test=test or DIGITS.test.fingerprint(), **about),
        path,
    )
    return path


def test_a_model_with_itself_is_itself(tmp_path: Path) -> None:
    path = saved(tmp_path / "run" / "finetuned" / "digits-small-0.safetensors", 1)
    report = evaluate("ensemble", path, "digits", others=str(path), device="cpu")
    ensemble, one, other, majority = report.rows
    assert ensemble.value == one.value == other.value and majority.encoder == "best constant"
    assert ensemble.settings == {"members": 2, "agreement": 1.0}
    assert one.encoder == "mae1 (digits-small-0)" and "100.0% of the test images." in report.protocol
    assert evaluate("ensemble", tmp_path / "run", "digits", others=[str(path)], device="cpu").rows == report.rows
    assert (tmp_path / "run" / "results.csv").exists()
    plan = evaluate("ensemble", path, "digits", others=str(path), device="cpu", dry_run=True)
    assert plan.rows == [] and "would average mae1 (digits-small-0)" in plan.protocol


def test_two_models_are_averaged(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2, 3)]
    report = evaluate("ensemble", paths[0], "digits", others=f"{paths[1]},{paths[2]}", device="cpu")
    assert report.headline.startswith("Ensemble of 3: ") and report.n_test == 360
    assert 0 < report.rows[0].settings["agreement"] < 1 and "on average" in report.protocol
    assert len({row.value for row in report.rows[1:4]}) > 1


def test_the_mean_is_of_probabilities() -> None:
    labels = torch.tensor([0, 1])
    sure = ClassPredictions(torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), labels, [])
    unsure = ClassPredictions(torch.tensor([[0.0, 1.0, 0.0], [0.0, 9.0, 0.0]]), labels, [])
    mean = average([sure, unsure])
    expected = (sure.logits.softmax(1) + unsure.logits.softmax(1)) / 2
    torch.testing.assert_close(mean.logits.exp().float(), expected)
    assert mean.accuracy() == 1.0 and (sure.accuracy(), unsure.accuracy()) == (0.5, 0.5)
    assert agreement_of([sure, unsure]) == 0.0 and agreement_of([sure, unsure, sure]) == pytest.approx(1 / 3)


def test_wrong_pairs_are_refused_in_a_sentence(tmp_path: Path) -> None:
    good = saved(tmp_path / "good.safetensors", 1)
    hundred = tuple(f"c{i}" for i in range(100))
    for name, options, said in (
        ("hundred", {"classes": hundred, "data": "cifar100"}, "has 100 classes of cifar100, and digits has 10"),
        ("letters", {"classes": tuple("abcdefghij"), "data": "letters"}, "letters, with other class names"),
        ("split", {"test": "0" * 16, "seed": 3}, "another split .* use the same data and --seed 3"),
    ):
        other = saved(tmp_path / f"{name}.safetensors", 2, **options)
        with pytest.raises(PatchloomError, match=said):
            evaluate("ensemble", good, "digits", others=str(other), device="cpu")
    for run, others, said in (
        (good, "", "needs two or more classifiers"),
        (good, "nowhere", "no classifier at nowhere"),
        (tmp_path, str(good), "has no classifier of digits and seed 0"),
    ):
        with pytest.raises(PatchloomError, match=said):
            evaluate("ensemble", run, "digits", others=others, device="cpu")
    for number in (1, 2):
        saved(tmp_path / "finetuned" / f"{number}.safetensors", number)
    with pytest.raises(PatchloomError, match="several classifiers .* name one of 1.safetensors, 2.safetensors"):
        evaluate("ensemble", tmp_path, "digits", others=str(good), device="cpu")
    (tmp_path / "broken.safetensors").write_bytes(good.read_bytes()[:500])
    with pytest.raises(PatchloomError, match="cannot be read as a classifier"):
        evaluate("ensemble", tmp_path / "broken.safetensors", "digits", others=str(good), device="cpu")


def test_another_seed_splits_otherwise_where_there_is_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = DIGITS.train.subset(np.arange(100))
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(train, None))
    test = settings.parts_of("digits", settings.EvalSettings(seed=1)).test.fingerprint()
    path = saved(tmp_path / "one.safetensors", 1, test=test, seed=1)
    assert evaluate("ensemble", path, "digits", others=str(path), device="cpu", seed=1).n_test == 20
    with pytest.raises(PatchloomError, match="use the same data and --seed 1"):
        evaluate("ensemble", path, "digits", others=str(path), device="cpu")
