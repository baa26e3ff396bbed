"""Time and peak memory of one training step, beside Hugging Face's ViTMAEForPreTraining, interleaved in one run.

    pip install 'patchloom[bench]'
    python benchmarks/step_time.py                 # ViT-S/16, 224 px, batch 32: about 10 minutes on two cores
    python benchmarks/step_time.py --device cuda --batch 256

Each step is forward, backward and fused AdamW on random images. Hugging Face's model is measured in both of its
attention forms, and the faster one counts. Peak memory is that of a process of its own: the resident set on a CPU
(less what the process held before the model was built), the allocator's peak on a GPU.
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

import torch

MODELS = {"patchloom mae": "mae", "patchloom droppos": "droppos", "hf mae (sdpa)": "sdpa", "hf mae (eager)": "eager"}


def build(kind: str, dtype: str, device: str, batch: int):
    """A function that does one step and waits for it."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 224, 224, device=device)
    if kind in ("mae", "droppos"):
        from patchloom.nets.encode import EncoderSpec, build_encoder, fuse_attention
        from patchloom.tasks import build_task

        net = build_task({"name": kind}, build_encoder(EncoderSpec("vit_small_patch16_224", (224, 224), 16)))
        fuse_attention(net, fused=not (device == "cpu" and dtype == "bfloat16"))

        def loss():
            return net(images, progress=0.5).loss
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
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def peak_memory(kind: str, dtype: str, device: str, batch: int) -> float:
    """GiB that two steps need at their peak, in a process of its own."""
    words = [sys.executable, __file__, "--memory-of", kind, "--dtype", dtype, "--device", device, "--batch", str(batch)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_memory(kind: str, dtype: str, device: str, batch: int) -> None:
    import transformers.models.vit_mae.modeling_vit_mae  # noqa: F401  (both sides' imports belong to the start)

    import patchloom.tasks.droppos  # noqa: F401  (as above)

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
    for dtype in args.dtype:
        steps = {name: build(kind, dtype, args.device, args.batch) for name, kind in MODELS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in MODELS}
        for round_ in range(args.rounds + 1):  # the first warms up
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if round_:
                    seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        peer = min(medians["hf mae (sdpa)"], medians["hf mae (eager)"])
        for name, kind in MODELS.items():
            row = {
                "dtype": dtype,
                "model": name,
                "seconds": round(medians[name], 3),
                "spread": [round(min(seconds[name]), 3), round(max(seconds[name]), 3)],
                "times the faster hf": round(peer / medians[name], 2),
                "peak GiB": round(peak_memory(kind, dtype, args.device, args.batch), 2),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
