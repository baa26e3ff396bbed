"""Verdicts: each rule with its words and advice, the file, and the closing sentence."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from patchloom.results.claims import START
from patchloom.results.evaluation import compare_results
from patchloom.results.result import SHARE, Baseline, Result
from patchloom.results.shares import level_of
from patchloom.results.verdict import RULES, Health, Signs, closing_sentence, judge, read_health, write_health
from patchloom.system.checksummed import write_checksummed

# shares of the way by their level: value and interval
CLEAR, WEAK, UNSURE, HARDLY = (0.5, 0.45, 0.55), (0.05, 0.04, 0.06), (0.12, 0.02, 0.3), (0.01, 0.005, 0.015)
NONE, WORSE, OPEN, SOLVED = (0.0, -0.01, 0.01), (-0.1, -0.2, -0.05), (0.05, -0.1, 0.3), (1.0, 0.98, 1.0)
ALONE = (0.5, -math.inf, math.inf)
LONGER, SLOWER = {"epochs": 40}, {"blr": 4e-4, "warmup_epochs": "higher"}
OUTPUTS = {"spread": 0.01, "effective rank": 1.2}
TEACHER = {"task.loss": "infonce", "task.momentum": "higher"}


def share(of, n=200):
    return Result(SHARE, *of, n, digits=0)


def measure(of, n=200, **more):
    beat = Baseline("blurred copy", 0.4, share(of, n), True, True)
    value = 0.4 - 0.4 * of[0]
    how = {"unit": "", "digits": 3, "higher_is_better": False, "baselines": (beat,)}
    return Result("error", value, value - 0.01, value + 0.01, n, **how | more)


def knn(of=CLEAR, untrained=CLEAR, control="raw pixels", n=200, **more):
    best = Baseline(control, 0.2, share(of, n), True, True)
    other = Baseline("untrained", 0.1, share(untrained, n), True, False)
    return Result("kNN", 0.3, 0.25, 0.35, n, "trained", "knn", baselines=(best, other), **more)


def signs(of=CLEAR, n=200, also=(), groups=0, **more):
    found = measure(of, n, also=dict(also), groups=groups)
    usual = {"epoch": 10.0, "epochs": 10.0, "updates": 1000, "blr": 4e-3, "ended": True}
    features = {"apart": 0.97, "rank": 9.0, "deviation": 0.9, "gained": share(NONE)}
    return Signs(found, **{"level": level_of(share(of, n))} | usual | features | more)


AT_ONCE = {"epoch": 0.0, "updates": 0, "ended": False}
MORE_IMAGES, HARDER = {"held_out": "higher", "images": "higher"}, {"difficulty": "higher", "task": "another"}
LABELS, OTHER = {"labels": "higher"}, {"data": "another", "patch_size": "lower", "blr": 4e-4, "task": "another"}
SAME = {"also": OUTPUTS, "same_targets": True, "remedies": TEACHER}

# signs, rule, words of the reason, actions
CASES = {
    "images alike": (signs(apart=0.03), "same_images", "3.0% of that of all values", {"data": "another"}),
    "images alike, at once": (signs(apart=0.03, **AT_ONCE), "same_images", "", {"data": "another"}),
    "features on a line": (signs(rank=1.4), "collapsed", "rank 1.4, deviation 90.0% of an untrained", SLOWER),
    "features in one place": (signs(deviation=0.01), "collapsed", "deviation 1.0% of", SLOWER),
    "features of unknown deviation": (signs(rank=1.4, deviation=math.nan), "collapsed", "rank 1.4)", SLOWER),
    "outputs collapsed": (signs(**SAME), "collapsed", "spread 0.01, effective rank 1.20", TEACHER | SLOWER),
    "the same, but better by labels": (signs(**SAME, knn=knn(UNSURE)), "same_targets", "kNN 30.0%", TEACHER | SLOWER),
    "in one place, but better by labels": (signs(deviation=0.01, knn=knn()), "healthy", "kNN 30.0%", {}),
    "better than untrained only": (signs(rank=1.0, knn=knn(WORSE), ended=False), "healthy", "kNN 30.0%", {}),
    "few images": (signs(OPEN, n=4, updates=1), "few_images", "4 held-out images are too few", MORE_IMAGES),
    "an interval with 0 and 10 %": (signs(OPEN), "few_images", "200 held-out images leave open", MORE_IMAGES),
    "few updates matter more": (signs(OPEN, updates=499), "early", "had 499 updates", LONGER),
    "not finite": (signs(OPEN, finite=False, rank=1.0, same_targets=True), "unstable", "not finite", SLOWER),
    "not finite at once": (signs(finite=False, **AT_ONCE), "unstable", "not finite", SLOWER),
    "went back": (signs(WORSE, setbacks=1), "unstable", "checkpoint once", SLOWER),
    "went back, and learnt": (signs(setbacks=2), "healthy", "50% of the way", LABELS),
    "fell": (signs(NONE, fell=(0.5, 0.6)), "unstable", "from 0.500 to 0.600", SLOWER),
    "fell, and learnt": (signs(WEAK, fell=(0.5, 0.6)), "weak", "5% of the way to perfect", LONGER),
    "at the start": (signs(NONE, **AT_ONCE, rank=1.0, same_targets=True), "early", "nothing is trained yet", {}),
    "a start that has learnt": (signs(**AT_ONCE), "early", "50% of the way", {}),
    "few updates": (signs(WORSE, updates=1), "early", "it had 1 update", LONGER),
    "few updates on the way": (signs(WORSE, updates=1, ended=False), "early", "had 1 update so", {}),
    "first half": (signs(NONE, epoch=4.9, ended=False), "early", "had 1,000 updates", {}),
    "no measure halfway": (signs(NONE, gained=None), "early", "had 1,000 updates", LONGER),
    "nearer than halfway": (signs(NONE, gained=share(WEAK)), "early", "5% nearer to perfect", LONGER),
    "open since halfway": (signs(NONE, gained=share(OPEN)), "early", "open whether", {"held_out": "higher"} | LONGER),
    "stands still": (signs(NONE), "stands_still", "hardly nearer", OTHER),
    "hardly learnt": (signs(HARDLY, gained=share(HARDLY)), "stands_still", "1% of the way", OTHER),
    "outputs alike": (signs(also=OUTPUTS, alike=True, remedies=TEACHER), "weak", "so similar", TEACHER | SLOWER),
    "an interval around 10 %": (signs(UNSURE), "weak", "leave open how well", {"held_out": "higher"} | LONGER),
    "weakly": (signs(WEAK), "weak", "5% of the way to perfect", LONGER),
    "weakly, stopped early": (signs(WEAK, patience=3), "weak", "", {"patience": "higher"}),
    "images of a batch, weakly": (signs(WEAK, compares=True), "weak", "", LONGER | {"batch_size": "higher"}),
    "no gain in classes": (
        *(signs(knn=knn(WORSE)), "no_gain", "not clearly better than raw pixels"),
        LONGER | {"task": "another", "evaluate": "finetune"},
    ),
    "no gain over the start": (
        *(signs(knn=knn(NONE, control=START)), "no_gain", "not clearly better than its start"),
        {"export": "start", "adapt": "blocks", "anchor": 1},
    ),
    "no gain in classes, solved": (signs(SOLVED, knn=knn(NONE)), "no_gain", "solved", HARDER),
    "no gain in classes on the way": (signs(knn=knn(NONE), ended=False), "healthy", "kNN 30.0%, raw pixels", {}),
    "clearly learnt": (signs(), "healthy", "error 0.200, blurred copy 0.400, 50% of the way", LABELS),
    "clear before, hardly less now": (signs(WEAK, level=level_of(share(CLEAR))), "healthy", "5% of", LABELS),
    "solved": (signs(SOLVED), "healthy", "solved", HARDER),
    "solved, with labels": (signs(SOLVED, knn=knn()), "healthy", "kNN 30.0%", {}),
    "agreement on everything is not solved": (signs(SOLVED, also=OUTPUTS), "healthy", "", LABELS),
    "with few labels": (signs(knn=knn(OPEN)), "healthy", "200 labelled images leave open", LABELS),
    "still improving": (signs(knn=knn(), improves=True), "healthy", "still improving", LONGER),
}
VERDICTS = {
    **dict.fromkeys(("same_images", "few_images"), "nothing can be told"),
    **dict.fromkeys(("same_targets", "weak", "no_gain"), "learning but weak"),
    **dict.fromkeys(("unstable", "stands_still"), "not learning"),
    **{"collapsed": "collapsed", "early": "too early to tell", "healthy": "healthy"},
}


@pytest.mark.parametrize("case", CASES)
def test_each_rule(case, tmp_path):
    given, rule, why, actions = CASES[case]
    health = judge(given)
    assert (health.rule, health.verdict) == (rule, VERDICTS[rule]), health
    assert why in health.why and health.actions == actions, health
    assert health.ended == given.ended and health.epoch == given.epoch and bool(health.then) == bool(health.actions)
    write_health(tmp_path, health)
    assert read_health(tmp_path) == health == Health.of(json.loads(json.dumps(health.plain(), allow_nan=False)))


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == {rule for _, rule, *_ in CASES.values()} == {*VERDICTS}


@pytest.mark.parametrize(
    ("inside", "outside", "rule"),
    [
        (signs(apart=0.0499), signs(apart=0.05), "same_images"),
        (signs(rank=1.99), signs(rank=2.0), "collapsed"),
        (signs(deviation=0.0499), signs(deviation=0.05), "collapsed"),
        (signs(rank=1.0, n=16), signs(rank=1.0, n=15), "collapsed"),
        (signs(NONE, updates=499), signs(NONE, updates=500), "early"),
        (signs(NONE, epoch=4.99, ended=False), signs(NONE, epoch=5.0, ended=False), "early"),
    ],
)
def test_thresholds(inside, outside, rule):
    assert judge(inside).rule == rule != judge(outside).rule


def test_nearly_solved_is_not_solved():
    assert not signs((0.98, 0.97, 0.99)).solved and not signs((1.0, 0.94, 1.0)).solved and signs(SOLVED).solved


def test_advice_names_options_with_their_present_and_next_values():
    assert judge(signs(NONE, fell=(0.5, 0.6))).then == "lower --blr (from 0.004 to 0.0004) or raise --warmup_epochs"
    collapsed = judge(signs(also=OUTPUTS, same_targets=True, remedies=TEACHER)).then
    assert collapsed.startswith("use --task.loss infonce, raise --task.momentum, lower --blr")
    assert judge(signs(UNSURE, groups=3)).then.startswith(
        "hold out more groups of images (now 3) (--held_out) or train"
    )
    assert "more --patience (now 3)" in judge(signs(WEAK, patience=3)).then
    assert "groups of images (now 4)" in judge(signs(knn=knn(OPEN, groups=4))).then
    start = judge(signs(knn=knn(NONE, control=START))).then
    assert "patchloom export RUN --start" in start and "--adapt blocks or use --anchor 1" in start


@pytest.mark.parametrize("case", CASES)
def test_recordings_are_not_called_images(case):
    given = CASES[case][0]
    features = None if given.knn is None else replace(given.knn, noun="recordings")
    heard = replace(given, measure=replace(given.measure, noun="recordings"), knn=features)
    said = f"{judge(heard)} {closing_sentence(heard, 'held-out recordings')}"
    assert "image" not in said.replace("(--held_out)", "") and "recording" in said


INVALID = {
    "verdict": ["splendid", ["healthy"]],
    "why": [3, "two\nlines"],
    "then": ["x" * 6000],
    "epoch": ["ten", -1],
    "ended": [1],
    "rule": [{"a": 1}],
    "measure": [5, measure(CLEAR, baselines=()).plain()],
    "actions": [["blr"], {"blr": [1]}, {"blr": "\x1b[2J"}],
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_verdict_is_none(name, tmp_path):
    values = judge(signs(NONE, fell=(0.5, 0.6))).plain()
    for given, known in [(values[name], True), *((one, False) for one in INVALID[name])]:
        write_checksummed(tmp_path / "verdict.yaml", values | {name: given})
        assert (read_health(tmp_path) is not None) == known


def test_a_missing_or_edited_verdict_is_none(tmp_path):
    assert read_health(tmp_path) is None
    write_health(tmp_path, judge(signs()))
    path = tmp_path / "verdict.yaml"
    path.write_text(path.read_text().replace("verdict: healthy", "verdict: collapsed"))
    assert read_health(tmp_path) is None
    path.write_text("[]")
    assert read_health(tmp_path) is None


@pytest.mark.parametrize(
    ("given", "head"),
    [
        (signs(CLEAR), "The task is clearly being learnt: error 0.200 on 200 held-out images, 50 % [45, 55] of the"),
        (signs(WEAK, level=level_of(share(CLEAR))), "The task is being learnt, but weakly so far"),
        (signs(HARDLY), "The task is hardly being learnt so far"),
        (signs(UNSURE), "The task is being learnt, but 200 held-out images leave open how well: error 0.352, 12 %"),
        (signs(NONE), "There is no clear sign that the task is being learnt"),
        (signs(WORSE), "The task is not learnt yet: error 0.440 on 200 held-out images, and 0.400 (blurred copy) has"),
        (signs(OPEN), "200 held-out images leave open whether the task is being learnt"),
        (
            signs(ALONE, n=1),
            "1 held-out image is too few to tell whether the task is being learnt: error 0.200, against",
        ),
        (signs(CLEAR, alike=True), "The outputs for whole images are so similar"),
        (signs(CLEAR, alike=True, same_targets=True), "The outputs for whole images have collapsed"),
    ],
)
def test_the_closing_sentence_follows_size_and_interval(given, head):
    said = closing_sentence(given)
    assert said.startswith(head) and said.endswith(".") and "no labels" not in said


def test_known_images_may_be_memorised():
    said = closing_sentence(signs(), "images that the weights of runs/old were trained on", doubt=True)
    assert "learnt, or these images are memorised: error 0.200 on 200 images that the weights of runs/old were" in said
    assert "memorised" not in closing_sentence(signs(WORSE), doubt=True)


@pytest.mark.parametrize(
    ("of", "other", "barred", "words"),
    [
        (CLEAR, WORSE, False, "; mean colour 0.100, which is better, but has information that the encoder lacks."),
        (CLEAR, WORSE, True, "; mean colour 0.100, which is better."),
        (WORSE, CLEAR, True, "; mean colour 0.100, which it beats."),
        (CLEAR, CLEAR, True, " to 0; mean colour 0.100."),
    ],
)
def test_disagreeing_baselines_are_reported(of, other, barred, words):
    beat = measure(of).to_beat
    both = (beat, Baseline("mean colour", 0.1, share(other), barred, False))
    assert words in closing_sentence(replace(signs(of), measure=measure(of, baselines=both)))


def test_with_labels_it_says_what_the_headline_says():
    right = {"trained": 30, "raw pixels": 20, "untrained": 29}
    rows = [Result.of_images(name, "knn", {"k": 20}, np.arange(60) < one) for name, one in right.items()]
    against = tuple(compare_results([rows[0]], [one], trained=False) for one in rows[1:])
    said = closing_sentence(signs(knn=replace(knn(), against=against)))
    assert "Accuracy by kNN: 30.0 % [25.0, 35.0]. The encoder is 16.7 points better than raw pixels" in said
    assert said.endswith(against[1].sentence()) and "no labels" not in said
