"""Search for the defaults of `auto`: sizes and task of the best encoder in 5, 15 or 60 minutes on two cores.

    for name in camvid cifar10; do python benchmarks/get_data.py $name /tmp/data; done
    OMP_NUM_THREADS=1 python benchmarks/defaults.py camvid /tmp/data/camvid --minutes 5
    OMP_NUM_THREADS=1 python benchmarks/defaults.py cifar /tmp/data --minutes 5 --only "mae 32/4 nano"

An arm is a task, an image size and patch size, and an encoder. Each gets the number of epochs that fits into the budget
of one core's time, augmentation and reading included. A minute of two cores counts as 1.8 minutes of one, the speed-up
of two threads here. The clock is the process's own, so other work on the machine does not shorten an arm.

Only labels judge the encoders. On CIFAR-10 the last evaluation is used: kNN and a linear probe with 5,000 labelled
images. The frames of CamVid have one label per pixel: each frame is divided into 24 x 32 cells, the encoder's map of
patch tokens is interpolated to them, and a linear probe predicts the most frequent class of each cell. The score is the
mean over classes of the intersection over union on the test frames. Finished arms are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from pace import Stepper
from PIL import Image
from torch.nn import functional as F

from patchloom.cli import main as patchloom
from patchloom.data.sources.open import open_data
from patchloom.data.splits import hold_out
from patchloom.evaluate.logistic import linear_probe
from patchloom.nets.checkpoints.format import load_encoder_file, untrained_twin
from patchloom.nets.encode import grid_size
from patchloom.results import store
from patchloom.system.files import write_whole

CORES = 1.8  # speed-up of two cores
CELLS = (24, 32)
VOID, CLASSES = 11, 11
ARMS = {
    "camvid": (
        "droppos 96/8 nano",
        "mae 96/8 nano",
        "mae 96/16 nano",
        "droppos 96/16 nano",
        "mae 192/16 nano",
        "restore 96/8 nano",
        "mae 96/8 micro",
        "mp3 96/16 nano",
        "mae 64/8 nano",
        "mae 128/16 mini",
        "mae 192/16 mini",
        "mae 224/16 nano",
    ),
    "cifar": (
        "mae 32/4 nano",
        "droppos 32/4 nano",
        "mae 32/4 mini",
        "droppos 32/8 nano",
        "mae 32/2 nano",
        "mae 32/4 micro",
        "restore 32/4 nano",
    ),
}


def settings_of(arm: str) -> tuple[str, dict[str, object]]:
    """Return the task and the settings of an arm such as "mae 96/8 nano"."""
    task, sizes, model = arm.split()
    side, patch = map(int, sizes.split("/"))
    return task, {"img_size": side, "patch_size": patch, "model": model, "workers": 0}


def images_a_second(data: Path, arm: str) -> float:
    """Measure training images per second of one core's time."""
    task, settings = settings_of(arm)
    stepper = Stepper(str(data), {"name": task}, settings, rounds=2, steps=5)
    return max(stepper.settings.batch_size / stepper.seconds() for _ in range(2))


def cell_labels(data: Path, split: str) -> torch.Tensor:
    """Return the most frequent class of each cell: int64 [frames, cells], -1 for void."""
    labels = []
    for path in sorted((data / "labels" / split).glob("*.png")):
        ids = torch.from_numpy(np.array(Image.open(path))).long()
        votes = F.adaptive_avg_pool2d(F.one_hot(ids, CLASSES + 1).permute(2, 0, 1).float(), CELLS).flatten(1)
        best = votes.argmax(0)
        labels.append(torch.where(best == VOID, -1, best))
    return torch.stack(labels)


def frames(data: Path, split: str, side: int) -> torch.Tensor:
    """Return all frames of a split, resized to squares: uint8 [frames, 3, side, side]."""
    paths = sorted((data / "images" / split).iterdir())
    size = (side, side)
    pictures = [np.array(Image.open(path).convert("RGB").resize(size, Image.Resampling.BICUBIC)) for path in paths]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


@torch.inference_mode()
def cell_features(vit: torch.nn.Module, card, images: torch.Tensor) -> torch.Tensor:
    """Return the frozen features of the cells: [frames, cells, width]."""
    mean, std = torch.tensor(card.mean).view(1, 3, 1, 1), torch.tensor(card.std).view(1, 3, 1, 1)
    found = []
    for batch in images.split(16):
        tokens = vit.eval().forward_features((batch / 255 - mean) / std)[:, vit.num_prefix_tokens :]
        maps = tokens.transpose(1, 2).unflatten(2, grid_size(vit))
        found.append(F.interpolate(maps, CELLS, mode="bilinear").flatten(2).transpose(1, 2))
    return torch.cat(found)


def cell_pixels(images: torch.Tensor) -> torch.Tensor:
    """Return the colours of each cell's four quarters: [frames, cells, 12]."""
    quarters = F.adaptive_avg_pool2d(images / 255, (2 * CELLS[0], 2 * CELLS[1]))
    return F.pixel_unshuffle(quarters, 2).flatten(2).transpose(1, 2)


def score(data: Path, features: dict[str, torch.Tensor]) -> float:
    """Return the mean over classes of the intersection over union of cells of the test frames."""
    kept, answers = {}, {}
    for split, values in features.items():
        labels = cell_labels(data, split)
        known = labels >= 0
        kept[split], answers[split] = values[known], labels[known]
    chosen = torch.randperm(len(answers["train"]), generator=torch.Generator().manual_seed(0))[:15_000]
    probe, _ = linear_probe(kept["train"][chosen].contiguous(), answers["train"][chosen], seed=0)
    pairs = answers["test"] * CLASSES + probe.predict(kept["test"])
    table = torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES).double()
    hits = table.diag()
    return float((hits / (table.sum(0) + table.sum(1) - hits)).mean())


def camvid_scores(data: Path, run: Path) -> dict[str, float]:
    """Return the scores of the trained encoder, its untrained twin, and colours."""
    vit, card = load_encoder_file(run)
    side = vit.patch_embed.img_size[0]
    pictures = {split: frames(data, split, side) for split in ("train", "test")}
    twin, _ = untrained_twin(card)
    return {
        "trained": score(data, {s: cell_features(vit, card, x) for s, x in pictures.items()}),
        "untrained": score(data, {s: cell_features(twin, card, x) for s, x in pictures.items()}),
        "colours": score(data, {s: cell_pixels(x) for s, x in pictures.items()}),
    }


def cifar_scores(run: Path) -> dict[str, float]:
    """Return the scores of the run's last evaluation."""
    return {
        f"{one.protocol} {'trained' if one.encoder == run.name else one.encoder}": one.value
        for one in store.load(run)
        if one.quoted
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", choices=ARMS)
    parser.add_argument("data", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", nargs="+", help="arms, instead of all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("/tmp/patchloom-defaults"))
    args = parser.parse_args()
    source = args.data / "images" / "train" if args.images == "camvid" else args.data / "cifar10"
    images = len(hold_out(open_data(str(source)).train, 0.05, seed=0)[0])
    for arm in args.only or ARMS[args.images]:
        pace = args.out / args.images / f"{arm.replace('/', '-')}.json"
        if not pace.exists():
            write_whole(pace, json.dumps(images_a_second(source, arm)))
        rate = json.loads(pace.read_text())
        epochs = max(1, round(args.minutes * 60 * CORES * rate / images))
        task, settings = settings_of(arm)
        for seed in args.seeds:
            run = pace.parent / f"{arm.replace('/', '-').replace(' ', '_')}_{args.minutes:g}_{seed}"
            kept = run.with_suffix(".scores")
            if not kept.exists():
                words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
                words += ["--task", task, "--epochs", str(epochs), "--seed", str(seed), "--out", str(run)]
                if patchloom(["pretrain", str(source), *words]):
                    raise SystemExit(f"{arm} failed")
                found = camvid_scores(args.data, run) if args.images == "camvid" else cifar_scores(run)
                write_whole(kept, json.dumps(found))
            found = json.loads(kept.read_text())
            cells = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
            print(
                f"ARM {args.minutes:g} min, {arm}, seed {seed}: {rate:.0f} images/s, {epochs} epochs: {cells}",
                flush=True,
            )


if __name__ == "__main__":
    main()
