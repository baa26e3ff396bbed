import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from patchloom.errors import PatchloomError
from patchloom.evaluate import choose_strength, linear_probe
from patchloom.evaluate.linear import fit_path

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
