"""Images per second that one core reads, crops and resizes from JPEG files: PIL and torchvision beside patchloom.

The files are made from scikit-learn's two photographs, so no data need be downloaded. The pipelines run in turns, each
with one process and one thread, up to the copy to the device: theirs gives normalised float32 images, ours uint8, which
is normalised on the device. With ``--crop_on``, the readers of ``--crop_on device`` are beside those of the default,
and then a CPU that also resizes, as a GPU would.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision import transforms

from patchloom.data.augment import RandomCrop
from patchloom.data.cache import cache_images
from patchloom.data.loader import training_batches
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 50


def draw_photographs(folder: Path, count: int, size: tuple[int, int] = (500, 375), quality: int = 90) -> None:
    """Write `count` JPEG files of `size` (w, h), each a different part of a photograph."""
    photographs, rng = load_sample_images().images, np.random.default_rng(0)
    for i in range(count):
        photograph = Image.fromarray(photographs[i % len(photographs)])
        width, height = (round(side * rng.uniform(0.6, 1)) for side in photograph.size)
        left, top = rng.integers(photograph.width - width + 1), rng.integers(photograph.height - height + 1)
        part = (left, top, left + width, top + height)
        photograph.resize(size, Image.Resampling.BICUBIC, box=part).save(folder / f"{i:04}.jpg", quality=quality)


def of_torchvision(source: Source, side: int) -> Callable[[], None]:
    """Return a pass over the files with PIL and torchvision's first transforms."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(side, scale=(0.2, 1), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    paths = [source.describe(i) for i in range(len(source))]

    def one_pass() -> None:
        for first in range(0, len(paths), BATCH):
            torch.stack([transform(Image.open(path).convert("RGB")) for path in paths[first : first + BATCH]])

    return one_pass


def of_patchloom(source: Source, side: int, crop_on: str = "workers", device: str | None = None) -> Callable[[], None]:
    """Return a pass over the images as in training; without a device, what it does is left out."""
    crop = RandomCrop((side, side)) if crop_on == "workers" else RandomCrop((side, side)).without_resizing()

    def one_pass() -> None:
        for _ in training_batches(source, crop, BATCH, 0, 0, len(source) // BATCH, device=device):
            pass

    return one_pass


def rates(passes: dict[str, Callable[[], None]], images: int, rounds: int) -> dict[str, list[float]]:
    """Return images per second in each round; the pipelines run in turns, after a warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds + 1):
        for name, one_pass in passes.items():
            start = time.perf_counter()
            one_pass()
            found[name].append(images / (time.perf_counter() - start))
    return {name: values[1:] for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=200, help="files, a multiple of 50")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 96, 32], help="pixels of a crop")
    parser.add_argument("--crop_on", action="store_true", help="compare where crops are resized")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| side | pipeline | images/s [range] | over PIL and torchvision |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        photographs = Path(folder) / "photographs"
        photographs.mkdir()
        draw_photographs(photographs, asked.images)
        source = open_data(photographs).train
        for side in asked.sides:
            passes = {"PIL and torchvision": of_torchvision(source, side), "patchloom": of_patchloom(source, side)}
            for how in ("whole", round(1.5 * side), round(1.15 * side)):
                kept = cache_images(source, how)
                of_patchloom(kept, side)()  # stores them
                kept.close()
                passes[f"patchloom, `--cache {how}`"] = of_patchloom(kept, side)
                if asked.crop_on:
                    passes[f"`--cache {how}`, `--crop_on device`: readers"] = of_patchloom(kept, side, "device")
                    passes[f"`--cache {how}`, `--crop_on device` on the CPU"] = of_patchloom(
                        kept, side, "device", "cpu"
                    )
            found = rates(passes, asked.images, asked.rounds)
            base = found["PIL and torchvision"]
            for name, values in found.items():
                gain = statistics.median(ours / theirs for ours, theirs in zip(values, base, strict=True))
                told = f"{statistics.median(values):,.0f} [{min(values):,.0f}, {max(values):,.0f}]"
                print(f"| {side} | {name} | {told} | ×{gain:.1f} |", flush=True)


if __name__ == "__main__":
    main()
