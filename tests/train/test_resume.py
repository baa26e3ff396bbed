"""An interrupted and resumed run, or one that is trained longer, ends with the weights of an uninterrupted run."""

import csv
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
from forked import Command
from killing import SMALL
from PIL import Image
from safetensors.torch import load_file

from patchloom import PatchloomError, load_encoder, pretrain
from patchloom.cli import main
from patchloom.runs.folder import RunFolder
from patchloom.system.signals import SIGNALS
from patchloom.train import loop as training
from patchloom.train import plan as planning
from patchloom.train.checkpointing import TrainState
from patchloom.train.clock import Piece
from patchloom.train.estimate import rounded

COMMAND = ["--task", "droppos", "--epochs", "16", "--batch_size", "16", "--accumulate", "2", "--img_size", "32"]
# with a process that reads images, which gets the signal, too
COMMAND += ["--workers", "1", "--randaugment", "9"]
SIZES = ["--model", "nano", "--model.embed_dim", "32", "--model.depth", "1", "--model.drop_path_rate", "0.1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Unlabelled images, which need no evaluation."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(120):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def words(images: Path, out: Path) -> list[str]:
    return ["pretrain", str(images), *COMMAND, *SIZES, "--out", str(out)]


@pytest.fixture(scope="module")
def plain(images, tmp_path_factory):
    """Run started from the command line in a fresh process; the others are forked."""
    out = tmp_path_factory.mktemp("plain")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # several threads may add up in another order
    command = [sys.executable, "-m", "patchloom", *words(images, out)]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    return out


@pytest.mark.parametrize("number", SIGNALS)
def test_a_resumed_run_equals_an_uninterrupted_one(images, plain, tmp_path, number):
    other = Command(words(images, tmp_path / "stopped"))
    for line in other.stdout:
        if " · epoch 4.0/16 · " in line:
            os.killpg(other.pid, number)  # as `timeout`, systemd, SLURM and a terminal that is closed do
            break
    _, told = other.communicate()
    assert other.returncode == 130 and told.startswith("patchloom: stopped, and a checkpoint was written"), told
    assert not (tmp_path / "stopped" / "encoder.safetensors").exists()
    again = Command(words(images, tmp_path / "stopped"))
    out, _ = again.communicate()
    assert again.returncode == 0 and "Resuming after step" in out and "Resuming after step 0 " not in out
    assert weights(plain) == weights(tmp_path / "stopped")
    rows = [(folder / "metrics.csv").read_text().splitlines() for folder in (plain, tmp_path / "stopped")]
    without_time = [[",".join(row.split(",")[:3]) for row in file] for file in rows]
    assert without_time[0] == without_time[1]


@pytest.mark.parametrize("door", [os.pipe, os.openpty])
def test_training_goes_on_without_a_reader_of_its_output(door, images, plain, tmp_path):
    """If Ctrl-C ends `tee`, or the terminal is closed, the output is still in the log."""
    reader, writer = door()
    process = Command(words(images, tmp_path / "unread"), stdout=writer)
    os.close(writer)
    printed = b""
    while b"everything goes to" not in printed:
        printed += os.read(reader, 1000)
    os.close(reader)
    _, told = process.communicate()
    assert (process.returncode, told) == (0, "")
    assert weights(plain) == weights(tmp_path / "unread")
    logs = [(folder / "log.txt").read_text().splitlines() for folder in (plain, tmp_path / "unread")]
    assert len(logs[0]) == len(logs[1]) and logs[1][-1].startswith("Pictures: ")


def weights(run: Path) -> dict[str, bytes]:
    tensors = load_file(run / "checkpoints" / "last.safetensors")
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


class _Kill(BaseException):
    """Exception that nothing handles, like SIGKILL."""


def killed(monkeypatch, owner, name: str, calls: int, *given, **settings) -> None:
    """Run `pretrain` until the n-th call of a function."""
    method, seen = getattr(owner, name), []

    def dies(*arguments, **named):
        seen.append(name)
        if len(seen) == calls:
            raise _Kill
        return method(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(_Kill):
        patch.setattr(training, "_SAVE_EVERY", 0.0)
        patch.setattr(owner, name, dies)
        pretrain(*given, **settings)


@pytest.fixture(scope="module")
def finished(images, tmp_path_factory):
    """Run of 2 epochs, and the same run trained to 6."""
    out = tmp_path_factory.mktemp("finished")
    pretrain(images, "extrema", out=out / "two", **SMALL | {"epochs": 2})
    shutil.copytree(out / "two", out / "six")
    pretrain(images, "extrema", out=out / "six", **SMALL | {"epochs": 6})
    return out


def test_a_finished_run_is_trained_longer_with_a_new_schedule(images, finished, capsys):
    two, six = finished / "two", finished / "six"
    rows = [
        dict(zip(*(line.split(",") for line in (head, row)), strict=False))
        for head, *some in [metrics(six)]
        for row in some
    ]
    rates = {int(row["step"]): float(row["lr"] or 0) for row in rows}
    last = max(rates) // 3
    assert metrics(six)[: last + 2] == metrics(two)
    assert rates[last] < 0.1 * rates[last + 2] and rates[last + 1] > rates[max(rates)]
    assert contents_of(six / "earlier" / "epochs-2") == contents_of(two)
    load_encoder(six / "earlier" / "epochs-2")
    assert weights(six) != weights(two)
    capsys.readouterr()
    pretrain(images, "extrema", out=six, **SMALL | {"epochs": 6})
    assert "is finished" in capsys.readouterr().out
    with pytest.raises(PatchloomError, match="trained for 6 epochs"):
        pretrain(images, "extrema", out=six, **SMALL | {"epochs": 2})
    with pytest.raises(PatchloomError, match="blr"):
        pretrain(images, "extrema", out=six, **SMALL | {"epochs": 12, "blr": 1e-3})


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (RunFolder, "keep_end", 1),
        (RunFolder, "rewrite", 1),
        (TrainState, "count", 5),
    ],
)
def test_longer_training_that_is_killed_resumes_to_the_same_result(
    owner, name, calls, images, finished, tmp_path, monkeypatch
):
    run = shutil.copytree(finished / "two", tmp_path / "six")
    longer = {"out": run, **SMALL, "epochs": 6}
    killed(monkeypatch, owner, name, calls, images, "extrema", **longer)
    if owner is TrainState:
        (run / "earlier" / "epochs-2 (copy)").mkdir()
        with pytest.raises(PatchloomError, match="being trained for 6 epochs, .* repeat --epochs 6 first"):
            pretrain(images, "extrema", **longer | {"epochs": 9})
        (run / "earlier" / "epochs-2 (copy)").rmdir()
    pretrain(images, "extrema", **longer)
    assert contents_of(run) == contents_of(finished / "six")
    kept = run / "earlier" / "epochs-2"
    assert weights(kept) == weights(finished / "two") and contents_of(kept) == contents_of(finished / "two")


def test_processes_that_read_different_checkpoints_stop(images, finished, tmp_path, monkeypatch):
    run = shutil.copytree(finished / "two", tmp_path / "six")
    longer = {"out": run, **SMALL, "epochs": 6}
    killed(monkeypatch, TrainState, "count", 5, images, "extrema", **longer)
    before = weights(run)
    monkeypatch.setattr(training, "smallest", lambda number: number - 1)  # another one has an earlier step
    with pytest.raises(PatchloomError, match="not all processes read the same checkpoint in .*six: give all machines"):
        pretrain(images, "extrema", **longer)
    assert weights(run) == before


@pytest.mark.parametrize("model", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"])
def test_a_run_with_rotations_that_is_killed_resumes_to_the_same_result(model, images, tmp_path, monkeypatch):
    sizes = {"depth": 1, "embed_dim": 32, "num_heads": 2, "init_values": 0.1}
    settings = SMALL | {"model": {"name": model, **sizes}, "epochs": 2}
    pretrain(images, "droppos", out=tmp_path / "whole", **settings)
    killed(monkeypatch, TrainState, "count", 5, images, "droppos", out=tmp_path / "parts", **settings)
    pretrain(images, "droppos", out=tmp_path / "parts", **settings)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    arguments = RunFolder(tmp_path / "parts").read_config().encoder_spec().timm_arguments()
    timm.create_model(**arguments).load_state_dict(load_file(tmp_path / "parts" / "encoder.safetensors"))


@pytest.mark.parametrize("task", ["part", "loca"])
def test_a_run_with_other_draws_that_is_killed_resumes_to_the_same_result(task, images, tmp_path, monkeypatch):
    """Corners, pairs and crops are drawn anew in each step, and loca has a teacher."""
    settings = SMALL | {"epochs": 2}
    pretrain(images, task, out=tmp_path / "whole", **settings)
    killed(monkeypatch, TrainState, "count", 5, images, task, out=tmp_path / "parts", **settings)
    pretrain(images, task, out=tmp_path / "parts", **settings)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_the_command_of_the_verdict_works(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pretrain(images, "mae", **SMALL | {"model": {"name": "nano", "depth": 1}, "epochs": 0.5, "img_size": (32, 40)})
    run = RunFolder(next((tmp_path / "runs").iterdir()))
    words = shlex.split(next(line for line in run.log.read_text().splitlines() if "to train longer: " in line))[3:]
    assert words[:2] == ["patchloom", "pretrain"] and words[-2:] == ["--epochs", "2"] and "--out" not in words
    assert main(words[1:]) == 0
    assert run.read_config().epochs == 2 and run.kept_end(0.5).exists()


def test_images_that_have_moved_are_the_same_ones(images, tmp_path, monkeypatch, capsys):
    there, moved = shutil.copytree(images, tmp_path / "there"), tmp_path / "moved"
    given = {**SMALL, "epochs": 2}
    pretrain(there, "mae", out=tmp_path / "plain", **given)
    killed(monkeypatch, TrainState, "count", 5, there, "mae", out=tmp_path / "run", **given)
    there.rename(moved)
    pretrain(moved, "mae", out=tmp_path / "run", **given)
    assert "the images have moved" in capsys.readouterr().out
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    assert RunFolder(tmp_path / "run").read_config().data == str(moved)
    pretrain(moved, "mae", out=tmp_path / "plain", **given)  # one that is finished
    assert RunFolder(tmp_path / "plain").read_config().data == str(moved)
    other = moved.rename(tmp_path / "other")
    (other / "0.png").unlink()
    with pytest.raises(PatchloomError, match=r"has \d+ of the \d+ training images") as refused:
        pretrain(other, "mae", out=tmp_path / "run", **given)
    assert "data: was" in str(refused.value)


def test_minutes_become_epochs_that_are_stored(images, tmp_path, capsys):
    given = {name: value for name, value in SMALL.items() if name != "epochs"} | {"out": tmp_path / "run"}
    pretrain(images, "mae", minutes=0.01, **given)
    stored = RunFolder(tmp_path / "run").read_config()
    assert stored.epochs > 0 and stored.minutes is None
    assert "0.01 minutes of training" in capsys.readouterr().out
    pretrain(images, "mae", minutes=0.01, **given)
    assert "is finished" in capsys.readouterr().out
    pretrain(images, "mae", **given | {"epochs": stored.epochs + 1})
    assert RunFolder(tmp_path / "run").kept_end(stored.epochs).exists()
    with pytest.raises(PatchloomError, match="--minutes and --epochs"):
        pretrain(images, "mae", minutes=1, **given | {"epochs": 2, "out": tmp_path / "other"})


def test_minutes_are_those_of_the_clock(images, tmp_path, capsys, monkeypatch):
    """As if steps had taken 30 times as long when they were timed, on a busy machine."""
    asked, timed = {name: value for name, value in SMALL.items() if name != "epochs"}, planning.epochs_in

    def on_a_busy_machine(minutes, *about):
        epochs, why = timed(minutes, *about)
        return rounded(epochs / 30), why

    monkeypatch.setattr(planning, "epochs_in", on_a_busy_machine)
    out, minutes = tmp_path / "run", 0.1
    pretrain(images, "mae", minutes=minutes, out=out, **asked)
    said, folder = capsys.readouterr().out, RunFolder(out)
    assert "planned anew by the clock" in said
    _, state, _ = folder.checkpoints.read()
    first, *others = state["pieces"]
    assert first[:2] == [0, 0.0] and others and state["step"] == state["steps"] == others[-1][2] > 5 * first[2]
    assert abs(state["seconds"] - 60 * minutes) < 0.2 * 60 * minutes
    assert folder.read_config().epochs == pytest.approx(state["steps"] / 6, rel=1e-3)  # 96 images in batches of 16
    rates = [float(row["lr"]) for row in csv.DictReader(folder.metrics.open()) if row["lr"]]
    assert rates[-1] < 0.1 * max(rates)  # the schedule ends with the training
    pretrain(images, "mae", minutes=minutes, out=out, **asked)
    assert "is finished" in capsys.readouterr().out


def interrupt_after(step, monkeypatch, images, out, asked):
    """Pre-train until the checkpoint of ``step`` is written."""
    save = training.save_checkpoint

    def stops(*given):
        saved = save(*given)
        if given[2].step == step:
            raise KeyboardInterrupt
        return saved

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(training, "save_checkpoint", stops)
        pretrain(images, "mae", out=out, **asked)


def test_a_resumed_run_keeps_the_plan_of_its_clock(images, tmp_path, monkeypatch):
    """A plan is in the checkpoint: what follows on it does not depend on another timing."""
    asked = {name: value for name, value in SMALL.items() if name != "epochs"} | {"minutes": 1000.0}
    monkeypatch.setattr(planning, "epochs_in", lambda *about: (8, "as it was timed"))  # 48 steps
    plans = iter([Piece(12, 0.5, 18)])
    monkeypatch.setattr(training, "is_due", lambda passed, time, progress: progress == 0.25)
    monkeypatch.setattr(training, "plan_anew", lambda now, *about: next(plans, now))
    pretrain(images, "mae", out=tmp_path / "whole", **asked)
    plans = iter([Piece(12, 0.5, 18)])
    interrupt_after(12, monkeypatch, images, tmp_path / "run", asked)
    pretrain(images, "mae", out=tmp_path / "run", **asked)
    assert RunFolder(tmp_path / "run").checkpoints.progress()[0] == 18
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.parametrize("killed_at", [12, 20])
def test_a_resumed_plan_of_the_clock_ends_where_it_was_planned(killed_at, images, tmp_path, capsys, monkeypatch):
    """The configuration has rounded epochs: 20 steps of 6 an epoch are 3 here, which would be 18 steps."""
    asked = {name: value for name, value in SMALL.items() if name != "epochs"} | {"minutes": 1000.0}
    monkeypatch.setattr(planning, "epochs_in", lambda *about: (8, "as it was timed"))
    monkeypatch.setattr(training, "rounded", round)
    plans = iter([Piece(12, 0.5, 20)])
    monkeypatch.setattr(training, "is_due", lambda passed, time, progress: progress == 0.25)
    monkeypatch.setattr(training, "plan_anew", lambda now, *about: next(plans, now))
    interrupt_after(killed_at, monkeypatch, images, tmp_path / "run", asked)
    capsys.readouterr()
    pretrain(images, "mae", out=tmp_path / "run", **asked)
    said, folder = capsys.readouterr().out, RunFolder(tmp_path / "run")
    assert f"Resuming after step {killed_at} of 20" in said and "Training longer" not in said
    _, state, _ = folder.checkpoints.read()
    rows = list(csv.DictReader(folder.metrics.open()))
    assert (state["step"], state["steps"], rows[-1]["step"]) == (20, 20, "20")
    assert rows[-1]["held_out"], "the last step is measured"


def test_the_first_minute_is_not_lost(images, tmp_path, monkeypatch):
    now = iter(range(10**6))  # a second passes between any two looks at the clock
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(now)))
    saved, save = [], training.save_checkpoint
    monkeypatch.setattr(training, "save_checkpoint", lambda *given: saved.append(given[2].step) or save(*given))
    pretrain(images, "mae", out=tmp_path / "run", **SMALL)
    assert len([step for step in saved if 0 < step < saved[-1]]) > 1


def metrics(run: Path) -> list[str]:
    return [",".join(row.split(",")[:-1]) for row in (run / "metrics.csv").read_text().splitlines()]


def contents_of(run: Path) -> dict[str, object]:
    """Return the contents of a finished run, without times."""
    kept = ("pictures/*.png", "verdict.yaml", "summary.txt", "encoder.safetensors", "trained_on.bin")
    files = {str(path.relative_to(run)): path.read_bytes() for pattern in kept for path in run.glob(pattern)}
    return {**weights(run), **files, "metrics": metrics(run)}


@pytest.mark.parametrize("task", ["crossmae", "latent"])
def test_a_task_that_is_killed_resumes_to_the_same_result(task, images, tmp_path, monkeypatch):
    settings = SMALL | {"epochs": 2}
    pretrain(images, task, out=tmp_path / "whole", **settings)
    killed(monkeypatch, TrainState, "count", 5, images, task, out=tmp_path / "parts", **settings)
    pretrain(images, task, out=tmp_path / "parts", **settings)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert weights(parts) == weights(whole) and metrics(parts) == metrics(whole)
