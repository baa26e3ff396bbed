"""Measures by class: solved by hand, and beside scikit-learn."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, recall_score, roc_auc_score

from patchloom.results import store
from patchloom.results.claims import difference
from patchloom.results.classes import (
    AUROC,
    BALANCED,
    MACRO_F1,
    PRECISION,
    Answers,
    auroc,
    average_precision,
    balanced_interval,
    class_results,
    confusion_of,
    explain_measure,
    quoted_measure,
)
from patchloom.results.evaluation import Evaluation, compare_results
from patchloom.results.intervals import wilson
from patchloom.results.result import ACCURACY


def _drawn(counts: tuple[int, ...], seed: int = 0) -> Answers:
    """Answers by scores of one digit, so that many are equal."""
    rng, labels = np.random.default_rng(seed), np.repeat(np.arange(len(counts)), counts)
    scores = np.round(rng.normal(0, 1, (len(labels), len(counts))) + 1.5 * np.eye(len(counts))[labels], 1)
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return Answers(labels, scores.argmax(1), shares, names=tuple("abcdef"[: len(counts)]))


@pytest.mark.parametrize("counts", [(60, 9), (9, 60), (30, 30), (40, 20, 5, 1)])
def test_values_are_those_of_scikit_learn(counts: tuple[int, ...]) -> None:
    found = _drawn(counts)
    rows = {row.measure: row for row in class_results("e", "knn", {}, found, every=True)}
    assert rows[ACCURACY].value == (found.labels == found.answers).mean()
    assert rows[BALANCED].value == pytest.approx(balanced_accuracy_score(found.labels, found.answers))
    for name, each in zip("abcd", recall_score(found.labels, found.answers, average=None), strict=False):
        assert rows[f"recall of {name}"].value == pytest.approx(each)
    assert rows[MACRO_F1].value == pytest.approx(f1_score(found.labels, found.answers, average="macro"))
    assert found.scores is not None
    if len(counts) == 2:  # of the rarer class; of two equal ones the second
        rare = 0 if counts[0] < counts[1] else 1
        theirs = (found.labels == rare, found.scores[:, rare])
        assert rows[AUROC].value == pytest.approx(roc_auc_score(*theirs))
        assert rows[PRECISION].value == pytest.approx(average_precision_score(*theirs))
    else:
        truth = np.eye(len(counts))[found.labels]
        assert rows[AUROC].value == pytest.approx(roc_auc_score(found.labels, found.scores, multi_class="ovr"))
        assert rows[PRECISION].value == pytest.approx(average_precision_score(truth, found.scores, average="macro"))
    assert all(row.low <= row.value <= row.high for row in rows.values())


def test_a_small_case_by_hand() -> None:
    """4 of class a with 3 right, 2 of class b with 1 right: recalls 3/4 and 1/2."""
    found = Answers(np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 0]), names=("a", "b"))
    accuracy, balanced, *recalls = class_results("e", "knn", {"k": 1}, found)
    assert (accuracy.value, balanced.value) == (4 / 6, 0.625)
    assert [(row.value, row.also["images"], row.also["answers"]) for row in recalls] == [(0.75, 4, 4), (0.5, 2, 2)]
    assert [(row.low, row.high) for row in recalls] == [wilson(0.75, 4), wilson(0.5, 2)]
    apart = [share - wilson(share, n)[0] for share, n in ((0.75, 4), (0.5, 2))]
    assert balanced.low == pytest.approx(0.625 - np.hypot(*apart) / 2)
    assert [row.quoted for row in (accuracy, balanced)] == [False, True]  # 4 of 6 are above 1.2 of a half
    matrix = next(row for row in class_results("e", "", {}, found, every=True) if row.measure == MACRO_F1)
    assert confusion_of(matrix, ("a", "b")).tolist() == [[3, 1], [1, 1]]


def test_the_area_under_the_curve_has_delongs_variance() -> None:
    """Scores 1, 3 of negatives and 2, 4 of positives: placements 1/2, 1 and 1, 1/2, area 3/4."""
    scores = np.array([[1], [3], [2], [4]]) * np.array([[-1, 1]])
    value, low, high = auroc(scores, np.array([0, 0, 1, 1]))
    variance = 2 * (2 * 0.25**2 / 2**2) + 2 * 0.25 / 2**2  # of the placements, and half a case at each end, per side
    middle = (2 * 0.75 + 0.5) / 3
    reach = 1.959964 * np.sqrt(variance) / (middle * (1 - middle))
    ends = [1 / (1 + np.exp(-np.log(middle / (1 - middle)) - sign * reach)) for sign in (-1, 1)]
    assert (value, low, high) == (0.75, pytest.approx(ends[0], abs=1e-5), pytest.approx(ends[1], abs=1e-5))
    perfect = auroc(np.array([[0, 0], [0, 1]]).repeat(20, 0), np.repeat([0, 1], 20))
    assert perfect[0] == perfect[2] == 1 and 0.6 < perfect[1] < 0.99


def test_a_resample_weighs_images_as_if_they_were_repeated() -> None:
    found, weights = _drawn((30, 12, 6)), np.random.default_rng(1).integers(1, 4, 48)
    assert found.scores is not None
    again = np.arange(48).repeat(weights)
    theirs = average_precision_score(np.eye(3)[found.labels[again]], found.scores[again], average="macro")
    assert average_precision(found.scores, found.labels, weights[None])[0] == pytest.approx(theirs)


def test_the_rule_of_the_headline() -> None:
    """A constant answer may be a fifth above the even share: 60 of 100 with two classes, 40 with three."""
    rule = {(60, 40): ACCURACY, (61, 39): BALANCED, (40, 30, 30): ACCURACY, (41, 30, 29): BALANCED}
    for counts, measure in rule.items():
        labels = np.repeat(np.arange(len(counts)), counts)
        assert quoted_measure(labels) == measure
        said = explain_measure(labels, ("x", "y", "z"))
        assert f"Quoted is {measure}" in said and "always answering x" in said
    assert "y 5" in explain_measure(np.repeat([0, 1], (95, 5)), ("x", "y"))


def test_whole_groups_widen_the_interval() -> None:
    labels, groups = np.tile([0, 1], 50), np.arange(100) // 10
    right = (groups % 2).astype(float)
    single, grouped = balanced_interval(right, labels), balanced_interval(right, labels, groups)
    assert grouped[1] - grouped[0] > 1.5 * (single[1] - single[0])
    answers = Answers(labels, np.where(right, labels, 1 - labels), groups=groups)
    rows = class_results("e", "", {}, answers, every=True)
    of_groups = [row for row in rows if row.measure.startswith("accuracy in")]
    assert [row.value for row in of_groups] == [0] * 5 + [1] * 5 and of_groups[0].also == {"images": 10}


def test_a_difference_of_balanced_accuracies_is_that_of_classes(tmp_path: Path) -> None:
    """All of a rare class are gained: by accuracy 5 points, by balanced accuracy 50; also after a file."""
    labels = np.repeat([0, 1], (95, 5))
    given = {"a": labels, "b": 0 * labels}
    one, other = (class_results(name, "knn", {}, Answers(labels, its)) for name, its in given.items())
    store.append(tmp_path, [one[1], other[1]])
    for ours, theirs in ((one[1], other[1]), store.load(tmp_path, outcomes=True)):
        found = compare_results([ours], [theirs], False)
        assert found.value == 0.5 and found.claim.value == "better" and found.low > 0.1
    accuracies = compare_results([one[0]], [other[0]], False)
    assert accuracies.value == pytest.approx(0.05)
    # of a single class it is that of the accuracy
    right = labels == 0
    same = [difference(right, ~right, trained=False, classes=classes) for classes in (None, 0 * labels)]
    assert same[0] == same[1]


def test_accuracy_misleads_and_the_report_says_so() -> None:
    labels, names = np.repeat([0, 1], (285, 15)), ("good", "bad")
    answers = {"mine": labels.copy(), "untrained": 0 * labels, "best constant": 0 * labels}
    answers["mine"][:9], answers["mine"][-9:] = 1, 0  # 282 right, fewer than the constant answer has
    rows = [
        row
        for name, its in answers.items()
        for row in class_results(name, "knn", {"answer": "good"}, Answers(labels, its, names=names), every=True)
    ]
    quoted = tuple(row for row in rows if row.quoted)[:2]
    report = Evaluation(rows, "Method.", "Headline.", quoted, "d", "f" * 16, 0, 300, classes=names)
    said = report.with_differences(False).text(100)
    remark = "By accuracy alone, mine (94.0 %) would be no better than always answering good (95.0 %)"
    assert remark in said.replace("\n", " ")
    assert "recall of bad" in said and "Confusion matrix of mine" in said
    for width in (60, 80, 120):
        assert max(map(len, report.text(width).split("\n"))) <= width
