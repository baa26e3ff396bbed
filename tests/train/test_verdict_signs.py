"""Inputs of the verdict: kNN against the controls, and significantly worse measures."""

import pytest
import torch

from patchloom.claims import Level
from patchloom.questions.question import Measure
from patchloom.runs.settings import Settings
from patchloom.train.verdict import ClassResult, VerdictInputs, logged_class_result


def test_classes_are_compared_with_the_better_control():
    start = {"knn": "0.10", "knn:untrained": "0.10", "knn:raw pixels": "0.17"}
    found = logged_class_result([start, {"knn": ""}, {"knn": "0.30"}], 2000)
    assert found == ClassResult(0.3, "raw pixels", 0.17, Level.CLEAR, Level.CLEAR, 2000)
    between = logged_class_result([start, {"knn": "0.16"}], 2000)
    assert (between.control, between.level, between.untrained) == ("raw pixels", Level.NONE, Level.WEAK)
    assert logged_class_result([{"held_out": "1"}], 2000) is None


@pytest.mark.parametrize(
    ("start", "found", "n", "worse"),
    [
        (0.062, 0.042, 48, False),  # the position accuracy of a run of a few updates: three right patches fewer
        (0.062, 0.050, 4800, False),  # certain, but it is 2 % of the way to perfect that count
        (0.50, 0.44, 48, False),
        (0.50, 0.44, 4800, True),
        (0.50, 0.56, 4800, False),
    ],
)
def test_worse_than_at_the_start_is_more_than_chance(start, found, n, worse):
    """Accuracies of images with 16 patches each, with independent errors and binomial deviation."""
    apart = (found * (1 - found) / 16) ** 0.5 * torch.tensor([1.0, -1.0]).repeat(n // 2)
    before = start + apart.reshape(-1, 4)[:, [0, 2, 1, 3]].flatten()
    measure = Measure("accuracy", found + apart, {"chance": torch.full((n,), 0.5)}, "chance", True)
    rows = [{"step": "0", "held_out": f"{start}"}, {"step": "6", "held_out": f"{found}"}]
    settings = Settings(data="photos", task={"name": "mae"}, model={"name": "nano"}, epochs=2, blr=4e-3)
    results = {"0": before.tolist()}
    assert VerdictInputs(measure, rows, settings, 6, 6, results=results).worse_than_at_the_start() == worse
