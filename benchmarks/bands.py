"""Twelve channels that begin with RGB weights: what they gain over random weights of the same length of training.

    python benchmarks/get_data.py cifar10 /tmp/data
    python benchmarks/bands.py draw /tmp/data/cifar10 /tmp/bands
    python benchmarks/bands.py study /tmp/bands /tmp/bands-runs

No public weights are used. ``draw`` copies 25,000 colour images of CIFAR-10's training set (half of each class), and
makes 12 bands of 2,500 others, and of 1,500 test images: each band is a fixed random mixture of red, green and blue,
with a response curve, gain, offset and noise of its own, float32. ``study`` pre-trains a small ViT by MAE on the colour
images. Then it trains on the 12 bands for as many images from three starts, with three seeds each: ``repeat``, the
colour weights as ``--init`` adapts them (as timm does: repeated in turn, times 3/12); ``mean``, their mean over the
colours in every channel, times 3/12; ``scratch``, random weights. ``start`` is ``repeat`` without a step, and
``untrained`` is random. The seed draws training and evaluation. Finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapt import SEEDS, table
from PIL import Image

import patchloom
from patchloom.evaluate.protocols import evaluate
from patchloom.nets.build import build_encoder
from patchloom.nets.checkpoints.format import load_encoder_file, save_encoder
from patchloom.results import store
from patchloom.results.claims import START, UNTRAINED
from patchloom.results.result import Result

BANDS, SAMPLES, START_SAMPLES = 12, 2_400, 25_000  # images that each training sees
SAME: dict[str, Any] = {
    "model": {"name": "nano", "embed_dim": 96, "depth": 4, "num_heads": 3},
    "img_size": 32,
    "patch_size": 8,
    "workers": 0,
    "precision": "float32",
}
COUNTS = {"train": 250, "test": 150}  # images of 12 bands of each class
COLOURS = 2_500  # colour images of each class, which are others


def draw(cifar: Path, out: Path) -> None:
    """Write the colour images without labels, and those of 12 bands in folders of their classes."""
    rng = np.random.default_rng(0)
    mixture = rng.dirichlet((0.7, 0.7, 0.7), BANDS).astype(np.float32)  # [bands rgb], rows sum to 1
    curve, gain, offset, noise = (
        rng.uniform(low, high, BANDS).astype(np.float32)
        for low, high in ((0.5, 2.0), (0.1, 0.6), (0.0, 0.1), (0.01, 0.05))
    )
    for part, count in COUNTS.items():
        for folder in sorted((cifar / part).iterdir()):
            paths = sorted(folder.iterdir())
            if part == "train":
                target = out / "colours" / folder.name
                target.mkdir(parents=True, exist_ok=True)
                for path in paths[:COLOURS]:
                    shutil.copy2(path, target / path.name)
            target = out / "bands" / part / folder.name
            target.mkdir(parents=True, exist_ok=True)
            for path in paths[-count:]:
                colours = np.asarray(Image.open(path).convert("RGB"), np.float32) / 255
                light = (colours @ mixture.T) ** curve * gain + offset
                seen = light + noise * rng.standard_normal(light.shape, np.float32)
                np.save(target / f"{path.stem}.npy", np.clip(seen, 0, 1))


def trained(data: Path, out: Path, arm: str, seed: int) -> Path:
    """Train on 12 bands from a start, or from random weights."""
    folder = out / f"{arm}-{seed}"
    if (folder / "encoder.safetensors").is_file():
        return folder
    given: dict[str, Any] = dict(SAME, epochs=SAMPLES / (10 * COUNTS["train"]), batch_size=32, channels=BANDS)
    if arm != "scratch":
        del given["model"]
        given["init"] = str(out / ("start" if arm == "repeat" else "mean.safetensors"))
    # a pattern of files has no labels, so that a run is not evaluated at its end
    files = str(data / "train" / "*" / "*.npy")
    patchloom.pretrain(files, "mae", out=folder, seed=seed, held_out=0.0, normalization="data", **given)
    return folder


def with_mean(start: Path, path: Path) -> None:
    """Write the start with the mean of its colour weights in every channel, times 3/12."""
    vit, card = load_encoder_file(start / "encoder.safetensors")
    weights = vit.state_dict()
    mixed = weights["patch_embed.proj.weight"].mean(1, keepdim=True).expand(-1, BANDS, -1, -1)
    wide = build_encoder(spec := replace(card.own_spec, channels=BANDS))
    wide.load_state_dict(weights | {"patch_embed.proj.weight": mixed * 3 / BANDS})
    save_encoder(wide, replace(card, spec=spec, mean=(0.5,) * BANDS, std=(0.25,) * BANDS, trained_on=""), path)


def evaluated(run: Path, data: Path, protocol: str, seed: int) -> dict[str, Result]:
    """Evaluate a run once, and return its quoted result and those of its controls by the name of the encoder."""
    kept = run / f"quoted-{protocol}-{seed}"
    if not store.load(kept):
        report = evaluate(protocol, run, data, seed=seed)
        kept.mkdir(exist_ok=True)
        store.append(kept, report.quoted)
    return {one.encoder: one for one in store.load(kept, outcomes=True)}


def study(data: Path, out: Path) -> None:
    """Train by each arm and seed, and print a table of gains over random weights for each protocol."""
    begin = out / "start"
    epochs = round(START_SAMPLES / (0.95 * 10 * COLOURS), 2)
    if not (begin / "encoder.safetensors").is_file():
        patchloom.pretrain(data / "colours", "mae", out=begin, epochs=epochs, batch_size=64, seed=0, **SAME)
    if not (out / "mean.safetensors").exists():
        with_mean(begin, out / "mean.safetensors")
    runs = {arm: [trained(data / "bands", out, arm, seed) for seed in SEEDS] for arm in ("scratch", "repeat", "mean")}
    for protocol in ("knn", "linear"):
        found: dict[str, list[Result]] = {arm: [] for arm in (*runs, START, UNTRAINED)}
        for arm, own in runs.items():
            for seed, run in zip(SEEDS, own, strict=True):
                quoted = evaluated(run, data / "bands", protocol, seed)
                found[arm].append(quoted[run.name])
                for control in {"repeat": (START,), "scratch": (UNTRAINED,)}.get(arm, ()):
                    found[control].append(quoted[control])
        table(f"12 bands, {protocol}", found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "study"))
    parser.add_argument("paths", nargs=2, type=Path, help="CIFAR-10 or drawn data, and the folder to write")
    asked = parser.parse_args()
    torch.manual_seed(0)
    {"draw": draw, "study": study}[asked.what](*asked.paths)
