"""A report fits the terminal, and its words follow from intervals."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import open_objects
from patchloom.evaluate.frozen import constant_answer
from patchloom.evaluate.results import Report, Row, append_rows, check_rows, compare_rows, frozen_ahead
from patchloom.results.claims import Claim, Difference

NAME = "runs/a-very-long-name-of-a-run-that-someone-chose/encoder.safetensors"


def _right(share: float, n: int = 200) -> torch.Tensor:
    return torch.arange(n) < share * n


def _report(rows: list[Row], **options) -> Report:
    return Report(rows, "What was done.", "The headline.", (rows[0],), "data", "f" * 16, 0, 200, **options)


def _rows(protocol: str, names: list[str], settings: list[dict], share: float = 0.6) -> list[Row]:
    return [Row.of_images(name, "mean", protocol, each, _right(share)) for name in names for each in settings]


GIVEN = ("as they are", "patches shuffled", "positions zeroed")
ORDER = [{"probe": probe, "test_images": given} for probe in ("linear", "kNN, k = 20") for given in GIVEN]
BOTH, RAW_PIXELS = [NAME, "untrained"], _rows("layers", ["raw pixels"], [{}], 0.9)
TABLES = {
    "knn": _report(_rows("knn", BOTH, [{"k": k, "temperature": 0.07} for k in (1, 5, 20, 100)]), across="k"),
    "order": _report(_rows("order", [NAME], ORDER), across="test_images"),
    "layers": _report(
        _rows("layers", BOTH, [{"layer": f"block {i}"} for i in range(3)]) + RAW_PIXELS, across="layer", down=True
    ),
    "linear": _report(_rows("linear", BOTH, [{"l2": l2, "held_out": 40} for l2 in (1e-6, 10.0)])),
}


@pytest.mark.parametrize("report", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_too_long_and_no_interval_is_broken(report: Report, width: int) -> None:
    text = report.text(width)
    assert max(map(len, text.split("\n"))) <= width
    interval = f"[{100 * report.rows[0].low:.1f}, {100 * report.rows[0].high:.1f}]"
    assert text.count(interval) == sum(interval in row.text() for row in report.rows)
    assert text.count("60.0 %") >= sum(row.value == 0.6 for row in report.rows)
    assert "runs" in text and ("safetensors" in text or "…" in text)
    if report is TABLES["layers"]:  # a control without layers stands in every column
        assert text.count("raw pixels") == 1 and text.count("90.0 %") == (2 if width == 120 else 1)


def test_the_paired_interval_decides_what_is_claimed() -> None:
    rows = {share: Row.of_images("x", "-", "knn", {}, _right(share)) for share in (0.5, 0.51, 0.6)}

    def claim(one: Row, other: Row, trained: bool = False) -> Claim:
        return compare_rows([one], [other], trained).claim

    # 2 images of 200 more, and none fewer: their separate intervals are 14 points wide, and the paired one is not
    assert claim(rows[0.51], rows[0.5]) is Claim.NONE
    assert claim(rows[0.6], rows[0.5]) is Claim.BETTER and claim(rows[0.5], rows[0.6]) is Claim.WORSE
    assert claim(rows[0.6], rows[0.5], trained=True) is Claim.ONCE
    assert rows[0.6].low < rows[0.5].high  # by separate intervals nothing could be said
    shuffled = Row.of_images("x", "-", "knn", {}, _right(0.6).flip(0))
    assert claim(shuffled, rows[0.5]) is Claim.NONE  # other images are right: much more noise
    assert claim(Row.of_images("x", "-", "knn", {}, _right(0.6, 190)), rows[0.5]) is Claim.APART
    assert claim(Row.of("x", "-", "knn", {}, 0.6, 200), rows[0.5]) is Claim.APART


def test_a_report_begins_with_its_headline_and_conclusion() -> None:
    rows = [Row.of_images(name, "-", "knn", {}, _right(share)) for name, share in (("a", 0.6), ("untrained", 0.5))]
    report = replace(_report(rows), quoted=tuple(rows)).with_differences(False)
    (found,) = report.against
    assert found.control == "untrained" and found.n == 200 and found.trainings == 1 and report.pairs == ((0, 1),)
    assert "10.0 points better" in report.conclusion()
    lines = report.text(300).split("\n")
    assert lines[:3] == ["The headline.", report.conclusion(), ""] and lines[-2:] == ["", "What was done."]


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(81 / 263, 263, 0.2553, 0.3662), (15 / 148, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.8830, 1)],
)
def test_wilsons_interval_is_newcombes(share: float, n: int, low: float, high: float) -> None:
    """Newcombe 1998, table I (method 3)."""
    row = Row.of("x", "-", "knn", {}, share, n)
    assert (row.low, row.high) == pytest.approx((low, high), abs=5e-5)


def test_few_test_images_are_said_to_be_few() -> None:
    few = Row.of_images("x", "-", "knn", {}, torch.ones(10, dtype=torch.bool))
    caution = replace(_report([few]), n_test=10).caution()
    assert "Only 10 test images" in caution and "72.2 % to 100.0 %" in caution
    assert not _report([Row.of_images("x", "-", "knn", {}, _right(0.6, 1000))]).caution()
    assert not _report([Row.exact("chance", "positions", {}, 0.1)]).caution()


def test_a_probe_that_is_ahead_of_fine_tuning_on_the_same_images_is_named(tmp_path) -> None:
    def one(protocol: str, share: float, encoder: str = "run", fingerprint: str = "f" * 16) -> Report:
        return replace(_report([Row.of_images(encoder, "mean", protocol, {}, _right(share))]), fingerprint=fingerprint)

    path, tuned = tmp_path / "results.csv", one("finetune", 0.6)
    for report in (one("knn", 0.5), one("knn", 0.9, "other"), one("linear", 0.9, fingerprint="0" * 16), tuned):
        append_rows(path, report)
    assert frozen_ahead(check_rows(path), tuned) == "" and frozen_ahead(b"", tuned) == ""
    append_rows(path, one("linear", 0.75))
    assert re.search(r"ahead: 75\.0 % by linear, 60\.0 %", frozen_ahead(check_rows(path), tuned))


def _test_images(labels: torch.Tensor) -> Source:
    test = open_objects([np.zeros((8, 8, 3), np.uint8)] * len(labels)).train
    test.labels, test.classes = labels, ("defect", "good")
    return test


def _labelled(ours: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> Report:
    test = _test_images(labels)
    rows = [Row.of_images(name, "mean", "knn", {}, right) for name, right in (("mine", ours), ("raw pixels", pixels))]
    constant = constant_answer("knn", labels, test, None)
    whole = _report([*rows, constant])
    return replace(whole, quoted=tuple(rows)).with_differences(False)


def test_the_constant_to_beat_is_that_of_the_test_images() -> None:
    """Of the training images, defects may be the majority: what is beaten must not depend on them."""
    labels = torch.tensor([0, 1, 1, 1])
    row = constant_answer("knn", labels, _test_images(labels), None)
    assert (row.encoder, row.value, row.settings) == ("best constant", 0.75, {"answer": "good"})
    assert row.as_control() == "75.0 % by always answering good"


def test_an_encoder_that_is_no_better_than_a_constant_answer_is_called_so() -> None:
    labels = torch.arange(100) < 71  # good
    report = _labelled(labels.clone(), labels | (torch.arange(100) < 94), labels.long())
    said = report.conclusion()
    assert "mine (71.0 %) is no better than always answering good" in said
    assert "Raw pixels are 23.0 points better" in said and "near copies" in said
    assert "no better than always answering good" in report.against[0].short()
    assert Difference.of(report.against[0].plain()) == report.against[0]
    good = _labelled(torch.arange(100) < 90, torch.arange(100) < 94, labels.long())
    assert "always" not in good.conclusion() and "Raw pixels are" not in good.conclusion()
    assert not good.against[0].constant


def test_over_seeds_the_constant_is_judged_by_all_of_them() -> None:
    """One seed above the constant answer and two that are it are no better together."""
    labels = torch.arange(100) < 71
    seeds = [_labelled(right, labels, labels.long()) for right in (torch.arange(100) < 80, labels, labels)]
    report = seeds[-1].over_seeds(seeds[:-1])
    assert "mine (74.0 %)" in report.conclusion() and report.against[0].constant == "good"


@pytest.mark.parametrize(
    ("foreground", "said"),
    [
        ((40, 0), "By foreground IoU, mine is 38.0 points better"),
        ((3, 40), "mine (71.0 %) is no better than always answering good"),  # the other side alone is better
        ((0, 0), "mine (71.0 %) and untrained (71.0 %) are no better than always answering good"),
    ],
)
def test_what_another_measure_shows_is_not_denied(foreground: tuple[int, int], said: str) -> None:
    """Of a rare class nearly nothing shows in the quoted measure."""
    n = torch.arange(100)
    values = {"mine": (71, foreground[0]), "untrained": (71, foreground[1]), "best constant": (71, 2)}
    rows = [
        Row.of_images(name, "-", "segment", {"measure": measure, "answer": "good"}, n < value)
        for name, each in values.items()
        for measure, value in zip(("mIoU", "foreground IoU"), each, strict=True)
    ]
    whole = replace(_report(rows, telling="foreground IoU"), quoted=(rows[0], rows[2]), n_test=100)
    for report in (whole.with_differences(False), whole.with_differences(False).over_seeds([whole] * 2)):
        assert said in report.conclusion()
        assert ("no better" in report.conclusion()) == bool(report.against[0].constant) == (foreground[0] < 10)
    plain = replace(whole, telling="").with_differences(False)
    assert "By foreground" not in plain.conclusion() and plain.against[0].constant == "good"
