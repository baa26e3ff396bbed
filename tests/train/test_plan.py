"""Plan and forecast of a run before it begins, and refusal of runs that do not fit."""

import re
import shutil
import time
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from killing import SMALL, left_behind, typed
from options_swept import OPTION_SETS
from refusing import refusal
from sweep import asked_of
from torch.autograd.graph import saved_tensors_hooks

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError, TemporaryError
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import HeldOut
from patchloom.runs.settings import request
from patchloom.system.device import Cores
from patchloom.system.load import Load
from patchloom.tasks import task_class
from patchloom.train import estimate
from patchloom.train.estimate import Step, TaskBytes, sketch, upper_bound_bytes
from patchloom.train.loop import pretrain
from patchloom.train.plan import Plan, Planner, describe_continuation
from patchloom.train.resolve import resolve

pytestmark = pytest.mark.usefixtures("quick_probe")
STATS = Stats((0.5,) * 3, (0.2,) * 3, 32, 32, 10, [])
GIB = 2**30
SHORT = SMALL | {"epochs": 2}  # 6 steps


def settings_for(task="mae", **given):
    asked = request("shapes", task, {"precision": "float32", "device": "cpu", "threads": 1, **given})
    return resolve(asked, 1000, 3, STATS)[0]


def test_a_run_that_stopped_early_goes_on_from_where_it_stopped(tmp_path):
    held_out = HeldOut(np.arange(0), np.arange(0))
    plan = Plan(True, settings_for(epochs=60), {}, STATS, "", held_out, ended=40, reached=2.0)
    first, kept = describe_continuation(plan, RunFolder(tmp_path))
    assert first.startswith("trains 58 epochs more after 2, from its weights") and "rises over 5.8 of them" in first
    assert kept == f"the run of 40 epochs is kept in {tmp_path}/earlier/epochs-40"


def test_a_dry_run_says_the_plan_and_writes_nothing(images, tmp_path, capsys):
    words = typed(images, tmp_path / "run", {"task": "mae", "epochs": 3})
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "mae on" in out and "48 images to train on, 12 held out" in out
    assert re.search(r"takes about \d+ s: 9 steps of [\d.e-]+ s, measured", out)
    assert re.search(r"needs about \d\.\d of [\d.,]+ GiB of memory\n", out)
    assert re.search(r"needs [\d.]+ MB of the [\d.,]+ [GM]B that are free on the disc\n", out)
    assert not any(tmp_path.iterdir()) and "dry run" in out
    run = pretrain(images, "mae", out=tmp_path / "run", dry_run=True, **SMALL)
    assert run.folder == tmp_path / "run" and "takes about" in run.summary and not run.folder.exists()


def test_a_plan_for_devices_that_are_not_here_says_what_is_unknown(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    free = ("device", "precision", "threads", "compile", "attention")
    given = {name: value for name, value in SMALL.items() if name not in free} | {"out": tmp_path / "run"}
    words = typed(images, tmp_path / "run", {"task": "mae", "epochs": 3})
    words = [word for word in words if not word.startswith(tuple(f"--{name}=" for name in free))]
    assert main([*words, "--device=cuda", "--devices=8", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "there is no cuda device here, so this plan is for another machine" in out
    assert "8 processes (ddp), 2 images per step each" in out
    assert re.search(r"precision +bfloat16", out) and "takes 9 steps" in out
    assert re.search(r"needs about \d\.\d GiB of memory on each device\n", out) and "takes about" not in out
    assert not any(tmp_path.iterdir())
    planned = pretrain(images, "mae", device="cuda", devices=4, dry_run=True, **given).planned
    assert planned["forecast"]["seconds"] is None and planned["settings"]["devices"] == 4
    assert "there is no cuda device" in refusal(pretrain, images, "mae", device="cuda", devices=8, **given)
    asked = {"device": "cuda", "dry_run": True} | given
    assert "shared evenly by 3 processes" in refusal(pretrain, images, "mae", devices=3, **asked)
    del asked["epochs"]
    assert "--minutes needs the time of a step" in refusal(pretrain, images, "mae", minutes=5, **asked)


def test_planning_does_not_affect_training(images, small_run, tmp_path, monkeypatch):
    forecast = Planner.forecast
    monkeypatch.setattr(Planner, "forecast", lambda self, plan, timed: forecast(self, plan, True))
    measured = pretrain(images, "extrema", out=tmp_path / "extrema", **SHORT).folder
    assert left_behind(measured) == left_behind(small_run("extrema"))


def test_training_begins_without_a_trial_and_its_first_updates_show_the_time(unlabelled_images, tmp_path, monkeypatch):
    tried, whole = [], task_class("mae").forward
    monkeypatch.setattr(
        task_class("mae"), "forward", lambda *given, **named: tried.append("step") or whole(*given, **named)
    )
    pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SMALL | {"epochs": 4})
    assert len(tried) == 12, "no step but those of the training"
    log = (tmp_path / "run" / "log.txt").read_text()
    places = [log.index(said) for said in ("takes 12 steps", "everything goes to", "before the first", "takes about")]
    assert places == sorted(places) and log.count("takes about") == log.count("takes 12 steps") == 1
    assert re.search(r"takes about \d+ s: 12 steps of [\d.e-]+ s, measured", log)
    assert re.search(r"needs at most \d\.\d of [\d.,]+ GiB of memory\n", log)


def test_the_rest_is_planned_from_the_checkpoint(images, small_run, tmp_path):
    """A kill between the checkpoint and its rows leaves a metrics.csv of another step."""
    out = shutil.copytree(small_run("mae"), tmp_path / "mae")
    (out / "summary.txt").unlink()
    log, before = (out / "log.txt").read_text(), RunFolder(out).checkpoints.progress()
    for rows in ("", "step,seconds\n1,0.5\n", "step,seconds\n900,0.5\n"):
        (out / "metrics.csv").write_text(rows)
        planned = pretrain(images, "mae", out=out, dry_run=True, **SHORT).planned["forecast"]
        assert (planned["steps"], planned["how"][:9]) == (0, "as before")
        assert before[0] == 6 and planned["step_seconds"] == pytest.approx(before[1] / 6)
    assert (out / "log.txt").read_text() == log and not (out / "summary.txt").exists()
    sizes = [path.stat().st_size for path in (out / "checkpoints").iterdir()]
    assert planned["disc_bytes"] == 3 * max(sizes) + max(sizes) // 3 - sum(sizes) + 2**22


def real_bytes(settings, images):
    """Return the bytes that a real step saves for the backward pass."""
    step, kept = Step(settings, batch=images), {}
    own = {one.untyped_storage().data_ptr() for one in (*step.task.parameters(), *step.task.buffers())}
    alive = []

    def keep(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(value)
        return value

    with saved_tensors_hooks(keep, lambda value: value):
        views = [view.float() for view in step.batch.views]
        step.task(*views, progress=0.5)
    return sum(kept.values()), TaskBytes.of(step.task)


@pytest.mark.parametrize("name", OPTION_SETS)
def test_the_estimated_memory_is_that_of_a_real_step(name):
    settings = settings_for(
        asked_of(name), img_size=32, patch_size=8, model={"name": "nano", "depth": 2}, kernels="torch"
    )
    before = torch.get_rng_state()
    counted = sketch(settings, 6)
    assert torch.equal(torch.get_rng_state(), before)
    kept, sizes = real_bytes(settings, 6)
    assert counted.activations == pytest.approx(kept, rel=0.02) and counted.sizes == sizes
    assert counted.flops > 6 * 1e6
    assert upper_bound_bytes(settings, 6) > counted.least(), "what is not counted is small"


def test_a_task_that_cannot_be_counted_is_not_refused_for_it(monkeypatch):
    def odd(*_, **__):
        raise ValueError("numbers are needed")

    monkeypatch.setattr("patchloom.tasks.mae.MAE.forward", odd)
    counted = sketch(settings_for(), 4)
    assert counted.activations is None and counted.flops is None and counted.least() > 0


def test_steps_larger_than_the_memory_are_refused():
    settings = settings_for("droppos", img_size=10_000, patch_size=16, attention="fused", kernels="torch")
    begin = time.process_time()
    said = refusal(estimate.refuse_too_large, settings, 128)
    assert re.search(r"a step of 128 images needs at least [\d,]+ GiB of memory .* and there are [\d.,]+ GiB", said)
    assert "lower --img_size" in said and time.process_time() - begin < 60


def test_a_refusal_names_the_batch_that_fits(monkeypatch):
    small = {"img_size": 32, "model": {"name": "nano", "depth": 1}, "attention": "fused", "kernels": "torch"}
    settings = settings_for(batch_size=128, patch_size=4, **small)
    whole = sketch(settings, 128)
    monkeypatch.setattr(estimate, "resident", lambda *_: 0.0)
    monkeypatch.setattr(estimate, "memory", lambda device: (0.0, whole.least(40) / 0.8 / GIB))
    assert "use --batch_size 32 and --accumulate 4" in refusal(estimate.refuse_too_large, settings, 128)
    with pytest.raises(PatchloomError, match="use --batch_size 64 and --accumulate 4, or"):  # of two processes
        estimate.refuse_too_large(replace(settings, accumulate=1, batch_size=256), 128)
    monkeypatch.setattr(estimate, "memory", lambda device: (0.0, whole.sizes.state / 2 / GIB))
    assert "choose a smaller --model" in refusal(estimate.refuse_too_large, settings, 128)
    monkeypatch.setattr(estimate, "memory", lambda device: (0.0, whole.least() / GIB * 1.01))
    assert estimate.refuse_too_large(settings, 128) == whole


def test_slow_or_tight_runs_get_hints():
    room = {"there": 10 * GIB, "free": 8 * GIB, "disc": 1e9, "room": 2e9}
    days = estimate.Forecast(steps=1000, step=3600.0, how="measured", memory=9 * GIB, **room, advice="do less")
    time_, remark, memory, tight, disc = days.sentences()
    assert time_.startswith("takes about 42 days: 1,000 steps of 1 h 0 min, measured") and "fewer --epochs" in remark
    assert "without" in time_ and "without" not in replace(days, steps_alone=False).sentences()[0]
    assert memory == "needs about 9.0 of 10.0 GiB of memory" and "8.0 GiB are free now: do less" in tight
    assert disc == "needs 1.0 GB of the 2.0 GB that are free on the disc"
    assert replace(days, processes=2, bounded=True).sentences()[2].startswith("needs at most 9.0 of 10.0 GiB of")
    assert replace(days, processes=2).sentences()[2].endswith("in each of 2 processes")
    quick = replace(days, step=0.06, memory=8 * GIB)
    assert len(quick.sentences()) == 3 and "1,000 steps of 0.06 s" in quick.sentences()[0]
    assert replace(days, step=None).sentences()[0].startswith("takes 1,000 steps: ")
    busy = replace(quick, load=Load(cores=2, wanted=2, own=0.4, others=1.6))
    assert "other programs use 1.6 of 2 cores" in busy.sentences()[1]
    assert busy.plain()["load"]["busy"] and not quick.plain()["load"]["busy"]


def test_minutes_become_epochs_by_the_time_of_a_step():
    settings = settings_for(batch_size=16)
    known = estimate.Forecast(steps=300, step=0.5, how="measured", disc=0.0, room=0.0)
    assert estimate.epochs_in(2, known, settings, 160)[0] == 24  # 240 steps of 10 an epoch
    assert estimate.epochs_in(0.001, known, settings, 160)[0] == 0.1, "one step"
    assert "give --epochs" in refusal(estimate.epochs_in, 2, replace(known, step=None), settings, 160)
    assert [estimate.rounded(one) for one in (3.0, 1.23456, 123456.0)] == [3, 1.235, 123500]
    assert isinstance(estimate.rounded(3.0), int)


def test_the_time_of_reading_is_shared_by_workers_and_saved_by_a_cache(monkeypatch):
    monkeypatch.setattr(estimate, "time_steps", lambda step, **_: [0.4])
    monkeypatch.setattr(estimate, "seconds_of_reading", lambda *_: (0.04, 0.02))
    settings = settings_for(epochs=10, threads=2, workers=0, cache="none", batch_size=10)
    source = open_data("shapes:20").train

    def tried(**changes):
        found = estimate.try_steps(replace(settings, **changes), 10, source, Cores(4), 7)
        assert (found.steps, found.step) == (7, pytest.approx(0.4))
        return found.reading, found.apart, found.shared

    assert tried() == (pytest.approx(0.6), False, 0)
    work = (0.4 * 2 + 0.6) / 4  # of the cores that there are
    assert tried(workers=3) == (pytest.approx(0.2), True, pytest.approx(work))
    assert tried(cache="whole")[0] == pytest.approx(10 * (0.04 / 10 + 0.02))


def test_a_long_step_is_extrapolated_without_what_does_not_depend_on_the_images(monkeypatch):
    """A step of n images takes 1 + n/2 seconds: those of 2 and 4 images are made, and not one of 64."""
    made = []

    def timed(step, **_):
        made.append(len(step.batch.indices))
        return [1 + made[-1] / 2]

    monkeypatch.setattr(estimate, "time_steps", timed)
    found = estimate.try_steps(settings_for(batch_size=64), 64, open_data("shapes:80").train, Cores(2), 10)
    assert made == [2, 4] and found.step == 1 + 64 / 2


def test_bytes_of_a_task_and_of_a_step():
    task = estimate.meta_task(settings_for(img_size=32, patch_size=8, model={"name": "nano", "depth": 1}))
    sizes = TaskBytes.of(task)
    assert sizes.encoder == 4 * sum(one.numel() for one in task.encoder.state_dict().values())
    assert sizes.trained == 4 * sum(one.numel() for one in task.parameters() if one.requires_grad)
    assert sizes.checkpoint == 4 * sum(one.numel() for one in task.state_dict().values()) + 2 * sizes.trained
    assert sizes.state == sizes.weights + 3 * sizes.trained
    step = estimate.Sketch(8, TaskBytes(10, 5, 0, 0), (1, 10), 80, 800, 1.0)
    assert (step.least(), step.least(4), step.likely) == (25 + 880, 25 + 440, 25 + 400 + 1000)


def test_a_disc_without_the_room_is_refused_before_anything_is_written(unlabelled_images, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(9e6, 8e6, 1e6))
    out = tmp_path / "some" / "run"
    with pytest.raises(TemporaryError, match=r"the run needs [\d.]+ MB .* has 1.0 MB free") as refused:
        pretrain(unlabelled_images, "mae", out=out, **SHORT)
    assert float(re.search(r"([\d.]+) MB", str(refused.value))[1]) > 4 and str(out) in str(refused.value)
    assert not any(tmp_path.iterdir())
