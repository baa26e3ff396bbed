"""Several processes that train together: how they begin and agree."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from patchloom.errors import AlreadyReported, PatchloomError
from patchloom.machine import check_device
from patchloom.processes import wait_for_all, world
from patchloom.rendezvous import PORT, Meeting

T = TypeVar("T")


class _Whole(Meeting, DDPStrategy):
    """Every process has all weights."""


class _Sharded(Meeting, ModelParallelStrategy):
    """Every process has its part of the weights."""


# what `fabric run` passes to its scripts; torchrun, which it starts, passes the same in its own way
_FABRIC_RUN = ("LT_CLI_USED", "LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_STRATEGY", "LT_PRECISION")
# Seconds before the interpreter ends. A thread of gloo may still hold a finished piece of work, and in it a Python
# object; if it lets go while the interpreter ends, CPython before 3.14 aborts (PyTorch's pull request 179291).
_LEAVING = 0.5


def launch(device: str, devices: int | str = "auto", nodes: int = 1, strategy: str = "auto") -> Fabric:
    """Start the processes that are asked for, or find out how torchrun, ``fabric run`` or SLURM have started them.

    Args:
        device: cpu, cuda or mps.
        devices: processes on each machine, with a device each; auto is what was started, else 1.
        nodes: machines.
        strategy: fsdp gives every process its part of the weights, anything else all of them.

    Raises:
        PatchloomError: there is no such device, what started the processes says another number of them, or not all of
            them come.
    """
    check_device(device)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # we say ourselves what is used
    given = {name: os.environ.pop(name) for name in _FABRIC_RUN if name in os.environ}
    if given.get("LT_PRECISION"):
        raise PatchloomError("give --precision to patchloom, not to fabric run")
    sharded = "fsdp" in (strategy, given.get("LT_STRATEGY"))
    nodes, devices = _started(nodes, devices)
    others: list[subprocess.Popen[bytes]] = []
    try:
        if nodes * devices == 1:
            fabric = Fabric(accelerator=device, devices=1)
        else:
            if nodes > 1:
                os.environ.setdefault("MASTER_PORT", PORT)  # Fabric would draw one, which nobody else knows
            how = _Sharded(_shard, nodes * devices, 1) if sharded else _Whole()
            fabric = Fabric(accelerator=device, devices=devices, num_nodes=nodes, strategy=how)
            others = getattr(how.launcher, "procs", others)
            atexit.register(_leave, others)
        fabric.launch()
    except KeyboardInterrupt:
        _kill(others)  # now: they wait for this process, and would tell at length that it is gone
        raise
    except (ValueError, RuntimeError) as problem:  # what the launcher refuses
        reason = " ".join(str(problem).split())
        raise PatchloomError(f"{devices} x {nodes} processes cannot be started here: {reason}") from problem
    return fabric


def _leave(started: list[subprocess.Popen[bytes]]) -> None:
    """What the first process does last of all: the others, which it has started, end with it."""
    others = started[:]
    started.clear()  # Lightning watches this list, and would kill this process since others ended with an exit code
    time.sleep(_LEAVING)
    _kill(others)  # whatever they may wait for will not come


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()


def started() -> int:
    """How many processes torchrun or SLURM started; 1 if none of them did."""
    found = _by_launcher()
    return 1 if found is None else found[0] * found[1]


def _by_launcher() -> tuple[int, int] | None:
    """Nodes, and processes on each, as the environment says."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return int(os.environ["WORLD_SIZE"]) // local, local
    if os.environ.get("SLURM_NTASKS", "1") != "1" and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        return nodes, int(os.environ["SLURM_NTASKS"]) // nodes
    return None


def _started(asked_nodes: int, asked_devices: int | str) -> tuple[int, int]:
    """Nodes, and devices on each: as the environment says, which must agree with what was asked for."""
    found = _by_launcher()
    wanted = asked_nodes, 1 if asked_devices == "auto" else int(asked_devices)
    if found is None:
        return wanted
    if asked_nodes not in (1, found[0]) or asked_devices not in ("auto", 1, found[1]):
        raise PatchloomError(
            f"--nodes {wanted[0]} --devices {wanted[1]} does not fit the {found[0]} x {found[1]} processes that were "
            "started: leave both out"
        )
    return found


def _shard(task: nn.Module, mesh: Any) -> nn.Module:
    # One unit: its weights are gathered once a step, and what a step leaves behind (weights, gradients, moments,
    # teacher) is in parts. Units inside would need every use of a weight to pass through a forward.
    fully_shard(task, mesh=mesh["data_parallel"])
    return task


@contextmanager
def gathered_weights(task: nn.Module) -> Iterator[None]:
    """While entered, a task whose weights are in parts has them whole. Every process must enter."""
    if not isinstance(task, FSDPModule):
        yield
        return
    task.unshard()
    try:
        yield
    finally:
        task.reshard()


def first_decides(fabric: Fabric, decide: Callable[[], T]) -> T:
    """What ``decide`` gives in the first process, in all of them.

    Raises:
        Exception: what it raised; in the others as `AlreadyReported`, which nobody prints again.
    """
    answer: Any = None
    problem: Exception | None = None
    wait_for_all()  # all together, they make what they wait by
    if fabric.is_global_zero:
        try:
            answer = decide()
        except Exception as error:  # of whatever kind, the others must not wait for an answer
            if world() == 1:
                raise
            problem = error
    wait_for_all()  # the first may have to read all of the images
    answer, text = fabric.broadcast((answer, None if problem is None else str(problem)))
    if problem is not None:
        raise problem
    if text is not None:
        raise AlreadyReported(text)
    return answer
