"""Verdicts and closing sentences: each rule, and runs that are made to fail."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import SMALL
from PIL import Image
from running import column

from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.data.sources.open import open_data
from patchloom.evaluate.results import Report, Row, compare_rows
from patchloom.questions.question import Measure
from patchloom.results.claims import START, Claim
from patchloom.results.shares import Level
from patchloom.system.checksummed import write_checksummed
from patchloom.runs.held_out import HeldOut
from patchloom.runs.settings import Settings
from patchloom.runs.verdict import Health, Rule, Verdict, no_labels, read_health, write_health
from patchloom.train.loop import pretrain
from patchloom.train.verdict import ClassResult, VerdictInputs, closing_sentence, health_of, logged_class_result

SETTINGS = Settings(data="photos", task={"name": "mae"}, model={"name": "nano"}, epochs=10, blr=4e-3)
FEATURES = {"features:spread": "0.9", "features:centred rank": "9", "features:deviation": "0.7"}
UNTRAINED = {"features:deviation:untrained": "0.8"}
HEALTHY, WEAK, EARLY, UNKNOWN = Verdict.HEALTHY, Verdict.WEAK, Verdict.EARLY, Verdict.UNKNOWN
NOT_LEARNING, COLLAPSED = Verdict.NOT_LEARNING, Verdict.COLLAPSED
GAIN = ClassResult(0.3, "raw pixels", 0.2, Level.CLEAR, Level.CLEAR)
NO_GAIN = ClassResult(0.2, "raw pixels", 0.3, Level.WORSE, Level.NONE)
BETTER = ClassResult(0.917, "untrained", 0.771, Level.UNSURE, Level.UNSURE)
UNSURE = ClassResult(0.2, "untrained", 0.3, Level.UNKNOWN, Level.UNKNOWN, 20)


def measure(value, base=0.4, n=200, noise=0.01, **more):
    """Return an error measure whose images differ by ±``noise``, so that means are exact."""
    apart = noise * torch.tensor([1.0, -1.0]).repeat(n)[:n]
    apart = apart - apart.mean()
    how = {"to_beat": "blurred copy", "higher_is_better": False, "form": ".3f"} | more
    return Measure("error", value + apart, {how["to_beat"]: torch.full((n,), base)}, **how)


def accuracy(value):
    return measure(value, 0.25, noise=0.0 if value == 1 else 0.01, to_beat="chance", higher_is_better=True, form=".1%")


def agreement(value, base, rank=99):
    outputs = torch.randn(200, rank, generator=torch.Generator().manual_seed(0))
    return measure(value, base, to_beat="on other images", higher_is_better=True, outputs=outputs)


def signs(found, values=(0.9,), step=1000, ended=True, apart="0.97", task=None, steps=1000, features=None, **more):
    """Return inputs of the rules at a step, with held-out measures evenly spread over the steps."""
    values = [*values, found.value]
    at = [round(step * i / (len(values) - 1)) for i in range(len(values))] if step else [0]
    rows = [{"step": str(one), "held_out": f"{value:.6g}"} for one, value in zip(at, values, strict=False)]
    rows[0] |= UNTRAINED | {"images:apart": apart}
    rows[-1] |= FEATURES | (features or {})
    rng, around = np.random.default_rng(0), found.values.double().numpy() - found.value
    results = {str(one): (value + rng.permutation(around)).tolist() for one, value in zip(at, values, strict=False)}
    settings = SETTINGS if task is None else replace(SETTINGS, task=task)
    return VerdictInputs(found, rows, settings, step, steps, ended=ended, **{"results": results} | more)


ALIKE = agreement(0.97, 0.93)
IN_ONE_PLACE = {"features:deviation": "0.008"}
# `mae` on 240 small images of four kinds, 60 updates: kNN 97.9 %, untrained 81.2 %
FAR_FROM_0 = {"features:spread": "0.034", "features:effective rank": "1.8", "features:deviation": "0.101"}
# `mae` at 100 times its learning rate, on 80 of `shapes`, 600 updates
HUNDREDFOLD = signs(measure(0.3766, 0.339, n=20, noise=0.1), (1.3034, 0.377477, 0.5230, 0.4432, 0.3907))

# inputs, verdict, words of the reason, words of the advice
CASES = {
    "clearly learnt": (signs(measure(0.2)), HEALTHY, "50% of the way", "label a few"),
    "with few labels": (signs(measure(0.2), classes=UNSURE), HEALTHY, "20 labelled images leave open", "label more"),
    "with few labels in groups": (
        signs(measure(0.2), classes=UNSURE._replace(images=200, groups=4)),
        *(HEALTHY, "200 labelled images", "more groups (now 4)"),
    ),
    "clear before, and hardly less now": (signs(measure(0.356, noise=0.05), (0.9, 0.35)), HEALTHY, "11%", ""),
    "clear before, and much less now": (signs(measure(0.38), (0.9, 0.3)), WEAK, "5% of the way", "(--epochs 40)"),
    "no gain in classes on the way": (
        signs(measure(0.2), ended=False, classes=NO_GAIN),
        *(HEALTHY, "kNN 20.0%, raw pixels 30.0%", ""),
    ),
    "with labels": (signs(measure(0.2), classes=GAIN), HEALTHY, "kNN 30.0%", ""),
    "still improving": (signs(measure(0.2), (0.9, 0.6, 0.4), classes=GAIN), HEALTHY, "50%", "still improving"),
    "no gain in classes": (signs(measure(0.2), classes=NO_GAIN), WEAK, "(20.0%, raw pixels 30.0%)", "another --task"),
    "solved, without labels": (signs(accuracy(1.0)), HEALTHY, "solved", "make the task harder"),
    "solved, no gain in classes": (signs(accuracy(1.0), classes=NO_GAIN), WEAK, "solved", "make the task harder"),
    "solved, with labels": (signs(accuracy(1.0), classes=GAIN), HEALTHY, "kNN 30.0%", ""),
    "nearly solved": (signs(accuracy(0.97)), HEALTHY, "96% of the way", "label a few"),
    "weakly": (signs(measure(0.38)), WEAK, "5% of the way to perfect", "train longer (--epochs 40)"),
    "hardly": (signs(measure(0.399, noise=0.001), (0.9, 0.4)), NOT_LEARNING, "error 0.399, blurred copy 0.400", ""),
    "a teacher, weakly": (signs(agreement(0.35, 0.3)), WEAK, "7% of the way", "larger --batch_size"),
    "outputs alike": (
        signs(ALIKE, task={"name": "lut", "loss": "byol"}),
        *(WEAK, "so similar", "use --task.loss infonce, raise --task.momentum, or lower --blr"),
    ),
    "outputs alike in a mixture": (
        signs(ALIKE, task={"name": "mixture", "agreement_loss": "byol"}),
        *(WEAK, "so similar", "use --task.agreement_loss infonce, raise --task.momentum"),
    ),
    "outputs alike without a teacher": (
        signs(ALIKE, task={"name": "extrema", "loss": "sigreg"}),
        *(WEAK, "so similar", "raise --task.gaussian_weight, or lower --blr"),
    ),
    "a teacher's hidden layers collapsed": (
        signs(replace(measure(0.1), outputs=torch.ones(200, 4)), task={"name": "latent", "loss": "smooth_l1"}),
        *(COLLAPSED, "means little", "raise --task.momentum, or lower --blr"),
    ),
    "outputs collapsed": (signs(agreement(0.99, 0.95, rank=2)), COLLAPSED, "effective rank 1.99", "--task.momentum"),
    "outputs collapsed, but better by labels": (
        signs(agreement(0.99, 0.95, rank=2), classes=BETTER),
        *(WEAK, "(91.7%, untrained 77.1%)", "--task.momentum"),
    ),
    "features on a line": (
        signs(measure(0.2), features={"features:centred rank": "1.4"}),
        *(COLLAPSED, "87.5% of an untrained encoder's, centred rank 1.4", "lower --blr (from 0.004 to"),
    ),
    "features in one place": (signs(measure(0.2), features=IN_ONE_PLACE), COLLAPSED, "is 1.0% of", ""),
    "features far from 0": (signs(measure(0.2), features=FAR_FROM_0), HEALTHY, "50%", ""),
    "features in one place, but better by labels": (
        signs(measure(0.2), features=IN_ONE_PLACE, classes=BETTER),
        *(HEALTHY, "kNN 91.7%", ""),
    ),
    "features not finite": (signs(measure(0.2), features={"features:spread": "nan"}), NOT_LEARNING, "not finite", ""),
    "measure not finite": (signs(measure(float("nan"))), NOT_LEARNING, "not finite", "lower --blr"),
    "images alike": (signs(measure(0.2), apart="0.03"), UNKNOWN, "only 3.0% of", "look at your data"),
    "images alike, at once": (signs(measure(0.9), (), 0, False, apart="0.03"), UNKNOWN, "nearly identical", ""),
    "few images": (signs(measure(0.3, n=4)), UNKNOWN, "4 held-out images are too few", "--held_out"),
    "an interval with 0 and 10 %": (signs(measure(0.39, n=20, noise=0.08)), UNKNOWN, "20 held-out images", "--held"),
    "few updates matter more than few images": (
        signs(measure(0.39, n=20, noise=0.08), step=499),
        *(EARLY, "after 499 updates", "train longer"),
    ),
    "few images for any claim, and few updates": (signs(measure(0.3, n=4), step=499), UNKNOWN, "too few", "--held_out"),
    "an interval around 10 %": (signs(measure(0.36, n=20, noise=0.06)), WEAK, "20 held-out images", "--held_out"),
    "at the start": (signs(measure(0.9), (), 0, False), EARLY, "nothing is trained yet: error 0.900", ""),
    "few updates": (signs(measure(0.5), step=499), EARLY, "after 499 updates", "train longer"),
    "first half": (signs(measure(0.5), step=500, ended=False, steps=1001), EARLY, "the first half", ""),
    "nearer than halfway": (signs(measure(0.5), (0.9, 0.55)), EARLY, "9% nearer to perfect", "longer"),
    "stands still": (signs(measure(0.5), (0.9, 0.5)), NOT_LEARNING, "error 0.500", "--patch_size"),
    "worse than at the start": (signs(measure(0.95)), NOT_LEARNING, "first step (0.900)", "lower --blr"),
    "worse by chance": (signs(measure(0.93, n=20, noise=0.1), step=8), EARLY, "after 8 updates", ""),
    "up and down": (signs(measure(0.45), (0.9, 0.5, 0.6)), NOT_LEARNING, "from 0.500 to 0.600", "lower --blr"),
    "a hundredfold learning rate": (HUNDREDFOLD, NOT_LEARNING, "from 0.377 to 0.523", "lower --blr"),
    "went back": (signs(measure(0.5), setbacks=2), NOT_LEARNING, "2 times", "lower --blr"),
    "went back, and learnt": (signs(measure(0.2), setbacks=2), HEALTHY, "50%", ""),
    "without the columns of features": (signs(measure(0.2))._replace(rows=[]), HEALTHY, "50%", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rule(case):
    found, verdict, why, then = CASES[case]
    health = health_of(found)
    assert health.verdict is verdict, health
    assert why in health.why and then in health.then, health
    assert health.ended == found.ended and health.epoch == round(found.step / found.steps * 10, 4)


def featured(name, value, n=200):
    return signs(measure(0.2, n=n), features={f"features:{name}": value})


def unfinished(step):
    return signs(measure(0.5), step=step, steps=1200, ended=False)


@pytest.mark.parametrize(
    ("found", "other", "rule"),
    [
        (signs(measure(0.2), apart="0.0499"), signs(measure(0.2), apart="0.05"), Rule.SAME_IMAGES),
        (featured("centred rank", "1.99"), featured("centred rank", "2"), Rule.SAME_FEATURES),
        (featured("deviation", "0.0399"), featured("deviation", "0.0401"), Rule.SAME_FEATURES),  # of 0.8
        (featured("deviation", "0.008", n=16), featured("deviation", "0.008", n=15), Rule.SAME_FEATURES),
        (signs(measure(0.5), (0.9, 0.5), 499), signs(measure(0.5), (0.9, 0.5), 500), Rule.FEW_UPDATES),
        (unfinished(599), unfinished(600), Rule.FIRST_HALF),
        (signs(measure(0.45), (0.9, 0.5, 0.53)), signs(measure(0.45), (0.9, 0.5, 0.52)), Rule.JUMPED_BACK),
        (signs(accuracy(0.993)), signs(accuracy(0.992)), Rule.SOLVED),
        (signs(accuracy(1.0)), signs(replace(accuracy(1.0), outputs=torch.randn(200, 99))), Rule.SOLVED),
    ],
)
def test_thresholds_of_rules(found, other, rule):
    assert health_of(found).rule is rule and health_of(other).rule is not rule


def test_a_teacher_of_hidden_layers_needs_no_larger_batch():
    weakly = agreement(0.35, 0.3)
    assert "batch_size" in health_of(signs(weakly)).actions
    assert "batch_size" not in health_of(signs(weakly, task={"name": "latent", "loss": "smooth_l1"})).actions


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_is_values_from_which_a_file_gives_the_same_words(case, tmp_path):
    health = health_of(CASES[case][0])
    write_health(tmp_path, health)
    found = read_health(tmp_path)
    assert str(found) == str(health) and found.rule is health.rule and found.actions == health.actions
    assert str(Health.of(json.loads(json.dumps(found.plain(), allow_nan=False)))) == str(health)
    heard = str(health_of(CASES[case][0]._replace(modality=modality_of(Sound()))))
    for given in ("raw pixels", "on other images"):  # names in these measures, which those of recordings have not
        heard = heard.replace(given, "")
    assert "image" not in heard and "pixel" not in heard


def test_actions_are_options_and_values():
    assert health_of(CASES["weakly"][0]).actions == {"epochs": 40}
    assert health_of(CASES["weakly"][0]._replace(stopped=True)).actions == {"out": "another", "patience": "higher"}
    slower = health_of(CASES["up and down"][0])
    assert slower.actions == {"blr": 4e-4, "warmup_epochs": "higher"} and slower.figures["blr"] == 4e-3
    assert (slower.figures["before"], slower.figures["after"]) == (0.5, 0.6)


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "splendid"},
        {"rule": "luck"},
        {"noun": "cats"},
        {"figures": {}},  # of which the words are made
        {"figures": {"before": "much", "after": 0.6, "blr": 1}},
        {"actions": {"blr": [1]}},
        {"measure": None},
        {"why": 3},
    ],
)
def test_an_invalid_verdict_is_none(change, tmp_path):
    values = health_of(CASES["up and down"][0]).plain()
    write_checksummed(tmp_path / "verdict.yaml", values)
    assert read_health(tmp_path) is not None
    write_checksummed(tmp_path / "verdict.yaml", values | change)
    assert read_health(tmp_path) is None


def answered(right, n=100, answers=4):
    """Return inputs with one answer per image, right with the probabilities ``right`` [measures]."""
    shares = np.random.default_rng(n).random((len(right), n)) < np.asarray(right)[:, None]
    chance = {"chance": torch.full((n,), 1 / answers)}
    found = Measure("accuracy", torch.tensor(shares[-1]).float(), chance, "chance", True)
    steps = [str(round(400 * i / (len(right) - 1))) for i in range(len(right))]
    rows = [{"step": at, "held_out": f"{row.mean():.6g}"} for at, row in zip(steps, shares, strict=True)]
    results = {at: row.astype(float).tolist() for at, row in zip(steps, shares, strict=True)}
    return VerdictInputs(found, rows, SETTINGS, 400, 1000, ended=True, results=results)


def test_a_jump_back_is_more_than_chance():
    """Noise over images must not make a run at chance "not learning", as it did for a third of such runs."""
    verdicts = [health_of(answered([0.25] * 7, n)).verdict for n in range(100, 160)]
    assert NOT_LEARNING not in verdicts and EARLY in verdicts
    assert health_of(answered([0.25, 0.25, 0.6, 0.2])).rule is Rule.JUMPED_BACK


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
    now = Measure("accuracy", found + apart, {"chance": torch.full((n,), 0.5)}, "chance", True)
    rows = [{"step": "0", "held_out": f"{start}"}, {"step": "6", "held_out": f"{found}"}]
    results = {"0": before.tolist()}
    assert VerdictInputs(now, rows, SETTINGS, 6, 6, results=results).worse_than_at_the_start() == worse


# The closing sentence follows the size of the effect and its interval, and states disagreements.

NEW = HeldOut(np.array([0]), np.array([]))
KNOWN = HeldOut(np.array([0]), np.array([]), "trained", "runs/old")
ERROR = {"to_beat": "blurred copy", "higher_is_better": False, "form": ".3f"}
PLACES = {"to_beat": "chance", "higher_is_better": True}
AGREEMENT = {"to_beat": "on other images", "higher_is_better": True, "form": ".3f"}


def taken(name, value, baselines, n=200, noise=0.01, **how):
    """Return a measure whose images differ by ±``noise``, so that means are exact."""
    apart = noise * torch.tensor([1.0, -1.0]).repeat(n)[:n]
    apart = apart - apart.mean()
    return Measure(name, value + apart, {key: torch.full((n,), one) for key, one in baselines.items()}, **how)


def error(value, blurred, flat, **more):
    return taken("reconstruction error", value, {"mean colour": flat, "blurred copy": blurred}, **ERROR | more)


IDENTICAL, DIFFERENT = {"outputs": torch.ones(200, 8)}, {"outputs": torch.randn(200, 99)}
CLOSING = {
    "hardly": (error(1.294, 1.295, 1.2, noise=0.001), "The task is hardly being learnt"),
    "hardly, with fewer images": (error(1.294, 1.295, 1.2, n=20), "There is no clear sign"),
    "clearly": (error(0.499, 0.727, 0.615), "The task is clearly being learnt"),
    "weakly": (error(0.660, 0.722, 0.7), "The task is being learnt, but weakly"),
    "loses to a baseline for scale": (error(0.973, 1.1, 0.934), "The task is clearly being learnt"),
    "worse": (error(0.973, 0.934, 0.9), "The task is not learnt yet"),
    "chance": (taken("positions", 0.083, {"chance": 0.083}, **PLACES), "There is no clear sign"),
    "a few images": (taken("positions", 0.4, {"chance": 0.333}, 12, 0.4, **PLACES), "12 held-out images leave open"),
    "one image": (taken("positions", 0.9, {"chance": 0.3}, n=1, **PLACES), "1 held-out image is too few to tell"),
    "how well": (
        taken("positions", 0.6, {"chance": 0.333}, 12, 0.4, **PLACES),
        "The task is being learnt, but 12 held-out images leave open how well",
    ),
    "collapsed": (
        taken("agreement", 0.992, {"on other images": 0.957}, **IDENTICAL, **AGREEMENT),
        "The outputs for whole images have collapsed",
    ),
    "nearly so": (
        taken("agreement", 0.973, {"on other images": 0.934}, **DIFFERENT, **AGREEMENT),
        "The outputs for whole images are nearly the same for all of them",
    ),
    "not so": (
        taken("agreement", 0.972, {"on other images": 0.609}, **DIFFERENT, **AGREEMENT),
        "The task is clearly being learnt",
    ),
}


@pytest.mark.parametrize("case", CLOSING)
def test_the_words_follow_size_and_interval(case):
    found, head = CLOSING[case]
    sentence = closing_sentence(found, None, NEW)
    assert sentence.startswith(head), sentence
    assert sentence.endswith(f". {no_labels()}")


def test_figure_and_interval_are_printed():
    said = closing_sentence(error(0.499, 0.727, 0.615), None, NEW)
    assert "reconstruction error 0.499 on 200 held-out images, 31.4 % [31.2, 31.6] of the way from 0.727" in said
    assert "to 0; mean colour 0.615." in said
    known = closing_sentence(error(0.499, 0.727, 0.615), None, KNOWN)
    assert "or these images are memorised" in known and "200 images that the weights of runs/old were tra" in known
    right = closing_sentence(taken("positions", 0.9, {"chance": 0.3}, **PLACES), None, NEW)
    assert "positions 90.0%" in right and "from 30.0% (chance) to 100%" in right


def test_disagreeing_baselines_are_reported():
    flat = closing_sentence(error(0.973, 1.1, 0.934), None, NEW)
    assert "that beats blurred copy, but not mean colour (0.934), which has information" in flat
    blurred = closing_sentence(error(0.973, 0.934, 1.1), None, NEW)
    assert "0.934 (blurred copy) has to be beaten; that beats mean colour (1.100), but not blurred copy" in blurred


def report(trained, untrained, pixels, n):
    names = {"trained": trained, "untrained": untrained, "raw pixels": pixels}
    rows = tuple(Row.of(name, "mean", "knn", {"k": 20}, value, n) for name, value in names.items())
    return Report(list(rows), "", "", rows, "images", "", 0, n)


@pytest.mark.parametrize(
    ("values", "n", "words"),
    [
        ((0.299, 0.110, 0.175), 2000, "clearly better than raw pixels (29.9%, 17.5%)."),
        ((0.420, 0.282, 0.371), 10_000, "somewhat better than raw pixels (42.0%, 37.1%)."),
        ((0.345, 0.285, 0.367), 10_000, "worse than raw pixels (34.5%, 36.7%), but better than untrained (28.5%)."),
        ((0.375, 0.285, 0.371), 10_000, "do not separate classes clearly better than raw pixels (37.5%, 37.1%), but"),
        ((0.267, 0.285, 0.367), 10_000, "worse than raw pixels (26.7%, 36.7%)."),
        ((0.583, 0.333, 0.583), 12, "12 test images leave open whether its features separate classes better than raw"),
    ],
)
def test_with_labels_the_features_are_compared_with_both_controls(values, n, words):
    sentence = closing_sentence(error(0.499, 0.727, 0.615), report(*values, n), NEW)
    assert "; and by kNN " in sentence and words in sentence and no_labels() not in sentence


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


# Runs that are made to fail.


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """Folder of a hundred shapes without labels."""
    return written(tmp_path_factory.mktemp("shapes"), [open_data("shapes").train.read(i) for i in range(100)])


def written(folder: Path, images) -> Path:
    folder.mkdir(exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(np.asarray(image.permute(1, 2, 0))).save(folder / f"{i:03d}.png")
    return folder


def trained(data, task, out, **how):
    return read_health(pretrain(data, task, out=out, **SMALL | {"epochs": 20, "batch_size": 8} | how).folder)


def test_a_verdict_has_its_row_in_the_metrics_however_soon_the_run_is_killed(shapes, tmp_path, monkeypatch):
    """A report reads both, also during training and after a kill between two checkpoints."""
    last = []

    def written(path, health):
        last.append((health.epoch, column(path, "epoch")[-1]))

    monkeypatch.setattr("patchloom.train.metrics.write_health", written)
    pretrain(shapes, out=tmp_path / "run", **(SMALL | {"epochs": 2}))
    assert len(last) > 2 and all(verdict == row for verdict, row in last) and last[-1][0] == 2


def test_copies_of_one_image(tmp_path):
    rng = np.random.default_rng(0)
    image = open_data("shapes").train.read(0).to(torch.int16)
    grain = (torch.from_numpy(rng.integers(-3, 4, image.shape)) for _ in range(60))
    folder = written(tmp_path / "images", [(image + one).clamp(0, 255).to(torch.uint8) for one in grain])
    assert trained(folder, "mae", tmp_path / "run", epochs=1).rule is Rule.SAME_IMAGES


@pytest.mark.slow
def test_a_far_too_high_learning_rate(shapes, tmp_path):
    health = trained(shapes, "mae", tmp_path / "run", blr=400.0)
    assert health.verdict in (NOT_LEARNING, COLLAPSED) and health.actions["blr"] == 40, health


@pytest.mark.slow
def test_a_teacher_that_follows_at_once(shapes, tmp_path):
    task = {"name": "extrema", "loss": "byol", "momentum": 0.0, "masks": 2}
    health = trained(shapes, task, tmp_path / "run", blr=4e-2)
    assert health.verdict == COLLAPSED and "nearly the same for all of them" in health.why, health


@pytest.mark.slow
def test_noise(tmp_path):
    noise = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    folder = written(tmp_path / "images", noise)
    health = trained(folder, "mae", tmp_path / "run", epochs=85, img_size=16)  # 510 updates
    assert health.verdict == NOT_LEARNING, health
