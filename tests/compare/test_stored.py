"""Comparison of runs by their stored results."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patchloom import PatchloomError, compare, evaluate
from patchloom.results import store
from patchloom.results.claims import Claim, Difference
from patchloom.results.regression import MAE, R2, Predictions, regression_results
from patchloom.results.result import Result

ABOUT = {"data": "photos", "fingerprint": "0" * 16, "date": "2026-01-01", "quoted": True}


def stored(run: Path, right: int, protocol: str = "knn", n: int = 200, seed: int = 0, k: int = 20, **about) -> Path:
    """Store an evaluation with the first ``right`` of ``n`` images correct, in a folder that is a run."""
    run.mkdir(exist_ok=True)
    for name in ("requested.yaml", "config.yaml"):
        (run / name).touch()
    settings = {"k": k, "pooling": run.name, "held_out_accuracy": right / n}
    own = Result.of_images(run.name, protocol, settings, np.arange(n) < right)
    control = Result.of_images("untrained", protocol, settings, np.arange(n) < 10)
    store.append(run, [replace(one, seed=seed, **{**ABOUT, **about}) for one in (own, control)])
    return run


def folder_of(*runs: Path) -> list[str]:
    return [str(run) for run in runs]


def test_runs_are_compared_image_by_image(tmp_path):
    one = stored(stored(tmp_path / "one", 100), 100, "linear")
    better, equal = stored(tmp_path / "better", 140), stored(tmp_path / "equal", 101)
    found = compare(folder_of(one, better, equal))
    assert found.winner is None and len(found.tables) == 1, "no other run has linear"
    (_, first, second), against = found.tables[0][1].rows, {run.encoder: run.against for run in found.results}
    assert first[0] == "better" and "+20.0 points" in first[2] and first[3] == "yes, ahead" and second[3] == "no"
    (apart,) = against["better"]
    assert apart.control == "one" and apart.claim is Claim.BETTER and apart.high - apart.low < 0.2, "it is paired"
    assert "better is 20.0 points better than one" in found.verdict[0]
    assert "equal is indistinguishable from one" in found.verdict[1]
    assert found.plain()["results"][0]["encoder"] == "one" and not found.plain()["files"]


def test_evaluations_by_one_protocol_are_told_by_their_options(tmp_path):
    runs = [stored(stored(tmp_path / name, 100, k=5), 110, k=20, date="2026-01-02") for name in ("one", "two")]
    found = compare(folder_of(*runs))
    assert [title for title, _, _ in found.tables] == [f"knn, k {k} on 200 test images of photos" for k in (5, 20)]


def test_seeds_are_paired_and_repeated_evaluations_replaced(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for seed, right in ((0, 10), (0, 100), (1, 110), (2, 120)):
        stored(one, right, seed=seed, date=f"2026-01-0{seed + 1}T{right}")
    stored(stored(two, 160, seed=1), 150, seed=0)
    found = compare(folder_of(one, two))
    assert [(run.seed, run.value) for run in found.results] == [(0, 0.5), (1, 0.55), (0, 0.75), (1, 0.8)]
    assert found.results[-1].against[0].trainings == 2
    assert found.tables[0][1].rows[1][1] == "77.5 ± 3.5\n[45.7, 100.0]" and found.tables[1][1].rows[3][:2] == (
        "two",
        "1",
    )
    alone = stored(tmp_path / "alone", 150, seed=7)  # on the same images, by another seed
    assert [run.seed for run in compare(folder_of(one, alone)).results] == [0, 7]


def test_each_seed_may_have_drawn_its_own_test_images(tmp_path):
    runs = []
    for name, right in (("one", 100), ("two", 150)):
        for seed in range(3):
            about = {"fingerprint": f"{seed}" * 16, "against": (Difference("", 0.0, 0.0, 0.0, 200, 3),)}  # of 3 seeds
            run = stored(tmp_path / name, right + seed * (name == "two"), seed=seed, **about)
        runs.append(run)
    (apart,) = compare(folder_of(*runs)).results[-1].against
    assert apart.claim is Claim.BETTER and apart.trainings == 3 and apart.n == 200


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"k": 5}, "options differ: k"),
        ({"fingerprint": "1" * 16}, "test images differ"),
        ({"n": 150}, "knn on 150 images of photos"),
        ({"protocol": "linear"}, "two has linear on 200 images of photos"),
        ({"quoted": False}, "two has none"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path, other, words):
    runs = folder_of(stored(tmp_path / "one", 100), stored(tmp_path / "two", 110, **other))
    with pytest.raises(PatchloomError, match=words) as refused:
        compare(runs)
    assert "one has knn on 200 images of photos" in str(refused.value)


def test_runs_are_given_alone(tmp_path):
    one, two = (stored(tmp_path / name, 100) for name in ("one", "two"))
    for runs, options, words in (
        ([one], {}, "two different ones"),
        ([one, tmp_path / "one" / ".." / "one"], {}, "two different ones"),
        ([one, "shapes"], {}, "shapes is not"),
        ([one, two], {"seeds": 3}, "--seeds is for training"),
        ([one, two], {"dry_run": True}, "--dry_run is for training"),
    ):
        with pytest.raises(PatchloomError, match=words):
            compare(folder_of(*map(Path, runs)), **options)
    (two / "compare.yaml").touch()
    with pytest.raises(PatchloomError, match="two is a comparison: give runs in it"):
        compare(folder_of(one, two))


def test_runs_of_one_name_are_shown_by_their_paths(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    runs = folder_of(*(stored(tmp_path / name / "mae", 100) for name in "ab"))
    assert [row[0] for row in compare(runs).tables[0][1].rows] == ["a/mae", "b/mae"]


def test_damaged_results_are_left_out_with_a_note(tmp_path):
    one, two = stored(tmp_path / "one", 100), stored(stored(tmp_path / "two", 110), 110, "linear")
    for file in (two / store.FOLDER).iterdir():
        file.unlink()
    with pytest.raises(PatchloomError, match="two has none"):
        compare(folder_of(one, two))
    stored(two, 120, date="2026-01-02")
    with open(two / store.FILE, "a") as file:
        file.write("{\n")
    assert "line 7" in compare(folder_of(one, two)).notes[0]


def regressed(run: Path, spread: float) -> Path:
    """Store a regression whose predictions are off by ``spread`` times a normal number."""
    run.mkdir()
    rng, targets = np.random.default_rng(0), np.arange(100.0)
    predicted = targets + spread * rng.standard_normal(100)
    about = {"column": "age", "regressor": "ridge", "l2": spread, "held_out_score": 0.5}
    rows = regression_results(run.name, "regress", about, Predictions(targets, predicted), 1)
    store.append(run, [replace(one, **ABOUT | {"quoted": one.measure == R2}) for one in rows])
    return run


def test_regressions_are_compared_by_their_number_and_their_error(tmp_path):
    runs = [regressed(tmp_path / name, spread) for name, spread in (("one", 20.0), ("two", 5.0))]
    found = compare(folder_of(*runs))
    assert [title for title, _, _ in found.tables] == [
        f"regress, {name} on 100 test images of photos" for name in (R2, MAE)
    ]
    by_measure = {one.measure: one for one in found.results if one.encoder == "two"}
    better, lower = (by_measure[measure].against[0] for measure in (R2, MAE))
    assert better.claim is lower.claim is Claim.BETTER and better.value > 0 > lower.value and not lower.higher_is_better
    one, two = (np.abs(spread * np.random.default_rng(0).standard_normal(100)) for spread in (20.0, 5.0))
    assert lower.value == pytest.approx((two - one).mean()) and lower.high - lower.low < 8  # it is paired
    assert "two is" in found.verdict[0] and "better than one" in found.verdict[0]
    assert f"two's {MAE} is {-lower.value:.1f} lower than that of one" in found.verdict[1]


def test_two_evaluated_runs(small_run, images, tmp_path):
    runs = [Path(shutil.copytree(small_run(task), tmp_path / task)) for task in ("mae", "droppos")]
    for run in runs:
        evaluate("knn", run, images, workers=0)
    found = compare(folder_of(*runs))
    own = {(one.encoder, one.protocol): one for one in found.results}
    assert {("mae", "knn"), ("droppos", "knn")} <= own.keys() and ("mae", "") not in own
    mae, droppos = (next(one for one in reversed(store.load(run)) if one.encoder == run.name) for run in runs)
    (apart,) = own["droppos", "knn"].against
    assert apart.control == "mae" and apart.n == mae.n == droppos.n
    assert apart.value == pytest.approx(own["droppos", "knn"].value - own["mae", "knn"].value)
