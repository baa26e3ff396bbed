"""Segmentation and detection: overfitting on ten images, and the gain of pre-training on real ones.

    pip install '.[dense]'
    python benchmarks/dense.py overfit
    for name in camvid raccoon; do python benchmarks/get_data.py $name /tmp/data; done
    python benchmarks/dense.py split /tmp/data/raccoon /tmp/raccoon
    patchloom pretrain /tmp/data/camvid/images/train,/tmp/raccoon/images/train --task mae --model nano --img_size 128 \\
        --patch_size 8 --epochs 800 --held_out 0.05 --cache whole --out /tmp/mae
    python benchmarks/dense.py camvid /tmp/mae /tmp/data/camvid --head upernet --labels 40
    python benchmarks/dense.py raccoon /tmp/mae /tmp/raccoon
    python benchmarks/dense.py family /tmp/data/camvid /tmp/raccoon /tmp/family --arms crossmae,loca,bootleg
    python benchmarks/dense.py places /tmp/family/mae-0 /tmp/data/camvid

``family`` pre-trains arms of `claims_arms.py` on the same images, each in the time of `mae`, with three seeds, and
segments CamVid by a linear layer on the frozen encoder. Finished parts are not repeated. ``places`` removes row and
column from patch tokens, as `patchloom export --without_positions`, and compares linear probes of the classes of cells.

``split`` copies the raccoons into train, val and test by their numbers: every fifth is for the test, and one in ten of
the others for validation. No test image is used for pre-training. Each row of a table is a mean over seeds, with the
range. The seed draws the head, the encoder from scratch, the order of the images, and which 40 of them are labelled.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from adapt import SEEDS, scored, table
from claims_arms import ARMS
from defaults import cell_features, frames, score
from pace import seconds_a_step

import patchloom
from patchloom.data.sources.open import open_data
from patchloom.evaluate.protocols import evaluate
from patchloom.export.without_positions import remove_positions_of
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file, save_encoder
from patchloom.results.evaluation import Evaluation

_NAMES = "sky building pole road pavement tree sign fence car pedestrian cyclist".split()
_CROP = {"size": 128, "side": 176, "validation": 0.0}


def split(source: Path, out: Path) -> None:
    """Copy images and annotations into parts, by the number in their names."""
    for image in sorted((source / "images").iterdir()):
        number = int(re.search(r"\d+", image.stem)[0])
        part = "test" if number % 5 == 0 else "val" if number % 10 == 1 else "train"
        for kind, file in (("images", image), ("annotations", source / "annotations" / f"{image.stem}.xml")):
            (out / kind / part).mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, out / kind / part / file.name)


def overfit(steps: int) -> None:
    """Train on ten drawn shapes, and test on the same ten: mIoU and AP50."""
    from patchloom.dense.annotations import detection, segmentation
    from patchloom.dense.annotations.base import AnnotatedData

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.safetensors"
        spec = EncoderSpec("nano", (64, 64), 8)
        save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,) * 3, (0.25,) * 3, "mae", "nano"), path)
        still: dict[str, Any] = {"scale": (1.0, 1.0), "flip": False, "color": False, "validation": 0.0, "size": 64}
        still |= {"steps": steps, "from_scratch": True, "layer_decay": 1.0, "batch_size": 10}
        for protocol, module, name in (
            ("segment", "patchloom.dense.segment", "open_label_maps"),
            ("detect", "patchloom.dense.detect", "open_boxes"),
        ):
            opened = {"open_label_maps": segmentation.open_label_maps, "open_boxes": detection.open_boxes}[name]
            ten = opened("shapes:10").train
            _replace(module, name, AnnotatedData(ten, None, ten))
            report = evaluate(protocol, path, "shapes:10", **still, **({"masks": True} if protocol == "detect" else {}))
            for one in report.results[:2]:
                print(f"{protocol}: {one.measure} {one.text()} after {steps} steps")


def _replace(module: str, name: str, data: Any) -> None:
    from importlib import import_module

    setattr(import_module(module), name, lambda *_: data)


def camvid(run: Path, data: Path, head: str, labels: int, **seeds: int) -> None:
    """Segment CamVid, fine-tuned or frozen, with a number of labelled frames; 0 is all."""
    (data / "classes.txt").write_text("\n".join(_NAMES) + "\n")
    steps = {"linear": 300, "upernet": 250}[head]
    given = {"max_train": labels or None, "head": head, "steps": steps, "ignore": 11, **seeds, **_CROP}
    print_report(f"camvid, {labels or 367} labels, {head}, {steps} steps", evaluate("segment", run, data, **given))


def raccoon(run: Path, data: Path, **seeds: int) -> None:
    """Detect raccoons, with all labels."""
    given = {"steps": 300, **seeds, "size": 192, "validation": 0.0}
    print_report("raccoon, 140 labels, 300 steps", evaluate("detect", run, data, **given))


FAMILY_EPOCHS = 60  # of `mae`, on 482 images
FAMILY: dict[str, Any] = {
    "model": {"name": "nano"},
    "img_size": 96,
    "patch_size": 8,
    "batch_size": 32,
    "held_out": 0.05,
    "precision": "bfloat16",
    "kernels": "torch",
    "cache": "whole",
    "threads": 1,
    "workers": 0,
}


def family(data: Path, raccoons: Path, out: Path, arms: list[str]) -> None:
    """Pre-train each arm in the time of `mae`, and print its mIoU on CamVid beside that of `mae`."""
    (data / "classes.txt").write_text("\n".join(_NAMES) + "\n")
    images = f"{data / 'images' / 'train'},{raccoons / 'images' / 'train'}"
    found = {}
    for arm in ("mae", *arms):
        runs = []
        for seed in SEEDS:
            run = out / f"{arm}-{seed}"
            patchloom.pretrain(images, ARMS[arm].task, out=run, epochs=_epochs(images, out, arm), seed=seed, **FAMILY)
            runs.append(run)
        given = {"control": False, "head": "linear", "steps": 300, "ignore": 11, **_CROP}
        found[arm] = [scored(run, data, "segment", seed=seed, **given) for seed, run in zip(SEEDS, runs, strict=True)]
    table("CamVid, frozen, a linear layer", found)


def _epochs(images: str, out: Path, arm: str) -> float:
    """Return the epochs that an arm trains in the time of `mae`, by steps measured once in turns."""
    kept = out / f"pace-{arm}.json"
    if not kept.exists():
        out.mkdir(parents=True, exist_ok=True)
        tasks = {"mae": ARMS["mae"].task, "arm": ARMS[arm].task}
        kept.write_text(json.dumps(seconds_a_step(images, {k: dict(v) for k, v in tasks.items()}, FAMILY, 5)))
    steps = json.loads(kept.read_text())
    return round(FAMILY_EPOCHS * steps["mae"][0] / steps["arm"][0], 2)


def places(run: Path, data: Path) -> None:
    """Print the mIoU of cells, as in `defaults.py`, and probes of the place, before and after its removal."""
    vit, card = load_encoder_file(run)
    removal = remove_positions_of(vit, card, open_data(data / "images" / "train").train)
    side = vit.patch_embed.img_size[0]
    found = {part: cell_features(vit, card, frames(data, part, side)) for part in ("train", "test")}
    before, after = score(data, found), score(data, {part: tokens @ removal.weight.T for part, tokens in found.items()})
    print(
        f"{run.name}: mIoU of cells {100 * before:.1f} before, {100 * after:.1f} after. {removal.sentence()}",
        flush=True,
    )


def print_report(title: str, report: Evaluation) -> None:
    reports = (*report.others, report)
    print(f"\n{title}")
    for number, result in enumerate(report.results):
        values = [100 * one.results[number].value for one in reports if number < len(one.results)]
        mean, low, high = sum(values) / len(values), min(values), max(values)
        if result.measure in ("mIoU", "aAcc", "AP", "AP50", "AP75"):
            print(f"  {result.encoder:14} {result.measure:5} {mean:5.1f} ({low:.1f} to {high:.1f})")
    print(report.headline, report.conclusion(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("split", "overfit", "camvid", "raccoon", "family", "places"))
    parser.add_argument("paths", nargs="*", type=Path, help="run and data, or source and copy")
    parser.add_argument("--head", choices=("linear", "upernet"), default="upernet", help="head of camvid")
    parser.add_argument("--labels", type=int, default=0, help="number of labelled frames of camvid; 0 is all")
    parser.add_argument("--arms", default="", help="arms of family beside mae, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.what == "split":
        split(*asked.paths)
    elif asked.what == "overfit":
        overfit(steps=400)
    elif asked.what == "camvid":
        camvid(*asked.paths, asked.head, asked.labels, seed=asked.seed, seeds=asked.seeds)
    elif asked.what == "family":
        family(*asked.paths, [arm for arm in asked.arms.split(",") if arm])
    elif asked.what == "places":
        places(*asked.paths)
    else:
        raccoon(*asked.paths, seed=asked.seed, seeds=asked.seeds)
