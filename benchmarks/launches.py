"""Kernel launches of a training step, eager and compiled, counted on the CPU.

    python benchmarks/launches.py mae droppos --model vit_small_patch16_224 --img_size 224

A GPU runs small models as fast as the CPU launches their kernels, so launches bound their speed. Every operator that
computes counts as one launch; views count as none, fused and foreach operators as one. Compiled kernels are those that
inductor writes for a CPU: those for a GPU may be split in another way. For each task the script prints one line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config, metrics

from patchloom.data.stats import Stats
from patchloom.runs.settings import request
from patchloom.train.estimate import Step
from patchloom.train.resolve import resolve

# operators that compute nothing on the device
_VIEWS = set(
    """view reshape as_strided expand expand_as view_as permute transpose t mT flatten unflatten unsqueeze squeeze
    select slice split split_with_sizes chunk unbind narrow detach detach_ alias _unsafe_view empty empty_like
    empty_strided new_empty new_empty_strided resize_ numpy_T diagonal movedim result_type lift_fresh _reshape_alias
    contiguous to _to_copy set_ is_nonzero swapaxes requires_grad_ _has_compatible_shallow_copy_type""".split()
)


_PARTS = ("Torch-Compiled Region", "CompiledFunctionBackward", "## Call CompiledFxGraph")


def launches(event: Any, parts: bool = True) -> int:
    """Return the number of launches of a profiled operator and those inside it, with or without compiled parts."""
    if not parts and event.name.startswith(_PARTS):
        return 0
    name = event.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return 1
    if inside := sum(launches(one, parts) for one in event.cpu_children):
        return inside
    return int(event.name.startswith("aten::") and name not in _VIEWS or "cpp_fused" in name)


def launches_of(step: Step) -> tuple[int, int]:
    """Return the number of launches of one step, and of those outside of compiled parts; a first step may compile."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    roots = [event for event in profile.events() if event.cpu_parent is None]
    whole, outside = (sum(launches(event, parts) for event in roots) for parts in (True, False))
    return whole, outside


def count(task: str, model: str, size: int, patch: int) -> dict[str, Any]:
    """Count a task's launches, graphs and kernels."""
    given = {"model": {"name": model}, "img_size": size, "patch_size": patch, "batch_size": 2, "device": "cpu"}
    given |= {"precision": "bfloat16", "attention": "fused", "kernels": "torch", "compile": False}
    settings = resolve(request("shapes", task, given), 1000, 3, Stats((0.5,) * 3, (0.2,) * 3, size, size, 10, []))[0]
    found: dict[str, Any] = {"task": task, "model": model, "eager": launches_of(Step(settings))[0]}
    counters.clear()
    metrics.reset()
    start, step = time.perf_counter(), Step(settings, compiled=True)
    found["compiled"], found["outside"] = launches_of(step)
    found["seconds"] = round(time.perf_counter() - start, 1)
    found |= {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    return found | {"kernels": metrics.generated_kernel_count}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("tasks", nargs="+")
    words.add_argument("--model", default="vit_small_patch16_224")
    words.add_argument("--img_size", type=int, default=224)
    words.add_argument("--patch_size", type=int, default=16)
    given = words.parse_args()
    config.cpp.enable_kernel_profile = True  # compiled kernels appear in the profile
    for task in given.tasks:
        print(json.dumps(count(task, given.model, given.img_size, given.patch_size)), flush=True)


if __name__ == "__main__":
    main()
