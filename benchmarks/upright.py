"""Quarter turns as augmentation: what they change for images without an up, and for upright ones.

    python benchmarks/get_data.py cifar10 /tmp/data
    OMP_NUM_THREADS=1 python benchmarks/upright.py /tmp/data/cifar10 /tmp/upright  # half an hour of a busy core

Images of CIFAR-10 (200 of each class to train on, 200 to test on) as they are, and the same images, each turned by a
random multiple of 90 degrees, so that none has an up. `mae` and `extrema` are pre-trained on both in a plain loop with
a small encoder: with their usual random crops and mirror images, and with a random quarter turn before these. kNN
(k = 20) and a linear probe take the means of the patch tokens; images of probe and test lie as they lie in the set.
The seed draws weights, crops and masks; both arms of a seed start from the same weights. Finished parts are kept.

THE RULE, fixed on 2026-11-28 before any figure was seen: `check` proposes turns for a task if, on the images without
an up, the difference in accuracy (mean over kNN and linear, paired by seed) has a 95 % interval (Student) above zero.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

import numpy as np
import torch
from curation import difference
from PIL import Image

from patchloom.data.augment import ColoredCrop, plan_colors, recolor
from patchloom.evaluate.logistic import linear_probe
from patchloom.evaluate.protocols.knn import knn_answers
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode
from patchloom.nets.optimizer import parameter_groups
from patchloom.schedules import cosine_rate
from patchloom.tasks import MAE, ExtreMA, Task
from patchloom.withhold.encoder_input import all_patches

SEEDS = 0, 1, 2
SETS, ARMS, PROTOCOLS = ("turned", "upright"), ("usual", "turns"), ("kNN", "linear")
TASKS: dict[str, type[Task]] = {"mae": MAE, "extrema": ExtreMA}
OPTIONS = {"mae": {"decoder_depth": 1}, "extrema": {"masks": 2, "loss": "infonce", "momentum": 0.75, "head_width": 128}}
EPOCHS = {"mae": 30, "extrema": 8}
IMAGES, SIDE, PATCH, BATCH, LR, K = 200, 32, 8, 64, 1.5e-3, 20
MODEL = {"embed_dim": 64, "depth": 3, "num_heads": 2}

Labelled = tuple[torch.Tensor, torch.Tensor]  # images and their classes


@cache
def opened(folder: Path, turned: bool) -> Labelled:
    """Return images of a part, uint8 [n 3 32 32], and their classes, int64 [n]."""
    rng, images, labels = np.random.default_rng(0), [], []
    for label, one in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        files = sorted(one.iterdir())
        for i in rng.permutation(len(files))[:IMAGES]:
            turn = int(rng.integers(4)) * turned
            pixels = torch.from_numpy(np.array(Image.open(files[i]).convert("RGB"))).permute(2, 0, 1)
            images.append(torch.rot90(pixels, turn, (1, 2)))
            labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def views_of(task: Task, images: list[torch.Tensor], rng: np.random.Generator) -> list[torch.Tensor]:
    """Return the views [b 3 h w] that a task takes of images, normalised; colours change a batch at a time."""
    if isinstance(task.augment, ColoredCrop):
        each, draws = zip(*(task.augment.split(one, rng) for one in images), strict=True)
        plans = [plan_colors(torch.stack(draw), 3) for draw in zip(*draws, strict=True)]
    else:
        each, plans = [task.augment(one, rng) for one in images], [None]
    views = [torch.stack(view) for view in zip(*each, strict=True)]
    shown = [view / 255 if plan is None else recolor(view, plan) for view, plan in zip(views, plans, strict=True)]
    return [(view - task.mean) / task.std for view in shown]


def pretrained(name: str, images: torch.Tensor, turns: bool, seed: int) -> Task:
    """Train a task on images [n 3 h w]."""
    torch.manual_seed(seed)
    task = TASKS[name](build_encoder(EncoderSpec("nano", (SIDE, SIDE), PATCH, options=MODEL)), **OPTIONS[name])
    values = (images / 255).transpose(0, 1).flatten(1)
    task.normalized_by(values.mean(1).tolist(), values.std(1).tolist())
    task.train()
    decay = 0.1 if name == "extrema" else 0.05
    optimizer = torch.optim.AdamW(parameter_groups(task, decay), betas=(0.9, 0.95))
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    each = len(images) // BATCH
    steps, step = EPOCHS[name] * each, 0
    for _ in range(EPOCHS[name]):
        for batch in torch.from_numpy(rng.permutation(len(images))[: each * BATCH]).view(each, BATCH):
            for group in optimizer.param_groups:
                group["lr"] = cosine_rate(step, steps, warmup=steps // 10, peak=LR)
            quarters = rng.integers(4, size=BATCH) * turns
            pairs = zip(batch.tolist(), quarters.tolist(), strict=True)
            shown = [torch.rot90(images[i], quarter, (1, 2)).contiguous() for i, quarter in pairs]
            task(*views_of(task, shown, rng), progress=step / steps, generator=generator).loss.backward()
            torch.nn.utils.clip_grad_norm_(task.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            task.after_step(step / steps)
    return task.eval()


@torch.inference_mode()
def features(task: Task, images: torch.Tensor) -> torch.Tensor:
    """Return the means of the patch tokens, float32 [n d]."""
    prepared = ((images / 255 - task.mean) / task.std).split(500)
    return torch.cat([encode(task.encoder, all_patches(some, task.geometry.n)).mean(1) for some in prepared])


def answers(
    task: Task, train: tuple[torch.Tensor, torch.Tensor], test: tuple[torch.Tensor, torch.Tensor]
) -> np.ndarray:
    """Return whether each test image is classified correctly, by kNN and by the linear probe, bool [2 n]."""
    gallery, queries = features(task, train[0]), features(task, test[0])
    nearest = knn_answers(gallery, train[1], queries, (K,))[K][0]
    probe, _ = linear_probe(gallery, train[1])
    return np.stack([(found == test[1]).numpy() for found in (nearest, probe.scores(queries).argmax(1))])


def measured(source: Path, out: Path, name: str, task: str, arm: str, seed: int) -> np.ndarray:
    """Return `answers` of one training, made if they are not there."""
    kept = out / f"{name}-{task}-{arm}-{seed}.npy"
    if not kept.exists():
        train, test = (opened(source / part, name == "turned") for part in ("train", "test"))
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, answers(pretrained(task, train[0], arm == "turns", seed), train, test))
    return np.load(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="CIFAR-10 as images in folders: train/CLASS, test/CLASS")
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| images | task | protocol | usual | turns | difference in points |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in SETS:
        for task in TASKS:
            found = {
                arm: np.array([measured(asked.source, asked.out, name, task, arm, seed) for seed in SEEDS]).mean(-1)
                for arm in ARMS
            }  # [seeds protocols]
            rows = [(protocol, *(found[arm][:, i] for arm in ARMS)) for i, protocol in enumerate(PROTOCOLS)]
            rows.append(("mean of both", *(found[arm].mean(1) for arm in ARMS)))
            for protocol, usual, turns in rows:
                mean, low, high = (100 * value for value in difference(turns, usual))
                shares = f"{100 * usual.mean():.1f} % | {100 * turns.mean():.1f} %"
                print(
                    f"| {name} | {task} | {protocol} | {shares} | {mean:+.1f} [{low:+.1f}, {high:+.1f}] |", flush=True
                )


if __name__ == "__main__":
    main()
