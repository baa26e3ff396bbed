"""`patchloom compare`: false winners where nothing can be learnt, and times planned beside times taken.

    python benchmarks/comparisons.py noise /tmp/noise --times 20
    python benchmarks/comparisons.py drawn
    python benchmarks/comparisons.py taken comparisons/shapes

``noise`` makes folders of noise images, each image of a class drawn by lot, and compares two tasks on each, two seeds
each, in small runs; what is there already is not made again. ``drawn`` draws right and wrong answers by lot instead,
for more tasks and more trials than could be trained. ``taken`` tells of a comparison that has ended how long each run
trained.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import patchloom
from patchloom.compare.judge import standing
from patchloom.compare.pace import Pace
from patchloom.evaluate import wilson
from patchloom.runs.sealed import read_sealed

IMAGES, CLASSES, SIDE = 240, 4, 16
SMALL = {"img_size": SIDE, "patch_size": 8, "batch_size": 32, "threads": 1, "workers": 0}
TRIALS, TESTED = 2000, 500


def noise(folder: Path, seed: int) -> Path:
    """A folder of noise images, a sub-folder a class."""
    rng = np.random.default_rng(seed)
    for number in range(IMAGES):
        place = folder / f"class{rng.integers(CLASSES)}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(place / f"{number:03d}.png")
    return folder


def compared(out: Path, times: int) -> None:
    """Comparisons on noise, and how many of them named a winner."""
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
    """False winners among answers by lot, by the numbers of tasks and of seeds."""
    rng = torch.Generator().manual_seed(0)
    for tasks in (2, 3, 6):
        for seeds in (1, 2, 3):
            named = 0
            for _ in range(TRIALS):
                right = {f"task {i}": torch.rand(seeds, TESTED, generator=rng) < 0.25 for i in range(tasks)}
                twins = {"untrained": torch.rand(seeds, TESTED, generator=rng) < 0.25}
                pixels = {"raw pixels": torch.rand(1, TESTED, generator=rng) < 0.25}
                named += bool(standing(right, twins | pixels).winner)
            low, high = wilson(named / TRIALS, TRIALS)
            print(
                f"{tasks} tasks, {seeds} seeds: {named} of {TRIALS} named a winner [{low:.2%}, {high:.2%}]", flush=True
            )


def taken(folder: Path) -> None:
    """Seconds of training that were planned, and those that each run took."""
    plan = read_sealed(folder / "compare.yaml")
    for run in sorted(folder.glob("*-seed*")):
        task = run.name.rpartition("-seed")[0]
        with open(run / "metrics.csv", newline="") as file:
            *_, last = csv.DictReader(file)
        planned, took = Pace(**plan["paces"][task]).seconds_of(plan["epochs"][task]), float(last["seconds"])
        print(f"{run.name:16} {took:8.1f} s of training, planned {planned:8.1f} s: {took / planned:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("noise", "drawn", "taken"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("comparisons"))
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    if given.what == "noise":
        compared(given.folder, given.times)
    elif given.what == "drawn":
        drawn()
    else:
        taken(given.folder)
