"""Training with several processes equals training with one: DDP and FSDP, also after their number has changed."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killing import SMALL
from lightning_fabric import Fabric
from ranks import SAVING, Signal, free_port, run_together

import patchloom.cli
from patchloom.errors import PatchloomError
from patchloom.options import parse_pretrain
from patchloom.runs.checksummed import read_checksummed, write_checksummed
from patchloom.runs.folder import RunFolder
from patchloom.system import distributed
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

CASES = {
    "droppos": {"task": "droppos", "accumulate": 2},
    "extrema": {"task": "extrema"},
    "lut": {"task": "lut"},
    "sigreg": {"task": {"name": "extrema", "loss": "sigreg"}},
    "visreg": {"task": {"name": "lut", "loss": "visreg"}},
    # patches of the images of all processes, but in measures and pictures of those of one
    "restore": {"task": {"name": "restore", "degradation": "zoom_out", "fill": "images"}},
}
# no drop path, which each process draws for itself; and a rate at which rounding does not grow
PLAIN = {"model": SMALL["model"] | {"drop_path_rate": 0.0}, "blr": 1e-3}


@pytest.fixture(scope="module")
def single_process(images, tmp_path_factory):
    """Results of one process, by case."""
    found = {}

    def run(case):
        if case not in found:
            out = tmp_path_factory.mktemp("single_process") / "run"
            (ended,), (tensors,) = run_together(images, out, 1, CASES[case] | PLAIN)
            assert ended.code == 0, ended.told
            found[case] = out, tensors
        return found[case]

    return run


def column(run: Path, name: str) -> list[float]:
    with open(run / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def same(found, wanted):
    """Return whether two results are equal up to the order of sums."""
    assert found.keys() == wanted.keys()
    far = {}
    for name, of in wanted.items():
        if of.is_floating_point() and not name.endswith(("qkv.bias", "k.bias")):  # those of keys only have rounding
            far[name] = ((found[name] - of).double().norm() / of.double().norm().clamp_min(1e-3)).item()
    worst = max(far, key=far.get)
    assert far[worst] < 2e-3, (worst, far[worst])


def check(ended, ranks, out, single_process):
    assert [one.code for one in ended] == [0] * len(ended), "\n".join(one.told for one in ended)
    for name in ("loss", "held_out"):
        assert column(out, name) == pytest.approx(column(single_process[0], name), rel=1e-4), name
    same(ranks[0], single_process[1])
    for other in ranks[1:]:  # what processes have is not nearly, but exactly the same
        assert all(torch.equal(value, other[name]) for name, value in ranks[0].items())


@pytest.mark.parametrize(
    ("case", "world", "strategy"),
    [*((case, 2, strategy) for case in CASES for strategy in ("ddp", "fsdp")), ("lut", 4, "fsdp")],
)
def test_several_processes_train_what_one_trains(case, world, strategy, images, single_process, tmp_path):
    out = tmp_path / "run"
    ended, ranks = run_together(images, out, world, CASES[case] | PLAIN | {"strategy": strategy})
    check(ended, ranks, out, single_process(case))
    assert f"{world} processes ({strategy}), {16 // world} images per step each" in (out / "log.txt").read_text()


@pytest.mark.parametrize(("first", "then", "strategies"), [(2, 1, "dd"), (2, 4, "df"), (4, 2, "fd")])
def test_a_process_that_dies_stops_the_others_and_any_number_goes_on(
    first, then, strategies, images, single_process, tmp_path
):
    out, kinds = tmp_path / "run", {"d": "ddp", "f": "fsdp"}
    options = CASES["lut"] | PLAIN
    ended, _ = run_together(images, out, first, options | {"strategy": kinds[strategies[0]]}, Signal((first - 1,), 10))
    *others, dead = ended
    assert dead.code == -9
    for other in others:
        assert other.code == 75 and other.seconds - dead.seconds < 60
        assert other.told.count("\n") == 1 and "another process has died" in other.told, other.told
    ended, ranks = run_together(images, out, then, options | {"strategy": kinds[strategies[1]]})
    check(ended, ranks, out, single_process("lut"))
    assert "Resuming after step 9 of 18." in (out / "log.txt").read_text()


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, (1,)), (signal.SIGHUP, (0, 1))])
def test_a_signal_to_any_of_them_stops_all_with_one_checkpoint(number, ranks, images, single_process, tmp_path):
    out, options = tmp_path / "run", CASES["lut"] | PLAIN
    (first, other), _ = run_together(images, out, 2, options, Signal(ranks, 10, number))
    said = "patchloom: stopped, and a checkpoint was written: run the same command to resume\n"
    assert (first.code, other.code, first.told, other.told) == (130, 130, said, "")
    # what started them may end all when one has ended, so the other one waits until the checkpoint is whole
    assert other.seconds > first.seconds - SAVING / 2
    ended, processes = run_together(images, out, 2, options)
    check(ended, processes, out, single_process("lut"))
    assert "Resuming after step 11 of 18." in (out / "log.txt").read_text()


def test_a_batch_that_cannot_be_shared_evenly_is_refused(images, tmp_path):
    ended, _ = run_together(images, tmp_path / "run", 3, {"task": "mae"})
    assert [one.code for one in ended] == [2, 2, 2]
    assert [one.told for one in ended] == [
        "patchloom: 16 images per step cannot be shared evenly by 3 processes: use --batch_size 15 or 18, or another "
        "number of processes\n",
        "",
        "",
    ]
    assert not (tmp_path / "run").exists()


# torchrun itself starts patchloom on several machines; here it is fabric that does so by it
ONE_TASK = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train"}
LAUNCHERS = {
    "fabric run": ["-m", "lightning_fabric.cli", "--devices", "2", "--main-port", "PORT", "--", "MAIN"],
    "itself": ["-m", "patchloom"],
    "itself, in a job of SLURM with one task": ["-m", "patchloom"],
}
SEVERAL = {
    "two machines": ["-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", "MACHINE", "--nproc_per_node", "1"]
    + ["--master_addr", "127.0.0.1", "--master_port", "PORT", "-m", "patchloom"]
}


def launched(launcher: str, images: Path, out: Path, machine: int = 0, port: int | None = None) -> subprocess.Popen:
    words = {"PORT": str(port or free_port()), "MAIN": patchloom.cli.__file__, "MACHINE": str(machine)}
    command = [sys.executable, *(words.get(word, word) for word in (LAUNCHERS | SEVERAL)[launcher])]
    command += ["pretrain", str(images), "--task", "mae", "--out", str(out), "--epochs", "2"]
    command += ["--batch_size", "16", "--workers", "0", "--precision", "float32", "--model.embed_dim", "32"]
    command += ["--model.depth", "1", *(["--devices", "2"] if launcher.startswith("itself") else [])]
    environment, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
    environment |= ONE_TASK if "SLURM" in launcher else {}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher, images, tmp_path):
    process = launched(launcher, images, tmp_path / "run")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("mae on ") == 1 and "2 processes (ddp), 8 images per step each" in out
    assert (tmp_path / "run" / "summary.txt").exists()


def test_torchrun_on_several_machines(images, tmp_path):
    """One torchrun per machine, both on this one."""
    port = free_port()
    machines = [launched("two machines", images, tmp_path / "run", machine, port) for machine in range(2)]
    (out, err), (other, _) = [process.communicate(timeout=300) for process in machines]
    assert [process.returncode for process in machines] == [0, 0], err
    assert "2 processes (ddp), 8 images per step each" in out and "mae on " not in other
    assert (tmp_path / "run" / "summary.txt").exists()


TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize("started", [TORCHRUN, SLURM])
def test_devices_that_do_not_fit_what_was_started(started, monkeypatch):
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert distributed.launched_processes() == 4
    with pytest.raises(PatchloomError, match="--devices 3 does not fit the 2 processes on each of 2 machines"):
        distributed.launch("cpu", 3)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        PatchloomError, match="8 processes on this machine need as many GPUs, and 2 can be used: give --devices 2"
    ):
        distributed.launch("cuda", 8)


def test_a_run_of_a_missing_device_says_so(images, small_run, tmp_path):
    run = shutil.copytree(small_run("mae"), tmp_path / "run")
    (run / "summary.txt").unlink()
    write_checksummed(run / "config.yaml", read_checksummed(run / "config.yaml") | {"device": "cuda"})
    with pytest.raises(PatchloomError, match="was begun on cuda, and there is no such device here: resume it where"):
        pretrain(images, "mae", out=run, **SMALL)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_that_still_has_the_setting_nodes_goes_on(nodes, images, small_run, tmp_path, capsys):
    run = shutil.copytree(small_run("mae"), tmp_path / "run")
    for path in (run / "config.yaml", run / "requested.yaml"):
        write_checksummed(path, read_checksummed(path) | {"nodes": nodes})
    again = pretrain(images, "mae", out=run, **SMALL | {"epochs": 2})
    assert again.folder == run and "is finished" in capsys.readouterr().out
    assert "nodes" not in RunFolder(run).command()
    given, _ = parse_pretrain(["--config", str(run / "config.yaml")])
    assert "nodes" not in given


def test_nodes_are_refused_with_what_starts_them(capsys):
    assert patchloom.cli.main(["pretrain", "photos/", "--nodes", "2"]) == 2
    assert "torchrun or srun" in capsys.readouterr().err


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_the_processes_that_it_started_end_with_it(send, images, tmp_path):
    """Processes that wait for the first one end with it, without output, before there is a checkpoint."""
    process = launched("itself", images, tmp_path / "run")
    assert process.stdout.readline().startswith("mae on ")
    send(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=300)  # which waits for all that may print
    slow = r"^(starting|waiting for the other processes) \(10 s\)\n"  # both of the first process
    said = re.sub(slow, "", err, count=2, flags=re.MULTILINE)
    assert (process.returncode, said) == (130, "patchloom: stopped.\n")


def test_gradients_that_wait_are_not_sent(images, tmp_path, monkeypatch):
    alone, whole = [], Fabric.no_backward_sync
    monkeypatch.setattr(Fabric, "no_backward_sync", lambda self, *what: alone.append(what) or whole(self, *what))
    pretrain(images, "mae", out=tmp_path / "run", **SMALL | {"accumulate": 4})
    assert len(alone) == 18 - 5  # of 18 steps, these move the weights: 4, 8, 12, 16, and the last
