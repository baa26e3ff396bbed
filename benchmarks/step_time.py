"""Time and peak memory of one training step, interleaved in one run: of tasks, ratios, trained blocks, peers.

    pip install '.[bench]'
    python benchmarks/step_time.py peers           # MAE and DropPos beside Hugging Face's and lightly's MAE
    python benchmarks/step_time.py tasks           # every task, as multiples of MAE
    python benchmarks/step_time.py tasks --model nano --img_size 32 --patch_size 8 --batch 128   # and at another size
    python benchmarks/step_time.py mp3             # MP3 at η 0 to 0.9, MAE at γ 0.3 to 0.9, a plain ViT (MP3's Table 2)
    python benchmarks/step_time.py mp3 --model vit_base_patch16_224 --batch 8    # and of ViT-B
    python benchmarks/step_time.py growth          # batches, image sizes and models: time over counted operations
    python benchmarks/step_time.py memory          # with and without gradient checkpointing
    python benchmarks/step_time.py blocks --model vit_base_patch16_224 --batch 8   # parts of it are trained, anchor
    python benchmarks/step_time.py kernels         # every task on torch's kernels and on ours
    python benchmarks/step_time.py versions --before /work/other    # every task, beside that of another checkout
    python benchmarks/step_time.py droppos --program ../DropPos --dtype float32    # beside the authors' program
    python benchmarks/step_time.py peers --device cuda --batch 256

ViT-S/16, 224 px, batch 32 unless a table says otherwise: 5 to 15 minutes per table on two cores. Each step is forward,
backward, fused AdamW and, if there is one, the teacher, on random images. Peak memory is that of a separate process.
Operations are those of matrix products, as torch counts them. The peak is the rate of 2048 x 2048 products (8192 on a
GPU), timed in turns with the steps, because the speed of a machine varies. Freed memory stays with the process for all
models (`patchloom.system.device.keep_freed_memory`); the peers do not do this on their own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path

import torch
from peaks import peak_in_subprocess, peak_memory
from peers import DROPPOS, PEERS, PROGRAM, Peer, operations_of

from patchloom.bench import flops_per_image, product
from patchloom.data.stats import Stats
from patchloom.estimate import seconds_of
from patchloom.runs.settings import Settings, request
from patchloom.system.device import keep_freed_memory
from patchloom.tasks import ready_tasks
from patchloom.train.estimate import Step
from patchloom.train.resolve import resolve

STATS = Stats((0.5,) * 3, (0.25,) * 3, 224, 224, 1, [])
IMAGES = 2**16  # of the training set; diet takes no more
PRODUCTS = 5
TABLES = ("peers", "droppos", "tasks", "versions", "mp3", "growth", "memory", "blocks", "kernels")
BLOCKS = (None, 4, 2, 1)
RATIOS = (0.0, 0.3, 0.5, 0.75, 0.9)


def settings_for(task: dict | str, device: str, batch: int, dtype: str, **changes) -> Settings:
    """Return the resolved settings of a task at the sizes of this benchmark."""
    given = {"model": "vit_small_patch16_224", "img_size": 224, "patch_size": 16, "batch_size": batch}
    given |= {"precision": dtype, "device": device, "clip": 0.0, "compile": False, **changes}
    return resolve(request("shapes", task, given), IMAGES, 3, STATS)[0]


def rows(args: argparse.Namespace, dtype: str) -> dict[str, Settings | str]:
    """Return the rows of a table by name: the settings of a task, or the name of another library's model."""
    task = partial(settings_for, device=args.device, dtype=dtype, batch=args.batch)
    if args.table == "peers":
        ours = {f"patchloom {name}": task(name, model=args.model) for name in ("mae", "droppos")}
        return {**{name: name for name in PEERS}, **ours}
    if args.table == "droppos":
        return {**{name: name for name in DROPPOS}, "patchloom droppos": task("droppos", model=args.model)}
    size = {"model": args.model, "img_size": args.img_size, "patch_size": args.patch_size}
    if args.table in ("tasks", "versions"):
        return {name: task(name, **size) for name in ("mae", *(name for name in ready_tasks() if name != "mae"))}
    if args.table == "mp3":
        mae = {f"mae, γ {ratio}": {"name": "mae", "mask_ratio": ratio} for ratio in RATIOS if ratio}
        mp3 = {f"mp3, η {ratio}": {"name": "mp3", "context_mask_ratio": ratio} for ratio in RATIOS}
        steps = {name: task(options, model=args.model) for name, options in {**mae, **mp3}.items()}
        return {"plain vit": "plain vit", **steps}
    if args.table == "kernels":
        kinds = "torch", "native"
        return {f"{name}, {kind}": task(name, kernels=kind, **size) for name in ready_tasks() for kind in kinds}
    if args.table == "blocks":  # the values of the weights do not change the time, so none are read
        zeros = {"name": "droppos", "placeholder": "zeros"}
        named = {"mae": "mae", "simmim": "simmim", "droppos": "droppos", "droppos, zeros": zeros}
        few = partial(task, model=args.model, init=f"timm:{args.model}")
        pairs = [(name, count) for name in named for count in BLOCKS]
        found = {f"{name}, {count or 'all'} blocks": few(named[name], train_blocks=count) for name, count in pairs}
        found |= {f"{name}, lora": few(named[name], adapt="lora") for name in named}
        return found | {f"{name}, all blocks, anchor": few(named[name], anchor=1.0) for name in named}
    if args.table == "memory":
        pairs = {f"{name}{', checkpointing' * on}": (name, on) for name in ("mae", "droppos", "mp3") for on in (0, 1)}
        return {row: task(name, checkpointing=bool(on)) for row, (name, on) in pairs.items()}
    sizes = {f"{side} px, batch {batch}": (side, batch) for side, batch in ((64, 64), (128, 16), (224, 8), (512, 2))}
    models = {f"{size}, batch 8": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")}
    return {
        **{f"batch {batch}": task("droppos", batch=batch) for batch in (8, 16, 32, 64)},
        **{name: task("droppos", img_size=side, batch=batch) for name, (side, batch) in sizes.items()},
        **{name: task("droppos", model=model, batch=8) for name, model in models.items()},
    }


def step_of(row: Settings | str, args: argparse.Namespace, dtype: str):
    return Step(row) if isinstance(row, Settings) else Peer(row, dtype, args.device, args.batch, args.model)


def one_step(kind: str, dtype: str, device: str, batch: int, model: str) -> None:
    Peer(kind, dtype, device, batch, model)()


def two_steps(kind: str, dtype: str, device: str, batch: int, model: str) -> None:
    keep_freed_memory()
    step = Peer(kind, dtype, device, batch, model)
    step()
    step()


def two_steps_of_ours(row: Settings) -> None:
    keep_freed_memory()
    if row.device == "cpu":
        torch.set_num_threads(row.threads)
    step = Step(row)
    step()
    step()


def memory(row: Settings | str, args: argparse.Namespace, dtype: str) -> float | None:
    if isinstance(row, Settings):
        return peak_in_subprocess(two_steps_of_ours, row.device, row)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(one_step, (row, dtype, args.device, 1, args.model))  # imports belong to the start
        return pool.apply(peak_memory, (two_steps, args.device, row, dtype, args.device, args.batch, args.model))


def count(row: Settings | str, model: str) -> float:
    """Return the operations per image."""
    if isinstance(row, Settings):
        return flops_per_image(replace(row, batch_size=2))
    return operations_of(row, model)


class OtherProcess:
    """The step of a task, and products, in a process of its own, with the patchloom of a checkout.

    Args:
        checkout: folder of the checkout; None: this one.
        name: name of the task in the table.
        args: arguments of this program, for the sizes.
        dtype: type of the products.
    """

    def __init__(self, checkout: str | None, name: str, args: argparse.Namespace, dtype: str):
        paths = [str(Path(checkout) / "src")] if checkout else []
        path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--timed", name, dtype, *sys.argv[1:]]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=os.environ | {"PYTHONPATH": path}, **pipes)
        self.operations = self()["operations"]

    def __call__(self) -> dict[str, float]:
        """Run a step and return its seconds, and those of a product."""
        print(file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def serve(name: str, args: argparse.Namespace, dtype: str) -> None:
    """Run and time a step of a task for each line of the standard input, after some to warm up."""
    row = rows(args, dtype)[name]
    steps = {"step": Step(row), "product": product(args.device, dtype, 2048)}
    seconds_of(steps, args.device, 1)
    found: dict[str, float] = {"operations": count(row, args.model) * row.batch_size}
    for _ in sys.stdin:
        for key, way in steps.items():
            start = time.perf_counter()
            way()
            found[key] = time.perf_counter() - start
        print(json.dumps(found), flush=True)


def versions(args: argparse.Namespace, dtype: str) -> None:
    """Print the times of every task before and now, each version in a process of its own, in turns."""
    for name in rows(args, dtype):
        if args.only and not any(map(name.count, args.only)):
            continue
        both = {"before": OtherProcess(args.before, name, args, dtype), "now": OtherProcess(None, name, args, dtype)}
        found = [{version: run() for version, run in both.items()} for _ in range(args.rounds)]
        line: dict[str, object] = {"row": name, "dtype": dtype}
        for version, run in both.items():
            run.process.stdin.close()
            run.process.wait()
            seconds = [one[version]["step"] for one in found]
            peak = 2 * 2048**3 / statistics.median(one[version]["product"] for one in found for version in one)
            line |= {
                f"{version}, s": round(statistics.median(seconds), 3),
                f"{version}, range": [round(min(seconds), 3), round(max(seconds), 3)],
                f"{version}, GFLOP/image": round(run.operations / args.batch / 1e9, 1),
                f"{version}, of peak": round(run.operations / statistics.median(seconds) / peak, 3),
            }
        line["gain"] = round(statistics.median(one["before"]["step"] / one["now"]["step"] for one in found), 3)
        print(json.dumps(line, ensure_ascii=False), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", choices=TABLES, default="peers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--model", default="vit_small_patch16_224", help="model of the tables peers, tasks, mp3, blocks and kernels"
    )
    parser.add_argument("--img_size", type=int, default=224, help="image size of the tables tasks and kernels")
    parser.add_argument("--patch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument(
        "--no-memory", action="store_true", help="do not measure peak memory, which needs a process per row"
    )
    parser.add_argument("--only", nargs="*", help="rows whose names begin with one of these")
    parser.add_argument("--fresh", action="store_true", help="return freed memory to the system, as the peers do")
    parser.add_argument("--before", help="folder of another checkout, for the table versions")
    parser.add_argument("--program", help="folder of the authors' DropPos, for the table droppos")
    parser.add_argument("--timed", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        os.environ[PROGRAM] = args.program
    if not args.fresh:
        keep_freed_memory()
    if args.timed:
        return serve(args.timed[0], args, args.timed[1])
    for dtype in args.dtype:
        if args.table == "versions":
            versions(args, dtype)
            continue
        table = {
            name: row for name, row in rows(args, dtype).items() if not args.only or name.startswith(tuple(args.only))
        }
        steps = {name: step_of(row, args, dtype) for name, row in table.items()}
        size = 2048 if args.device == "cpu" else 8192
        multiply = product(args.device, dtype, size)
        ways = {**steps, "": lambda multiply=multiply: [multiply() for _ in range(PRODUCTS)]}
        seconds = seconds_of(ways, args.device, args.rounds)
        peak = PRODUCTS * 2 * size**3 / statistics.median(seconds.pop(""))
        print(
            f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads; {dtype}: "
            f"{peak / 1e9:,.0f} GFLOP/s at most",
            flush=True,
        )
        first = next(iter(seconds.values()))
        for name, row in table.items():
            median = statistics.median(seconds[name])
            batch = row.batch_size if isinstance(row, Settings) else args.batch
            flops = count(row, args.model) * batch
            needed = None if args.no_memory else memory(row, args, dtype)
            line = {
                "row": name,
                "seconds": round(median, 3),
                "range": [round(min(seconds[name]), 3), round(max(seconds[name]), 3)],
                # by the round, since others may use the machine, too
                f"over {next(iter(table))}": round(statistics.median(map(truediv, seconds[name], first)), 2),
                "GFLOP/image": round(flops / batch / 1e9, 1),
                "of peak": round(flops / median / peak, 3),
                "peak GiB": needed and round(needed, 2),
            }
            print(json.dumps(line, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
