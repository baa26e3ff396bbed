"""Plan and forecast of a run before it begins, and refusal of runs that do not fit."""

import os
import re
import shutil
import signal
import threading
import time
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from killing import SMALL, left_behind, typed
from options_swept import OPTION_SETS
from sweep import asked_of
from torch.autograd.graph import saved_tensors_hooks

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.options import parse_pretrain
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import HeldOut
from patchloom.runs.settings import request
from patchloom.system.files import run_interruptibly
from patchloom.system.hardware import Cores
from patchloom.train import estimate
from patchloom.train.estimate import Step, TaskBytes, sketch, upper_bound_bytes
from patchloom.train.loop import pretrain
from patchloom.train.plan import Plan, Planner, describe_continuation
from patchloom.train.resolve import resolve

pytestmark = pytest.mark.usefixtures("quick_probe")
STATS = Stats((0.5,) * 3, (0.2,) * 3, 32, 32, 10, [])
GIB = 2**30


def settings_for(task="mae", **given):
    asked = request("shapes", task, {"precision": "float32", "device": "cpu", "threads": 1, **given})
    return resolve(asked, 1000, 3, STATS)[0]


def test_a_run_that_stopped_early_goes_on_from_where_it_stopped(tmp_path):
    held_out = HeldOut(np.arange(0), np.arange(0))
    plan = Plan(True, settings_for(epochs=60), {}, STATS, "", held_out, ended=40, reached=2.0)
    first, kept = describe_continuation(plan, RunFolder(tmp_path))
    assert first.startswith("trains 58 epochs more after 2, from its weights") and "rises over 5.8 of them" in first
    assert kept == f"the run of 40 epochs is kept in {tmp_path}/earlier/epochs-40"


@pytest.mark.parametrize("option", ["--dry-run", "--dry_run", "--dry-run=true", "--dry_run=true"])
def test_a_dry_run_is_asked_for_in_either_spelling(option):
    for words in ([option, "shapes"], ["shapes", option], ["shapes", option, "--epochs", "3"]):
        assert parse_pretrain(words)[0]["dry_run"] is True
    assert "dry_run" not in parse_pretrain(["shapes"])[0]


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


def test_values_of_auto_are_aligned(images, tmp_path, capsys):
    words = typed(images, tmp_path / "run", {"task": "mp3", "epochs": 1})
    assert main([*words, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    became = [line for line in lines if re.fullmatch(r"  [a-z_.]+ +\S+ +\(.*\)", line)]
    assert len(became) > 2 and any("task.context_mask_ratio" in line for line in became)
    assert len({re.match(r"  \S+ +", line).end() for line in became}) == 1


def test_planning_does_not_affect_training(images, tmp_path, monkeypatch):
    for task in ("droppos", "extrema"):
        pretrain(images, task, out=tmp_path / task / "measured" / "run", **SMALL | {"epochs": 2})
        with monkeypatch.context() as patch:
            patch.setattr(Planner, "forecast", lambda *_: None)
            pretrain(images, task, out=tmp_path / task / "not" / "run", **SMALL | {"epochs": 2})
        one, two = (left_behind(tmp_path / task / name / "run") for name in ("measured", "not"))
        assert one == two


def test_the_plan_is_in_the_log_and_a_run_that_goes_on_says_what_is_left(images, tmp_path, capsys):
    out = tmp_path / "run"
    pretrain(images, "mae", out=out, **SMALL | {"epochs": 2})
    log = (out / "log.txt").read_text()
    assert log.count("takes about") == 1 and log.index("takes about") < log.index("everything goes to")
    (out / "summary.txt").unlink()
    capsys.readouterr()
    pretrain(images, "mae", out=out, dry_run=True, **SMALL | {"epochs": 2})
    assert re.search(r"takes about \d+ s: 0 steps of [\d.e-]+ s, as before", capsys.readouterr().out)
    assert (out / "log.txt").read_text() == log and not (out / "summary.txt").exists()


@pytest.mark.parametrize(
    "rows", ["", "step,seconds\n1,0.5\n", "step,seconds\n900,0.5\n"], ids=["none", "older", "newer"]
)
def test_the_rest_is_planned_from_the_checkpoint(images, tmp_path, rows):
    """A kill between the checkpoint and its rows leaves a metrics.csv of another step."""
    out = tmp_path / "run"
    pretrain(images, "mae", out=out, **SMALL | {"epochs": 2})
    (out / "summary.txt").unlink()
    (out / "metrics.csv").write_text(rows)
    planned = pretrain(images, "mae", out=out, dry_run=True, **SMALL | {"epochs": 2}).planned
    assert planned["forecast"]["steps"] == 0 and planned["forecast"]["step_seconds"] > 0


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
    with pytest.raises(PatchloomError) as refusal:
        estimate.refuse_too_large(settings, 128)
    said = str(refusal.value)
    assert re.search(r"a step of 128 images needs at least [\d,]+ GiB of memory .* and there are [\d.,]+ GiB", said)
    assert "lower --img_size" in said and time.process_time() - begin < 60


def test_a_refusal_names_the_batch_that_fits(monkeypatch):
    settings = settings_for(batch_size=128, img_size=64, patch_size=4, attention="fused", kernels="torch")
    whole = sketch(settings, 128)
    monkeypatch.setattr(estimate, "resident", lambda *_: 0.0)
    monkeypatch.setattr(estimate, "memory", lambda device: (0.0, whole.least(40) / 0.8 / GIB))
    with pytest.raises(PatchloomError, match="use --batch_size 32 and --accumulate 4"):
        estimate.refuse_too_large(settings, 128)
    with pytest.raises(PatchloomError, match="use --batch_size 64 and --accumulate 4, or"):  # of two processes
        estimate.refuse_too_large(replace(settings, accumulate=1, batch_size=256), 128)
    monkeypatch.setattr(estimate, "memory", lambda device: (0.0, whole.sizes.state / 2 / GIB))
    with pytest.raises(PatchloomError, match="choose a smaller --model"):
        estimate.refuse_too_large(settings, 128)
    monkeypatch.setattr(estimate, "memory", lambda device: (0.0, whole.least() / GIB * 1.01))
    assert estimate.refuse_too_large(settings, 128) == whole


def test_slow_or_tight_runs_get_hints():
    room = {"there": 10 * GIB, "free": 8 * GIB, "disc": 1e9, "room": 2e9}
    days = estimate.Forecast(steps=1000, step=3600.0, how="calculated", memory=9 * GIB, **room, advice="do less")
    time_, remark, memory, tight, disc = days.sentences()
    assert time_.startswith("takes about 42 days: 1,000 steps of 1 h 0 min, calculated") and "fewer --epochs" in remark
    assert "without" in time_ and "without" not in replace(days, steps_alone=False).sentences()[0]
    assert memory == "needs about 9.0 of 10.0 GiB of memory" and "8.0 GiB are free now: do less" in tight
    assert disc == "needs 1.0 GB of the 2.0 GB that are free on the disc"
    assert replace(days, processes=2).sentences()[2].endswith("10.0 GiB of memory in each of 2 processes")
    quick = replace(days, step=0.06, memory=1 * GIB).sentences()
    assert len(quick) == 3


def test_a_large_model_is_calculated_and_not_made_twice(monkeypatch):
    settings, source = settings_for(batch_size=4), open_data("shapes:20").train
    monkeypatch.setattr(estimate, "Step", None)
    monkeypatch.setattr(estimate, "_SURE", 0.0)
    monkeypatch.setattr(estimate, "_LARGE", 0)
    found = estimate.forecast_run(settings, source, 4, Cores(2), RunFolder("nowhere/run"))
    assert found.how == "calculated" and found.total > 0 and found.memory > 0


def test_no_gpu_is_set_up_for_steps_that_are_tried_elsewhere(monkeypatch):
    settings, source = settings_for(batch_size=4), open_data("shapes:20").train
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: asked.append(device) or torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    tried = estimate.Tried(1.0, 0.0, "", estimate.TaskBytes(1, 1, 1, 1), None)
    monkeypatch.setattr(estimate, "try_steps", lambda *_: tried)
    before = torch.get_rng_state()
    estimate.forecast_run(settings, source, 4, Cores(2), RunFolder("nowhere/run"))
    assert not asked and torch.equal(torch.get_rng_state(), before)


def test_a_disc_without_the_room_is_refused_before_anything_is_written(images, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(9e6, 8e6, 1e6))
    assert main(typed(images, tmp_path / "some" / "run", {"task": "mae", "epochs": 3})) == 75
    err = capsys.readouterr().err
    need = re.search(
        r"the run needs ([\d.]+) MB for its checkpoints and the encoder, and the disc of (\S+) has 1.0", err
    )
    assert float(need[1]) > 4 and need[2] == str(tmp_path / "some" / "run") and "--out" in err
    assert not any(tmp_path.iterdir())


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_a_large_file_is_written_where_ctrl_c_is_heard():
    timer, begin = interrupt_after(0.3), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(lambda: time.sleep(20))
    timer.join()
    assert time.monotonic() - begin < 5
    with pytest.raises(OSError, match="full"):
        run_interruptibly(lambda: (_ for _ in ()).throw(OSError("full")))
