from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from patchloom.data.sources.open import open_data
from patchloom.data.splits import pick
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract
from patchloom.evaluate.logistic import L2_STRENGTHS, choose_strength, fit_path, linear_probe
from patchloom.evaluate.protocols import evaluate
from patchloom.nets.checkpoints.format import load_encoder_file

IMAGES, LABELS = load_digits(return_X_y=True)
X, Y = torch.from_numpy(IMAGES.astype(np.float32)), torch.from_numpy(LABELS)


def test_agrees_with_scikit_learn() -> None:
    scaler = StandardScaler().fit(IMAGES[:1000])
    strengths = (1.0, 1e-2, 1e-3)
    for strength, probe in zip(strengths, fit_path(X[:1000], Y[:1000], strengths), strict=True):
        theirs = LogisticRegression(C=1 / (strength * 1000), tol=1e-7, max_iter=2000)
        theirs.fit(scaler.transform(IMAGES[:1000]), LABELS[:1000])
        reach = np.abs(theirs.coef_).max()
        assert np.abs(probe.weights.numpy().T - theirs.coef_).max() < 0.01 * reach
        assert np.abs(probe.biases.numpy() - theirs.intercept_).max() < 0.01 * reach
        expected = theirs.predict(scaler.transform(IMAGES[1000:]))
        assert (probe.predict(X[1000:]).numpy() == expected).mean() > 0.997


def test_the_protocol_agrees_with_scikit_learn_on_features_of_an_encoder(tiny_encoder: Path) -> None:
    report = evaluate("linear", tiny_encoder, "digits", device="cpu", pooling="mean", max_train=400, seed=3)
    row = report.rows[0]
    digits, (vit, card) = open_data("digits"), load_encoder_file(tiny_encoder)
    some = digits.train.subset(np.setdiff1d(np.arange(1437), pick(digits.train.labels, 1437 - 400, 3)))
    train, test = (extract(vit, card, source, device="cpu") for source in (some, digits.test))
    x, y = train.pooled("mean").numpy(), some.labels
    held = pick(y, 80, 3)
    rest = np.setdiff1d(np.arange(400), held)

    def score(of: np.ndarray, labels: np.ndarray, on: np.ndarray, truth: np.ndarray, strength: float) -> float:
        theirs = LogisticRegression(C=1 / (strength * len(of)), solver="newton-cg", tol=1e-6, max_iter=500)
        return make_pipeline(StandardScaler(), theirs).fit(of, labels).score(on, truth)

    inner = {strength: score(x[rest], y[rest], x[held], y[held], strength) for strength in L2_STRENGTHS}
    assert row.settings["held_out_accuracy"] == pytest.approx(inner[row.settings["l2"]], abs=1.1 / 80)
    assert inner[row.settings["l2"]] >= max(inner.values()) - 1.1 / 80 > inner[10.0]
    theirs = score(x, y, test.pooled("mean").numpy(), digits.test.labels, row.settings["l2"])
    assert row.value == pytest.approx(theirs, abs=2.1 / 360) and row.settings["held_out"] == 80


def test_starting_from_a_stronger_fit_changes_nothing() -> None:
    warm, cold = fit_path(X[:500], Y[:500], (1.0, 1e-2))[-1], fit_path(X[:500], Y[:500], (1e-2,))[0]
    assert (warm.weights - cold.weights).abs().max() < 0.01 * cold.weights.abs().max()


def test_the_strength_is_the_best_on_held_out_images() -> None:
    noisy = X[:600] + 12 * torch.randn(600, 64, generator=torch.Generator().manual_seed(0))
    choice = choose_strength(noisy, Y[:600], strengths=(1e4, 1e-1, 1e-6))
    alone = {s: choose_strength(noisy, Y[:600], strengths=(s,)).accuracy for s in (1e4, 1e-1, 1e-6)}
    assert choice.strength == max(alone, key=alone.get) == 1e-1
    assert choice.held_out == 120


def test_scaling_and_constant_features_do_not_matter() -> None:
    plain, _ = linear_probe(X[:300], Y[:300])
    shifted, _ = linear_probe(X[:300] * 100 + 7, Y[:300])
    assert (plain.predict(X[300:]) == shifted.predict(X[300:] * 100 + 7)).double().mean() > 0.99


def test_rare_classes_are_served() -> None:
    labels = Y[:200].clone()
    labels[labels == 9] = 0
    labels[:1] = 42
    probe, _ = linear_probe(X[:200], labels)
    assert probe.classes.tolist() == [*range(9), 42]
    assert linear_probe(X[:2], torch.tensor([3, 5]))[0].classes.tolist() == [3, 5]
    with pytest.raises(PatchloomError, match="two classes"):
        linear_probe(X[:5], torch.zeros(5, dtype=torch.int64))


def test_fewer_images_than_numbers_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    wide = IMAGES @ rng.normal(size=(64, 1500)) / 50 + rng.normal(size=(len(IMAGES), 1500))
    (probe,) = fit_path(torch.from_numpy(wide[:90].astype(np.float32)), Y[:90], [0.01])
    theirs = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (0.01 * 90), tol=1e-8, max_iter=5000))
    expected = theirs.fit(wide[:90], LABELS[:90]).predict(wide[90:])
    assert (probe.predict(torch.from_numpy(wide[90:].astype(np.float32))).numpy() == expected).mean() > 0.995
