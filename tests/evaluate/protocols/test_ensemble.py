"""Ensembles are of classifiers that may be compared, and average what they say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import numbers

from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import settings
from patchloom.evaluate.classification import ClassPredictions, predict_classes
from patchloom.evaluate.classifier import Classifier, ClassifierCard, load_classifier, save_classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.ensemble import agreement_of, average
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.results import store

SPEC = EncoderSpec("nano", (8, 8), 4, channels=1, options={"depth": 1, "embed_dim": 32, "num_heads": 2})
DIGITS = open_data("digits")
NAMES = DIGITS.train.classes


def saved(path: Path, draw: int, classes: tuple[str, ...] = NAMES, test: str = "", **about) -> Path:
    torch.manual_seed(draw)
    model = Classifier(build_encoder(SPEC), len(classes), "mean")
    torch.nn.init.normal_(model.head.weight)
    card = EncoderCard(SPEC, (0.3,), (0.37,), "mae", f"mae{draw}")
    about = {"data": "digits", "seed": 0, "settings": {}, "test": test or DIGITS.test.fingerprint()} | about
    save_classifier(model, ClassifierCard(card, "keep", "mean", classes, **about), path)
    return path


def test_a_model_with_itself_is_itself(tmp_path: Path) -> None:
    path = saved(tmp_path / "run" / "finetuned" / "digits-small-0.safetensors", 1)
    report = evaluate("ensemble", path, "digits", others=str(path), device="cpu")
    ensemble, one, other, majority = report.results[:4]
    assert ensemble.value == one.value == other.value and majority.encoder == "best constant"
    assert ensemble.settings == {"members": 2, "agreement": 1.0} and one.encoder == "mae1 (digits-small-0)"
    again = evaluate("ensemble", tmp_path / "run", "digits", others=[str(path)], device="cpu")
    assert numbers(again.results) == numbers(report.results)
    assert (tmp_path / "run" / store.FILE).exists()
    plan = evaluate("ensemble", path, "digits", others=str(path), device="cpu", dry_run=True)
    assert plan.results == [] and "would average mae1 (digits-small-0)" in plan.method


def test_three_models_are_averaged(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2, 3)]
    report = evaluate("ensemble", paths[0], "digits", others=f"{paths[1]},{paths[2]}", device="cpu")
    test = open_data("digits").test
    each = [predict_classes(*_loaded(path, test)) for path in paths]
    assert report.results[0].value == average(each).accuracy() and report.n_test == 360
    assert [row.value for row in report.results[1:4]] == [one.accuracy() for one in each]
    assert report.results[0].settings == {"members": 3, "agreement": agreement_of(each)}


def _loaded(path: Path, test: Source) -> tuple:
    model, card = load_classifier(path)
    return model, test, card.encoder, settings.EvalSettings(device="cpu")


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
    hundred = saved(tmp_path / "hundred.safetensors", 2, tuple(f"c{i}" for i in range(100)), data="cifar100")
    letters = saved(tmp_path / "letters.safetensors", 2, tuple("abcdefghij"), data="letters")
    split = saved(tmp_path / "split.safetensors", 2, test="0" * 16, seed=3)
    (tmp_path / "broken.safetensors").write_bytes(good.read_bytes()[:500])
    for number in (1, 2):
        saved(tmp_path / "several" / "finetuned" / f"{number}.safetensors", number)
    for run, others, said in (
        (good, hundred, "100 classes of cifar100, and digits has 10"),
        (good, letters, "letters, with other class names"),
        (good, split, "another split .* --seed 3"),
        (good, "", "two or more classifiers"),
        (good, "nowhere", "no classifier at nowhere"),
        (tmp_path, good, "has no classifier of digits and seed 0"),
        (tmp_path / "several", good, "name one of 1.safetensors, 2.safetensors"),
        (tmp_path / "broken.safetensors", good, "cannot be read as a classifier"),
    ):
        with pytest.raises(PatchloomError, match=said):
            evaluate("ensemble", run, "digits", others=str(others), device="cpu")


def test_another_seed_splits_otherwise_where_there_is_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = DIGITS.train.subset(np.arange(100))
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(train, None))
    test = settings.parts_of("digits", settings.EvalSettings(seed=1)).test.fingerprint()
    path = saved(tmp_path / "one.safetensors", 1, test=test, seed=1)
    assert evaluate("ensemble", path, "digits", others=str(path), device="cpu", seed=1).n_test == 20
    with pytest.raises(PatchloomError, match="use the same data and --seed 1"):
        evaluate("ensemble", path, "digits", others=str(path), device="cpu")
