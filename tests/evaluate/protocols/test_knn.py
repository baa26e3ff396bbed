from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from patchloom.data.sources.open import open_data
from patchloom.data.splits import pick
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import extract
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.knn import knn_accuracies
from patchloom.nets.checkpoints.format import load_encoder_file

IMAGES, LABELS = load_digits(return_X_y=True)
# noise keeps the accuracies far from 1 and apart from each other, so that a wrong vote shows
NOISY = (IMAGES + np.random.default_rng(0).normal(0, 8, IMAGES.shape)).astype(np.float32)
FEATURES, TARGETS = torch.from_numpy(NOISY), torch.from_numpy(LABELS)


@pytest.mark.parametrize("weighted", [True, False])
def test_agrees_with_scikit_learn(weighted: bool) -> None:
    ours = knn_accuracies(FEATURES[:1200], TARGETS[:1200], FEATURES[1200:], TARGETS[1200:], weighted=weighted, chunk=77)
    vote = _vote if weighted else "uniform"
    for k in (1, 5, 20, 100):
        theirs = KNeighborsClassifier(k, weights=vote, metric="cosine", algorithm="brute")
        assert ours[k] == pytest.approx(theirs.fit(NOISY[:1200], LABELS[:1200]).score(NOISY[1200:], LABELS[1200:]))
    assert len(set(ours.values())) == 4


@pytest.mark.parametrize("gallery", [1.0, 0.1])
def test_the_protocol_agrees_with_scikit_learn_on_features_of_an_encoder(tiny_encoder: Path, gallery: float) -> None:
    report = evaluate("knn", tiny_encoder, "digits", device="cpu", ks=(1, 20, 100), gallery=gallery, seed=2)
    digits, (vit, card) = open_data("digits"), load_encoder_file(tiny_encoder)
    voting = np.arange(1437)
    if gallery < 1:
        voting = np.setdiff1d(voting, pick(digits.train.labels, 1437 - 144, 2))
        counts = np.bincount(digits.train.labels[voting])
        assert abs(counts - np.bincount(digits.train.labels) / 10).max() < 1  # each class in its share
        assert "The gallery is a stratified 10 % of 1,437 training images (seed 2)." in report.protocol
    train, test = (extract(vit, card, source, device="cpu") for source in (digits.train.subset(voting), digits.test))
    assert {row.settings.get("gallery", 1.0) for row in report.rows if "k" in row.settings} == {gallery}
    found = 0
    for row in report.rows:
        if row.encoder != "tiny":
            continue
        theirs = KNeighborsClassifier(row.settings["k"], weights=_vote, metric="cosine", algorithm="brute")
        theirs.fit(train.pooled(row.pooling).numpy(), train.labels)
        score = theirs.score(test.pooled(row.pooling).numpy(), test.labels)
        assert row.value == pytest.approx(score, abs=1.1 / 360)  # two neighbours may be equally near
        found += row.value == pytest.approx(score)
    assert found >= 8 and len({row.value for row in report.rows}) > 8


def test_extremas_protocol(tiny_encoder: Path) -> None:
    """A gallery of 10 %, k = 200, of more images than digits has: what is too large for it is left out, and said."""
    report = evaluate("knn", tiny_encoder, "digits", device="cpu", pooling="mean", ks=(20, 200), gallery=0.1)
    assert {row.settings["k"] for row in report.rows if "k" in row.settings} == {20}
    assert "the k most similar of 144 training images" in report.protocol
    assert "Left out, since larger than the gallery: k = 200." in report.protocol
    whole = evaluate("knn", tiny_encoder, "digits", device="cpu", pooling="mean", ks=(20, 200))
    assert {row.settings["k"] for row in whole.rows if "k" in row.settings} == {20, 200}
    assert "Left out" not in whole.protocol and "gallery" not in whole.protocol
    assert whole.quoted[0].value > report.quoted[0].value
    for share in (0.0, -0.1, 1.01):
        with pytest.raises(PatchloomError, match="--gallery must be a fraction above 0"):
            evaluate("knn", tiny_encoder, "digits", gallery=share)


def _vote(distances: np.ndarray) -> np.ndarray:
    return np.exp((1 - distances) / 0.07)


def test_k_beyond_the_gallery_is_dropped() -> None:
    some = FEATURES[:10], TARGETS[:10]
    assert list(knn_accuracies(*some, *some, ks=(20, 5, 1))) == [1, 5]
    for ks in ((20,), (0, 1)):
        with pytest.raises(PatchloomError, match="gallery of 10"):
            knn_accuracies(*some, *some, ks=ks)


def test_a_class_that_the_gallery_lacks_is_missed() -> None:
    x, y = FEATURES[:4], torch.tensor([0, 0, 1, 1])
    assert knn_accuracies(x, y, x, torch.tensor([0, 0, 1, 7]), ks=(1,)) == {1: 0.75}
