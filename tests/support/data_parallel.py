"""Data-parallel training of a task, each process with its rows of one batch and of its random draws.

A separate module because the processes have to import it.
"""

import time
import traceback
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import torch
from forked import server
from perturbing import perturbed
from sweep import build, views_of
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from patchloom.system.distributed import Shared, _of_cpus, smallest, wait_for_all

WORLD, BATCH, STEPS = 2, 8, 2  # the second step has momentum, and a teacher that has moved


class Result(NamedTuple):
    """Record of a training: the loss of each step, gradients of the first, weights before and after."""

    losses: Tensor
    gradients: dict[str, Tensor]
    start: dict[str, Tensor]
    end: dict[str, Tensor]


def train(name, asked, rank=0, world=1):
    """Train a few steps of a task with the options ``asked`` on this process's rows of the batch."""
    task = build(name, asked=asked)
    perturbed(task)  # zero biases, and a teacher that is the student, would hide mistakes
    # with the defaults of Fabric: parameters that the loss does not use are an error
    module = DistributedDataParallel(task) if world > 1 else task
    trained = {key: weight for key, weight in task.named_parameters() if weight.requires_grad}
    # not Adam, whose first steps depend on the sign of gradients that are zero up to rounding
    optimizer = torch.optim.SGD(trained.values(), lr=0.1, momentum=0.9)
    views = [view.chunk(world)[rank] for view in views_of(task, BATCH)]
    start, losses, gradients = copied(task.state_dict()), [], {}
    for step in range(STEPS):
        generator = Shared()
        generator.manual_seed(step)
        outcome = module(*views, progress=step / STEPS, generator=generator)
        outcome.loss.backward()
        gradients = gradients or copied({key: weight.grad for key, weight in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
        task.after_step((step + 1) / STEPS)
        losses.append(outcome.loss.detach())
    return Result(torch.stack(losses), gradients, start, copied(task.state_dict()))


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def worker(rank, cases, folder):
    """Train each of ``cases`` (name and options) with the other processes; write results or tracebacks."""
    torch.set_num_threads(1)
    found = []
    for number, case in enumerate(cases):
        # a new group for each case, so that processes resynchronise after a failure
        meeting = f"file://{folder}/meeting{number}"
        dist.init_process_group("gloo", meeting, timedelta(seconds=60), WORLD, rank)
        try:
            found.append(tuple(train(*case, rank, WORLD)))
        except Exception:  # reported by the test of this case; the other cases continue
            found.append(traceback.format_exc())
        finally:
            dist.destroy_process_group()
    found.append(smallest_by_backend(rank, folder))
    found.append(patience(rank, folder))
    torch.save(found, f"{folder}/rank{rank}.pt")


def smallest_by_backend(rank: int, folder: str) -> list[int]:
    """Return the smallest of 3 and 4, for processes with a backend for CPUs, and with one only for GPUs."""
    dist.init_process_group("gloo", f"file://{folder}/smallest", timedelta(seconds=60), WORLD, rank)
    found = [smallest(4 - rank)]
    with mock.patch.object(dist, "get_backend", lambda group: "nccl"):
        _of_cpus.cache_clear()
        found += [smallest(4 - rank) for _ in range(2)]
        assert _of_cpus.cache_info().misses == 1 and _of_cpus(dist.group.WORLD) is not dist.group.WORLD
    dist.destroy_process_group()
    return found


def patience(rank: int, folder: str) -> str:
    """Return the result of waiting for a first process for longer than the usual timeout."""
    dist.init_process_group("gloo", f"file://{folder}/patience", timedelta(seconds=1), WORLD, rank)
    try:
        wait_for_all()
        time.sleep(0 if rank else 2.5)
        wait_for_all()
        return "well"
    except RuntimeError as problem:
        return str(problem)
    finally:
        dist.destroy_process_group()


def train_together(cases, folder):
    """Return the results of each of ``cases`` by process, `smallest_by_backend`, and `patience`."""
    server()  # its imports are shared by the processes
    torch.multiprocessing.start_processes(worker, (cases, str(folder)), WORLD, start_method="forkserver")
    *by_case, smallest_ones, waits = zip(*(torch.load(f"{folder}/rank{rank}.pt") for rank in range(WORLD)), strict=True)
    return (
        [[one if isinstance(one, str) else Result(*one) for one in of_case] for of_case in by_case],
        smallest_ones,
        waits,
    )
