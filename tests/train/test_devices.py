"""Training with several processes equals training with one: DDP and FSDP, also after their number has changed."""

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
from refusing import refusal
from running import column

from patchloom.errors import PatchloomError
from patchloom.results.verdict import read_health
from patchloom.system import distributed
from patchloom.system.checksummed import read_checksummed, write_checksummed
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
PLAIN = {"model": SMALL["model"] | {"drop_path_rate": 0.0}, "blr": 1e-3, "epochs": 2}


@pytest.fixture(scope="module")
def single_process(images, tmp_path_factory):
    found = {}

    def run(case):
        if case not in found:
            out = tmp_path_factory.mktemp("single_process") / "run"
            (ended,), (tensors,) = run_together(images, out, 1, CASES[case] | PLAIN)
            assert ended.code == 0, ended.told
            found[case] = out, tensors
        return found[case]

    return run


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
    for name in ("knn:untrained", "knn:raw pixels"):  # with the weights before the first update, taken after it
        assert column(out, name) == column(single_process[0], name), name
    same(ranks[0], single_process[1])
    for other in ranks[1:]:  # what processes have is not nearly, but exactly the same
        assert all(torch.equal(value, other[name]) for name, value in ranks[0].items())


@pytest.mark.parametrize(
    ("case", "world", "strategy"),
    [
        ("lut", 2, "ddp"),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                ("droppos", 2, "ddp"),
                ("restore", 2, "ddp"),
                ("sigreg", 2, "ddp"),
                ("extrema", 2, "fsdp"),
                ("visreg", 2, "fsdp"),
                ("lut", 4, "fsdp"),
            )
        ),
    ],
)
def test_several_processes_train_what_one_trains(case, world, strategy, images, single_process, tmp_path):
    out = tmp_path / "run"
    ended, ranks = run_together(images, out, world, CASES[case] | PLAIN | {"strategy": strategy})
    check(ended, ranks, out, single_process(case))
    assert f"{world} processes ({strategy}), {16 // world} images per step each" in (out / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "checkpointing"), [("ddp", True), ("fsdp", False)])
def test_compiled_processes_train_what_one_trains(strategy, checkpointing, images, single_process, tmp_path):
    out, options = tmp_path / "run", {"strategy": strategy, "compile": True, "checkpointing": checkpointing}
    ended, ranks = run_together(images, out, 2, CASES["droppos"] | PLAIN | options)
    check(ended, ranks, out, single_process("droppos"))


@pytest.mark.slow
@pytest.mark.parametrize(("then", "strategies"), [(4, "df"), (1, "fd")])
def test_a_process_that_dies_stops_the_others_and_any_number_goes_on(
    then, strategies, images, single_process, tmp_path
):
    out, kinds = tmp_path / "run", {"d": "ddp", "f": "fsdp"}
    options = CASES["lut"] | PLAIN
    (other, dead), _ = run_together(images, out, 2, options | {"strategy": kinds[strategies[0]]}, Signal((1,), 4))
    assert (dead.code, other.code) == (-9, 75) and other.seconds - dead.seconds < 60
    assert other.told.count("\n") == 1 and "another process has died" in other.told, other.told
    ended, ranks = run_together(images, out, then, options | {"strategy": kinds[strategies[1]]})
    check(ended, ranks, out, single_process("lut"))
    assert "Resuming after step 3 of 6." in (out / "log.txt").read_text()


@pytest.mark.slow
def test_a_signal_to_any_of_them_stops_all_with_one_checkpoint(images, single_process, tmp_path):
    out, options = tmp_path / "run", CASES["lut"] | PLAIN
    (first, other), _ = run_together(images, out, 2, options, Signal((1,), 4, signal.SIGTERM))
    said = "patchloom: stopped, and a checkpoint was written: run the same command to resume\n"
    assert (first.code, other.code, first.told, other.told) == (130, 130, said, "")
    # what started them may end all when one has ended, so the other one waits until the checkpoint is whole
    assert other.seconds > first.seconds - SAVING / 2
    ended, processes = run_together(images, out, 2, options)
    check(ended, processes, out, single_process("lut"))
    assert "Resuming after step 5 of 6." in (out / "log.txt").read_text()


def launched(images: Path, out: Path, starter: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    """Start a run of two processes, by ``starter`` or by itself."""
    command = [sys.executable, *starter, "-m", "patchloom", "pretrain", str(images), "--task", "mae", "--out", str(out)]
    command += ["--epochs", "1", "--batch_size", "16", "--workers", "0", "--precision", "float32"]
    command += ["--model.embed_dim", "32", "--model.depth", "1", *([] if starter else ["--devices", "2"])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


@pytest.mark.slow
def test_it_starts_its_processes_in_a_job_of_slurm_with_one_task(images, tmp_path):
    one_task = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train"}
    process = launched(images, tmp_path / "run", **one_task)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("mae on ") == 1 and "2 processes (ddp), 8 images per step each" in out
    assert (tmp_path / "run" / "summary.txt").exists()


@pytest.mark.slow
def test_torchrun_on_several_machines(images, tmp_path):
    """One torchrun per machine, both on this one."""
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1")
    torchrun += ("--master_port", str(free_port()))
    machines = [launched(images, tmp_path / "run", (*torchrun, "--node_rank", str(rank))) for rank in range(2)]
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
    assert "--devices 3 does not fit the 2 processes on each of 2 machines" in refusal(distributed.launch, "cpu", 3)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "need as many GPUs, and 2 can be used: give --devices 2" in refusal(distributed.launch, "cuda", 8)


def test_a_run_of_a_missing_device_says_so(images, small_run, tmp_path):
    run = shutil.copytree(small_run("mae"), tmp_path / "run")
    (run / "summary.txt").unlink()
    write_checksummed(run / "config.yaml", read_checksummed(run / "config.yaml") | {"device": "cuda"})
    with pytest.raises(PatchloomError, match="was begun on cuda, and there is no such device here: resume it where"):
        pretrain(images, "mae", out=run, **SMALL)


@pytest.mark.slow
def test_the_processes_that_it_started_end_with_it(images, tmp_path):
    """Processes that wait for the first one end with it, without output, before there is a checkpoint."""
    process = launched(images, tmp_path / "run")
    assert process.stdout.readline().startswith("mae on ")
    os.kill(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=300)  # which waits for all that may print
    slow = r"^(starting|waiting for the other processes) \(10 s\)\n"  # both of the first process
    said = re.sub(slow, "", err, count=2, flags=re.MULTILINE)
    assert (process.returncode, said) == (130, "patchloom: stopped.\n")


def test_gradients_that_wait_are_not_sent(unlabelled_images, tmp_path, monkeypatch):
    """Of nine steps, the fourth, the eighth and the last move the weights."""
    alone, whole = [], Fabric.no_backward_sync
    monkeypatch.setattr(Fabric, "no_backward_sync", lambda self, *what: alone.append(what) or whole(self, *what))
    pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SMALL | {"epochs": 3, "accumulate": 4})
    assert len(alone) == 9 - 3
    assert "3 updates" in read_health(tmp_path / "run").why
