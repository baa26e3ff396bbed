"""Several seeds: a report and rows of each, and one sentence of mean and range."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from patchloom.claims import Claim
from patchloom.cli import main
from patchloom.data.source import Data
from patchloom.data.sources.open import open_data
from patchloom.evaluate import settings
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.results import Report, Row, differences_of

pytestmark = pytest.mark.usefixtures("quick_probe")

SEEDS = {"device": "cpu", "ks": (5, 20), "max_train": 80, "pooling": "mean"}


@pytest.fixture
def run(tiny_encoder: Path, tmp_path: Path) -> Path:
    (tmp_path / "encoder.safetensors").write_bytes(tiny_encoder.read_bytes())
    return tmp_path


def test_three_seeds_are_three_reports(run: Path) -> None:
    report = evaluate("knn", run, "digits", seed=4, seeds=3, **SEEDS)
    reports = (*report.others, report)
    assert [one.seed for one in reports] == [4, 5, 6] and not any(one.others for one in report.others)
    rows = list(csv.DictReader((run / "results.csv").open()))
    assert [row["seed"] for row in rows] == [str(one.seed) for one in reports for _ in one.rows]
    assert [float(row["value"]) for row in rows] == [row.value for one in reports for row in one.rows]
    found = [differences_of(row["against"]) for row in rows if row["against"]]
    assert found == [one.against for one in reports] and [one[0].trainings for one in found] == [1, 1, 3]
    assert [one.control for one in report.against] == ["untrained", "raw pixels"]
    for one in reports:  # each is what it would have been alone
        assert evaluate("knn", run / "encoder.safetensors", "digits", seed=one.seed, **SEEDS).rows == one.rows
    assert len({one.quoted[1].value for one in reports}) == 3  # other untrained encoders, other training images


def test_each_seed_splits_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_data("digits").train.subset(range(200))
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(whole, None))
    report = evaluate("knn", run, "digits", seeds=2, device="cpu", ks=(5,))
    assert report.others[0].fingerprint != report.fingerprint
    gains = [one.quoted[0].value - one.quoted[1].value for one in (*report.others, report)]
    found = report.against[0]
    assert found.value == pytest.approx(sum(gains) / 2) and found.trainings == 2 and found.n == report.n_test
    # Student's 12.706 for 1 degree of freedom; a half for two seeds, and a quarter for what their splits share
    reach = 12.706 * abs(gains[0] - gains[1]) / 2**0.5 * (1 / 2 + 1 / 4) ** 0.5
    assert found.high == pytest.approx(min(1, found.value + reach), abs=1e-4)


def test_one_training_claims_nothing_and_three_are_taken_together(run: Path) -> None:
    given = {"device": "cpu", "workers": 0, "max_train": 60, "epochs": 1, "seeds": 3}
    report = evaluate("finetune", run, "digits", **given)
    reports = (*report.others, report)
    assert all(one.against[0].claim in (Claim.ONCE, Claim.NONE) for one in report.others)
    (found,) = report.against
    assert found.trained and found.trainings == 3 and found.n == report.n_test and found.over_seeds > 0
    sides = [[one.quoted[i].value for one in reports] for i in (0, 1)]
    assert all(len(set(side)) > 1 for side in sides), "seeds move the trainings of both sides"
    assert found.value == pytest.approx(sum(sides[0]) / 3 - sum(sides[1]) / 3)
    assert len({one.fingerprint for one in reports}) == 1
    assert report.conclusion() in report.text(300).split("\n")[:4] and "3 trainings of each" in report.conclusion()


def _report(**values: float) -> Report:
    found = {name.replace("_", " "): value for name, value in values.items()}
    quoted = tuple(Row.of(name, "mean", "knn", {"k": 20}, value, 10) for name, value in found.items())
    return Report(list(quoted), "", "", quoted, "data", "f" * 16, 0, 10)


def test_mean_and_range() -> None:
    first, second, last = _report(a=0.5, raw_pixels=0.3), _report(a=0.9, raw_pixels=0.3), _report(a=0.4, raw_pixels=0.3)
    assert replace(last, others=(first, second)).spread() == (
        "Over 3 seeds, mean and range: a 60.0 % (40.0 % to 90.0 %); raw pixels 30.0 % (30.0 % to 30.0 %)."
    )


def test_an_encoder_that_is_quoted_twice_is_told_apart() -> None:
    def report(best: str, value: float) -> Report:
        quoted = tuple(
            Row.of(name, "mean", "layers", {"layer": layer} if layer else {}, share, 10)
            for name, layer, share in (("a", "norm", 0.5), ("a", best, value), ("raw pixels", "", 0.3))
        )
        return Report(list(quoted), "", "", quoted, "data", "f" * 16, 0, 10, across="layer", down=True)

    assert replace(report("block 2", 0.8), others=(report("block 3", 0.6),)).spread() == (
        "Over 2 seeds, mean and range: a, norm 50.0 % (50.0 % to 50.0 %); a, block 3 or block 2 70.0 % "
        "(60.0 % to 80.0 %); raw pixels 30.0 % (30.0 % to 30.0 %)."
    )


@pytest.mark.parametrize("protocol", ["knn", "layers"])
def test_the_command_prints_them(run: Path, protocol: str, capsys: pytest.CaptureFixture) -> None:
    words = ["--seeds", "3", "--device", "cpu", "--max_train", "60", *(["--pooling", "mean"] * (protocol != "layers"))]
    assert main(["evaluate", protocol, str(run), "digits", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Over 3 seeds, mean and range: tiny" in printed
    rows = list(csv.DictReader((run / "results.csv").open()))
    ours = [row for row in rows if row["quoted"] == "True" and row["encoder"] == "tiny"]
    if protocol == "layers":
        ours = [row for row in ours if '"norm"' in row["settings"]]
    values = [100 * float(row["value"]) for row in ours]
    low, high = min(values), max(values)
    assert len(values) == 3
    mean, *ends = re.search(r"tiny(?:, norm)? ([\d.]+) % \(([\d.]+) % to ([\d.]+) %\)", printed).groups()
    assert (float(mean), *map(float, ends)) == pytest.approx((sum(values) / 3, low, high), abs=0.051)


def test_one_seed_says_nothing_of_seeds(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", "knn", str(run), "digits", "--device", "cpu", "--max_train", "60"]) == 0
    assert "seeds" not in capsys.readouterr().out
