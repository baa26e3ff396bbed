"""Images per second with one, two and four processes on this machine, DDP and FSDP, in interleaved rounds.

python benchmarks/devices.py [--rounds 3] [--epochs 6]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

# processes, strategy, threads per process
FORMS = [(1, "ddp", 2), (1, "ddp", 1), (2, "ddp", 1), (2, "fsdp", 1), (4, "ddp", 1), (4, "fsdp", 1)]
WORDS = "--task mae --model micro --img_size 64 --patch_size 8 --batch_size 64 --precision float32 --workers 0"


def rate(images: Path, out: Path, world: int, strategy: str, threads: int, epochs: int) -> float:
    """Return images per second at the end of a short run."""
    command = [sys.executable, "-m", "patchloom"]
    if world > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        command += ["-m", "patchloom"]
    command += ["pretrain", str(images), *WORDS.split(), "--epochs", str(epochs), "--out", str(out)]
    command += ["--strategy", strategy, "--threads", str(threads), "--attention", "explicit"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return float(re.findall(r"([\d,]+) images/s", done.stdout)[-1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "images")
        images.mkdir()
        for i in range(1024):
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(images / f"{i}.png")
        found: dict[tuple, list[float]] = {form: [] for form in FORMS}
        for number in range(arguments.rounds):
            for form in FORMS:
                out = Path(folder, "-".join(map(str, (*form, number))))
                found[form].append(rate(images, out, *form, arguments.epochs))
    first = statistics.median(found[FORMS[0]])
    print("| processes | threads of each | strategy | images/s (median, range) | beside one process |")
    print("| --- | --- | --- | --- | --- |")
    for (world, strategy, threads), rates in found.items():
        middle, name = statistics.median(rates), strategy if world > 1 else ""
        spread = f"{middle:,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
        print(f"| {world} | {threads} | {name} | {spread} | ×{middle / first:.2f} |")


if __name__ == "__main__":
    main()
