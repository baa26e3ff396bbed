"""Rare classes in segmentation: class weights, Dice + cross-entropy, and crops that hold them.

    python benchmarks/get_data.py camvid /tmp/data
    OMP_NUM_THREADS=1 python benchmarks/rare.py /tmp/data/camvid /tmp/rare

Three data sets: CamVid (every eighth test frame), drawn membranes (`resolution.tissue`), and drawn surfaces, a quarter
of which has a defect of 1 % of the pixels. A small encoder (64 pixels, patch 8, 4 blocks of width 64) is trained with
UPerNet from scratch, 250 steps of 8 crops, by each arm with three seeds, which draw weights and the order of the
images. The arms ``START`` are also trained from an encoder that ``mae`` pre-trained on the training images.

Printed are means and ranges over seeds of the foreground IoU (mean over the classes except the most frequent one of the
test images), of the IoU of the rare classes (under 5 % of the training pixels), and of mIoU. Finished parts are not
repeated. ``--table`` prints what there is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense import _NAMES
from PIL import Image
from resolution import tissue
from scipy.ndimage import gaussian_filter

import patchloom
from patchloom.dense.annotations.segmentation import class_pixels, open_label_maps
from patchloom.dense.metrics import class_ious, mean_iou
from patchloom.dense.recipes import SEGMENT
from patchloom.dense.segment import begin_segmenter, joined, predict_overlaps, rare_classes
from patchloom.dense.segmenter import Segmenter
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import at_size
from patchloom.pace import Pace
from patchloom.runs.encoder import load_encoder

SEEDS = (0, 1, 2)
SIDE, PATCH, OPTIONS = 64, 8, {"depth": 4, "embed_dim": 64, "num_heads": 2}
AS_BEFORE: dict[str, Any] = {"loss": "cross-entropy", "class_weights": False, "rare_crops": 0.0}
_CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"class_weights": True},
    "dice": {"loss": "dice"},
    "crops": {"rare_crops": 0.5},
}
ARMS = {
    "as before": AS_BEFORE,
    **{name: AS_BEFORE | change for name, change in _CHANGES.items()},
    "weights + crops": AS_BEFORE | _CHANGES["weights"] | _CHANGES["crops"],
    "dice + crops": AS_BEFORE | _CHANGES["dice"] | _CHANGES["crops"],
    "all three": AS_BEFORE | _CHANGES["weights"] | _CHANGES["dice"] | _CHANGES["crops"],
}
START = ("as before", "weights + crops")  # also trained from a pre-trained encoder
SIDES: dict[str, Any] = {"camvid": 176, "membranes": "native", "defect": "native"}
SHARED: dict[str, Any] = {"size": SIDE, "steps": 250, "batch": 8, "validation": 0.0, "head_width": 32, "auxiliary": 0.0}
SHARED |= {"lr": 4e-3, "layer_decay": 1.0}  # at 1e-3 and 0.75 few arms find a defect in 250 steps
SAMPLES = 20_000  # images of a pre-training


def surface(rng: np.random.Generator, side: int, defect: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw a surface, and 1 where it has a defect of 1 % of the pixels, uint8 [side side] each."""
    shade = 0.5 + 0.08 * _noise(rng, side, side / 4) + 0.03 * _noise(rng, side, 1.0)
    rows, columns = np.mgrid[:side, :side]
    for _ in range(6):  # stains, which are no defects: larger, and with a soft edge
        y, x = rng.uniform(0, side, 2)
        shade += rng.choice([-0.08, 0.08]) * np.exp(
            -((rows - y) ** 2 + (columns - x) ** 2) / (2 * rng.uniform(6, 10) ** 2)
        )
    labels = np.zeros((side, side), np.uint8)
    if defect:
        y, x, turn = *rng.uniform(0.15 * side, 0.85 * side, 2), rng.uniform(0, np.pi)
        long = rng.uniform(1.0, 3.0)
        across = np.cos(turn) * (rows - y) + np.sin(turn) * (columns - x)
        along = np.cos(turn) * (columns - x) - np.sin(turn) * (rows - y)
        radius = np.hypot(along / long, across) * (1 + 0.15 * _noise(rng, side, 3.0))
        labels[radius <= np.quantile(radius, 0.01)] = 1
        shade = shade - 0.25 * gaussian_filter(labels.astype(float), 0.7)
    seen = shade + rng.normal(0, 0.04, (side, side))
    return (255 * seen.clip(0, 1)).astype(np.uint8), labels


def _noise(rng: np.random.Generator, side: int, reach: float) -> np.ndarray:
    """Return smooth noise of standard deviation 1, [side side]."""
    found = gaussian_filter(rng.normal(size=(side, side)), reach, mode="wrap")
    return found / found.std()


def drawn(out: Path, draw: Any, train: int, test: int, names: str) -> None:
    """Write ``images/`` and ``labels/`` with ``train/`` and ``test/``; ``draw(number)`` returns image and label map."""
    for part, first, count in (("train", 0, train), ("test", train, test)):
        for number in range(first, first + count):
            for kind, pixels in zip(("images", "labels"), draw(number), strict=True):
                path = out / kind / part / f"{number:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    (out / "classes.txt").write_text(names)


def prepared(name: str, source: Path, out: Path) -> Path:
    """Return the folder of a data set, made if it is not there."""
    folder = out / "data" / name
    if (folder / "classes.txt").exists():
        return folder
    if name == "membranes":
        drawn(folder, lambda i: tissue(np.random.default_rng(i), 256), 48, 12, "cell\nmembrane\norganelle\n")
    elif name == "defect":
        drawn(folder, lambda i: surface(np.random.default_rng(i), 128, i % 4 == 0), 200, 80, "background\ndefect\n")
    else:
        for kind in ("images", "labels"):
            shutil.copytree(source / kind / "train", folder / kind / "train")
            (folder / kind / "test").mkdir()
            for file in sorted((source / kind / "test").iterdir())[::8]:
                shutil.copy2(file, folder / kind / "test" / file.name)
        (folder / "classes.txt").write_text("\n".join(_NAMES) + "\n")
    return folder


def pretrained(name: str, folder: Path, out: Path) -> Path:
    """Return a short run of `mae` on the training images."""
    images, run = folder / "images" / "train", out / "runs" / name
    given = {"img_size": SIDE, "patch_size": PATCH, "batch_size": 64, "held_out": 0.05, "threads": 1, "workers": 0}
    model = {"name": "nano", **OPTIONS}
    patchloom.pretrain(images, "mae", out=run, epochs=SAMPLES / len([*images.iterdir()]), model=model, **given)
    return run


def measured(name: str, arm: str, start: bool, seed: int, source: Path, out: Path) -> dict[str, float]:
    """Train once; return the IoU of each class that occurs, and mIoU."""
    kept = out / "results" / f"{name}-{arm.replace(' ', '')}-{'start' if start else 'scratch'}-{seed}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    folder = prepared(name, source, out)
    data = open_label_maps(folder, 11 if name == "camvid" else 255)
    channels = 3 if name == "camvid" else 1
    spec = EncoderSpec("nano", (SIDE, SIDE), PATCH, channels=channels, options=OPTIONS)
    card = EncoderCard(spec, (0.5,) * channels, (0.25,) * channels, "mae", "nano")
    torch.manual_seed(seed)
    vit = build_encoder(spec)
    if start:
        vit, card = load_encoder(pretrained(name, folder, out))
    asked = replace(SEGMENT["small"], **SHARED, **ARMS[arm], side=SIDES[name])
    recipe = asked.settled(len(data.train), "cpu", 0, SIDE, PATCH, OPTIONS["embed_dim"])
    settings = EvalSettings(device="cpu", workers=0, seed=seed, cache=False)
    head = {"head": "upernet", "head_width": recipe.head_width, "auxiliary": recipe.auxiliary > 0}
    model = Segmenter(at_size(vit, card, (SIDE, SIDE)), len(data.train.classes), **head)
    training = begin_segmenter(model, card, recipe, data.train, None, settings=settings)
    model = training.fit(f"{name}, {arm}, seed {seed}", Pace(recipe.steps)).model
    each = predict_overlaps(model, data.test, card, settings, recipe.resized, precision="float32")
    total = joined(each, len(data.train.classes)).sum(0)
    ious = zip(data.train.classes, class_ious(total).tolist(), strict=True)
    found = {"mIoU": mean_iou(total).item()} | {called: iou for called, iou in ious if iou == iou}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found))
    return found


def table(names: list[str], source: Path, out: Path) -> None:
    """Print what was measured."""
    for name in names:
        data = open_label_maps(prepared(name, source, out), 11 if name == "camvid" else 255)
        pixels, tested = class_pixels(data.train), class_pixels(data.test)
        rare = [data.train.classes[i] for i in rare_classes(pixels)]
        shares = ", ".join(f"{data.train.classes[i]} {pixels[i] / pixels.sum():.2%}" for i in rare_classes(pixels))
        most = data.train.classes[tested.argmax()]
        print(f"\n{name}; rare: {shares or 'none'}; most frequent: {most}")
        print("| arm | from | foreground IoU | rare classes | mIoU |\n| --- | --- | --- | --- | --- |")
        for start in (False, True):
            for arm in ARMS:
                pattern = f"{name}-{arm.replace(' ', '')}-{'start' if start else 'scratch'}-*.json"
                found = [json.loads(file.read_text()) for file in sorted((out / "results").glob(pattern))]
                if not found:
                    continue
                front = [one for one in data.train.classes if one != most]
                cells = [
                    shown([statistics.mean(one.get(k, 0.0) for k in those) for one in found if those])
                    for those in (front, rare, ["mIoU"])
                ]
                print(f"| {arm} | {'mae' if start else 'scratch'} | {' | '.join(cells)} |")


def shown(values: list[float]) -> str:
    """Format mean and range in %."""
    if not values:
        return "-"
    return f"{100 * statistics.mean(values):.1f} ({100 * min(values):.1f}-{100 * max(values):.1f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("camvid", type=Path, help="CamVid, as get_data.py writes it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*SIDES], default=[*SIDES])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--start", choices=("both", "scratch", "mae"), default="both")
    parser.add_argument("--table", action="store_true", help="print only what was measured before")
    asked = parser.parse_args()
    if not asked.table:
        for seed in SEEDS:
            for start in (False, True):
                for name in asked.only:
                    for arm in asked.arms:
                        if name == "membranes" and ARMS[arm]["rare_crops"]:
                            continue  # which have no class under 5 %
                        if asked.start in ("both", "mae" if start else "scratch") and (not start or arm in START):
                            measured(name, arm, start, seed, asked.camvid, asked.out)
    table(asked.only, asked.camvid, asked.out)
