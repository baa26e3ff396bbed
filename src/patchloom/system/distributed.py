"""Collectives of the processes of one training, and the launch of these processes.

With a single process, every collective is the identity.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from patchloom.display import StatusMessage
from patchloom.errors import AlreadyReported, PatchloomError, Stopped, TemporaryError
from patchloom.system.device import Cores, check_device, cores, is_available, own_cores

T = TypeVar("T")


# Collectives: communication between the processes of one training.


_alone = False


def world() -> int:
    """Return the number of processes that train together."""
    if _alone:
        return 1
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def without_collectives() -> Iterator[None]:
    """Disable collectives inside this block: they would wait for other processes, which take no part in it.

    The block has to end before the next operation of all processes.
    """
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if world() > 1 else 0


def total(values: Tensor) -> Tensor:
    """Return the sum of every process's ``values``, without gradient."""
    values = values.detach()
    if world() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def smallest(number: int) -> int:
    """Return the smallest ``number`` of all processes, without waiting for a GPU."""
    if world() == 1:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=_of_cpus(dist.group.WORLD))
    return int(found)


def any_process(flag: bool) -> bool:
    """Return whether ``flag`` is true in any process; all must call it."""
    return smallest(0 if flag else 1) == 0


def wait_for_all() -> None:
    """Wait until every process is here, for up to a week; other collectives end after half an hour."""
    if world() > 1:
        dist.barrier(group=_patient(dist.group.WORLD))


@cache
def _patient(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(days=7)))  # this process is in it


@cache
def _of_cpus(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the processes of ``group`` for tensors on CPUs."""
    return group if dist.get_backend(group) == "gloo" else cast(dist.ProcessGroup, dist.new_group(backend="gloo"))


def gathered(values: Tensor) -> Tensor:
    """Return every process's ``values`` [b ...], concatenated in the order of ranks [world*b ...], without gradient.

    b must be the same in all of them, as everywhere here; the training loop ensures it (`smallest`).
    """
    values = values.detach().contiguous()
    if world() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(world())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def gathered_with_gradient(values: Tensor) -> Tensor:
    """Return `gathered` values, through which gradients flow back to the processes that they come from."""
    return _Gathered.apply(values) if world() > 1 else values


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return gathered(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # each process's loss depends on the values of all, so the gradients of all are added
        return total(gradient).chunk(world())[rank()]


def collected(values: list[T]) -> list[T]:
    """Return every process's list, concatenated in the order of the ranks."""
    if world() == 1:
        return values
    parts: list[list[T]] = [[] for _ in range(world())]
    dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]


def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
    """Give every process the first one's values, in place: each process has its own BatchNorm statistics."""
    if world() > 1:
        for buffer in buffers:
            dist.broadcast(buffer, 0)


def cores_here() -> Cores:
    """Return the cores of this machine that this training's processes here may use, and their number. All must call it.

    Cores are counted, since each process may have its own (SLURM), or all of them the same.
    """
    here = platform.node()
    known = [(own, count) for machine, own, count in collected([(here, own_cores(), cores())]) if machine == here]
    limits = {
        frozenset(own): count for own, count in known
    }  # processes on the same cores share a control group's quota
    return Cores(min(len(frozenset().union(*limits)), sum(limits.values())), len(known))


class Shared(torch.Generator):
    """Random generator that every process of a training seeds alike.

    Numbers are drawn for the images of all processes, and each process takes the rows of its images. So the numbers of
    an image do not depend on the number of processes.

    Args:
        device: device on which it draws. From one seed, a GPU draws other numbers than a CPU; no transfer is needed.
    """

    def __new__(cls, device: torch.device | str = "cpu") -> Shared:
        return super().__new__(cls, device)  # type: ignore[call-arg]  # torch does not declare Generator.__new__

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.world = rank(), world()


def draw(
    kind: Callable[..., Tensor],
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device | str,
    *bounds: int,
) -> Tensor:
    """Draw random numbers of ``shape`` (one row per image) on the device of ``generator``.

    On the CPU, a seed gives the same numbers on every machine.
    """
    at = generator.device if generator is not None else device
    if not isinstance(generator, Shared):
        return kind(*bounds, tuple(shape), generator=generator, device=at)
    b, *each = shape
    whole = kind(*bounds, (b * generator.world, *each), generator=generator, device=at)
    return whole[generator.rank * b : (generator.rank + 1) * b]


def averaged(values: Tensor) -> Tensor:
    """Return the mean of every process's ``values``, through which gradients flow back to all of them."""
    return _Averaged.apply(values) if world() > 1 else values


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return total(values) / world()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # each process's loss depends on the values of all, so the gradients of all are added
        return total(gradient) / world()


class SharedBatchNorm(_BatchNorm):
    """Batch norm over the batches of all processes, on any device; torch's ``SyncBatchNorm`` is for GPUs only.

    Every process must have a batch of the same size. Buffers and parameters have the names of ``nn.BatchNorm1d`` and
    ``nn.BatchNorm2d``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [b d ...] over all dimensions but the second; in float32, also under autocast."""
        x = x.float()
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        others = [i for i in range(x.ndim) if i != 1]
        n = x.numel() // x.shape[1] * world()
        if n < 2:
            raise ValueError("batch norm needs 2 or more images in a batch")
        # it is always built with statistics
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        channels = (1, -1, *[1] * (x.ndim - 2))
        mean = averaged(x.mean(others))
        # the difference is computed twice: with one, gradients add up in another order, and old runs differ in rounding
        variance = averaged((x - mean.view(channels)).square().mean(others))
        with torch.no_grad():
            # without a momentum, as in nn.BatchNorm, the running statistics are the mean over all batches
            self.num_batches_tracked += 1
            weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, weight)
            self.running_var.lerp_(variance * n / (n - 1), weight)
        normalised = (x - mean.view(channels)) * (variance + self.eps).rsqrt().view(channels)
        if self.affine:
            normalised = normalised * self.weight.view(channels) + self.bias.view(channels)
        return normalised

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape."""


def share_batch_norms(model: nn.Module) -> nn.Module:
    """Have each batch norm of ``model`` use the batches of all processes, in place; return the model."""
    if next(model.parameters()).device.type == "cuda":
        return cast(nn.Module, nn.SyncBatchNorm.convert_sync_batchnorm(model))
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
                shared = SharedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine)
                shared.load_state_dict(norm.state_dict())
                setattr(module, name, shared.train(norm.training))
    return model


@contextmanager
def gathered_weights(task: nn.Module) -> Iterator[None]:
    """Gather the sharded weights of a task inside this block. Every process must enter it."""
    if not isinstance(task, FSDPModule):
        yield
        return
    task.unshard()
    try:
        yield
    finally:
        task.reshard()


def first_decides(decide: Callable[[], T]) -> T:
    """Return the result of ``decide`` in the first process to all of them."""
    if world() == 1:
        return decide()
    answer: Any = None
    problem: Exception | None = None
    wait_for_all()  # all processes together create the group for waiting
    if rank() == 0:
        try:
            answer = decide()
        except Exception as error:  # after any exception, the others must not wait for an answer
            problem = error
    wait_for_all()  # the first may have to read all of the images
    shared = [answer, None if problem is None else (str(problem), getattr(problem, "exit_code", 1))]
    dist.broadcast_object_list(shared)
    answer, ended = shared
    if problem is not None:
        raise problem
    if ended is not None:
        raise AlreadyReported(*ended)
    return answer


def raise_together(problem: PatchloomError | None) -> None:
    """Raise the problem of any process in all of them, once each has called this with its own or with None."""
    try:
        wait_for_all()  # patiently, as others may still be at work
        own = None if problem is None else (str(problem), problem.exit_code)
        found = [one for one in collected([own]) if one is not None]
    except RuntimeError as lost:
        if problem is None and not is_peer_death(lost):
            raise
        raise problem or TemporaryError(LOST) from lost
    if problem is not None:
        raise problem
    if found:
        raise AlreadyReported(*found[0])


def refused_by_all(reason: str) -> PatchloomError:
    """Return the error that every process raises at the same place, and that only the first one reports."""
    return PatchloomError(reason) if rank() == 0 else AlreadyReported(reason)


def stopped_by_all(reason: str, progress: Mapping[str, Any] | None = None) -> PatchloomError:
    """Return the error that every process raises when training was interrupted, once the first one is ready to end.

    Its last work (a checkpoint, its trackers) would be lost otherwise: a launcher may end all once one has ended. Only
    the first process reports it.
    """
    with suppress(RuntimeError):  # another process has died
        wait_for_all()
    return Stopped(reason, progress) if rank() == 0 else AlreadyReported(reason, Stopped.exit_code)


_LOST = re.compile(r"connection|gloo|nccl|socket|timed? ?out|broken pipe|(\b|tcp|dist)store(\b|error)", re.IGNORECASE)
LOST = (
    "another process has died, so this one stops, too: see the messages before this, then run the same command again "
    "to continue"
)


def is_peer_death(problem: BaseException) -> bool:
    """Return whether ``problem`` means that another process has died."""
    return world() > 1 and isinstance(problem, RuntimeError) and bool(_LOST.search(str(problem)))


@contextmanager
def explain_peer_death() -> Iterator[None]:
    """Raise exceptions which mean that another process has died as a `TemporaryError`, inside this block."""
    try:
        yield
    except RuntimeError as problem:
        if not is_peer_death(problem):
            raise
        raise TemporaryError(LOST) from problem


# Launching: Fabric starts the processes of one machine; torchrun, `fabric run` or SLURM those of several machines.


# variables that `fabric run` passes to its scripts; torchrun, which it starts, passes the same in its own way
_FABRIC_RUN = ("LT_CLI_USED", "LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_STRATEGY", "LT_PRECISION")
# Seconds to wait before the interpreter ends. A thread of gloo may still hold a finished piece of work, and in it a
# Python object; if that is released while the interpreter ends, CPython before 3.14 aborts (PyTorch pull request
# 179291).
_LEAVING = 0.5


def launch(device: str, devices: int | str = "auto", strategy: str = "auto") -> Fabric:
    """Start ``devices`` processes here, or join those that torchrun, ``fabric run`` or SLURM started."""
    check_device(device)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # patchloom reports the devices itself
    given = {name: os.environ.pop(name) for name in _FABRIC_RUN if name in os.environ}
    if given.get("LT_PRECISION"):
        raise PatchloomError("give --precision to patchloom, not to fabric run")
    sharded = "fsdp" in (strategy, given.get("LT_STRATEGY"))
    nodes, devices = _started(devices)
    if device == "cuda" and devices > (there := torch.cuda.device_count()):
        less = f"give --devices {there}" if _by_launcher() is None else "start fewer, or let each see all GPUs"
        raise PatchloomError(f"{devices} processes on this machine need as many GPUs, and {there} can be used: {less}")
    others: list[subprocess.Popen[bytes]] = []
    # a job of SLURM with one task starts no processes, although Lightning takes it for their launcher
    one_task = "SLURM_NTASKS" in os.environ and _by_launcher() is None
    environment = LightningEnvironment() if one_task else None
    try:
        if nodes * devices == 1:
            fabric = Fabric(accelerator=device, devices=1, plugins=environment)
        else:
            how = ModelParallelStrategy(_shard, nodes * devices, 1) if sharded else DDPStrategy()
            fabric = Fabric(accelerator=device, devices=devices, num_nodes=nodes, strategy=how, plugins=environment)
            others = getattr(how.launcher, "procs", others)
            atexit.register(_leave, others)
        with StatusMessage("waiting for the other processes"):
            fabric.launch()
    except KeyboardInterrupt:
        _kill(others)  # at once: otherwise they would wait for this process, and print long errors about its end
        raise
    except (ValueError, RuntimeError, MisconfigurationException) as problem:  # the launcher's errors
        reason = " ".join(str(problem).split())
        kind = TemporaryError if isinstance(problem, RuntimeError) else PatchloomError  # a port in use, a machine away
        raise kind(f"{nodes * devices} processes cannot be started together: {reason}") from problem
    return fabric


def launch_once(device: str, devices: int | str = "auto") -> None:
    """Start or join processes like `launch`, unless they are joined already or this one is the only one."""
    if world() == 1 and (launched_processes() > 1 or devices not in ("auto", 1)):
        launch(device, devices)


def _leave(started: list[subprocess.Popen[bytes]]) -> None:
    """End the processes that this one started when it ends itself."""
    others = started[:]
    started.clear()  # Lightning watches this list, and would kill this process since others ended with an exit code
    time.sleep(_LEAVING)
    _kill(others)  # they may wait for messages that will not come


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()


def processes_here() -> int:
    """Return the number of the processes that train together on this machine."""
    found = _by_launcher()
    return world() if found is None or world() == 1 else found[1]


def launched_processes() -> int:
    """Return the number of processes that torchrun or SLURM started; 1 if neither did."""
    found = _by_launcher()
    return 1 if found is None else found[0] * found[1]


def _by_launcher() -> tuple[int, int] | None:
    """Return the numbers of nodes and of processes on each, from the environment."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return int(os.environ["WORLD_SIZE"]) // local, local
    if os.environ.get("SLURM_NTASKS", "1") != "1" and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        return nodes, int(os.environ["SLURM_NTASKS"]) // nodes
    return None


def _started(devices: int | str) -> tuple[int, int]:
    """Return the numbers of nodes and of processes on each; ``devices`` must agree with the environment."""
    found = _by_launcher()
    if found is None:
        return 1, 1 if devices == "auto" else int(devices)
    nodes, local = found
    if devices not in ("auto", 1, local):
        places = "" if nodes == 1 else f" on each of {nodes} machines"
        raise PatchloomError(
            f"--devices {devices} does not fit the {local} processes{places} that torchrun or SLURM started: leave "
            "--devices out"
        )
    return found


def missing_devices(device: str, devices: int | str) -> str:
    """Return which of so many ``devices`` this machine lacks, as the start of a sentence; "" if none."""
    if not is_available(device):
        return f"there is no {device} device here"
    there = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and _by_launcher() is None and devices != "auto" and int(devices) > there:
        return f"there are {there} of {devices} GPUs here" if there != 1 else f"there is 1 of {devices} GPUs here"
    return ""


def _shard(task: nn.Module, mesh: Any) -> nn.Module:
    # One unit: its weights are gathered once a step, and between steps all is sharded (weights, gradients, moments,
    # teacher). Nested units would need every use of a weight to pass through a forward.
    fully_shard(task, mesh=mesh["data_parallel"])
    return task
