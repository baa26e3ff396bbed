"""Tables of benchmarks/adapt.py: gains over the start with intervals, from stored results."""

from dataclasses import fields, replace

import adapt
import numpy as np
import pytest

from patchloom.options.protocols import PROTOCOLS
from patchloom.results.claims import difference
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Outcomes, Result


def report(right, fingerprint="f" * 16):
    """Return the evaluation of an accuracy with ``right`` [n], or of a mean IoU with such pseudo-values."""
    one = Result.of_images("run", "knn", {"k": 20}, right)
    if right.dtype != bool:
        one = replace(Result.exact("mIoU", "run", "segment", {}, right.mean() - 0.01), outcomes=Outcomes(right, True))
    return Evaluation([one], "", "", (one,), "cells", fingerprint, 0, len(right))


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Return a function that stores the results [s n] of an arm."""
    waiting = []
    monkeypatch.setattr(adapt, "evaluate", lambda *_, **__: waiting.pop(0))

    def scored(arm, results, **about):
        waiting.extend(report(one, **about) for one in results)
        for seed in range(len(results)):
            (tmp_path / f"{arm}-{seed}").mkdir(exist_ok=True)
        return [adapt.scored(tmp_path / f"{arm}-{seed}", tmp_path, "knn", seed=seed) for seed in range(len(results))]

    return scored


@pytest.mark.parametrize("kind", ["accuracy", "mean IoU"])
def test_the_gain_is_that_of_the_house_over_images_and_trainings(answers, capsys, kind):
    rng = np.random.default_rng(0)
    # each side has images that are hard in all trainings
    start, arm = (rng.random(400) + rng.normal(0, 0.1, (3, 400)) for _ in range(2))
    start, arm = start < 0.6, arm < np.array([[0.75], [0.8], [0.85]])
    values = None
    if kind == "mean IoU":
        start, arm = start + rng.normal(0, 0.1, start.shape), arm + rng.normal(0, 0.1, arm.shape)
        values = [[float(one.mean()) - 0.01 for one in side] for side in (arm, start)]
    found = {"start": answers("start", start), "mae": answers("mae", arm)}
    gain, same = adapt.gain_over(*found.values()), difference(arm, start, values)
    assert (gain.low, gain.high) == pytest.approx((same.low, same.high)) and gain.trainings == 3 and gain.n == 400
    assert 0 < gain.over_images < gain.high - gain.value and 0 < gain.over_seeds < gain.high - gain.value
    adapt.table("cells, vit, knn", found)
    title, first, second = capsys.readouterr().out.strip().splitlines()
    assert title.endswith("on 400 test images") and "better" not in first
    assert f"{gain.text()}, better over 3 trainings (± {100 * gain.over_images:.1f} over images" in second


def test_results_are_stored_with_those_of_single_images(answers, tmp_path):
    right = np.random.default_rng(0).random((2, 50)) < 0.5
    before = answers("mae", right)
    again = [adapt.scored(tmp_path / f"mae-{seed}", tmp_path, "knn", seed=seed) for seed in range(2)]  # evaluates none
    assert again == before and [one.outcomes.values.tolist() for one in again] == right.tolist()
    with pytest.raises(SystemExit, match="different images"):
        adapt.gain_over(before, answers("other", right, fingerprint="0" * 16))


def test_options_of_the_evaluations_are_known():
    for protocols in adapt.PROTOCOLS.values():
        for name, given in protocols:
            assert given.keys() <= {one.name for one in fields(PROTOCOLS[name].options)}
