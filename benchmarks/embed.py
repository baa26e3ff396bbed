"""Size, time and memory of files of vectors: python benchmarks/embed.py [images].

The images are generated, 32 pixels wide (20,000 by default; PNG files in a folder that is removed), and the encoder is
an untrained nano with patches of 8 pixels. Printed are, for each format, seconds of the wall clock and of the
processor, the size of the file, and the peak memory beyond that of the imports. Each file has a separate process.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

FILES = {
    "f.parquet": {},
    "f.npz": {},
    "f.safetensors": {},
    "parts": {"format": "parquet"},
    "f16.parquet": {"dtype": "float16"},
    "patches.safetensors": {"dtype": "float16", "pooling": "patches"},
}


def draw(folder: Path, count: int) -> None:
    """Write images of 10 classes that differ in the colours of small blocks."""
    rng = np.random.default_rng(0)
    for i in range(count):
        path = folder / f"class {i % 10}" / f"{i:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((32, 32), Image.Resampling.BICUBIC).save(path)


def encoder(path: Path) -> None:
    """Write the file of an untrained nano encoder."""
    from patchloom.nets.build import EncoderSpec, build_encoder
    from patchloom.nets.checkpoints.format import EncoderCard, save_encoder

    torch.manual_seed(0)
    spec = EncoderSpec("nano", (32, 32), 8)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,) * 3, (0.25,) * 3, "untrained", "nano"), path)


def timed(folder: str, name: str, options: dict[str, Any], threads: int) -> None:
    """Make one file, and print time, size and memory."""
    from patchloom.embed.embed import embed
    from patchloom.system.device import resident

    torch.set_num_threads(threads)
    root = Path(folder)
    Path("/proc/self/clear_refs").write_text("5")  # else the peak would be that of the imports
    before, begun, worked = resident(), time.perf_counter(), time.process_time()
    done = embed(root / "nano.safetensors", root / "images", to=root / name, device="cpu", workers=0, **options)
    seconds, work = time.perf_counter() - begun, time.process_time() - worked
    more = (resident(peak=True) - before) / 1e6
    print(
        f"| {name} | {done.card['rows']:,} x {done.card['shape']} {done.card['dtype']} | {done.size / 1e6:.1f} MB "
        f"| {seconds:.1f} s | {work:.1f} s | {more:.0f} MB |",
        flush=True,
    )


def main(count: int = 20_000, threads: int = 1) -> None:
    """Make all files for a number of images, with a number of threads."""
    folder = tempfile.mkdtemp()
    try:
        draw(Path(folder) / "images", count)
        encoder(Path(folder) / "nano.safetensors")
        print("| file | vectors | size | clock | processor | memory beyond the imports |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for name, options in FILES.items():
            process = multiprocessing.get_context("spawn").Process(target=timed, args=(folder, name, options, threads))
            process.start()
            process.join()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
