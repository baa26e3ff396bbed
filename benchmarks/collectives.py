"""Collectives of an update by several processes, counted by gloo on the CPU: calls, and bytes of their tensors.

    torchrun --standalone --nproc_per_node 2 benchmarks/collectives.py mae,droppos,lut ddp,fsdp

Neither numbers nor bytes depend on the backend. For each task and strategy the first process prints one line of JSON.
A ring of n devices sends 2 (n-1)/n of these bytes for an all-reduce, and half of that for a gather or a scatter.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchloom.data.loader import training_batches
from patchloom.data.stats import Stats
from patchloom.runs.settings import request
from patchloom.system import distributed
from patchloom.system.distributed import Shared, rank, world
from patchloom.train.estimate import RandomImages, prepare_task
from patchloom.train.resolve import resolve
from patchloom.train.step import Stepper

SIZE, EACH = 224, 2


class Collectives(TorchDispatchMode):
    """Count of collectives: number and bytes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the collectives inside come one by one
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.partition("::")[2].strip("_")
            sizes = [one.nbytes for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            if sizes and name not in ("wait_tensor", "wrap_tensor_autograd"):  # these send nothing
                self.calls[name] += 1
                self.bytes[name] += max(sizes)  # the whole, not the shard
        return function(*args, **(kwargs or {}))


def count(task: str, strategy: str) -> dict[str, Any]:
    """Count the collectives of an update of ViT-S."""
    fabric = distributed.launch("cpu", "auto", strategy)
    given = {"model": {"name": "vit_small_patch16_224"}, "img_size": SIZE, "patch_size": 16, "device": "cpu"}
    given |= {"batch_size": EACH * world(), "precision": "bfloat16", "kernels": "torch", "compile": False}
    stats = Stats((0.5,) * 3, (0.2,) * 3, SIZE, SIZE, 10, [])
    settings = resolve(request("shapes", task, given | {"strategy": strategy}), 1000, 3, stats, world())[0]
    torch.manual_seed(0)
    stepper = Stepper(fabric, prepare_task(settings, stats), settings, 10)
    drawn = RandomImages(torch.randint(256, (EACH * world(), 3, SIZE, SIZE), dtype=torch.uint8))
    batches = training_batches(drawn, stepper.task.augment, EACH * world(), 0, 0, 3, rank=rank(), world=world())
    for step, batch in enumerate(batches):
        with Collectives() as counted:  # the last one counts: DDP forms its buckets in the first
            made = stepper.forward(batch, step, range(step, step + 1), Shared())
            stepper.update(step + 1, 1e-4, [made], [False])
    weights = sum(one.numel() for one in stepper.task.parameters() if one.requires_grad)
    calls = {name: [number, counted.bytes[name]] for name, number in counted.calls.items()}
    return {"task": task, "strategy": strategy, "processes": world(), "trained weights": weights, "calls": calls}


if __name__ == "__main__":
    for one in sys.argv[1].split(","):
        for way in sys.argv[2].split(","):
            found = count(one, way)
            if rank() == 0:
                print(json.dumps(found), flush=True)
