"""Adapting an encoder to other images: what it gains over its start, by task, trained part and anchor.

    python benchmarks/get_data.py cifar10 /tmp/data
    for name in camvid raccoon; do python benchmarks/get_data.py $name /tmp/data; done
    python benchmarks/dense.py split /tmp/data/raccoon /tmp/raccoon
    python benchmarks/adapt.py draw /tmp/cells
    python benchmarks/adapt.py start /tmp/data/cifar10/train /tmp/adapt --encoder vit        # or eva
    python benchmarks/adapt.py cells /tmp/cells /tmp/adapt --encoder vit
    python benchmarks/adapt.py camvid /tmp/data/camvid /tmp/adapt --encoder vit --arms mae,mae-blocks,distill
    python benchmarks/adapt.py raccoon /tmp/raccoon /tmp/adapt --encoder vit --arms mae-blocks

No public weights are used: the start is pre-trained here by MAE on CIFAR-10, without labels. ``draw`` makes 3,000
unlabelled and 1,500 labelled fields of cells as a fluorescence microscope shows them, with six phenotypes. Each arm
continues from the same start for the same number of images, with three seeds; ``scratch`` trains on the new images from
random weights for as many images, and ``scratch-long`` for those of the start, too; ``untrained`` is not trained. The
seed draws the adaptation and the labelled images or heads of the evaluation. Finished parts are not repeated, so the
same command resumes a study, or prints the tables of a finished one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

import patchloom
from patchloom.data.sources.open import open_data
from patchloom.evaluate.protocols import evaluate
from patchloom.results import store
from patchloom.results.claims import UNTRAINED, Difference
from patchloom.results.evaluation import compare_results
from patchloom.results.result import Result

SEEDS = (0, 1, 2)
START_EPOCHS, IMAGES = 10, 50_000  # of the start; images that an adaptation sees
SIZE: dict[str, Any] = {
    "img_size": 64,
    "patch_size": 8,
    "channels": 3,
    "batch_size": 64,
    "workers": 0,
    "kernels": "torch",
}
SMALL = {"embed_dim": 128, "depth": 6, "num_heads": 4}
ENCODERS: dict[str, dict[str, Any]] = {
    "vit": {"model": {"name": "nano"}},
    "eva": {"model": {"name": "vit_small_patch16_dinov3", **SMALL}},
}
# settings of `pretrain` that differ from its defaults for --init
ARMS: dict[str, dict[str, Any]] = {
    "mae": {"task": "mae"},
    "mae-anchor": {"task": "mae", "anchor": 1.0},
    "mae-blocks": {"task": "mae", "adapt": "blocks"},
    "mae-blocks-anchor": {"task": "mae", "adapt": "blocks", "anchor": 1.0},
    "mae-lora": {"task": "mae", "adapt": "lora"},
    "mae-full-rate": {"task": "mae", "blr": 4e-3, "layer_decay": 1.0, "heads_first": 0.0},
    "extrema": {"task": "extrema"},
    "distill": {"task": "distill"},
    "diet": {"task": "diet"},
    "droppos": {"task": "droppos"},
    "scratch": {"task": "mae"},
    "scratch-long": {"task": "mae"},
}

# A field of cells.


SIDE = 64
# radius in pixels, elongation, spots per cell, share of the light in the rim, whether the cells are in one clump
PHENOTYPES = {
    "control": (6.0, 1.15, 0, 0.0, False),
    "enlarged": (8.0, 1.15, 0, 0.0, False),
    "elongated": (5.5, 1.8, 0, 0.0, False),
    "granular": (6.0, 1.15, 6, 0.0, False),
    "rimmed": (6.0, 1.15, 0, 0.7, False),
    "clumped": (6.0, 1.15, 0, 0.0, True),
}


def field_of(phenotype: str, rng: np.random.Generator) -> np.ndarray:
    """Draw a field of view, uint8 [64 64]: cells, light out of focus, uneven illumination, photon and camera noise."""
    radius, elongation, spots, rim, clumped = PHENOTYPES[phenotype]
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    light = np.zeros((SIDE, SIDE), np.float32)
    centre = rng.uniform(16, SIDE - 16, 2)
    for _ in range(rng.integers(4, 8)):
        r, c = rng.normal(centre, 9.0) if clumped else rng.uniform(2, SIDE - 2, 2)
        size, turn = radius * rng.lognormal(0, 0.15), rng.uniform(0, np.pi)
        stretch = np.sqrt(elongation * rng.lognormal(0, 0.1))
        u = ((rows - r) * np.cos(turn) + (columns - c) * np.sin(turn)) / (size * stretch)
        v = ((columns - c) * np.cos(turn) - (rows - r) * np.sin(turn)) / (size / stretch)
        distance = np.hypot(u, v)
        body = 1 / (1 + np.exp((distance - 1) * 8))
        cell = (1.15 - rim) * body + rim * np.exp(-(((distance - 0.95) / 0.15) ** 2))
        for _ in range(rng.poisson(spots)):
            a, b = rng.uniform(-0.7, 0.7, 2)
            cell += 0.9 * np.exp(-((u - a) ** 2 + (v - b) ** 2) / 0.02) * body
        light = np.maximum(light, rng.lognormal(0, 0.25) * cell)
    seen = gaussian_filter(light, rng.uniform(0.5, 1.1)) + 0.25 * gaussian_filter(light, 6)
    slope = 1 + rng.uniform(-0.5, 0.5) * (rows / SIDE - 0.5) + rng.uniform(-0.5, 0.5) * (columns / SIDE - 0.5)
    photons = rng.poisson(np.clip(seen * slope * rng.uniform(25, 60) + rng.uniform(2, 6), 0, None))
    return np.clip((photons + rng.normal(0, 1.5, light.shape)) * 255 / 110, 0, 255).astype(np.uint8)


def draw(out: Path) -> None:
    """Write the unlabelled images, and the labelled ones as train and test."""
    rng = np.random.default_rng(0)
    for part, each in (("unlabelled", 500), ("labelled/train", 100), ("labelled/test", 150)):
        for name in PHENOTYPES:
            folder = out / part / ("" if part == "unlabelled" else name)
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(each):
                Image.fromarray(field_of(name, rng)).save(folder / f"{name}{i:04}.png")


# Training.


def start(data: Path, out: Path, encoder: str) -> Path:
    """Pre-train the start on CIFAR-10, scaled to 64 pixels."""
    folder = out / f"start-{encoder}"
    patchloom.pretrain(data, "mae", out=folder, epochs=START_EPOCHS, seed=0, **SIZE, **ENCODERS[encoder])
    return folder


def adapted(images: Path, out: Path, name: str, encoder: str, arm: str, seed: int) -> Path:
    """Continue from the start on unlabelled images, or train from scratch on them."""
    folder, begin = out / f"{name}-{encoder}-{arm}-{seed}", out / f"start-{encoder}"
    given = dict(ARMS[arm])
    task: Any = given.pop("task")
    if task == "distill":
        task = {"name": "distill", "features_of": str(begin)}
    n = 0.95 * len(open_data(images).train)
    seen = IMAGES + (START_EPOCHS * 47_500 if arm == "scratch-long" else 0)
    given |= ENCODERS[encoder] | {"positions": "auto"} if arm.startswith("scratch") else {"init": str(begin)}
    patchloom.pretrain(images, task, out=folder, epochs=round(seen / n, 2), seed=seed, **SIZE, **given)
    return folder


def scored(run: Path, data: Path, protocol: str, beside: str = "", **given: Any) -> Result:
    """Evaluate a run, or a control of it, and store the quoted result with its outcomes in a folder of the run."""
    kept = run / f"quoted-{beside}{'-' * bool(beside)}{protocol}-{given.get('seed', 0)}"
    if not store.load(kept):
        report = evaluate(protocol, run, data, **given)
        found = next((one for one in report.quoted if beside in ("", one.encoder)), None)
        if found is None:
            raise SystemExit(f"evaluate {protocol} has no result of {beside}: leave out that arm")
        kept.mkdir(exist_ok=True)
        store.append(kept, [found])
    return store.load(kept, outcomes=True)[-1]


def gain_over(base: Sequence[Result], arm: Sequence[Result]) -> Difference:
    """Compare an arm with the base on the same test images, one result per seed of each."""
    if len({one.about for one in (*base, *arm)}) > 1:
        raise SystemExit("the seeds were tested on different images: delete the folders quoted-* of all runs")
    return compare_results(arm, base, trained=True)


def table(title: str, found: dict[str, list[Result]]) -> None:
    """Print mean and range over seeds of each arm, and its gain over the first one in points.

    The gain's 95 % interval covers test images and trainings; half-widths over each alone follow.
    """
    base = next(iter(found.values()))
    print(f"\n{title}, on {base[0].n:,} test images")
    for arm, results in found.items():
        values = [100 * one.value for one in results]
        line = f"  {arm:18} {statistics.mean(values):5.1f} ({min(values):.1f} to {max(values):.1f})"
        if results is not base:
            gain = gain_over(base, results)
            by_seed = ", ".join(f"{value - 100 * other.value:+.1f}" for value, other in zip(values, base, strict=True))
            over = f"{100 * gain.over_images:.1f} over images, {100 * gain.over_seeds:.1f} over trainings"
            claim = f"{gain.claim.value} over {gain.trainings} trainings"
            line += f"   {gain.text()}, {claim} (± {over}; by seed {by_seed})"
        print(line, flush=True)


# each arm has the start of the study beside it, which has its own evaluation
PROTOCOLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "cells": [("knn", {}), ("linear", {})],
    "camvid": [("segment", {"control": False, "head": "linear", "steps": 300, "size": 128, "side": 176, "ignore": 11})],
    "raccoon": [("detect", {"control": False, "steps": 300, "size": 192})],
}
IMAGES_OF = {"cells": "unlabelled", "camvid": "images/train", "raccoon": "images/train"}


def study(name: str, data: Path, out: Path, encoder: str, arms: list[str], base: str) -> None:
    """Adapt by each arm and seed, and print a table of gains over ``base`` for each protocol."""
    labelled = data / "labelled" if name == "cells" else data
    more = {} if name == "cells" else {"validation": 0.0}
    for protocol, given in PROTOCOLS[name]:
        found = {}
        for arm in dict.fromkeys((base, *arms)):
            runs = [
                out / f"start-{encoder}"
                if arm in ("start", UNTRAINED)
                else adapted(data / IMAGES_OF[name], out, name, encoder, arm, seed)
                for seed in SEEDS
            ]
            found[arm] = [
                scored(run, labelled, protocol, UNTRAINED if arm == UNTRAINED else "", seed=seed, **given, **more)
                for seed, run in zip(SEEDS, runs, strict=True)
            ]
        table(f"{name}, {encoder}, {protocol}", found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "start", *PROTOCOLS))
    parser.add_argument("paths", nargs="+", type=Path, help="data, and folder of the runs")
    parser.add_argument("--encoder", choices=[*ENCODERS], default="vit")
    parser.add_argument("--arms", default=",".join(ARMS), help="names with commas between")
    parser.add_argument("--base", default="start", help="arm over which gains are given")
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.what == "draw":
        draw(*asked.paths)
    elif asked.what == "start":
        start(*asked.paths, asked.encoder)
    else:
        study(asked.what, *asked.paths, asked.encoder, asked.arms.split(","), asked.base)
