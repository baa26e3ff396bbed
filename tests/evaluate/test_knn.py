import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from patchloom.errors import PatchloomError
from patchloom.evaluate import knn_accuracies

IMAGES, LABELS = load_digits(return_X_y=True)
# noise keeps the accuracies far from 1 and apart from each other, so that a wrong vote shows
NOISY = (IMAGES + np.random.default_rng(0).normal(0, 8, IMAGES.shape)).astype(np.float32)
FEATURES, TARGETS = torch.from_numpy(NOISY), torch.from_numpy(LABELS)


@pytest.mark.parametrize("weighted", [True, False])
def test_agrees_with_scikit_learn(weighted: bool) -> None:
    ours = knn_accuracies(FEATURES[:1200], TARGETS[:1200], FEATURES[1200:], TARGETS[1200:], weighted=weighted, chunk=77)
    vote = (lambda distance: np.exp((1 - distance) / 0.07)) if weighted else "uniform"
    for k in (1, 5, 20, 100):
        theirs = KNeighborsClassifier(k, weights=vote, metric="cosine", algorithm="brute")
        assert ours[k] == pytest.approx(theirs.fit(NOISY[:1200], LABELS[:1200]).score(NOISY[1200:], LABELS[1200:]))
    assert len(set(ours.values())) == 4


def test_k_beyond_the_gallery_is_dropped() -> None:
    some = FEATURES[:10], TARGETS[:10]
    assert list(knn_accuracies(*some, *some, ks=(20, 5, 1))) == [1, 5]
    for ks in ((20,), (0, 1)):
        with pytest.raises(PatchloomError, match="gallery of 10"):
            knn_accuracies(*some, *some, ks=ks)


def test_a_class_that_the_gallery_lacks_is_missed() -> None:
    x, y = FEATURES[:4], torch.tensor([0, 0, 1, 1])
    assert knn_accuracies(x, y, x, torch.tensor([0, 0, 1, 7]), ks=(1,)) == {1: 0.75}
