"""Time and peak memory of one training step, interleaved in one run: a table of tasks, of MP3's η, or of peers.

    pip install 'patchloom[bench]'
    python benchmarks/step_time.py peers           # MAE and DropPos beside Hugging Face's ViTMAEForPreTraining
    python benchmarks/step_time.py tasks           # every task, as multiples of MAE
    python benchmarks/step_time.py mp3             # MP3 at η 0 to 0.9, beside MAE and a plain ViT (its cost study)
    python benchmarks/step_time.py peers --device cuda --batch 256

ViT-S/16, 224 px, batch 32: 5 to 15 minutes a table on two cores. Each step is forward, backward, fused AdamW and, where
there is one, the teacher, on random images. Hugging Face's model is measured in both of its attention forms, and the
faster one counts. Peak memory is that of a process of its own: the resident set on a CPU (less what the process held
before the model was built), the allocator's peak on a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn

from patchloom.nets.encode import EncoderSpec, build_encoder, fuse_attention
from patchloom.tasks import TASKS, build_task, encoder_wishes, task_class
from patchloom.tasks.task import Task

SPEC = ("vit_small_patch16_224", (224, 224), 16)
RATIOS = (0.0, 0.3, 0.5, 0.75, 0.9)

# by the row's name, what is built: a task with its options as JSON, "vit", or one of Hugging Face's forms
TABLES = {
    "peers": {
        "hf mae (sdpa)": "sdpa",
        "hf mae (eager)": "eager",
        "patchloom mae": '{"name": "mae"}',
        "patchloom droppos": '{"name": "droppos"}',
    },
    "tasks": {name: json.dumps({"name": name}) for name in ("mae", *(task for task in TASKS if task != "mae"))},
    "mp3": {
        "mae": '{"name": "mae"}',
        "plain vit": "vit",
        **{f"mp3, η {ratio}": json.dumps({"name": "mp3", "context_mask_ratio": ratio}) for ratio in RATIOS},
    },
}


def build(kind: str, dtype: str, device: str, batch: int):
    """A function that does one step and waits for it."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 224, 224, device=device)
    if kind.startswith("{"):
        net, loss = patchloom_task(json.loads(kind), dtype, device, batch)
    elif kind == "vit":
        net = nn.Sequential(timm.create_model(SPEC[0], num_classes=0), nn.Linear(384, 1000))
        fuse_attention(net, fused=not (device == "cpu" and dtype == "bfloat16"))

        def loss():
            return nn.functional.cross_entropy(net(images), torch.arange(batch, device=device))
    else:
        from transformers import ViTMAEConfig, ViTMAEForPreTraining

        config = ViTMAEConfig(
            hidden_size=384, num_attention_heads=6, intermediate_size=1536, norm_pix_loss=True, attn_implementation=kind
        )
        net = ViTMAEForPreTraining(config)

        def loss():
            return net(images).loss

    net.to(device).train()
    optimizer = torch.optim.AdamW([w for w in net.parameters() if w.requires_grad], lr=1e-5, fused=True)

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(net, Task):
            net.after_step(0.5)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def patchloom_task(task: dict, dtype: str, device: str, batch: int):
    """A task, and a function that gives its loss on random views of the sizes that it asks for."""
    wishes = {name: value for name, (value, _) in encoder_wishes(task).items()}
    options = {"class_token": wishes["class_token"]} if "class_token" in wishes else {}
    spec = EncoderSpec(*SPEC, positions=wishes.get("positions", "sincos"), options=options)
    net = build_task(task, build_encoder(spec))
    fuse_attention(net, fused=not (device == "cpu" and dtype == "bfloat16"))
    some = net.augment(torch.rand(3, *net.augment.size), np.random.default_rng(0))
    views = [torch.randn(batch, *view.shape, device=device) for view in some]
    return net, lambda: net(*views, progress=0.5).loss


def peak_memory(kind: str, dtype: str, device: str, batch: int) -> float:
    """GiB that two steps need at their peak, in a process of its own."""
    words = [sys.executable, __file__, "--memory-of", kind, "--dtype", dtype, "--device", device, "--batch", str(batch)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_memory(kind: str, dtype: str, device: str, batch: int) -> None:
    if not kind.startswith(("{", "vit")):
        import transformers.models.vit_mae.modeling_vit_mae  # noqa: F401  (imports belong to the start)
    else:
        for name in TASKS:
            task_class(name)

    before = resident("VmRSS")
    if device != "cuda":
        Path("/proc/self/clear_refs").write_text("5")  # or the peak would be that of the process that forked us
    step = build(kind, dtype, device, batch)
    step()
    step()
    if device == "cuda":
        print(torch.cuda.max_memory_allocated() / 2**30)
    else:
        print(resident("VmHWM") - before)


def resident(which: str) -> float:
    """GiB of this process in memory: now (VmRSS) or at its peak (VmHWM); Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+) kB", status)[1]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", choices=TABLES, default="peers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--memory-of")
    args = parser.parse_args()
    if args.memory_of:
        return print_memory(args.memory_of, args.dtype[0], args.device, args.batch)
    print(
        f"torch {torch.__version__} on {args.device}, {torch.get_num_threads()} threads",
        f"ViT-S/16, 224 px, batch {args.batch}",
        sep="; ",
    )
    models = TABLES[args.table]
    peers = [name for name in models if name.startswith("hf")] or [next(iter(models))]
    for dtype in args.dtype:
        steps = {name: build(kind, dtype, args.device, args.batch) for name, kind in models.items()}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for round_ in range(args.rounds + 1):  # the first warms up
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if round_:
                    seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        first = min(medians[name] for name in peers)
        for name, kind in models.items():
            row = {
                "dtype": dtype,
                "model": name,
                "seconds": round(medians[name], 3),
                "spread": [round(min(seconds[name]), 3), round(max(seconds[name]), 3)],
                f"seconds over {' or '.join(peers)}": round(medians[name] / first, 2),
                "peak GiB": round(peak_memory(kind, dtype, args.device, args.batch), 2),
            }
            print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
