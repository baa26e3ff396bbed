"""Keyword spotting on recordings: what pre-training brings to MP3's speech model, and how fast recordings are read.

    pip install 'patchloom[audio]'
    mkdir /tmp/data && tar -xf ../shared/data/keywords.tar -C /tmp/data
    python benchmarks/sound.py pace /tmp/data/keywords
    python benchmarks/sound.py keywords /tmp/data/keywords /tmp/sound
    python benchmarks/sound.py updates /tmp/data/keywords /tmp/sound
    python benchmarks/sound.py tasks /tmp/data/keywords /tmp/sound

The data is the part of the Arabic Speech Commands set that shared/data/README.md describes: no speaker is in two parts.
Pre-training sees the recordings of the training part without their labels. Each seed draws the pre-training, the order
of the recordings, the head, the encoder from scratch and which labels are kept; each row is a mean over seeds, with the
range. What is made already is not made again, so that a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import patchloom
from patchloom.data import open_data, plain_batches, statistics_of_recordings, training_batches
from patchloom.data.cache import cache_images
from patchloom.data.sound.excerpts import RandomExcerpt
from patchloom.data.sound.features import pictures
from patchloom.evaluate import Report, evaluate
from patchloom.sound import Sound

WORDS = "yes no up down left right start stop open close".split()
SEEDS = (0, 1, 2)
# MP3's model, and batches and updates that two cores make in an hour; the rate's peak is for these
BATCH, UPDATES, FINE_TUNING = 64, 600, 300
RATE = 3e-3


def pretrained(data: Path, out: Path, task: str, seed: int, updates: int = UPDATES) -> Path:
    """An encoder of MP3's speech model, pre-trained by a task for about so many updates."""
    folder = out / f"{task}-{updates}-{seed}"
    n = 0.95 * len(open_data(data).train)
    epochs = max(1, round(updates / (n // BATCH)))
    model = {"name": "vit_tiny_patch16_224", "embed_dim": 32, "depth": 8, "num_heads": 4, "mlp_ratio": 2.0}
    model |= {"class_token": True, "proj_drop_rate": 0.1, "pos_drop_rate": 0.1}
    chosen: dict[str, Any] = {"name": task}
    if task == "mp3":
        chosen |= {"context_mask_ratio": 0.0, "known_positions": 0.05}
    same = {"model": model, "positions": "sincos", "batch_size": BATCH, "weight_decay": 0.0, "precision": "float32"}
    patchloom.pretrain(data, chosen, out=folder, epochs=epochs, blr=RATE * 256 / BATCH, seed=seed, **same)
    return folder


def spotted(run: Path, data: Path, seed: int, labels: float, **options: Any) -> Report:
    """Fine-tuning of a run, beside the same from scratch."""
    given = {"words": ",".join(WORDS), "batch_size": BATCH, "updates": FINE_TUNING, "lr": RATE, "precision": "float32"}
    return evaluate("keywords", run, data, seed=seed, labels=labels, **given, **options)


def row(name: str, reports: list[Report], number: int) -> str:
    """A line of a table: the mean over seeds, and the range."""
    values = [100 * report.rows[number].value for report in reports]
    return f"  {name:28} {statistics.mean(values):5.1f} ({min(values):.1f} to {max(values):.1f})"


def compared(data: Path, out: Path, tasks: tuple[str, ...], updates: int = UPDATES) -> None:
    """Fine-tuned with all labels and with a tenth of them, by task; from scratch and raw features beside them."""
    for labels in (1.0, 0.1):
        found = {
            task: [spotted(pretrained(data, out, task, seed, updates), data, seed, labels) for seed in SEEDS]
            for task in tasks
        }
        print(f"\n{labels:.0%} of the labels, {updates} updates of pre-training, {FINE_TUNING} of fine-tuning")
        for task, reports in found.items():
            print(row(task, reports, 0))
        for number, control in enumerate(reports[0].rows[1:], 1):
            print(row(control.encoder, reports, number))
        for task, reports in found.items():
            gains = [100 * (report.rows[0].value - report.rows[1].value) for report in reports]
            print(f"  {task} less from scratch, by seed: {', '.join(f'{gain:+.1f}' for gain in gains)}", flush=True)


def by_updates(data: Path, out: Path) -> None:
    """MP3's Table 6: accuracy by the updates of pre-training, which decay to 0 in each."""
    print()
    for updates in (UPDATES // 4, UPDATES, 4 * UPDATES):
        runs = [pretrained(data, out, "mp3", seed, updates) for seed in SEEDS]
        reports = [spotted(run, data, seed, 1.0, control=False) for run, seed in zip(runs, SEEDS, strict=True)]
        print(row(f"{updates} updates", reports, 0), flush=True)


def pace(data: Path) -> None:
    """Recordings a second on one core: read from FLAC, from the cache, and made into pictures."""
    torch.set_num_threads(1)
    source, sound = open_data(data).train.subset(range(1024)), Sound()
    stats = statistics_of_recordings(source, sound, sample=256)
    assert stats.sound is not None
    heard = source.heard_as(stats.sound)
    cached = cache_images(heard, "whole", 0)
    waves = next(plain_batches(heard, sound.size, 256, channels=1)).views[0]
    raw = torch.randint(-(2**12), 2**12, (256, 1, 1, sound.samples), dtype=torch.int16)
    ways = {
        "read from FLAC": lambda: [heard.read(i) for i in range(256)],
        "read from the cache": lambda: [cached.read(i) for i in range(256)],
        "made into pictures": lambda: pictures(raw, stats.sound),
        "read, cut and made into pictures": lambda: next(
            training_batches(heard, RandomExcerpt(stats.sound), 256, 0, 0, 1, channels=1)
        ),
    }
    assert len(waves) == 256
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(256 / (time.perf_counter() - start))
    for name, rates in taken.items():
        print(f"  {name:34} {statistics.median(rates):9,.0f} recordings a second (of {len(rates)})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pace", "keywords", "updates", "tasks"))
    parser.add_argument("paths", nargs="+", type=Path, help="the data, and a folder for the runs")
    asked = parser.parse_args()
    if asked.what == "pace":
        pace(*asked.paths)
    elif asked.what == "updates":
        by_updates(*asked.paths)
    else:
        compared(*asked.paths, ("mp3",) if asked.what == "keywords" else ("mp3", "mae", "droppos"))
