"""Native scale against reduced images, in pre-training by mae and in segmentation after it.

    for name in camvid raccoon; do python benchmarks/get_data.py $name /tmp/data; done
    python benchmarks/resolution.py /tmp/data /tmp/resolution
    python benchmarks/resolution.py /tmp/data /tmp/resolution --only membranes --head upernet

Three data sets: drawn membranes (512 x 512 pixels, like tissue under an electron microscope, with exact label maps),
CamVid's frames (480 x 360; every fourth test frame), and 200 photographs of raccoons (480 x 360 at the median, at most
2000 pixels wide), whose label maps are their boxes. ``mae`` is pre-trained twice on each, for the same number of crops
of 96 pixels: with the usual crops, a fifth of the image to the whole, and at native scale. Each encoder is then tested
by ``evaluate segment``, in windows of 144 pixels: on images reduced until a window holds their shorter side, and on
images at their own size.

Each number is a mean over seeds of the head and the order of images, with the range. There is one pre-training of each
kind (``--pretrainings`` makes more), so a difference between encoders must be much larger than the spread over seeds of
the head to mean anything. Finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.spatial import cKDTree

import patchloom
from patchloom.evaluate.protocols import evaluate

CROPS, WINDOW = ("0.2", "native"), 144
SAMPLES = 20_000  # crops of a pre-training: three minutes of a core
STEPS = {"linear": 150, "upernet": 100}


def membranes(out: Path, train: int = 48, test: int = 16, side: int = 512) -> None:
    """Draw tissue: cells between dark membranes, with organelles whose rims and folds look like membranes.

    Args:
        out: folder for ``images/`` and ``labels/`` (0 cell, 1 membrane, 2 organelle), with ``train/`` and ``test/``.
        train, test: number of images of each part.
        side: side of an image in pixels. Membranes are 4 to 6 pixels thick, cells about 50 wide, organelles 14 to 36.
    """
    for part, first, count in (("train", 0, train), ("test", train, test)):
        for number in range(first, first + count):
            image, labels = tissue(np.random.default_rng(number), side)
            for kind, pixels in (("images", image), ("labels", labels)):
                path = out / kind / part / f"{number:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    (out / "classes.txt").write_text("cell\nmembrane\norganelle\n")


def tissue(rng: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw an image and its label map, uint8 [side side] each."""
    rows, columns = np.mgrid[:side, :side].astype(np.float64)
    bent = [at + 60 * gaussian_filter(rng.normal(size=(side, side)), 12) for at in (rows, columns)]  # no straight wall
    steps = np.arange(-50, side + 51, 50.0)
    cells = np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 2)
    cells += rng.uniform(-22, 22, cells.shape)
    (near, second), (own, other) = (one.T for one in cKDTree(cells).query(np.stack(bent, -1).reshape(-1, 2), k=2))
    to_wall = (second**2 - near**2) / (2 * np.linalg.norm(cells[own] - cells[other], axis=1))
    wall = (to_wall < rng.uniform(2, 3)).reshape(side, side)
    labels = wall.astype(np.uint8)
    shade = np.where(wall, 0.25, 0.7) + 0.06 * gaussian_filter(rng.normal(size=(side, side)), 25) * 25
    for _ in range(side * side // 1000):
        y, x, turn = *rng.uniform(0, side, 2), rng.uniform(0, np.pi)
        long, short = rng.uniform(10, 18), rng.uniform(7, 10)
        across = np.cos(turn) * (rows - y) + np.sin(turn) * (columns - x)
        along = np.cos(turn) * (columns - x) - np.sin(turn) * (rows - y)
        radius = np.hypot(along / long, across / short)
        inside = radius < 1
        if (wall | (labels == 2))[inside].any():
            continue
        labels[inside] = 2
        folds = 0.5 + 0.12 * np.sign(np.sin(along * 2 * np.pi / 5))
        shade = np.where(inside, np.where(radius > 0.75, 0.3, folds), shade)
    grain = 0.05 * gaussian_filter(rng.normal(size=(side, side)), 1.5) * 4  # ribosomes and the like
    seen = gaussian_filter(shade + grain, 0.7) + rng.normal(0, 0.08, (side, side))
    return (255 * seen.clip(0, 1)).astype(np.uint8), labels


def boxed(source: Path, out: Path) -> None:
    """Write label maps of the raccoons: 1 in their boxes, 0 elsewhere; every fifth photograph is for the test."""
    for number, image in enumerate(sorted((source / "images").iterdir())):
        picture = Image.open(image).convert("RGB")
        labels = np.zeros((picture.height, picture.width), np.uint8)
        for box in ElementTree.parse(source / "annotations" / f"{image.stem}.xml").iter("bndbox"):
            left, top, right, bottom = (int(float(box.findtext(name))) for name in ("xmin", "ymin", "xmax", "ymax"))
            labels[max(0, top - 1) : bottom, max(0, left - 1) : right] = 1
        part = "test" if number % 5 == 0 else "train"
        for kind, pixels in (("images", picture), ("labels", Image.fromarray(labels))):
            path = out / kind / part / f"{image.stem}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels.save(path)
    (out / "classes.txt").write_text("elsewhere\nraccoon\n")


def thinned(source: Path, out: Path) -> None:
    """Copy CamVid's training frames, and every fourth test frame."""
    for part, every in (("train", 1), ("test", 4)):
        for image in sorted((source / "images" / part).iterdir())[::every]:
            for kind, file in (("images", image), ("labels", source / "labels" / part / f"{image.stem}.png")):
                (out / kind / part).mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, out / kind / part / file.name)
    names = "sky building pole road pavement tree sign fence car pedestrian cyclist"
    (out / "classes.txt").write_text(names.replace(" ", "\n") + "\n")


def pretrained(data: Path, out: Path, crops: str, seed: int) -> Path:
    """Pre-train ``mae`` on the training images, with a scale of crops, and return the run."""
    run = out / f"mae-{crops}-{seed}"
    images = data / "images" / "train"
    n = len(list(images.iterdir())) * 0.95
    begun = time.monotonic()
    patchloom.pretrain(
        images,
        "mae",
        out=run,
        img_size=96,
        patch_size=8,
        model="nano",
        batch_size=32,
        epochs=max(1, round(SAMPLES / n)),
        held_out=0.05,
        cache="whole",
        crop_scale="native" if crops == "native" else float(crops),
        seed=seed,
        workers=0,
    )
    print(f"{run}: {time.monotonic() - begun:.0f} s", flush=True)
    return run


def segmented(run: Path, data: Path, side: int | str, head: str, seeds: int, ignore: int) -> list[float]:
    """Return mIoU in percent for some seeds of the head; stored in the run's folder."""
    kept = run / f"segmented-{side}-{head}-{STEPS[head]}-{seeds}.json"
    if not kept.exists():
        given: dict[str, Any] = {"size": WINDOW, "side": side, "steps": STEPS[head], "validation": 0.0, "workers": 0}
        begun = time.monotonic()
        report = evaluate("segment", run, data, head=head, seeds=seeds, control=False, ignore=ignore, **given)
        scores = [100 * one.results[0].value for one in (*report.others, report)]
        kept.write_text(json.dumps({"mIoU": scores, "seconds": time.monotonic() - begun}))
    return json.loads(kept.read_text())["mIoU"]


def prepared(data: Path, out: Path, name: str) -> Path:
    """Return the folder of a data set, and make it if necessary."""
    folder = out / f"{name}-data"
    if not (folder / "classes.txt").exists():
        if name == "membranes":
            membranes(folder)
        else:
            {"camvid": thinned, "raccoon": boxed}[name](data / name, folder)
    return folder


def main() -> None:
    """Run the study, or parts of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with camvid/ and raccoon/")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=("membranes", "camvid", "raccoon"))
    parser.add_argument("--sides", nargs="+", choices=(str(WINDOW), "native"), default=[str(WINDOW), "native"])
    parser.add_argument("--head", choices=tuple(STEPS), default="linear")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of the head")
    parser.add_argument("--pretrainings", type=int, default=1)
    asked = parser.parse_args()
    for name in asked.only or ("membranes", "camvid", "raccoon"):
        data = prepared(asked.data, asked.out, name)
        for crops in CROPS:
            for seed in range(asked.pretrainings):
                run = pretrained(data, asked.out / name, crops, seed)
                for side in asked.sides:
                    side = int(side) if side.isdecimal() else side
                    scores = segmented(run, data, side, asked.head, asked.seeds, 11 if name == "camvid" else 255)
                    low, high = min(scores), max(scores)
                    print(
                        f"{name}, {asked.head}: pre-trained on crops of {crops} (seed {seed}), side {side}: mIoU "
                        f"{statistics.mean(scores):.1f} ({low:.1f} to {high:.1f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
