"""Verdicts: each rule, and runs that are made to fail."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import SMALL
from PIL import Image

from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.claims import Level, MeasureResult
from patchloom.data.sources.open import open_data
from patchloom.questions.question import Measure
from patchloom.runs.checksummed import write_checksummed
from patchloom.runs.settings import Settings
from patchloom.runs.verdict import Health, Rule, Verdict, read_health, write_health
from patchloom.train.loop import pretrain
from patchloom.train.verdict import ClassResult, VerdictInputs, health_of

SETTINGS = Settings(data="photos", task={"name": "mae"}, model={"name": "nano"}, epochs=10, blr=4e-3)
FEATURES = {"features:spread": "0.9", "features:centred rank": "9", "features:deviation": "0.7"}
UNTRAINED = {"features:deviation:untrained": "0.8"}
BETTER = ClassResult(0.917, "untrained", 0.771, Level.UNSURE, Level.UNSURE)


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


def signs(found, values=(0.9,), step=1000, ended=True, **more):
    """Return inputs of the rules at ``step`` of 1,000, with held-out measures evenly spread over the steps."""
    values = [*values, found.value]
    steps = [round(step * i / (len(values) - 1)) for i in range(len(values))] if step else [0]
    rows = [{"step": str(at), "held_out": f"{value:.6g}"} for at, value in zip(steps, values, strict=False)]
    rows[0] |= UNTRAINED | {"images:apart": more.pop("apart", "0.97")}
    rows[-1] |= FEATURES | more.pop("features", {})
    rng, apart = np.random.default_rng(0), found.values.double().numpy() - found.value
    results = {str(at): (value + rng.permutation(apart)).tolist() for at, value in zip(steps, values, strict=False)}
    return VerdictInputs(found, rows, SETTINGS, step, 1000, ended=ended, **{"results": results} | more)


CASES = {
    "clearly learnt": (
        signs(measure(0.2)),
        Verdict.HEALTHY,
        "error 0.200, blurred copy 0.400, 50% of the way",
        "label a few",
    ),
    "with few labels": (
        signs(measure(0.2), classes=ClassResult(0.2, "untrained", 0.3, Level.UNKNOWN, Level.UNKNOWN, 20)),
        *(
            Verdict.HEALTHY,
            "20 labelled images leave open whether its features are better than unt",
            "label more",
        ),
    ),
    "with few labels in groups": (
        signs(measure(0.2), classes=ClassResult(0.2, "untrained", 0.3, Level.UNKNOWN, Level.UNKNOWN, 200, 4)),
        *(Verdict.HEALTHY, "200 labelled images leave open", "label images of more groups (now 4)"),
    ),
    "clear before, and hardly less now": (
        signs(measure(0.356, noise=0.05), (0.9, 0.35)),
        *(Verdict.HEALTHY, "11% of the way", ""),
    ),
    "clear before, and much less now": (
        signs(measure(0.38), (0.9, 0.3)),
        *(Verdict.WEAK, "5% of the way to perfect", "train longer (--epochs 40)"),
    ),
    "no gain in classes on the way": (
        signs(measure(0.2), ended=False, classes=ClassResult(0.2, "raw pixels", 0.3, Level.WORSE, Level.NONE)),
        *(Verdict.HEALTHY, "kNN 20.0%, raw pixels 30.0%", ""),
    ),
    "with labels": (
        signs(measure(0.2), classes=ClassResult(0.3, "raw pixels", 0.2, Level.CLEAR, Level.CLEAR)),
        Verdict.HEALTHY,
        "kNN 30.0%",
        "",
    ),
    "still improving": (
        signs(measure(0.2), (0.9, 0.6, 0.4), classes=ClassResult(0.3, "raw pixels", 0.2, Level.CLEAR, Level.CLEAR)),
        *(Verdict.HEALTHY, "50%", "train longer (--epochs 40): it was still improving"),
    ),
    "no gain in classes": (
        signs(measure(0.2), classes=ClassResult(0.2, "raw pixels", 0.3, Level.WORSE, Level.NONE)),
        *(Verdict.WEAK, "not clearly better than raw pixels (20.0%, raw pixels 30.0%)", "another --task"),
    ),
    "solved, without labels": (signs(accuracy(1.0)), Verdict.HEALTHY, "the task is solved", "make the task harder"),
    "solved, no gain in classes": (
        signs(accuracy(1.0), classes=ClassResult(0.2, "raw pixels", 0.3, Level.WORSE, Level.NONE)),
        *(Verdict.WEAK, "solved, and more training adds little, but by kNN its features", "make the task harder"),
    ),
    "solved, with labels": (
        signs(accuracy(1.0), classes=ClassResult(0.3, "raw pixels", 0.2, Level.CLEAR, Level.CLEAR)),
        *(Verdict.HEALTHY, "kNN 30.0%", ""),
    ),
    "nearly solved": (signs(accuracy(0.97)), Verdict.HEALTHY, "96% of the way", "label a few"),
    "weakly": (signs(measure(0.38)), Verdict.WEAK, "5% of the way to perfect", "train longer (--epochs 40)"),
    "hardly": (
        signs(measure(0.399, noise=0.001), (0.9, 0.4)),
        Verdict.NOT_LEARNING,
        "error 0.399, blurred copy 0.400",
        "",
    ),
    "a teacher, weakly": (signs(agreement(0.35, 0.3)), Verdict.WEAK, "7% of the way", "larger --batch_size"),
    "outputs alike": (
        signs(agreement(0.97, 0.93))._replace(settings=replace(SETTINGS, task={"name": "lut", "loss": "byol"})),
        *(Verdict.WEAK, "so similar that agreement", "use --task.loss infonce, raise --task.momentum, or lower --blr"),
    ),
    "outputs alike in a mixture": (
        signs(agreement(0.97, 0.93))._replace(
            settings=replace(SETTINGS, task={"name": "mixture", "agreement_loss": "byol"})
        ),
        *(Verdict.WEAK, "so similar that agreement", "use --task.agreement_loss infonce, raise --task.momentum"),
    ),
    "a teacher's hidden layers collapsed": (
        signs(replace(measure(0.1), outputs=torch.ones(200, 4)))._replace(
            settings=replace(SETTINGS, task={"name": "latent", "loss": "smooth_l1"})
        ),
        *(Verdict.COLLAPSED, "so predicting them means little", "raise --task.momentum, or lower --blr"),
    ),
    "outputs alike without a teacher": (
        signs(agreement(0.97, 0.93))._replace(settings=replace(SETTINGS, task={"name": "extrema", "loss": "sigreg"})),
        *(Verdict.WEAK, "so similar that agreement", "raise --task.gaussian_weight, or lower --blr"),
    ),
    "outputs collapsed": (
        signs(agreement(0.99, 0.95, rank=2)),
        Verdict.COLLAPSED,
        "effective rank 1.99",
        "--task.momentum",
    ),
    "outputs collapsed, but better by labels": (
        signs(agreement(0.99, 0.95, rank=2), classes=BETTER),
        *(Verdict.WEAK, "the features do separate classes (91.7%, untrained 77.1%)", "--task.momentum"),
    ),
    "features on a line": (
        signs(measure(0.2), features={"features:centred rank": "1.4"}),
        *(
            Verdict.COLLAPSED,
            "87.5% of an untrained encoder's, centred rank 1.4",
            "lower --blr (from 0.004 to",
        ),
    ),
    "features in one place": (
        signs(measure(0.2), features={"features:deviation": "0.008"}),
        Verdict.COLLAPSED,
        "is 1.0% of",
        "",
    ),
    # of `mae` on 240 small images of four kinds, 60 updates: kNN 97.9 %, untrained 81.2 %
    "features far from 0": (
        signs(
            measure(0.2),
            features={"features:spread": "0.034", "features:effective rank": "1.8", "features:deviation": "0.101"},
        ),
        *(Verdict.HEALTHY, "50%", ""),
    ),
    "features in one place, but better by labels": (
        signs(measure(0.2), features={"features:deviation": "0.008"}, classes=BETTER),
        *(Verdict.HEALTHY, "kNN 91.7%", ""),
    ),
    "features not finite": (
        signs(measure(0.2), features={"features:spread": "nan"}),
        Verdict.NOT_LEARNING,
        "not finite",
        "",
    ),
    "measure not finite": (signs(measure(float("nan"))), Verdict.NOT_LEARNING, "not finite", "lower --blr"),
    "images alike": (
        signs(measure(0.2), apart="0.03"),
        Verdict.UNKNOWN,
        "only 3.0% of",
        "look at your data",
    ),
    "images alike, at once": (
        signs(measure(0.9), (), 0, False, apart="0.03"),
        Verdict.UNKNOWN,
        "nearly identical",
        "",
    ),
    "few images": (signs(measure(0.3, n=4)), Verdict.UNKNOWN, "4 held-out images are too few to tell", "--held_out"),
    "an interval with 0 and 10 %": (
        signs(measure(0.39, n=20, noise=0.08)),
        Verdict.UNKNOWN,
        "of the way to perfect: 20 held-out images leave open whether",
        "--held",
    ),
    "few updates matter more than few images": (
        signs(measure(0.39, n=20, noise=0.08), step=499),
        *(Verdict.EARLY, "after 499 updates", "train longer"),
    ),
    "few images for any claim, and few updates": (
        signs(measure(0.3, n=4), step=499),
        *(Verdict.UNKNOWN, "4 held-out images are too few to tell", "--held_out"),
    ),
    "an interval around 10 %": (
        signs(measure(0.36, n=20, noise=0.06)),
        *(Verdict.WEAK, "10% of the way to perfect, and 20 held-out images leave open how well", "--held_out"),
    ),
    "at the start": (signs(measure(0.9), (), 0, False), Verdict.EARLY, "nothing is trained yet: error 0.900", ""),
    "few updates": (signs(measure(0.5), step=499), Verdict.EARLY, "after 499 updates", "train longer"),
    "first half": (
        signs(measure(0.5), step=500, ended=False)._replace(steps=1001),
        Verdict.EARLY,
        "the first half",
        "",
    ),
    "nearer than halfway": (
        signs(measure(0.5), (0.9, 0.55)),
        Verdict.EARLY,
        "but 9% nearer to perfect than halfway",
        "longer",
    ),
    "stands still": (
        signs(measure(0.5), (0.9, 0.5)),
        Verdict.NOT_LEARNING,
        "error 0.500, blurred copy 0.400",
        "--patch_size",
    ),
    "worse than at the start": (
        signs(measure(0.95)),
        Verdict.NOT_LEARNING,
        "before the first step (0.900)",
        "lower --blr",
    ),
    "worse than at the start, by chance": (
        signs(measure(0.93, n=20, noise=0.1), step=8),
        Verdict.EARLY,
        "after 8 updates",
        "",
    ),
    "up and down": (
        signs(measure(0.45), (0.9, 0.5, 0.6)),
        Verdict.NOT_LEARNING,
        "fell back from 0.500 to 0.600",
        "lower --blr",
    ),
    # of `mae` at 100 times its learning rate, on 80 of `shapes`, 600 updates
    "a hundredfold learning rate": (
        signs(measure(0.3766, 0.339, n=20, noise=0.1), (1.3034, 0.377477, 0.5230, 0.4432, 0.3907)),
        *(Verdict.NOT_LEARNING, "fell back from 0.377 to 0.523", "lower --blr"),
    ),
    "went back": (
        signs(measure(0.5), setbacks=2),
        Verdict.NOT_LEARNING,
        "went back to a checkpoint 2 times",
        "lower --blr",
    ),
    "went back, and learnt": (signs(measure(0.2), setbacks=2), Verdict.HEALTHY, "50%", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rule(case):
    found, verdict, why, then = CASES[case]
    health = health_of(found)
    assert health.verdict is verdict, health
    assert why in health.why and then in health.then, health
    assert health.ended == found.ended and health.epoch == round(found.step / found.steps * 10, 4)


def test_a_teacher_of_hidden_layers_needs_no_larger_batch():
    found, _, _, then = CASES["a teacher, weakly"]
    latent = found._replace(settings=replace(SETTINGS, task={"name": "latent", "loss": "smooth_l1"}))
    assert then in health_of(found).then and then not in health_of(latent).then


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_is_values_from_which_a_file_gives_the_same_words(case, tmp_path):
    health = health_of(CASES[case][0])
    write_health(tmp_path, health)
    found = read_health(tmp_path)
    assert str(found) == str(health) and found.rule is health.rule and found.actions == health.actions
    text = json.dumps(found.plain(), allow_nan=False)
    assert str(Health.of(json.loads(text))) == str(health)
    recordings = modality_of(Sound())
    heard = str(health_of(CASES[case][0]._replace(modality=recordings)))
    for given in ("raw pixels", "on other images"):  # names in these measures, which those of recordings have not
        heard = heard.replace(given, "")
    assert "image" not in heard and "pixel" not in heard


def test_actions_are_options_and_values():
    assert health_of(CASES["weakly"][0]).actions == {"epochs": 40}
    assert health_of(CASES["weakly"][0]._replace(stopped=True)).actions == {"out": "another", "patience": "higher"}
    slower = health_of(CASES["up and down"][0])
    assert slower.actions == {"blr": 4e-4, "warmup_epochs": "higher"} and slower.figures["blr"] == 4e-3
    assert (slower.figures["before"], slower.figures["after"]) == (0.5, 0.6)


def test_a_verdict_of_an_older_version_is_its_words(tmp_path):
    old = {"verdict": "healthy", "why": "error 0.2", "then": "", "epoch": 2.0, "ended": True}
    write_checksummed(tmp_path / "verdict.yaml", old)
    found = read_health(tmp_path)
    assert found.verdict is Verdict.HEALTHY and str(found) == "healthy: error 0.2." and found.rule is None


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


@pytest.mark.parametrize("form", ["1000000d", ".99999999f", "{0}", "s"])
def test_an_invalid_measure_is_rejected(form):
    values = measure(0.2).plain()
    assert MeasureResult.of(values).show() == "0.200"
    with pytest.raises(ValueError):
        MeasureResult.of(values | {"form": form})


def answered(right, n=100, answers=4):
    """Return inputs with one answer per image, right with the probabilities ``right`` [measures]."""
    shares = np.random.default_rng(n).random((len(right), n)) < np.asarray(right)[:, None]
    found = Measure(
        "accuracy", torch.tensor(shares[-1]).float(), {"chance": torch.full((n,), 1 / answers)}, "chance", True
    )
    steps = [round(400 * i / (len(right) - 1)) for i in range(len(right))]
    return signs(found)._replace(
        rows=[{"step": str(at), "held_out": f"{row.mean():.6g}"} for at, row in zip(steps, shares, strict=True)],
        results={str(at): row.astype(float).tolist() for at, row in zip(steps, shares, strict=True)},
        step=400,
    )


def test_chance_alone_is_no_jump_back():
    """Noise over images must not make a run at chance "not learning", as it did for a third of such runs."""
    verdicts = [health_of(answered([0.25] * 7, n)).verdict for n in range(100, 160)]
    assert Verdict.NOT_LEARNING not in verdicts and Verdict.EARLY in verdicts


def test_a_true_jump_back_is_more_than_chance():
    health = health_of(answered([0.25, 0.25, 0.6, 0.2]))
    assert health.verdict == Verdict.NOT_LEARNING and health.rule == Rule.JUMPED_BACK, health


def test_a_run_of_an_older_version_has_no_columns_of_features():
    old = signs(measure(0.2))
    old = old._replace(rows=[{name: row[name] for name in ("step", "held_out")} for row in old.rows])
    assert health_of(old).verdict == Verdict.HEALTHY


# ---- runs that were made to fail, and one that was not


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """Folder of a hundred shapes without labels."""
    return written(tmp_path_factory.mktemp("shapes"), [open_data("shapes").train.read(i) for i in range(100)])


def written(folder: Path, images) -> Path:
    for i, image in enumerate(images):
        Image.fromarray(np.asarray(image.permute(1, 2, 0))).save(folder / f"{i:03d}.png")
    return folder


def trained(data, task, out, **how):
    return read_health(pretrain(data, task, out=out, **SMALL | {"epochs": 20, "batch_size": 8} | how).folder)


def test_a_verdict_has_its_row_in_the_metrics_however_soon_the_run_is_killed(shapes, tmp_path, monkeypatch):
    """A report reads both, also during training and after a kill between two checkpoints."""
    last = []

    def written(path, health):
        with (path / "metrics.csv").open() as lines:
            last.append((health.epoch, float([*csv.DictReader(lines)][-1]["epoch"])))

    monkeypatch.setattr("patchloom.train.metrics.write_health", written)
    pretrain(shapes, out=tmp_path / "run", **(SMALL | {"epochs": 3}))
    assert len(last) > 2 and all(verdict == row for verdict, row in last) and last[-1][0] == 3


def test_an_ordinary_run_gets_no_bad_verdict(shapes, tmp_path):
    """After 80 updates the task is not learnt yet, so the verdict is "too early to tell"."""
    health = trained(shapes, "mae", tmp_path / "run", epochs=8)
    assert health.verdict == Verdict.EARLY and "after 80 updates" in health.why, health


def test_a_far_too_high_learning_rate(shapes, tmp_path):
    health = trained(shapes, "mae", tmp_path / "run", blr=400.0)
    assert (
        health.verdict in (Verdict.NOT_LEARNING, Verdict.COLLAPSED) and "lower --blr (from 400 to 40)" in health.then
    ), health


def test_a_teacher_that_follows_at_once(shapes, tmp_path):
    task = {"name": "extrema", "loss": "byol", "momentum": 0.0, "masks": 2}
    health = trained(shapes, task, tmp_path / "run", blr=4e-2)
    assert health.verdict == Verdict.COLLAPSED and "nearly the same for all of them" in health.why, health


def test_copies_of_one_image(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "images"
    folder.mkdir()
    image = open_data("shapes").train.read(0).to(torch.int16)
    grain = (torch.from_numpy(rng.integers(-3, 4, image.shape)) for _ in range(60))
    written(folder, [(image + one).clamp(0, 255).to(torch.uint8) for one in grain])
    health = trained(folder, "mae", tmp_path / "run", epochs=1)
    assert health.verdict == Verdict.UNKNOWN and "nearly identical" in health.why, health


def test_noise(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    noise = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    health = trained(written(folder, noise), "mae", tmp_path / "run", epochs=85, img_size=16)  # 510 updates
    assert health.verdict == Verdict.NOT_LEARNING, health
