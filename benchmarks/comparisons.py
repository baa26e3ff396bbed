"""`patchloom compare`: false winners where nothing can be learnt.

    python benchmarks/comparisons.py noise /tmp/noise --times 20
    python benchmarks/comparisons.py drawn

``noise`` makes folders of noise images with random classes, and compares two tasks on each, two seeds each, in small
runs; finished ones are not repeated. ``drawn`` draws random answers instead, for more tasks and trials than could be
trained, and with a known spread over seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import patchloom
from patchloom.compare.outcome import rank_encoders
from patchloom.results.intervals import wilson
from patchloom.results.result import Result

IMAGES, CLASSES, SIDE = 240, 4, 16
SMALL = {"img_size": SIDE, "patch_size": 8, "batch_size": 32, "threads": 1, "workers": 0}
TRIALS, TESTED = 2000, (500, 2000)


def noise(folder: Path, seed: int) -> Path:
    """Write noise images, one sub-folder per class."""
    rng = np.random.default_rng(seed)
    for number in range(IMAGES):
        place = folder / f"class{rng.integers(CLASSES)}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(place / f"{number:03d}.png")
    return folder


def compared(out: Path, times: int) -> None:
    """Run comparisons on noise, and count those that named a winner."""
    winners = []
    for seed in range(times):
        place = out / f"{seed:02d}"
        images = place / "images"
        if not images.exists():
            noise(images, seed)
        found = patchloom.compare(
            str(images), tasks=["mae", "droppos"], samples=10 * IMAGES, few=[], out=place / "out", **SMALL
        )
        winners.append(found.winner)
        print(f"{seed}: {found.winner or 'no winner'}; {found.verdict[0]}", flush=True)
    print(f"{sum(map(bool, winners))} of {len(winners)} comparisons on noise named a winner")


def drawn() -> None:
    """Count false winners among random answers of equally good tasks, by the spread over seeds."""
    # by case: for every task the share of right answers and its spread over seeds; the share of the controls
    cases = {
        "3 tasks that learnt nothing": ([(0.25, 0.0)] * 3, 0.25),
        "2 tasks alike, seeds move 1.5 points": ([(0.5, 0.015)] * 2, 0.25),
        "6 tasks alike, seeds move 1.5 points": ([(0.5, 0.015)] * 6, 0.25),
        "2 tasks alike, seeds move 3 points; 4 stand still": ([(0.5, 0.03)] * 2 + [(0.35, 0.002)] * 4, 0.25),
        "1 task like raw pixels, seeds move 3 points; 5 stand still": ([(0.5, 0.03)] + [(0.35, 0.002)] * 5, 0.5),
    }
    rng = torch.Generator().manual_seed(0)
    for name, (tasks, untrained) in cases.items():
        for tested in TESTED:
            for seeds in (2, 3):
                named = 0
                for _ in range(TRIALS):
                    right = {f"task {i}": answers(*task, seeds, tested, rng) for i, task in enumerate(tasks)}
                    controls = {f"control {count}": answers(untrained, 0.0, count, tested, rng) for count in (1, seeds)}
                    named += bool(rank_encoders(right, controls).winner)
                low, high = (f"{100 * one:.1f}" for one in wilson(named / TRIALS, TRIALS))
                print(f"{name}; {tested:,} images, {seeds} seeds: {named} of {TRIALS:,} [{low}, {high}] %", flush=True)


def answers(share: float, moved: float, seeds: int, images: int, rng: torch.Generator) -> list[Result]:
    """Draw right answers of each seed to ``images``, with a share that varies over seeds by a standard deviation."""
    chance = share + moved * torch.randn(seeds, 1, generator=rng)
    drawn = torch.rand(seeds, images, generator=rng) < chance.expand(seeds, images)
    return [Result.of_images("", "linear", {}, right) for right in drawn]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("noise", "drawn"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("comparisons"))
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    if given.what == "noise":
        compared(given.folder, given.times)
    else:
        drawn()
