"""Short `pretrain` without a group, and again in a group of one process with real collectives: NCCL's on a GPU.

    torchrun --standalone --nproc_per_node 1 benchmarks/gpu_nccl.py IMAGES FOLDER DEVICE TASK STRATEGY

NCCL allows only one process per GPU, and patchloom makes no group for a single process. Here patchloom is made to
believe that there are more. So DDP (or FSDP), and every sum, gather and broadcast of a run use NCCL, each with one
process, and must return their input: the weights are compared with those of the run without a group. An exchange
between two processes is not tested. The script prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from safetensors.torch import load_file
from torch import distributed as dist

from patchloom.system import distributed
from patchloom.train import loop as pretraining

SMALL = {"model": {"name": "nano", "embed_dim": 64, "depth": 2, "num_heads": 2}, "img_size": 32, "patch_size": 8}
SMALL |= {"batch_size": 16, "epochs": 2, "precision": "float32", "attention": "explicit", "kernels": "torch"}
SMALL |= {"workers": 0, "compile": False, "held_out": 0.2}


class One(int):
    """Number 1 that equals nothing and is greater than 1, so that a single process uses its group."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return other <= 1


class Group:
    """torch.distributed with a group of `One`; counts the calls of collectives."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()

    def get_world_size(self) -> int:
        return One(1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("all_", "broadcast")):
            self.made[name] += 1
        return getattr(dist, name)


def launch(device: str, devices: int | str, strategy: str) -> Fabric:
    """Start one process as patchloom starts several."""
    sharded = strategy == "fsdp"
    how = ModelParallelStrategy(distributed._shard, 1, 1) if sharded else DDPStrategy()
    fabric = Fabric(accelerator=device, devices=1, strategy=how)
    fabric.launch()
    return fabric


def largest_difference(one: Path, two: Path) -> float:
    """Return the largest difference of weights and moments of two runs, relative to the norm of each tensor."""
    first, second = (load_file(run / "checkpoints" / "last.safetensors") for run in (one, two))
    if first.keys() != second.keys():
        raise ValueError(f"the runs differ in {sorted(first.keys() ^ second.keys())[:5]}")
    found = 0.0
    for name, values in first.items():
        apart = (values.double() - second[name].double()).norm() / values.double().norm().clamp_min(1e-12)
        found = max(found, apart.item())
    return found


def check(device: str) -> None:
    """Check the exchange of values in a group of one.

    Raises:
        ValueError: a value changes on the way.
    """
    values = torch.randn(4, 3, device=device)
    for tell in (distributed.total, distributed.gathered, distributed.averaged):
        if not torch.equal(tell(values), values):
            raise ValueError(f"{tell.__name__} of one process is not what that has given")
    if distributed.collected([1, "two"]) != [1, "two"]:
        raise ValueError("collected of one process is not what that has given")


def main(images: str, folder: str, device: str, task: str, strategy: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # to end with torchrun, which is in another process group of the system
    options = SMALL | {"task": task, "device": device, "strategy": strategy}
    plain, together = Path(folder, "plain"), Path(folder, "together")
    pretraining.pretrain(images, out=plain, **options)
    group = distributed.dist = Group()
    pretraining.launch = launch
    pretraining.pretrain(images, out=together, **options)
    check(device)
    told = {"backend": dist.get_backend(), "collectives": group.made, "strategy": strategy, "task": task}
    told |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None}
    print("\n" + json.dumps(told | {"difference": largest_difference(plain, together)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
