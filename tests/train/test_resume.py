"""An interrupted and resumed run, or one that is trained longer, ends with the weights of an uninterrupted run."""

import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
from forked import Command, server
from killing import SMALL, Kill, kill_until_done, left_behind, start
from refusing import refusal
from running import killed, rows, stop_at, weights
from safetensors.torch import load_file

from patchloom import PatchloomError, load_encoder, pretrain
from patchloom.cli import main
from patchloom.errors import Stopped
from patchloom.runs.folder import RunFolder
from patchloom.system.signals import SIGNALS
from patchloom.train import loop as training
from patchloom.train.checkpointing import TrainState

pytestmark = pytest.mark.usefixtures("quick_probe")

SHORT = SMALL | {"epochs": 2}  # 6 steps
ROTARY = {"depth": 1, "embed_dim": 32, "num_heads": 2, "init_values": 0.1}
CASES = {
    "extrema": {},
    "loca": {},
    "accumulated": {"task": "droppos", "accumulate": 2},
    "cropped on the device": {"task": "extrema", "crop_on": "device"},
    "augmented": {"task": "mae", "randaugment": 9.0, "halve_every": 2},
    "rotary": {"task": "droppos", "model": {"name": "vit_small_patch16_dinov3", **ROTARY}},
}
SLOW_CASES = {
    **{"lut": {}, "part": {}, "crossmae": {}, "latent": {}},
    "mixed rotary": {"task": "droppos", "model": {"name": "vit_small_patch16_rope_mixed_224", **ROTARY}},
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_a_killed_run_resumes_to_the_same_result(case, images, unlabelled_images, small_run, tmp_path, monkeypatch):
    own = (CASES | SLOW_CASES)[case]
    images = unlabelled_images if own else images  # those of `small_run` have labels, and results to resume
    options = {"task": case} | own
    given = SHORT | options
    whole = small_run(case) if not own else pretrain(images, out=tmp_path / "whole" / "run", **given).folder
    out = tmp_path / "killed" / whole.name
    killed(monkeypatch, TrainState, "count", 2 if "accumulate" in options else 5, images, out=out, **given)
    assert not (out / "encoder.safetensors").exists()
    pretrain(images, out=out, **given)
    assert left_behind(out) == left_behind(whole)
    arguments = RunFolder(out).read_config().encoder_spec().timm_arguments()
    timm.create_model(**arguments).load_state_dict(load_file(out / "encoder.safetensors"))


def test_a_stopped_run_resumes_to_the_same_result(images, small_run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "mae"
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_at(patch, 4)
        pretrain(images, "mae", out=out, **SHORT)
    pretrain(images, "mae", out=out, **SHORT)
    assert "Resuming after step 4 of 6" in capsys.readouterr().out
    assert left_behind(out) == left_behind(small_run("mae"))


COMMAND = ["--task", "droppos", "--epochs", "16", "--batch_size", "16", "--accumulate", "2", "--img_size", "32"]
COMMAND += ["--workers", "1", "--randaugment", "9"]
COMMAND += ["--model", "nano", "--model.embed_dim", "32", "--model.depth", "1", "--model.drop_path_rate", "0.1"]


def words(images: Path, out: Path) -> list[str]:
    return ["pretrain", str(images), *COMMAND, "--out", str(out)]


@pytest.fixture(scope="module")
def plain(unlabelled_images, tmp_path_factory):
    """Run started from the command line in a fresh process; the others are forked."""
    out = tmp_path_factory.mktemp("plain") / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # several threads may add up in another order
    command = [sys.executable, "-m", "patchloom", *words(unlabelled_images, out)]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_that_gets_a_signal_can_be_resumed(unlabelled_images, plain, tmp_path, number):
    out = tmp_path / "run"
    other = Command(words(unlabelled_images, out))
    for line in other.stdout:
        if " · epoch 4.0/16 · " in line:
            os.killpg(other.pid, number)  # as `timeout`, systemd, SLURM and a terminal that is closed do
            break
    _, told = other.communicate()
    assert other.returncode == 130 and told.startswith("patchloom: stopped, and a checkpoint was written"), told
    assert not (out / "encoder.safetensors").exists()
    again = Command(words(unlabelled_images, out))
    printed, _ = again.communicate()
    assert again.returncode == 0 and "Resuming after step" in printed and "Resuming after step 0 " not in printed
    assert left_behind(out) == left_behind(plain)


SEED = 20261120
KILLS = 4  # at the least, of each task
KILLED = {
    "droppos": {"task": "droppos", "accumulate": 2, "epochs": 4},
    "lut": {"task": "lut", "epochs": 3},
    "mae": {"task": "mae", "workers": 1, "epochs": 3},
    "simmim": {"task": "simmim", "epochs": 2, "device": "cuda"},  # whose checkpoints are written while it trains
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KILLED)
def test_a_run_killed_anywhere_resumes_to_the_same_result(case, images, tmp_path):
    options, rng = KILLED[case], random.Random(f"{SEED} {case}")
    print(f"seed {SEED} {case}")
    server().Process(target=time.sleep, args=(0,)).start()  # the start of the server is not part of the seconds
    begin = time.perf_counter()
    killed, events = start(images, tmp_path / "plain" / "run", options, Kill())
    seconds = time.perf_counter() - begin
    assert not killed and events > 20
    plain, kills, folders = left_behind(tmp_path / "plain" / "run"), 0, 0
    while kills < KILLS:
        out = tmp_path / f"killed{folders}" / "run"  # of the same name, which the encoder's card has
        kills += kill_until_done(images, out, options, events, seconds, rng)
        folders += 1
        found = left_behind(out)
        assert found.keys() == plain.keys()
        differing = [name for name in plain if plain[name] != found[name]]
        rows = [(plain[name], found[name]) for name in differing if name.endswith(".csv")]
        assert not differing, f"{differing} ({rows}) after {kills} kills in {folders} folders"
    print(f"{kills} kills in {folders} folders, {seconds:.1f} s a run")


LONGER = SMALL | {"epochs": 4}


@pytest.fixture(scope="module")
def longer(images, small_run, tmp_path_factory):
    """Run of 2 epochs that was trained to 4, in a folder of the same name."""
    out = shutil.copytree(small_run("extrema"), tmp_path_factory.mktemp("longer") / "extrema")
    return pretrain(images, "extrema", out=out, **LONGER).folder


def contents_of(run: Path) -> dict[str, object]:
    """Return the contents of a finished run, without times and evaluations."""
    kept = ("pictures/*.png", "verdict.yaml", "summary.txt", "encoder.safetensors", "trained_on.bin")
    files = {str(path.relative_to(run)): path.read_bytes() for pattern in kept for path in run.glob(pattern)}
    return {**weights(run), **files, "rows": rows(run)}


def test_a_finished_run_is_trained_longer_with_a_new_schedule(images, small_run, longer, capsys):
    short = small_run("extrema")
    rates = {int(row["step"]): float(row["lr"] or 0) for row in rows(longer)}
    assert [*rates] == [*range(13)] and rows(longer)[:7] == rows(short)
    assert rates[6] < 0.1 * rates[8] and rates[7] > rates[12]
    assert contents_of(longer / "earlier" / "epochs-2") == contents_of(short)
    load_encoder(longer / "earlier" / "epochs-2")
    assert weights(longer) != weights(short)
    pretrain(images, "extrema", out=longer, **LONGER)
    assert "is finished" in capsys.readouterr().out
    assert "trained for 4 epochs" in refusal(pretrain, images, "extrema", out=longer, **SHORT)
    assert "blr" in refusal(pretrain, images, "extrema", out=longer, **LONGER | {"epochs": 12, "blr": 1e-3})


@pytest.mark.parametrize(
    ("owner", "name", "call"), [(RunFolder, "keep_end", 1), (RunFolder, "rewrite", 1), (TrainState, "count", 4)]
)
def test_longer_training_that_is_killed_resumes_to_the_same_result(
    owner, name, call, images, small_run, longer, tmp_path, monkeypatch
):
    run = shutil.copytree(small_run("extrema"), tmp_path / "extrema")
    killed(monkeypatch, owner, name, call, images, "extrema", out=run, **LONGER)
    if owner is TrainState:
        (run / "earlier" / "epochs-2 (copy)").mkdir()
        with pytest.raises(PatchloomError, match="being trained for 4 epochs, .* repeat --epochs 4 first"):
            pretrain(images, "extrema", out=run, **SMALL | {"epochs": 9})
        (run / "earlier" / "epochs-2 (copy)").rmdir()
        before = weights(run)
        with monkeypatch.context() as patch, pytest.raises(PatchloomError, match="read the same checkpoint"):
            patch.setattr(training, "smallest", lambda number: number - 1)  # another process has an earlier step
            pretrain(images, "extrema", out=run, **LONGER)
        assert weights(run) == before
    pretrain(images, "extrema", out=run, **LONGER)
    assert contents_of(run) == contents_of(longer)
    assert contents_of(run / "earlier" / "epochs-2") == contents_of(small_run("extrema"))


def test_the_command_of_the_verdict_works(unlabelled_images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"model": {"name": "nano", "depth": 1}, "epochs": 0.5, "img_size": (32, 40)}
    pretrain(unlabelled_images, "mae", **SMALL | given)
    run = RunFolder(next((tmp_path / "runs").iterdir()))
    words = shlex.split(next(line for line in run.log.read_text().splitlines() if "to train longer: " in line))[3:]
    assert words[:2] == ["patchloom", "pretrain"] and words[-2:] == ["--epochs", "2"] and "--out" not in words
    assert main(words[1:]) == 0
    assert run.read_config().epochs == 2 and run.kept_end(0.5).exists()


def test_images_that_have_moved_are_the_same_ones(unlabelled_images, tmp_path, monkeypatch, capsys):
    there, moved = shutil.copytree(unlabelled_images, tmp_path / "there"), tmp_path / "moved"
    pretrain(there, "mae", out=tmp_path / "plain", **SHORT)
    killed(monkeypatch, TrainState, "count", 5, there, "mae", out=tmp_path / "run", **SHORT)
    there.rename(moved)
    for run in (tmp_path / "run", tmp_path / "plain"):  # one of them is finished
        pretrain(moved, "mae", out=run, **SHORT)
        assert "the images have moved" in capsys.readouterr().out
        assert RunFolder(run).read_config().data == str(moved)
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    other = moved.rename(tmp_path / "other")
    (other / "0.png").unlink()
    with pytest.raises(PatchloomError, match=r"data: was .*has \d+ of the \d+ training images"):
        pretrain(other, "mae", out=tmp_path / "run", **SHORT)


def test_the_first_minute_is_not_lost(unlabelled_images, tmp_path, monkeypatch):
    now = iter(range(10**6))  # a second passes between any two looks at the clock
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(now)))
    saved, save = [], training.save_checkpoint
    monkeypatch.setattr(training, "save_checkpoint", lambda *given: saved.append(given[2].step) or save(*given))
    pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SHORT)
    assert any(0 < step <= 5 for step in saved), "the first checkpoint is due after 5 seconds"


def test_the_last_rows_are_written_again_after_a_kill(unlabelled_images, tmp_path, monkeypatch):
    """The rows are in the checkpoint, so the table is whole after the next start."""
    run = tmp_path / "run"
    whole = pretrain(unlabelled_images, "lut", out=tmp_path / "whole", **SHORT).folder
    shutil.copytree(whole, run)
    (run / "summary.txt").unlink()
    table = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(table[:-3]))
    pretrain(unlabelled_images, "lut", out=run, **SHORT)
    assert rows(run) == rows(whole) and weights(run) == weights(whole)
