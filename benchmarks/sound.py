"""Keyword spotting on recordings: the gain of pre-training for MP3's speech model, and the speed of reading.

    pip install '.[audio]'
    python benchmarks/get_data.py keywords /tmp/data
    python benchmarks/sound.py pace /tmp/data/keywords
    python benchmarks/sound.py keywords /tmp/data/keywords /tmp/sound
    python benchmarks/sound.py longer /tmp/data/keywords /tmp/sound
    python benchmarks/sound.py updates /tmp/data/keywords /tmp/sound
    python benchmarks/sound.py tasks /tmp/data/keywords /tmp/sound

The data is a part of the Arabic Speech Commands set (get_data.py prints source and layout); no speaker is in two parts.
Pre-training sees the recordings of the training part without their labels. Each seed draws the pre-training, the order
of the recordings, the head, the encoder from scratch and the labels that are used. Each row is a mean over seeds, with
the range. Finished parts are not repeated, so the same command resumes a study.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import patchloom
from patchloom.audio.augment import Excerpt
from patchloom.audio.config import Sound
from patchloom.audio.spectrogram import pictures
from patchloom.data.cache import cache_images
from patchloom.data.loader import plain_batches, training_batches
from patchloom.data.sources.open import open_data
from patchloom.data.stats import statistics_of_recordings
from patchloom.evaluate.classification import SCRATCH
from patchloom.evaluate.protocols import evaluate

WORDS = "yes no up down left right start stop open close".split()
SEEDS = (0, 1, 2)
# batch and updates that two cores manage in an hour, and the peak learning rate for them
BATCH, UPDATES, FINE_TUNING = 64, 600, 300
RATE = 3e-3


def pretrained(data: Path, out: Path, task: str, seed: int, updates: int = UPDATES) -> Path:
    """Pre-train an encoder of MP3's speech model by a task, for about ``updates`` updates, and return the run."""
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


def spotted(
    run: Path, data: Path, seed: int, labels: float, updates: int = FINE_TUNING, control: bool = False
) -> dict[str, float]:
    """Fine-tune a run: test accuracy in percent, beside its controls; stored in the run's folder."""
    kept = run / f"spotted-{updates}-{labels:g}.json"
    if not kept.exists():
        given = {"words": ",".join(WORDS), "batch_size": BATCH, "updates": updates, "lr": RATE, "precision": "float32"}
        report = evaluate("keywords", run, data, seed=seed, labels=labels, control=control, **given)
        found = {one.encoder.replace(run.name, "encoder"): 100 * one.value for one in report.results}
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def row(name: str, values: list[float]) -> None:
    """Print a line of a table: mean and range over seeds."""
    print(f"  {name:28} {statistics.mean(values):5.1f} ({min(values):.1f} to {max(values):.1f})", flush=True)


def compared(
    data: Path,
    out: Path,
    tasks: tuple[str, ...],
    shares: tuple[float, ...] = (1.0, 0.1),
    fine_tuning: int = FINE_TUNING,
) -> None:
    """Compare tasks after fine-tuning with all labels and with a tenth of them, beside scratch and raw features."""
    for labels in shares:
        # Training from scratch is the same for every task, so it is run only for the first.
        found = {
            task: [
                spotted(pretrained(data, out, task, seed), data, seed, labels, fine_tuning, control=task == tasks[0])
                for seed in SEEDS
            ]
            for task in tasks
        }
        print(f"\n{labels:.0%} of the labels, {UPDATES} updates of pre-training, {fine_tuning} of fine-tuning")
        controls = found[tasks[0]]
        for task, seeds in found.items():
            row(task, [by_name["encoder"] for by_name in seeds])
        for name in list(controls[0])[1:]:
            row(name, [by_name[name] for by_name in controls])
        for task, seeds in found.items():
            gains = [own["encoder"] - other[SCRATCH] for own, other in zip(seeds, controls, strict=True)]
            print(f"  {task} less from scratch, by seed: {', '.join(f'{gain:+.1f}' for gain in gains)}", flush=True)


def by_updates(data: Path, out: Path) -> None:
    """Measure accuracy by updates of pre-training, with a full decay of the rate in each (MP3's Table 6)."""
    print()
    for updates in (UPDATES // 4, UPDATES // 2, UPDATES):
        runs = [pretrained(data, out, "mp3", seed, updates) for seed in SEEDS]
        found = [spotted(run, data, seed, 1.0, control=updates == UPDATES) for seed, run in enumerate(runs)]
        row(f"{updates} updates", [by_name["encoder"] for by_name in found])


def pace(data: Path) -> None:
    """Measure recordings per second on one core: from FLAC, from the cache, and as spectrograms."""
    torch.set_num_threads(1)
    source, sound = open_data(data).train.subset(range(1024)), Sound()
    stats = statistics_of_recordings(source, sound, sample=256)
    assert stats.sound is not None
    heard = source.heard_as(stats.sound)
    cached = cache_images(heard, "whole")
    for i in range(len(cached)):  # stores them
        cached.read(i)
    cached.close()
    waves = next(plain_batches(heard, sound.size, 256, channels=1)).views[0]
    raw = torch.randint(-(2**12), 2**12, (256, 1, 1, sound.samples), dtype=torch.int16)
    ways = {
        "read from FLAC": lambda: [heard.read(i) for i in range(256)],
        "read from the cache": lambda: [cached.read(i) for i in range(256)],
        "made into pictures": lambda: pictures(raw, stats.sound),
        "read, cut and made into pictures": lambda: next(
            training_batches(heard, Excerpt(stats.sound), 256, 0, 0, 1, channels=1)
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
    parser.add_argument("what", choices=("pace", "keywords", "longer", "updates", "tasks"))
    parser.add_argument("paths", nargs="+", type=Path, help="data, and folder of the runs")
    asked = parser.parse_args()
    if asked.what == "pace":
        pace(*asked.paths)
    elif asked.what == "updates":
        by_updates(*asked.paths)
    elif asked.what == "longer":
        compared(*asked.paths, ("mp3",), (1.0,), 4 * FINE_TUNING)
    else:
        compared(*asked.paths, ("mp3",) if asked.what == "keywords" else ("mp3", "mae", "droppos"))
