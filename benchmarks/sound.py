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
BATCH, UPDATES = 64, 600
RATE = 3e-3


def pretrained(data: Path, out: Path, task: str, seed: int, updates: int = UPDATES) -> Path:
    """An encoder of MP3's speech model, pre-trained by a task for about so many updates."""
    folder = out / f"{task}-{updates}-{seed}"
    n = 0.95 * len(open_data(data).train)
    epochs = max(1, round(updates / (n // BATCH)))
    model = {"name": "vit_tiny_patch16_224", "embed_dim": 32, "depth": 8, "num_heads": 4, "mlp_ratio": 2.0}
    model |= {"class_token": True, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "pos_drop_rate": 0.1}
    chosen: dict[str, Any] = {"name": task}
    if task == "mp3":
        chosen |= {"context_mask_ratio": 0.0, "known_positions": 0.05}
    same = {"model": model, "positions": "sincos", "batch_size": BATCH, "weight_decay": 0.0, "precision": "float32"}
    patchloom.pretrain(data, chosen, out=folder, epochs=epochs, blr=RATE * 256 / BATCH, seed=seed, **same)
    return folder


def spotted(run: Path, data: Path, seed: int, labels: float, **options: Any) -> Report:
    """Fine-tuning of a run, beside the same from scratch."""
    given = {"words": ",".join(WORDS), "batch": BATCH, "updates": UPDATES, "lr": RATE, "precision": "float32"}
    return evaluate("keywords", run, data, seed=seed, labels=labels, **given, **options)
