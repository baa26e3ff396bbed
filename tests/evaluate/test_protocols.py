import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from patchloom.claims import wilson
from patchloom.data.source import Data, Source
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate import logistic, settings
from patchloom.evaluate.protocols import evaluate, linear
from patchloom.evaluate.results import COLUMNS, Report, Row, append_rows, check_rows, differences_of
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder

pytestmark = pytest.mark.usefixtures("quick_probe")

PROTOCOLS = ("knn", "linear")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    spec = EncoderSpec("nano", (8, 8), 2, channels=1, options={"depth": 2, "embed_dim": 64, "num_heads": 2})
    torch.manual_seed(1)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.3,), (0.37,), "mae", "tiny"), folder / "encoder.safetensors")
    return folder


def _printed(report: Report) -> str:
    return report.text(400)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_whole_of_it_on_digits(run: Path, protocol: str) -> None:
    before = len(_rows(run))
    report = evaluate(protocol, run, "digits", device="cpu", max_train=250)
    assert list(dict.fromkeys(row.encoder for row in report.rows)) == [
        "tiny",
        "untrained",
        "raw pixels",
        "best constant",
    ]
    best = {name: max(row.value for row in report.rows if row.encoder == name) for name in ("tiny", "raw pixels")}
    assert best["raw pixels"] > 0.85 and best["tiny"] > 0.3 > report.rows[-1].value
    assert report.n_test == 360 and all(row.low < row.value < row.high for row in report.rows)
    printed = _printed(report)
    assert "a stratified 250 of 1,437 training images" in printed and "on 360 test images." in printed
    written = _rows(run)[before:]
    assert [float(row["value"]) for row in written] == [row.value for row in report.rows]
    assert {row["data_fingerprint"] for row in written} == {open_data("digits").test.fingerprint()}
    again = evaluate(protocol, run / "encoder.safetensors", "digits", device="cpu", max_train=250)
    assert again.rows == report.rows and len(_rows(run)) == before + len(written)


def test_knn_quotes_a_fixed_row(run: Path) -> None:
    report = evaluate("knn", run, "digits", device="cpu", max_train=150)
    quoted = next(row for row in report.rows if (row.pooling, row.settings["k"]) == ("mean", 20))
    assert report.headline.startswith(f"kNN (k=20, mean): {quoted.text()} against")
    assert "Gallery: 150 training images; test: the data's test split." in report.headline
    said = report.conclusion()
    assert len(re.findall(r"(than|indistinguishable from) (the untrained one|raw pixels) [\[(]", said)) == 2
    assert (
        "k=5, class" in evaluate("knn", run, "digits", pooling="class", ks=(5,), device="cpu", max_train=200).headline
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_test_labels_choose_nothing(run: Path, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = []
    probe_of = logistic.linear_probe

    def watched(*args, **kwargs):
        fitted.append(probe_of(*args, **kwargs))
        return fitted[-1]

    monkeypatch.setattr(linear, "linear_probe", watched)
    honest = evaluate(protocol, run, "digits", device="cpu", max_train=150)
    half = len(fitted)
    train, test = open_data("digits").train, open_data("digits").test
    shuffled = test.subset(range(len(test)))
    shuffled.labels = np.random.default_rng(0).permutation(test.labels)
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(train, shuffled))
    blind = evaluate(protocol, run, "digits", device="cpu", max_train=150)
    assert [row.settings for row in blind.rows] == [row.settings for row in honest.rows]
    assert blind.headline.split(":")[0] == honest.headline.split(":")[0]
    assert max(row.value for row in blind.rows) < 0.2 < max(row.value for row in honest.rows)
    assert half == {"knn": 0, "linear": 7}[protocol]
    for (one, choice), (other, same) in zip(fitted[:half], fitted[half:], strict=True):
        assert torch.equal(one.weights, other.weights) and choice == same


def test_data_without_test_images_is_split_and_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train: Source = open_data("digits").train.subset(range(300))
    monkeypatch.setattr(settings, "open_data", lambda data, **options: Data(train, None))
    report = evaluate("knn", run, "digits", device="cpu")
    assert report.n_test == 60
    assert "pre-training may have seen those images, without their labels" in _printed(report)
    train.labels = None
    with pytest.raises(PatchloomError, match="digits has no labels"):
        evaluate("knn", run, "digits", device="cpu")


def test_refusals(run: Path) -> None:
    for change, message in (
        ({"protocol": "svm"}, "no protocol svm"),
        ({"device": "abacus"}, "device abacus"),
        ({"max_train": 1}, "max_train must be 2 or more"),
    ):
        with pytest.raises(PatchloomError, match=message):
            evaluate(**{"protocol": "knn", "run": run, "data": "digits", "device": "cpu"} | change)


def test_wilson_interval() -> None:
    # Newcombe 1998, table I (method 3)
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.8830, 1), abs=5e-5)
    with pytest.raises(ValueError):
        wilson(0.5, 0)


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.csv"
    row = Row.of("a,b", "mean", "knn", {"k": 20}, 0.5, 10)
    report = Report([row], "", "", (row, row, row), "some data", "f" * 16, 0, 10)
    append_rows(path, report)
    path.write_bytes(path.read_bytes()[:-1])
    append_rows(path, report)
    found = list(csv.DictReader(path.open()))
    assert [one["encoder"] for one in found] == ["a,b", "a,b"]
    assert json.loads(found[1]["settings"]) == {"k": 20} and found[1]["n_test"] == "10"
    path.write_text("other,columns\n")
    with pytest.raises(PatchloomError, match="other columns"):
        append_rows(path, report)


@pytest.mark.parametrize("last", ["quoted", "against"])
def test_a_file_of_an_older_version_is_read_and_appended_to(last: str, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    rows = [Row.of_images(name, "mean", "knn", {"k": 20}, torch.arange(40) < n) for name, n in (("a", 30), ("b", 10))]
    report = Report(rows, "", "", tuple(rows), "some, data", "f" * 16, 0, 40).with_differences(False)
    append_rows(path, replace(report, against=(), pairs=()))
    old = [line.rsplit(",", {"quoted": 2, "against": 1}[last])[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join([*old, "2026,cut"]))  # as before, the last write cut off
    assert b"2026,cut" in check_rows(path) and path.read_text().splitlines()[0].endswith(f",{last}")
    append_rows(path, report, once=True)  # nothing is there twice for want of a difference
    assert len(path.read_text().splitlines()) == 4
    append_rows(path, report)
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS) and "2026,cut" in lines
    found = list(csv.DictReader(line for line in lines if line != "2026,cut"))
    assert [differences_of(row["against"]) for row in found] == [(), (), report.against, ()]
    assert [row["unit"] for row in found] == ["", "", "%", "%"]
    assert differences_of(found[2]["against"])[0].sentence() == report.conclusion()
    assert differences_of(None) == differences_of("") == ()
    for damaged in ("{", "{}", '[{"control": "b"}]', "[1]"):
        with pytest.raises(ValueError):
            differences_of(damaged)


def test_results_of_another_kind_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("other,columns\n")
    with pytest.raises(PatchloomError, match="other columns"):  # and not that the folder holds no run
        evaluate("knn", tmp_path, "digits")


def _rows(run: Path) -> list[dict[str, str]]:
    path = run / "results.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []
