"""Signs of a run: what a verdict is given, by chance and by rows; and runs that are made to fail."""

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
from patchloom.questions.question import Measure
from patchloom.results.claims import START
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Result
from patchloom.results.shares import Level, level_of
from patchloom.results.verdict import judge, read_health
from patchloom.runs.settings import Settings
from patchloom.train.loop import pretrain
from patchloom.train.verdict import VerdictInputs, final_knn, logged_knn

SETTINGS = Settings(data="photos", task={"name": "mae"}, model={"name": "nano"}, epochs=10, blr=4e-3)


def measured(value, base=0.4, n=200, noise=0.01, up=False, **more):
    """Return a measure whose images differ by ±``noise``, so that means are exact."""
    apart = noise * torch.tensor([1.0, -1.0]).repeat(n)[:n]
    baselines = {"base": torch.full((n,), base)}
    return Measure("error", value + apart - apart.mean(), baselines, "base", up, unit="%" if up else "", **more)


def run(found, values=(0.9,), step=1000, steps=1000, columns=(), **more):
    """Return inputs at a step, with measures of ``values`` before it, evenly spread over the steps."""
    values = [*values, found.value]
    at = [str(round(step * i / (len(values) - 1))) for i in range(len(values))]
    rows = [{"step": one, "held_out": f"{value:.6g}"} for one, value in zip(at, values, strict=True)]
    rows[-1] |= dict(columns)
    rng, around = np.random.default_rng(0), found.values.double().numpy() - found.value
    each = {one: (value + rng.permutation(around)).tolist() for one, value in zip(at, values, strict=True)}
    return VerdictInputs(found, rows, each, SETTINGS, step, steps, **more)


def test_columns_become_numbers_and_unknown_ones_nan():
    columns = {
        "images:apart": "0.97",
        "features:centred rank": "9",
        "features:deviation": "0.6",
        "features:spread": "1",
    }
    found = run(measured(0.2), columns=columns | {"features:deviation:untrained": "0.8"}, setbacks=2).signs()
    assert (found.apart, found.rank, found.deviation, found.finite) == (0.97, 9, pytest.approx(0.75), True)
    assert (found.epoch, found.updates, found.setbacks, found.blr) == (10, 1000, 2, 4e-3)
    more = run(measured(0.2), step=999)._replace(settings=replace(SETTINGS, accumulate=2, patience=3))
    assert (more.signs().updates, more.signs().patience, more._replace(stopped=True).signs().patience) == (500, 0, 3)
    bare = run(measured(0.2)).signs()
    assert bare.finite and np.isnan([bare.apart, bare.rank, bare.deviation]).all()
    assert not run(measured(0.2), columns={"features:spread": "nan"}).signs().finite
    assert not run(measured(float("nan"))).signs().finite


@pytest.mark.parametrize(
    ("task", "remedies", "compares"),
    [
        ({"name": "lut", "loss": "byol"}, {"task.loss": "infonce", "task.momentum": "higher"}, True),
        ({"name": "mixture", "agreement_loss": "byol"}, {"task.agreement_loss": "infonce"}, True),
        ({"name": "extrema", "loss": "sigreg"}, {"task.gaussian_weight": "higher"}, True),
        ({"name": "latent", "loss": "smooth_l1"}, {"task.momentum": "higher"}, False),
    ],
)
def test_remedies_are_options_of_the_task(task, remedies, compares):
    outputs = torch.randn(200, 99, generator=torch.Generator().manual_seed(0))
    found = run(measured(0.97, 0.93, up=True, outputs=outputs))._replace(settings=replace(SETTINGS, task=task)).signs()
    assert remedies.items() <= found.remedies.items() and found.compares == compares
    assert found.alike and not found.same_targets and set(found.measure.also) == {"spread", "effective rank"}


@pytest.mark.parametrize(
    ("value", "before", "noise", "level"),
    [
        (0.2, (0.9,), 0.01, Level.CLEAR),
        (0.356, (0.9, 0.35), 0.05, Level.CLEAR),  # clear before, and hardly less now
        (0.38, (0.9, 0.3), 0.01, Level.WEAK),  # clear before, and much less now
        (0.5, (0.9, 0.3), 0.01, Level.WORSE),
    ],
)
def test_what_was_clear_stays_so_until_it_falls(value, before, noise, level):
    assert run(measured(value, noise=noise), before).signs().level is level


@pytest.mark.parametrize(
    ("value", "before", "n", "noise", "fell"),
    [
        (0.45, (0.9, 0.5, 0.53), 200, 0.01, (0.5, 0.53)),
        (0.45, (0.9, 0.5, 0.52), 200, 0.01, None),
        (0.95, (0.9,), 200, 0.01, (0.9, 0.95)),
        (0.91, (0.9,), 200, 0.01, None),  # certain, but below 2 % of the way
        (0.93, (0.9,), 20, 0.1, None),  # by chance
        (0.38, (0.37, 0.9), 200, 0.01, (0.37, 0.9)),
        # `mae` at 100 times its learning rate, on 80 of `shapes`, 600 updates
        (0.3766, (1.3034, 0.377477, 0.5230, 0.4432, 0.3907), 20, 0.1, (0.377477, 0.523)),
    ],
)
def test_a_fall_is_large_and_more_than_chance(value, before, n, noise, fell):
    found = run(measured(value, n=n, noise=noise), before).signs().fell
    assert found == (None if fell is None else pytest.approx(fell))


def test_noise_over_images_is_no_fall():
    """It made a third of the runs at chance "not learning"."""

    def answered(right, n):
        shares = np.random.default_rng(n).random((len(right), n)) < np.asarray(right)[:, None]
        chance = {"chance": torch.full((n,), 0.25)}
        steps = [str(round(400 * i / (len(right) - 1))) for i in range(len(right))]
        rows = [{"step": at, "held_out": f"{row.mean():.6g}"} for at, row in zip(steps, shares, strict=True)]
        each = {at: row.astype(float).tolist() for at, row in zip(steps, shares, strict=True)}
        found = Measure("accuracy", torch.tensor(shares[-1]).float(), chance, "chance", True)
        return judge(VerdictInputs(found, rows, each, SETTINGS, 400, 1000, ended=True).signs())

    rules = [answered([0.25] * 7, n).rule for n in range(100, 160)]
    assert "unstable" not in rules and "early" in rules
    assert answered([0.25, 0.25, 0.6, 0.2], 100).rule == "unstable"


def test_gains_are_those_since_halfway_and_in_the_last_quarter():
    found = run(measured(0.2), (0.9, 0.6, 0.4), ended=True).signs()
    assert found.gained.value == pytest.approx(2 / 3, abs=0.01) and found.improves
    assert not run(measured(0.2), (0.9, 0.6, 0.4)).signs().improves
    assert run(measured(0.5), (0.9, 0.55)).signs().gained.value == pytest.approx(0.09, abs=0.01)
    assert run(measured(0.2))._replace(each={}).signs().gained is None


def test_a_logged_knn_is_compared_with_the_better_control():
    start = {"knn": "0.10", "knn:untrained": "0.10", "knn:raw pixels": "0.17"}
    found = logged_knn([start, {"knn": ""}, {"knn": "0.30"}], 2000)
    assert (found.value, found.n, found.to_beat.name) == (0.3, 2000, "raw pixels")
    between = logged_knn([start, {"knn": "0.16"}], 2000, modality_of(Sound()))
    assert [level_of(one.share) for one in between.baselines] == [Level.NONE, Level.WEAK]
    assert between.noun == "recordings" and between.to_beat.name == "raw features"
    assert logged_knn([start | {f"knn:{START}": "0.1"}], 60).to_beat.name == START
    for row, n in ((start, 0), ({"held_out": "1"}, 2000), ({"knn": "0.3", "knn:untrained": "0.1"}, 2000)):
        assert logged_knn([row], n) is None


def test_a_final_knn_is_compared_image_by_image():
    rows = [
        Result.of_images(name, "knn", {"k": 20}, torch.arange(60) < right)
        for name, right in {"trained": 30, "raw pixels": 18, "untrained": 20, START: 15}.items()
    ]
    found = final_knn(Evaluation(rows, "", "", tuple(rows), "", "", 0, 60))
    assert [one.name for one in found.baselines] == [START, "untrained", "raw pixels"]
    assert found.against[0].n == 60 and found.to_beat.share.value == pytest.approx(found.against[0].value / 0.75)


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
    assert trained(folder, "mae", tmp_path / "run", epochs=1).rule == "same_images"


@pytest.mark.slow
def test_a_far_too_high_learning_rate(shapes, tmp_path):
    health = trained(shapes, "mae", tmp_path / "run", blr=400.0)
    assert health.rule in ("unstable", "collapsed") and health.actions["blr"] == 40, health


@pytest.mark.slow
def test_a_teacher_that_follows_at_once(shapes, tmp_path):
    task = {"name": "extrema", "loss": "byol", "momentum": 0.0, "masks": 2}
    health = trained(shapes, task, tmp_path / "run", blr=4e-2)
    assert health.rule == "collapsed" and "nearly the same for all of them" in health.why, health


@pytest.mark.slow
def test_noise(tmp_path):
    noise = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    folder = written(tmp_path / "images", noise)
    health = trained(folder, "mae", tmp_path / "run", epochs=85, img_size=16)  # 510 updates
    assert health.verdict == "not learning", health
