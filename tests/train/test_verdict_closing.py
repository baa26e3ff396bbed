"""The closing sentence follows the size of the effect and its interval, and states disagreements."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from patchloom.claims import START, Claim
from patchloom.evaluate.results import Report, Row, compare_rows
from patchloom.questions.question import Measure
from patchloom.runs.held_out import HeldOut
from patchloom.runs.verdict import no_labels
from patchloom.train.verdict import closing_sentence

NEW = HeldOut(np.array([0]), np.array([]))
KNOWN = HeldOut(np.array([0]), np.array([]), "trained", "runs/old")
ERROR = {"to_beat": "blurred copy", "higher_is_better": False, "form": ".3f"}
PLACES = {"to_beat": "chance", "higher_is_better": True}
AGREEMENT = {"to_beat": "on other images", "higher_is_better": True, "form": ".3f"}


def measure(name, value, baselines, n=200, noise=0.01, **how):
    """Return a measure whose images differ by ±``noise``, so that means are exact."""
    apart = noise * torch.tensor([1.0, -1.0]).repeat(n)[:n]
    apart = apart - apart.mean()
    return Measure(name, value + apart, {key: torch.full((n,), one) for key, one in baselines.items()}, **how)


def error(value, blurred, flat, **more):
    return measure("reconstruction error", value, {"mean colour": flat, "blurred copy": blurred}, **ERROR | more)


CASES = {
    "what the issue saw": (error(1.294, 1.295, 1.2, noise=0.001), "The task is hardly being learnt so far"),
    "with fewer images": (error(1.294, 1.295, 1.2, n=20), "There is no clear sign that the task is being learnt"),
    "clearly": (error(0.499, 0.727, 0.615), "The task is clearly being learnt"),
    "weakly": (error(0.660, 0.722, 0.7), "The task is being learnt, but weakly so far"),
    "loses to a baseline for scale": (error(0.973, 1.1, 0.934), "The task is clearly being learnt"),
    "worse": (error(0.973, 0.934, 0.9), "The task is not learnt yet"),
    "chance": (measure("positions", 0.083, {"chance": 0.083}, **PLACES), "There is no clear sign that the task"),
    "a few images": (
        measure("positions", 0.4, {"chance": 0.333}, n=12, noise=0.4, **PLACES),
        "12 held-out images leave open whether the task is being learnt: positions 40.0%, ",
    ),
    "one image": (
        measure("positions", 0.9, {"chance": 0.3}, n=1, **PLACES),
        "1 held-out image is too few to tell whether the task is being learnt: positions 90.0%, against 30.0% (chance)",
    ),
    "how well": (
        measure("positions", 0.6, {"chance": 0.333}, n=12, noise=0.4, **PLACES),
        "The task is being learnt, but 12 held-out images leave open how well",
    ),
    "collapsed": (
        measure("agreement", 0.992, {"on other images": 0.957}, outputs=torch.ones(200, 8), **AGREEMENT),
        "The outputs for whole images have collapsed",
    ),
    "nearly so": (
        measure("agreement", 0.973, {"on other images": 0.934}, outputs=torch.randn(200, 99), **AGREEMENT),
        "The outputs for whole images are nearly the same for all of them, so agreement with them means little",
    ),
    "not so": (
        measure("agreement", 0.972, {"on other images": 0.609}, outputs=torch.randn(200, 99), **AGREEMENT),
        "The task is clearly being learnt",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_words_follow_size_and_interval(case):
    found, head = CASES[case]
    sentence = closing_sentence(found, None, NEW)
    assert sentence.startswith(head), sentence
    assert sentence.endswith(f". {no_labels()}")


def test_figure_and_interval_are_printed():
    assert closing_sentence(error(0.499, 0.727, 0.615), None, NEW) == (
        "The task is clearly being learnt: reconstruction error 0.499 on 200 held-out images, 31.4 % [31.2, 31.6] of "
        f"the way from 0.727 (blurred copy) to 0; mean colour 0.615. {no_labels()}"
    )
    known = closing_sentence(error(0.499, 0.727, 0.615), None, KNOWN)
    assert known.startswith("The task is clearly being learnt, or these images are memorised: reconstruction err")
    assert "on 200 images that the weights of runs/old were trained on" in known


def test_disagreeing_baselines_are_reported():
    flat = closing_sentence(error(0.973, 1.1, 0.934), None, NEW)
    assert "that beats blurred copy, but not mean colour (0.934), which has information that the encoder lacks" in flat
    blurred = closing_sentence(error(0.973, 0.934, 1.1), None, NEW)
    assert "and 0.934 (blurred copy) has to be beaten; that beats mean colour (1.100), but not blurred copy" in blurred


def report(trained, untrained, pixels, n):
    names = {"trained": trained, "untrained": untrained, "raw pixels": pixels}
    rows = tuple(Row.of(name, "mean", "knn", {"k": 20}, value, n) for name, value in names.items())
    return Report(list(rows), "", "", rows, "images", "", 0, n)


@pytest.mark.parametrize(
    ("values", "n", "words"),
    [
        ((0.299, 0.110, 0.175), 2000, "its features separate classes clearly better than raw pixels (29.9%, 17.5%)."),
        (
            (0.420, 0.282, 0.371),
            10_000,
            "its features separate classes somewhat better than raw pixels (42.0%, 37.1%).",
        ),
        (
            (0.345, 0.285, 0.367),
            10_000,
            "its features separate classes worse than raw pixels (34.5%, 36.7%), but better than untrained (28.5%).",
        ),
        (
            (0.375, 0.285, 0.371),
            10_000,
            "its features do not separate classes clearly better than raw pixels (37.5%, 37.1%), but better than",
        ),
        ((0.267, 0.285, 0.367), 10_000, "its features separate classes worse than raw pixels (26.7%, 36.7%)."),
        (
            (0.583, 0.333, 0.583),
            12,
            "12 test images leave open whether its features separate classes better than raw pixels (58.3%,",
        ),
    ],
)
def test_with_labels_the_features_are_compared_with_both_controls(values, n, words):
    sentence = closing_sentence(error(0.499, 0.727, 0.615), report(*values, n), NEW)
    assert f"; and by kNN {words}" in sentence and no_labels() not in sentence


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (0.2, "clearly better than its start (50.0%, 20.0%), but worse than raw pixels (60.0%)."),
        (0.7, "worse than its start (50.0%, 70.0%), but better than untrained (30.0%)."),
    ],
)
def test_an_adapted_encoder_is_compared_with_its_start_first(start, words):
    of_all = report(0.5, 0.3, 0.6, 2000)
    row = Row.of(START, "mean", "knn", {"k": 20}, start, 2000)
    found = replace(of_all, quoted=(of_all.quoted[0], row, *of_all.quoted[1:]))
    assert words in closing_sentence(error(0.499, 0.727, 0.615), found, NEW)


def test_on_the_same_images_the_closing_sentence_says_what_the_headline_says():
    right = torch.arange(60) < 30
    rows = {"trained": right, "untrained": torch.arange(60) < 20, "raw pixels": torch.arange(60) < 18}
    quoted = tuple(Row.of_images(name, "mean", "knn", {"k": 20}, one) for name, one in rows.items())
    found = Report(list(quoted), "", "", quoted, "images", "", 0, 60)
    assert compare_rows([quoted[0]], [quoted[1]], trained=False).claim is Claim.BETTER
    sentence = closing_sentence(error(0.499, 0.727, 0.615), found, NEW)
    assert "its features separate classes better than untrained, but 60 test images leave open by" in sentence
