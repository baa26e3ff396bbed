"""A run that was stopped and resumed ends with the very weights of one that never was."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import Command
from PIL import Image

from patchloom.stopping import SIGNALS

COMMAND = ["--task", "droppos", "--epochs", "16", "--batch_size", "16", "--accumulate", "2", "--img_size", "32"]
# with a process that reads images, which gets the signal, too
COMMAND += ["--workers", "1", "--randaugment", "9"]
SIZES = ["--model", "nano", "--model.embed_dim", "32", "--model.depth", "1", "--model.drop_path_rate", "0.1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Without labels, so that no time goes into evaluation."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(120):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def words(images: Path, out: Path) -> list[str]:
    return ["pretrain", str(images), *COMMAND, *SIZES, "--out", str(out)]


@pytest.fixture(scope="module")
def plain(images, tmp_path_factory):
    """A run that begins as users begin theirs; the others are forked."""
    out = tmp_path_factory.mktemp("plain")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # several threads may add up in another order
    command = [sys.executable, "-m", "patchloom", *words(images, out)]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    return out


@pytest.mark.parametrize("number", SIGNALS)
def test_stopped_and_resumed_is_never_stopped(images, plain, tmp_path, number):
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
def test_training_goes_on_when_nobody_reads_what_it_prints(door, images, plain, tmp_path):
    """As where Ctrl-C ends `tee`, or the terminal is gone: what is printed is in the log."""
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
    from safetensors.torch import load_file

    tensors = load_file(run / "checkpoints" / "last.safetensors")
    return {name: value.numpy().tobytes() for name, value in tensors.items()}
