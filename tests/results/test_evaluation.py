"""An evaluation fits the terminal, and its words follow from intervals."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import open_objects
from patchloom.evaluate.classification import constant_answers
from patchloom.results.claims import Claim
from patchloom.results.evaluation import Evaluation, as_control, compare_results, few_remark, frozen_ahead
from patchloom.results.result import Result

NAME = "runs/a-very-long-name-of-a-run-that-someone-chose/encoder.safetensors"


def _right(share: float, n: int = 200) -> torch.Tensor:
    return torch.arange(n) < share * n


def _report(rows: list[Result], **options) -> Evaluation:
    return Evaluation(rows, "What was done.", "The headline.", (rows[0],), "data", "f" * 16, 0, 200, **options)


def _rows(protocol: str, names: list[str], settings: list[dict], share: float = 0.6) -> list[Result]:
    return [
        Result.of_images(name, protocol, each | {"pooling": "mean"}, _right(share))
        for name in names
        for each in settings
    ]


GIVEN = ("as they are", "patches shuffled", "positions zeroed")
ORDER = [{"probe": probe, "test_images": given} for probe in ("linear", "kNN, k = 20") for given in GIVEN]
BOTH, RAW_PIXELS = [NAME, "untrained"], _rows("layers", ["raw pixels"], [{}], 0.9)
TABLES = {
    "knn": _report(
        _rows("knn", BOTH, [{"pooling": "mean", "k": k, "temperature": 0.07} for k in (1, 5, 20, 100)]), across="k"
    ),
    "order": _report(_rows("order", [NAME], ORDER), across="test_images"),
    "layers": _report(
        _rows("layers", BOTH, [{"layer": f"block {i}"} for i in range(3)]) + RAW_PIXELS, across="layer", down=True
    ),
    "linear": _report(_rows("linear", BOTH, [{"l2": l2, "held_out": 40} for l2 in (1e-6, 10.0)])),
}


@pytest.mark.parametrize("report", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_too_long_and_no_interval_is_broken(report: Evaluation, width: int) -> None:
    text = report.text(width)
    assert max(map(len, text.split("\n"))) <= width
    interval = f"[{100 * report.results[0].low:.1f}, {100 * report.results[0].high:.1f}]"
    assert text.count(interval) == sum(interval in row.text() for row in report.results)
    assert text.count("60.0 %") >= sum(row.value == 0.6 for row in report.results)
    assert "runs" in text and ("safetensors" in text or "…" in text)
    if report is TABLES["layers"]:  # a control without layers stands in every column
        assert text.count("raw pixels") == 1 and text.count("90.0 %") == (2 if width == 120 else 1)


def test_the_paired_interval_decides_what_is_claimed() -> None:
    rows = {share: Result.of_images("x", "knn", {}, _right(share)) for share in (0.5, 0.51, 0.6)}

    def claim(one: Result, other: Result, trained: bool = False) -> Claim:
        return compare_results([one], [other], trained).claim

    # 2 images of 200 more, and none fewer: their separate intervals are 14 points wide, and the paired one is not
    assert claim(rows[0.51], rows[0.5]) is Claim.NONE
    assert claim(rows[0.6], rows[0.5]) is Claim.BETTER and claim(rows[0.5], rows[0.6]) is Claim.WORSE
    assert claim(rows[0.6], rows[0.5], trained=True) is Claim.ONCE
    assert rows[0.6].low < rows[0.5].high  # by separate intervals nothing could be said
    shuffled = Result.of_images("x", "knn", {}, _right(0.6).flip(0))
    assert claim(shuffled, rows[0.5]) is Claim.NONE  # other images are right: much more noise
    assert claim(Result.of_images("x", "knn", {}, _right(0.6, 190)), rows[0.5]) is Claim.APART
    assert claim(Result.of_share("x", "knn", {}, 0.6, 200), rows[0.5]) is Claim.APART


def test_a_report_begins_with_its_headline_and_conclusion() -> None:
    rows = [Result.of_images(name, "knn", {}, _right(share)) for name, share in (("a", 0.6), ("untrained", 0.5))]
    report = replace(_report(rows), quoted=tuple(rows)).with_differences(False)
    (found,) = report.against
    assert found.control == "untrained" and found.n == 200 and found.trainings == 1 and report.controls == (1,)
    assert "10.0 points better" in report.conclusion()
    lines = report.text(300).split("\n")
    assert lines[:3] == ["The headline.", report.conclusion(), ""] and lines[-2:] == ["", "What was done."]


def test_few_test_images_are_said_to_be_few() -> None:
    few = Result.of_images("x", "knn", {}, torch.ones(10, dtype=torch.bool))
    assert "Only 10 test images" in few_remark(few) and "72.2 % to 100.0 %" in few_remark(few)
    assert not few_remark(Result.of_images("x", "knn", {}, _right(0.6, 1000)))
    assert not few_remark(Result.exact("top-1", "chance", "positions", {}, 0.1))
    for low, high, said in ((0.42, 0.52, True), (0.48, 0.58, True), (0.44, 0.56, False)):  # the larger half decides
        assert bool(few_remark(Result("accuracy", 0.5, low, high, 99))) == said


def test_a_probe_that_is_ahead_of_fine_tuning_on_the_same_images_is_named() -> None:
    def one(protocol: str, share: float, encoder: str = "run", fingerprint: str = "f" * 16) -> Evaluation:
        return replace(
            _report([Result.of_images(encoder, protocol, {"pooling": "mean"}, _right(share))]), fingerprint=fingerprint
        )

    tuned = one("finetune", 0.6)
    before = [one("knn", 0.605), one("knn", 0.9, "other"), one("linear", 0.9, fingerprint="0" * 16), tuned]
    assert frozen_ahead([row for each in before for row in each.results], tuned) == ""
    found = frozen_ahead([row for each in (*before, one("linear", 0.75)) for row in each.results], tuned)
    assert re.search(r"ahead: 75\.0 % by linear, 60\.0 %", found)


def _test_images(labels: torch.Tensor) -> Source:
    test = open_objects([np.zeros((8, 8, 3), np.uint8)] * len(labels)).train
    test.labels, test.classes = labels, ("defect", "good")
    return test


def _labelled(ours: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> Evaluation:
    test = _test_images(labels)
    rows = [
        Result.of_images(name, "knn", {"pooling": "mean"}, right)
        for name, right in (("mine", ours), ("raw pixels", pixels))
    ]
    constant, _ = constant_answers("knn", labels, test, None)
    whole = _report([*rows, constant])
    return replace(whole, quoted=tuple(rows)).with_differences(False)


def test_the_constant_to_beat_is_that_of_the_test_images() -> None:
    """Of the training images, defects may be the majority: what is beaten must not depend on them."""
    labels = torch.tensor([0, 1, 1, 1])
    row, balanced = constant_answers("knn", labels, _test_images(labels), None)
    assert (row.encoder, row.value, row.settings) == ("best constant", 0.75, {"answer": "good"})
    assert (balanced.measure, balanced.value) == ("balanced accuracy", 0.5)
    assert as_control(row) == "75.0 % by always answering good"


def test_an_encoder_that_is_no_better_than_a_constant_answer_is_called_so() -> None:
    labels = torch.arange(100) < 71  # good
    report = _labelled(labels.clone(), labels | (torch.arange(100) < 94), labels.long())
    said = report.conclusion()
    assert "mine (71.0 %) is no better than always answering good" in said
    assert "Raw pixels are 23.0 points better" in said and "near copies" in said
    assert report.against[0].constant == "good"
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
        Result.of_images(name, "segment", {"answer": "good"}, n < value, measure=measure)
        for name, each in values.items()
        for measure, value in zip(("mIoU", "foreground IoU"), each, strict=True)
    ]
    whole = replace(_report(rows, telling="foreground IoU"), quoted=(rows[0], rows[2]), n_test=100)
    for report in (whole.with_differences(False), whole.with_differences(False).over_seeds([whole] * 2)):
        assert said in report.conclusion()
        assert ("no better" in report.conclusion()) == bool(report.against[0].constant) == (foreground[0] < 10)
    plain = replace(whole, telling="").with_differences(False)
    assert "By foreground" not in plain.conclusion() and plain.against[0].constant == "good"


def _quoted(best: str, value: float, raw: float = 0.3) -> Evaluation:
    quoted = tuple(
        Result.of_share(name, "layers", {"layer": layer} if layer else {}, share, 10)
        for name, layer, share in (("a", "norm", 0.5), ("a", best, value), ("raw pixels", "", raw))
    )
    return Evaluation(list(quoted), "", "", quoted, "data", "f" * 16, 0, 10, across="layer", down=True)


def test_mean_and_range_of_what_is_quoted() -> None:
    first, second, last = _quoted("block 3", 0.6), _quoted("block 3", 0.95), _quoted("block 2", 0.8, 0.33)
    assert replace(last, others=(first, second)).spread() == (
        "Over 3 seeds, mean and range: a, norm 50.0 % (50.0 % to 50.0 %); a, block 3 or block 2 78.3 % "
        "(60.0 % to 95.0 %); raw pixels 31.0 % (30.0 % to 33.0 %)."
    )
