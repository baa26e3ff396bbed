"""A report fits the terminal, and its words follow from intervals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from patchloom.audio.recordings import Recordings
from patchloom.claims import RAW, Claim, Difference
from patchloom.data.modality import Modality
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import open_objects
from patchloom.evaluate.frozen import constant_answer
from patchloom.evaluate.results import Report, Row, append_rows, check_rows, compare_rows, frozen_ahead

NAME = "runs/a-very-long-name-of-a-run-that-someone-chose/encoder.safetensors"


def _right(share: float, n: int = 200) -> torch.Tensor:
    return torch.arange(n) < share * n


def _report(rows: list[Row], **options) -> Report:
    return Report(rows, "What was done.", "The headline.", (rows[0],), "data", "f" * 16, 0, 200, **options)


def _knn() -> Report:
    rows = [
        Row.of_images(name, pooling, "knn", {"k": k, "temperature": 0.07}, _right(0.6))
        for name in (NAME, "untrained")
        for pooling in ("class", "mean", "both")
        for k in (1, 5, 20, 100)
    ]
    return _report([*rows, Row.of_images("best constant", "-", "knn", {}, _right(0.1))], across="k")


def _order() -> Report:
    rows = [
        Row.of_images(NAME, "mean", "order", {"probe": probe, "test_images": given}, _right(0.6))
        for probe in ("linear", "kNN, k = 20")
        for given in ("as they are", "patches shuffled", "positions zeroed")
    ]
    return _report(rows, across="test_images")


def _layers() -> Report:
    rows = [
        Row.of_images(name, "mean", "layers", {"layer": f"block {i}"}, _right(0.6))
        for name in (NAME, "untrained")
        for i in range(3)
    ]
    return _report([*rows, Row.of_images("raw pixels", "pixels", "layers", {}, _right(0.4))], across="layer", down=True)


def _linear() -> Report:
    settings = {"l2": 1e-6, "held_out_accuracy": 0.5, "held_out": 40}
    return _report(
        [
            Row.of_images(name, "mean", "linear", settings | {"l2": l2}, _right(0.6))
            for name, l2 in ((NAME, 1e-6), ("untrained", 10.0))
        ]
    )


@pytest.mark.parametrize("report", [_knn(), _order(), _layers(), _linear()], ids=["knn", "order", "layers", "linear"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_too_long_and_no_interval_is_broken(report: Report, width: int) -> None:
    text = report.text(width)
    assert max(map(len, text.split("\n"))) <= width
    interval = f"[{100 * report.rows[0].low:.1f}, {100 * report.rows[0].high:.1f}]"
    assert text.count(interval) == sum(interval in row.text() for row in report.rows)
    assert text.count("60.0 %") >= sum(row.value == 0.6 for row in report.rows)
    assert "runs" in text and ("safetensors" in text or "…" in text)


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
    report = Report(rows, "The settings.", "The headline.", tuple(rows), "data", "f" * 16, 0, 200).with_differences(
        False
    )
    (found,) = report.against
    assert found.control == "untrained" and found.n == 200 and found.trainings == 1 and report.pairs == ((0, 1),)
    assert "10.0 points better than the untrained one" in report.conclusion()
    lines = report.text(300).split("\n")
    assert lines[:3] == ["The headline.", report.conclusion(), ""] and lines[-2:] == ["", "The settings."]


def test_few_test_images_are_said_to_be_few() -> None:
    few = Row.of_images("x", "-", "knn", {}, torch.ones(10, dtype=torch.bool))
    report = Report([few], "", "", (few,), "data", "f" * 16, 0, 10)
    assert report.caution() == "Only 10 test images: others could have given anything from 72.2 % to 100.0 %."
    assert report.caution() in " ".join(report.text(80).split())
    many = Row.of_images("x", "-", "knn", {}, _right(0.6, 1000))
    assert not Report([many], "", "", (many,), "data", "f" * 16, 0, 1000).caution()
    exact = Row.exact("chance", "positions", {}, 0.1)
    assert not Report([exact], "", "", (exact,), "data", "f" * 16, 0, 3).caution()


def test_a_probe_that_is_ahead_of_fine_tuning_on_the_same_images_is_named(tmp_path) -> None:
    def one(protocol: str, share: float, encoder: str = "run", fingerprint: str = "f" * 16) -> Report:
        return replace(_report([Row.of_images(encoder, "mean", protocol, {}, _right(share))]), fingerprint=fingerprint)

    path, tuned = tmp_path / "results.csv", one("finetune", 0.6)
    for report in (one("knn", 0.5), one("knn", 0.9, "other"), one("linear", 0.9, fingerprint="0" * 16), tuned):
        append_rows(path, report)
    assert frozen_ahead(check_rows(path), tuned) == "" and frozen_ahead(b"", tuned) == ""
    append_rows(path, one("linear", 0.75))
    assert "the frozen encoder was ahead: 75.0 % by linear, 60.0 % fine-tuned" in frozen_ahead(check_rows(path), tuned)


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
    always = labels.clone()
    report = _labelled(always, labels | (torch.arange(100) < 94), labels.long())
    said = report.conclusion()
    assert "mine (71.0 %) is no better than always answering good (71.0 %)" in said
    assert "Raw pixels are 23.0 points better than the encoder" in said and "near copies" in said
    assert report.against[0].short() == "worse; no better than always answering good"
    assert Difference.of(report.against[0].plain()) == report.against[0]
    good = _labelled(torch.arange(100) < 90, torch.arange(100) < 94, labels.long())
    assert "constant" not in good.conclusion() and "always" not in good.conclusion()
    assert "better than the encoder" not in good.conclusion() and not good.against[0].constant


def test_over_seeds_the_constant_is_judged_by_all_of_them() -> None:
    """One seed above the constant answer and two that are it are no better together."""
    labels = torch.arange(100) < 71
    seeds = [_labelled(right, labels, labels.long()) for right in (torch.arange(100) < 80, labels, labels)]
    report = seeds[-1].over_seeds(seeds[:-1])
    assert "mine (74.0 %)" in report.conclusion() and report.against[0].constant == "good"


@pytest.mark.parametrize(
    ("foreground", "said"),
    [
        ((40, 0), "By foreground IoU, mine is 38.0 points better than a constant answer [+27."),
        ((3, 40), "mine (71.0 %) is no better than always answering good (71.0 %)"),  # the other side alone is better
        ((0, 0), "mine (71.0 %) and untrained (71.0 %) are no better than always answering good (71.0 %)"),
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


def test_the_names_of_raw_controls_are_those_of_the_modalities() -> None:
    assert set(RAW) == {Modality.raw, Recordings.raw}
