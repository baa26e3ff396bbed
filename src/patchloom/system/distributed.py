"""What the processes of one training tell each other. With a single process every function is the identity."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import FSDPModule, fully_shard

from patchloom.display import StatusMessage
from patchloom.errors import AlreadyReported, PatchloomError
from patchloom.system.hardware import Cores, check_device, cores, own_cores

T = TypeVar("T")


_alone = False


def world() -> int:
    """How many processes train together."""
    if _alone:
        return 1
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def without_collectives() -> Iterator[None]:
    """While entered, this process does as if it were the only one: what the others take no part in would wait for them.

    It has to end before anything that all of them do.
    """
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world() > 1 else 0


def total(values: Tensor) -> Tensor:
    """The sum of every process's ``values``, without gradient."""
    values = values.detach()
    if world() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def smallest(number: int) -> int:
    """The smallest of every process's ``number``; no GPU is waited for."""
    if world() == 1:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=_of_cpus(dist.group.WORLD))
    return int(found)


def wait_for_all() -> None:
    """Wait until every process is here: a week if need be, where other waiting ends after half an hour."""
    if world() > 1:
        dist.barrier(group=_patient(dist.group.WORLD))


@cache
def _patient(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


@cache
def _of_cpus(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The processes of ``group``, joined for what is on CPUs."""
    return group if dist.get_backend(group) == "gloo" else dist.new_group(backend="gloo")


def gathered(values: Tensor) -> Tensor:
    """Every process's ``values`` [b ...], one below the other in the order of the ranks [world*b ...], no gradient.

    b must be the same in all of them, as everywhere here: the training loop sees to it (`smallest`).
    """
    values = values.detach().contiguous()
    if world() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(world())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def collected(values: list[T]) -> list[T]:
    """Every process's list, one after the other in the order of the ranks."""
    if world() == 1:
        return values
    parts: list[list[T]] = [[] for _ in range(world())]
    dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]


def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
    """Give every process the first one's values, in place: statistics of a BatchNorm are each process's own."""
    if world() > 1:
        for buffer in buffers:
            dist.broadcast(buffer, 0)


def cores_here() -> Cores:
    """Cores of this machine that the processes of this training may use, and how many these are. All must ask at once.

    They are counted, since each process may have cores of its own (SLURM), or all of them the same.
    """
    here = platform.node()
    known = [(own, count) for machine, own, count in collected([(here, own_cores(), cores())]) if machine == here]
    limits = {
        frozenset(own): count for own, count in known
    }  # processes on the same cores share a control group's quota
    return Cores(min(len(frozenset().union(*limits)), sum(limits.values())), len(known))


class Shared(torch.Generator):
    """A generator that every process of a training seeds alike.

    What is drawn with it is drawn for the images of all processes, and each process takes the rows of its own. So what
    happens to an image does not depend on how many processes there are.

    Args:
        device: where it draws. A GPU draws other numbers from a seed than a CPU does, and has nothing to wait for.
    """

    def __new__(cls, device: torch.device | str = "cpu") -> Shared:
        return super().__new__(cls, device)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.world = rank(), world()


def draw(
    kind: Callable[..., Tensor],
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device | str,
    *bounds: int,
) -> Tensor:
    """Random numbers of ``shape`` (an image a row), where ``generator`` lives: from a seed on the CPU, every machine
    makes the same.
    """
    at = generator.device if generator is not None else device
    if not isinstance(generator, Shared):
        return kind(*bounds, tuple(shape), generator=generator, device=at)
    b, *each = shape
    whole = kind(*bounds, (b * generator.world, *each), generator=generator, device=at)
    return whole[generator.rank * b : (generator.rank + 1) * b]


def averaged(values: Tensor) -> Tensor:
    """The mean of every process's ``values``, through which gradients flow back to all of them."""
    return _Averaged.apply(values) if world() > 1 else values


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return total(values) / world()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # each process's loss depends on everybody's values, so everybody's gradients add up
        return total(gradient) / world()


# Processes of several machines, or of one, meet before they train: told in a line, for a limited time, and stoppable.


PORT = "29500"  # torch's own, where several machines are told no other
_MINUTES = 10.0  # that everybody has to come; PATCHLOOM_RENDEZVOUS says others, in seconds
_LOOK = 0.2  # seconds between two looks
_QUIET = 2.0  # seconds after which it is said what is waited for
_HELLO = 20.0  # seconds for a connection to somebody who is there


def join_group(address: str, port: int, rank: int, world: int, machines: int, backend: str, **more: Any) -> None:
    """Wait for all processes, and make them a group."""
    seconds = _seconds()
    end = time.monotonic() + seconds
    # of the processes of a machine one speaks; with a single machine they are there in a moment
    said = time.monotonic() + _QUIET if machines > 1 and os.environ.get("LOCAL_RANK", "0") == "0" else 0.0
    place, store, here = f"{address}:{port}", None, 0
    if rank == 0:
        store = TCPStore(address, port, world, True, timedelta(seconds=_HELLO), wait_for_workers=False)
    what = "other processes" if rank == 0 else "first process"
    with StatusMessage(f"waiting for the {what} at {place}"):
        while here < world:
            if store is None and _answers(address, port):
                store = TCPStore(address, port, world, False, timedelta(seconds=_HELLO), wait_for_workers=False)
            if store is not None:
                here = store.add("here", 0 if here else 1)
            if here >= world:
                break
            if time.monotonic() > end:
                raise PatchloomError(_late(place, here, world, machines, seconds))
            if said and time.monotonic() > said:
                print(_line(place, rank, here, world, machines, seconds), flush=True)
                said = 0.0
            time.sleep(_LOOK)
    store.set_timeout(dist.default_pg_timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **more)
    if backend == "nccl":
        atexit.register(_part)  # which it wants, and says so if it is not done


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _seconds() -> float:
    text = os.environ.get("PATCHLOOM_RENDEZVOUS", "")
    try:
        seconds = float(text) if text else 60 * _MINUTES
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 7 * 86400:
        raise PatchloomError(f"PATCHLOOM_RENDEZVOUS must be seconds above 0 and below a week, not {text}")
    return seconds


def _line(place: str, rank: int, here: int, world: int, machines: int, seconds: float) -> str:
    limit = f"at most {_span(seconds)}"
    if rank:
        return f"Waiting for the first process at {place}, {limit}."
    return f"Waiting at {place} for {world - here} of {world} processes, {limit}. {_how(place, machines)}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:g} seconds"


def _how(place: str, machines: int) -> str:
    address, _, port = place.rpartition(":")
    if address in ("127.0.0.1", "localhost"):
        address = socket.gethostname()
    ranks = "1" if machines == 2 else f"1 to {machines - 1}"
    return f"Each other machine runs the same command with NODE_RANK={ranks} MASTER_ADDR={address} MASTER_PORT={port}."


def _late(place: str, here: int, world: int, machines: int, seconds: float) -> str:
    came = f"{here} of {world} processes came" if here else "the first process did not come"
    told = f"{came} to {place} within {_span(seconds)}"
    if machines == 1:
        return f"{told}: see what was printed before this, and run the same command again"
    return f"{told}: run the same command on each of the {machines} machines (docs/devices.md), or leave out --nodes"


class RendezvousMixin:
    """For a strategy of Fabric: its processes `join_group`, instead of waiting in torch."""

    def setup_environment(self: Any) -> None:
        """What the strategy does, once all are there."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # of torchrun, which has seen to it
            self.accelerator.setup_device(self.root_device)
            self._set_world_ranks()
            environment, backend = self.cluster_environment, self._get_process_group_backend()
            place = environment.main_address, environment.main_port
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place[0], str(place[1])
            ranks = environment.global_rank(), environment.world_size()
            device = None if self.root_device.type == "cpu" else self.root_device
            join_group(*place, *ranks, self.num_nodes, backend, timeout=self._timeout, device_id=device)
        super().setup_environment()


# Several processes that train together: how they begin and agree.


class _Whole(RendezvousMixin, DDPStrategy):
    """Every process has all weights."""


class _Sharded(RendezvousMixin, ModelParallelStrategy):
    """Every process has its part of the weights."""


# what `fabric run` passes to its scripts; torchrun, which it starts, passes the same in its own way
_FABRIC_RUN = ("LT_CLI_USED", "LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_STRATEGY", "LT_PRECISION")
# Seconds before the interpreter ends. A thread of gloo may still hold a finished piece of work, and in it a Python
# object; if it lets go while the interpreter ends, CPython before 3.14 aborts (PyTorch's pull request 179291).
_LEAVING = 0.5


def launch(device: str, devices: int | str = "auto", nodes: int = 1, strategy: str = "auto") -> Fabric:
    """Start the processes that are asked for, or find out how torchrun, ``fabric run`` or SLURM have started them."""
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


def launched_processes() -> int:
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
    """What ``decide`` gives in the first process, in all of them."""
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
