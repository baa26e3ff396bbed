"""Several processes do what one does: for DDP and FSDP, from the start and after a change of their number."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killing import SMALL, draw_images
from lightning_fabric import Fabric
from ranks import free_port, run_together

import patchloom.cli
from patchloom.train.pretrain import pretrain

CASES = {
    "droppos": {"task": "droppos", "accumulate": 2},
    "extrema": {"task": "extrema"},
    "lut": {"task": "lut"},
}
# no drop path, which each process draws for itself; and a rate at which rounding does not grow
PLAIN = {"model": SMALL["model"] | {"drop_path_rate": 0.0}, "blr": 1e-3}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def alone(images, tmp_path_factory):
    """What one process does, by case."""
    found = {}

    def run(case):
        if case not in found:
            out = tmp_path_factory.mktemp("alone") / "run"
            (ended,), (tensors,) = run_together(images, out, 1, CASES[case] | PLAIN)
            assert ended.code == 0, ended.told
            found[case] = out, tensors
        return found[case]

    return run


def losses(run: Path) -> list[float]:
    with open(run / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def same(found, wanted):
    """Equal within what the order of sums changes."""
    assert found.keys() == wanted.keys()
    far = {}
    for name, of in wanted.items():
        if of.is_floating_point() and not name.endswith(("qkv.bias", "k.bias")):  # those of keys only have rounding
            far[name] = ((found[name] - of).double().norm() / of.double().norm().clamp_min(1e-3)).item()
    worst = max(far, key=far.get)
    assert far[worst] < 2e-3, (worst, far[worst])


def check(ended, ranks, out, alone):
    assert [one.code for one in ended] == [0] * len(ended), "\n".join(one.told for one in ended)
    assert losses(out) == pytest.approx(losses(alone[0]), rel=1e-4)
    same(ranks[0], alone[1])
    for other in ranks[1:]:  # what processes have is not nearly, but exactly the same
        assert all(torch.equal(value, other[name]) for name, value in ranks[0].items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("case", "world"), [*((case, 2) for case in CASES), ("lut", 4)])
def test_several_processes_train_what_one_trains(case, world, strategy, images, alone, tmp_path):
    out = tmp_path / "run"
    ended, ranks = run_together(images, out, world, CASES[case] | PLAIN | {"strategy": strategy})
    check(ended, ranks, out, alone(case))
    assert f"{world} processes ({strategy}) with {16 // world} images of a step each" in (out / "log.txt").read_text()


@pytest.mark.parametrize(("first", "then", "strategies"), [(2, 1, "dd"), (2, 4, "df"), (4, 2, "fd"), (2, 1, "fd")])
def test_a_process_that_dies_stops_the_others_and_any_number_goes_on(first, then, strategies, images, alone, tmp_path):
    out, kinds = tmp_path / "run", {"d": "ddp", "f": "fsdp"}
    options = CASES["lut"] | PLAIN
    ended, _ = run_together(images, out, first, options | {"strategy": kinds[strategies[0]]}, dies=(first - 1, 10))
    *others, dead = ended
    assert dead.code == -9
    for other in others:
        assert other.code == 2 and other.seconds - dead.seconds < 60
        assert other.told.count("\n") == 1 and "another process of this training has died" in other.told, other.told
    ended, ranks = run_together(images, out, then, options | {"strategy": kinds[strategies[1]]})
    check(ended, ranks, out, alone("lut"))
    assert "Resuming after step 9 of 18." in (out / "log.txt").read_text()


def test_processes_that_cannot_share_a_batch_are_told(images, tmp_path):
    ended, _ = run_together(images, tmp_path / "run", 3, {"task": "mae"})
    assert [one.code for one in ended] == [2, 2, 2]
    assert [one.told for one in ended] == [
        "patchloom: 16 images a step cannot be shared evenly by 3 processes: use --batch_size 15 or 18, or another "
        "number of processes\n",
        "",
        "",
    ]
    assert not (tmp_path / "run").exists()


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT", "-m", "patchloom"],
    "fabric run": ["-m", "lightning_fabric.cli", "--devices", "2", "--main-port", "PORT", "--", "MAIN"],
    "itself": ["-m", "patchloom"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher, images, tmp_path):
    words = {"PORT": str(free_port()), "MAIN": patchloom.cli.__file__}
    command = [sys.executable, *(words.get(word, word) for word in LAUNCHERS[launcher])]
    command += ["pretrain", str(images), "--task", "mae", "--out", str(tmp_path / "run"), "--epochs", "2"]
    command += ["--batch_size", "16", "--workers", "0", "--precision", "float32", "--model.embed_dim", "32"]
    command += ["--model.depth", "1", *(["--devices", "2"] if launcher == "itself" else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mae on ") == 1 and "2 processes (ddp) with 8 images of a step each" in done.stdout
    assert (tmp_path / "run" / "summary.txt").exists()


def test_gradients_that_wait_are_not_sent(images, tmp_path, monkeypatch):
    alone, whole = [], Fabric.no_backward_sync
    monkeypatch.setattr(Fabric, "no_backward_sync", lambda self, *what: alone.append(what) or whole(self, *what))
    pretrain(images, "mae", out=tmp_path / "run", **SMALL | {"accumulate": 4})
    assert len(alone) == 18 - 5  # of 18 steps, these move the weights: 4, 8, 12, 16, and the last
