"""Regression of a column on frozen features: its parts against scikit-learn, choices, refusals and results."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluating import folder_of, write_encoder
from PIL import Image
from refusing import failed, refusal
from sklearn.linear_model import Ridge as TheirRidge
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import StandardScaler
from spoken import Tones, encoder_of_sound

from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.evaluate import settings
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.regress import choose_ridge, fit_ridge, held_out_score, knn_predictions, with_targets
from patchloom.results import store
from patchloom.results.claims import MEAN, Claim
from patchloom.results.regression import MAE, R2, SPEARMAN


@pytest.mark.parametrize("shape", [(120, 30), (25, 60)])
def test_ridge_is_that_of_scikit_learn(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) @ rng.normal(size=(shape[1], shape[1])) + 5).astype(np.float32)
    x[:, 3] = 2.5  # constant
    y, new = 100 + x[:, 0] + 9 * rng.normal(size=shape[0]), rng.normal(size=(7, shape[1])).astype(np.float32)
    strengths = (10.0, 1e-2, 1e-6)
    found = fit_ridge(torch.from_numpy(x), torch.from_numpy(y), strengths).predict(torch.from_numpy(new))
    wide = x.astype(np.float64)
    scaled = StandardScaler().fit(wide)
    for i, strength in enumerate(strengths):
        theirs = (
            TheirRidge(alpha=len(x) * strength)
            .fit(scaled.transform(wide), y)
            .predict(scaled.transform(new.astype(np.float64)))
        )
        assert found[:, i].numpy() == pytest.approx(theirs, rel=1e-6)


def test_knn_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    x, y, new = rng.normal(size=(50, 8)), rng.normal(size=50), rng.normal(size=(9, 8))
    theirs = KNeighborsRegressor(5, metric="cosine", weights=lambda apart: np.exp((1 - apart) / 0.07)).fit(x, y)
    found = knn_predictions(*map(torch.from_numpy, (x.astype(np.float32), y, new.astype(np.float32))), 5)
    assert found.numpy() == pytest.approx(theirs.predict(new), abs=1e-5)


def test_the_strength_is_the_best_on_held_out_images_and_ties_go_to_the_strongest() -> None:
    rng = np.random.default_rng(2)
    x, noise = torch.from_numpy(rng.normal(size=(300, 60)).astype(np.float32)), torch.from_numpy(rng.normal(size=300))
    rest, held = torch.arange(240), torch.arange(240, 300)
    strong, score = choose_ridge(x, noise, rest, held)
    weak, better = choose_ridge(x, x @ torch.ones(60, dtype=torch.float32) + 0.01 * noise, rest, held)
    assert strong > 0.5 > 0.1 > weak and score < 0.2 < 0.9 < better
    for strength in (1e3, 1e-3):
        fitted = fit_ridge(x[rest], noise[rest], [strength]).predict(x[held])
        assert held_out_score(fitted, noise[held], noise[rest])[0] <= score + 1e-9
    assert choose_ridge(torch.zeros(300, 2), noise, rest, held)[0] == 1e4


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0)
    rows = [["file", "bright", "noise", "word", "same", "endless", "few", "plate"]]
    for i in range(120):
        tone = rng.integers(40, 200)
        pixels = np.clip(rng.normal(tone, 20, (8, 8)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        bright = "" if i in (3, 50) else "NaN" if i == 7 else f"{pixels.mean() / 10:.3f}"
        rows.append([f"{i}.png", bright, f"{rng.normal():.3f}", "abc"[i % 3], "4", "inf" if i == 9 else str(i)]
                    + [str(i) if i < 9 else "", str(i // 4)])  # fmt: skip
    with open(folder / "numbers.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder / "numbers.csv"


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return folder_of(write_encoder(tmp_path / "encoder.safetensors", depth=2), tmp_path / "run")


def test_results_have_the_encoder_beside_its_controls_and_the_mean(seeing: Path, table: Path) -> None:
    report = evaluate("regress", seeing, str(table), column="bright", device="cpu", k=5)
    assert list(dict.fromkeys(row.encoder for row in report.results)) == ["tiny", "untrained", "raw pixels", MEAN]
    ours, *_, mean = report.quoted
    assert ours.measure == R2 and ours.value > 0.8 > 0.1 > mean.value and ours.settings["regressor"] == "ridge"
    best = max((row for row in report.results if row.encoder == "tiny" and row.settings["regressor"] == "ridge"),
               key=lambda row: row.settings["held_out_score"])  # fmt: skip
    assert ours.settings == best.settings and report.headline.startswith(
        f"Regression of bright (ridge, {ours.pooling})"
    )
    assert report.n_test == 23 and "3 of 120 images have no value of bright and are left out" in report.method
    errors = {
        row.encoder: row for row in report.results if row.measure == MAE and row.settings.get("regressor") != "knn"
    }
    assert f"by the mean; on {report.n_test}" in report.headline and errors[MEAN].number() in report.headline
    assert [one.control for one in report.against] == ["untrained", "raw pixels", MEAN]
    assert report.against[-1].claim is Claim.BETTER
    error = next(row for row in report.results if row.measure == MAE and row.against)
    assert error.against[-1].claim is Claim.BETTER and error.against[-1].high < 0
    assert f"MAE is {-error.against[-1].value:.2f} lower than that of the mean predictor" in report.conclusion()
    assert SPEARMAN not in {row.measure for row in report.results if row.encoder == MEAN}
    assert [row.value for row in store.load(seeing)] == [row.value for row in report.results]
    assert Image.open(seeing / "pictures" / "regress-numbers.csv-bright-0.png").size[0] > 1000
    again = evaluate("regress", seeing, str(table), column="bright", device="cpu", k=5)
    assert "features were used for tiny" in again.method and again.quoted[0].value == ours.value


def test_noise_is_not_predicted(seeing: Path, table: Path) -> None:
    report = evaluate("regress", seeing, str(table), column="noise", device="cpu", pooling="mean", seeds=2)
    assert report.against[-1].claim is not Claim.BETTER and "over 2 seeds" in report.conclusion()
    assert all(row.low <= row.value <= row.high for row in report.results)


def test_groups_stay_on_one_side_and_intervals_are_over_them(seeing: Path, table: Path) -> None:
    options = {"column": "bright", "device": "cpu", "pooling": "mean", "group": "plate", "k": 5}
    report = evaluate("regress", seeing, str(table), **options)
    ours = report.quoted[0]
    assert 2 < ours.groups < 8 and ours.outcomes is not None and len(ours.outcomes.values) == ours.groups
    assert "in whole groups" in report.method and ours.settings["group"] == "plate"


def test_test_images_choose_nothing(seeing: Path, table: Path, tmp_path: Path) -> None:
    rows = list(csv.reader(table.open()))
    found = []
    for shuffled in (False, True):
        lines = [[*rows[0], "split"], *([*row, "train" if i < 80 else "test"] for i, row in enumerate(rows[1:]))]
        numbers = [line[1] for line in lines[81:]]
        for line, number in zip(lines[81:], numbers[::-1] if shuffled else numbers, strict=True):
            line[1], line[0] = number, line[0]
        for line in lines[1:]:
            line[0] = str(table.parent / line[0])
        place = tmp_path / f"{shuffled}.csv"
        with place.open("w", newline="") as file:
            csv.writer(file).writerows(lines)
        found.append(evaluate("regress", seeing, str(place), column="bright", device="cpu", k=5))
    honest, blind = found
    assert [row.settings for row in honest.results] == [row.settings for row in blind.results]
    assert honest.quoted[0].value > 0.8 > 0.3 > blind.quoted[0].value
    assert honest.fingerprint != blind.fingerprint and honest.n_test == 40


REFUSED = [
    ({}, "needs --column: choose bright, noise, few or plate"),
    ({"column": "brigth"}, "no column brigth: choose bright"),
    ({"column": "word"}, "has 'a' for .*0.png, which is not a number: choose bright"),
    ({"column": "same"}, "has the same value, 4, for all images"),
    ({"column": "endless"}, "has 'inf' for .*9.png, which is not finite"),
    ({"column": "few"}, "has a value for 9 of 120 images"),
    ({"column": "bright", "k": 95}, "--k 95 is more than the 94 training images"),
    ({"column": "bright", "pooling": "instance"}, "instance"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_cannot_be_used_is_refused_in_a_sentence(seeing: Path, table: Path, options: dict, said: str) -> None:
    assert re.search(said, refusal(evaluate, "regress", seeing, str(table), device="cpu", **options))
    assert [path.name for path in seeing.iterdir()] == ["encoder.safetensors"]


def test_data_without_columns_and_a_dry_run(seeing: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, "evaluate", "regress", seeing, "digits", "--column", "age", "--device", "cpu")
    assert "digits has no column age: give a table" in said
    report = evaluate("regress", seeing, str(table), column="bright", device="cpu", dry_run=True)
    assert "encode 94 training and 23 test images" in report.method and report.results == []


def test_splits_are_stratified_by_the_numbers_and_test_images_without_any_are_dropped(table: Path) -> None:
    opened, said = with_targets(open_data(str(table)), "bright")
    assert np.bincount(opened.train.labels).tolist() == [24, 23, 23, 23, 24] and "3 of 120" in said
    assert opened.train.column("bright") and len(opened.train) == 117
    train = open_data(str(table)).train
    parts, _ = with_targets(Data(train.subset(range(9, 120)), train.subset([3, 7, 50])), "bright")
    assert parts.test is None and len(parts.train) == 110


def test_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pitched(Tones):
        def column(self, name: str) -> list[str] | None:
            return [str(label + 0.01 * i) for i, label in enumerate(self.labels)] if name == "pitch" else None

        def column_names(self) -> list[str]:
            return ["pitch"]

    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(Pitched(20), Pitched(8, first=1000)))
    report = evaluate("regress", encoder_of_sound(tmp_path / "ear"), "tones", device="cpu", column="pitch")
    said = re.sub("raw features pixels", "", " ".join(report.text(200).split()))
    assert report.n_test == 24 and "24 test recordings" in said and not re.search(r"\bimages\b|pixels", said)
    assert {"raw features", MEAN} < {row.encoder for row in report.results}


def test_the_encoder_reads_test_images_after_all_is_chosen(
    seeing: Path, record_reads: Callable[..., list[str]]
) -> None:
    record = record_reads()
    opened = settings.open_data("digits")
    for source in (opened.train, opened.test):
        source.column = lambda name, labels=source.labels: [str(label) for label in labels]
    evaluate("regress", seeing, "digits", column="digit", device="cpu", pooling="mean")
    assert "".join("t" if what == "test" else "r" for what in dict.fromkeys(record)) == "rt"
    assert record[: len(opened.train)] == ["train"] * len(opened.train)
