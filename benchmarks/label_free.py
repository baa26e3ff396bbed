"""Correlation of measures without labels with accuracy by labels, over 35 short runs and 2 untrained encoders.

    python benchmarks/get_data.py cifar5k /tmp/data          # for /tmp/data/cifar5k in place of shapes
    OMP_NUM_THREADS=1 python benchmarks/label_free.py train shapes /tmp/st/shapes
    OMP_NUM_THREADS=1 python benchmarks/label_free.py measure shapes /tmp/st/shapes --results /tmp/measured/shapes
    python benchmarks/label_free.py table /tmp/measured/shapes

A folder with train/ and test/ can take the place of shapes. The runs see 2,500 training images in a flat folder,
without labels. The measures without labels use 300 test images, which no run saw. kNN (k = 20) and the linear probe use
the same mean of the patch tokens, and classify all test images by 2,500 labelled training images. Finished runs and
measures are not repeated; ``measure`` skips unfinished runs.

The table has Spearman's ρ between each measure and each accuracy: over all encoders, where longer training raises many
numbers at once; and within equal epochs, as the mean of the ρ of each length, which matters for the choice of a task.
Intervals are the middle 95 % of 2,000 draws of encoders with replacement, within the lengths; and, because two seeds of
one task are similar, of draws of tasks, with both their seeds.

Whether a measure chooses the epoch of one run for dense use is another question:

    python benchmarks/get_data.py camvid /tmp/data
    python benchmarks/label_free.py epochs /tmp/data/camvid /tmp/st/epochs --task mae --epochs 160
    python benchmarks/label_free.py epochs-table /tmp/st/epochs/measured

Three runs (seeds) on the training frames keep eight encoders each (`pretrain --keep_every`). The measures see the test
frames without labels; the score is the mIoU of `evaluate segment --head linear` on them. The table has Kendall's τ and
Spearman's ρ over the epochs of a run, mean and range over seeds, and what the epoch that a measure chooses lacks to the
best one, beside the last epoch. DSE weighs its parts over the epochs of a run, as its paper does.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.stats import kendalltau, rankdata

import patchloom
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.evaluate.features import extract
from patchloom.evaluate.logistic import linear_probe
from patchloom.evaluate.protocols.knn import knn_accuracies
from patchloom.evaluate.protocols.label_free import (
    ALPHA,
    DENSE_DIMENSIONS,
    DSE,
    IDEST,
    MEASURES,
    RANKME,
    SEPARATION,
    DenseStructure,
    label_free_rows,
    weighted_dse,
)
from patchloom.evaluate.settings import EvalSettings, stratified_subset
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin

TASKS = "mae droppos mp3 simmim restore extrema lut".split()
SEEDS, EPOCHS = (0, 1), (4, 16, 32)
SEEN, LABELLED, MEASURED = 2500, 2500, 300  # images of the runs; labelled ones for kNN; of the measures without labels
SAME = {"img_size": 32, "patch_size": 8, "batch_size": 128, "threads": 1, "workers": 0}
LABELS = ("kNN", "linear")
EFFECT = "the task's own effect"
NEAR_ONE = "nearness of α to 1"  # the best value by its paper
DRAWS = 2000
# baselines that a task has to beat, and the value of a perfect answer
TO_BEAT = {"chance": 1, "on other images": 1, "blurred copy": 0, "flat patches": 0, "what was given": 0}

# (task, epochs, seed, values by measure) for each encoder
Table = list[tuple[str, int, int, dict[str, float]]]


def train(data: str, out: Path) -> None:
    """Train the 35 runs, seed by seed, short ones first."""
    flat = out / "images"
    if not flat.exists():
        part, source = out / ".images", open_data(data).train
        part.mkdir(parents=True, exist_ok=True)
        for i in np.sort(np.random.default_rng(0).permutation(len(source))[:SEEN]):
            Image.fromarray(source.read(int(i)).permute(1, 2, 0).numpy()).save(part / f"{i:05d}.png")
        part.rename(flat)
    for run in runs(out):
        task, epochs, seed = run.name.rsplit("-", 2)
        patchloom.pretrain(flat, task, out=run, epochs=int(epochs), seed=int(seed), **SAME)


def runs(out: Path) -> list[Path]:
    """Return the folders of the 35 runs, in running order."""
    every = [(epochs, 0) for epochs in EPOCHS] + [(epochs, 1) for epochs in EPOCHS[:2]]
    return [out / f"{task}-{epochs}-{seed}" for epochs, seed in every for task in TASKS]


def encoders(out: Path) -> Iterator[tuple[str, torch.nn.Module, EncoderCard, float | None]]:
    """Yield name, encoder, card and effect of the task, of each finished run and of one untrained encoder per seed."""
    card = None
    for run in runs(out):
        if (run / "summary.txt").exists():
            vit, card = patchloom.load_encoder(run)
            yield run.name, vit, card, own_effect(run)
    if card is not None:
        for seed in SEEDS:
            yield f"untrained-0-{seed}", untrained_twin(card, seed=seed)[0], card, None


def own_effect(run: Path) -> float:
    """Return the share of the way from the baseline to perfect, from the last validation in metrics.csv."""
    with (run / "metrics.csv").open() as file:
        last = [line for line in csv.DictReader(file) if line["held_out"]][-1]
    found = {name: float(last[f"baseline:{name}"]) for name in TO_BEAT if last.get(f"baseline:{name}")}
    (perfect,) = {TO_BEAT[name] for name in found}
    baseline = max(found.values()) if perfect else min(found.values())
    return (float(last["held_out"]) - baseline) / (perfect - baseline)


def measure(data: str, out: Path, results: Path) -> None:
    """Write a JSON file for every encoder: all measures without labels, its task's effect, and both accuracies."""
    results.mkdir(parents=True, exist_ok=True)
    settings = EvalSettings(device="cpu", workers=0, cache=False)
    train = test = None
    for name, vit, card, effect in encoders(out):
        kept = results / f"{name}.json"
        if kept.exists():
            continue
        if train is None or test is None:
            opened = open_data(data)
            assert opened.test is not None, f"{data} brings no test images"
            train = stratified_subset(opened.train, LABELLED, 0)
            test = opened.test
        rows = label_free_rows(name, vit, card, test, settings, images=MEASURED)
        found = {row.measure: row.value for row in rows}
        if effect is not None:
            found[EFFECT] = effect
        found |= accuracies(vit, card, train, test)
        kept.write_text(json.dumps(found, indent=1))
        print(f"{name}: kNN {found['kNN']:.1%}, linear {found['linear']:.1%}", flush=True)


def accuracies(vit: torch.nn.Module, card: EncoderCard, train: Source, test: Source) -> dict[str, float]:
    """Return the accuracies of kNN (k = 20) and the linear probe, by the mean of the patch tokens."""
    fitted, asked = (extract(vit, card, source, device="cpu") for source in (train, test))
    (x, y), (queries, truth) = ((one.pooled("mean"), one.labels) for one in (fitted, asked))
    probe, _ = linear_probe(x, y, seed=0, device=torch.device("cpu"))
    knn = knn_accuracies(x, y, queries, truth, (20,))[20]
    return {"kNN": knn, "linear": probe.right(queries, truth).double().mean().item()}


def read(results: Path) -> Table:
    """Read the results of all encoders."""
    found = []
    for path in sorted(results.glob("*.json")):
        task, epochs, seed = path.stem.rsplit("-", 2)
        values = json.loads(path.read_text())
        found.append((task, int(epochs), int(seed), values | {NEAR_ONE: -abs(values[ALPHA] - 1)}))
    return found


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's ρ along the last axis [... n]; nan if all values are equal."""
    x, y = (rankdata(one, axis=-1) for one in (x, y))
    x, y = (one - one.mean(-1, keepdims=True) for one in (x, y))
    with np.errstate(invalid="ignore"):
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def grouped(x: np.ndarray, y: np.ndarray, groups: list[np.ndarray], draws: list[np.ndarray]) -> str:
    """Return the mean of ρ over groups of encoders with its interval, from drawn indices [t ...] within each group."""
    rho = np.mean([spearman(x[group], y[group]) for group in groups])
    drawn = [spearman(x[group][each], y[group][each]) for group, each in zip(groups, draws, strict=True)]
    low, high = np.nanquantile(np.mean(drawn, axis=0), (0.025, 0.975))
    return f"{rho:+.2f} [{low:+.2f}, {high:+.2f}]"


def table(results: Path) -> None:
    """Print ρ of every measure with both accuracies, and the range of the accuracies."""
    encoders = read(results)
    lengths = [epochs for epochs in EPOCHS if sum(one[1] == epochs for one in encoders) > 3]
    groups = [np.array([i for i, one in enumerate(encoders) if one[1] == epochs]) for epochs in lengths]
    said = ", ".join(f"{len(group)} of {epochs} epochs" for group, epochs in zip(groups, lengths, strict=True))
    print(f"\n{results.name}: {len(encoders)} encoders, {said}")
    for name in LABELS:
        values = [one[3][name] for one in encoders]
        print(f"  {name}: {min(values):.1%} to {max(values):.1%}")
    print(f"\n| | {' | '.join(f'{name}: all | within epochs | the same, by tasks' for name in LABELS)} |")
    print(f"| --- |{' --- |' * 3 * len(LABELS)}")
    for measured in (*MEASURES, NEAR_ONE, EFFECT):
        cells = []
        for name in LABELS:
            rng = np.random.default_rng(0)
            there = np.array([i for i, one in enumerate(encoders) if measured in one[3]])
            x, y = (np.array([one[3].get(of, np.nan) for one in encoders]) for of in (measured, name))
            cells.append(grouped(x, y, [there], [rng.integers(len(there), size=(DRAWS, len(there)))]))
            cells.append(
                grouped(x, y, groups, [rng.integers(len(group), size=(DRAWS, len(group))) for group in groups])
            )
            low, high = by_tasks(x, y, groups, [one[0] for one in encoders], rng)
            cells.append(f"[{low:+.2f}, {high:+.2f}]")
        print(f"| {measured} | {' | '.join(cells)} |")


def by_tasks(
    x: np.ndarray, y: np.ndarray, groups: list[np.ndarray], tasks: list[str], rng: np.random.Generator
) -> tuple[float, float]:
    """Return the interval of the mean ρ over groups, from draws of tasks with all their seeds."""
    names = sorted({tasks[i] for group in groups for i in group})
    of_task = [[[i for i in group if tasks[i] == name] for name in names] for group in groups]
    drawn = []
    for chosen in rng.integers(len(names), size=(DRAWS, len(names))):
        each = [np.array(sum((task[c] for c in chosen), []), int) for task in of_task]
        drawn.append(np.mean([spearman(x[some], y[some]) for some in each if len(some)]))
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return float(low), float(high)


# Checkpoints of one run, and dense scores.


KEPT = 8  # encoders of a run
DENSE_SAME = {"img_size": 96, "patch_size": 8, "batch_size": 64}
PROBED = {"head": "linear", "control": False, "steps": 200, "size": 96, "side": 132, "ignore": 11}
MIOU = "mIoU"
WEIGHTED, LAST = "DSE, λ over the run", "the last epoch"
LESS_IS_BETTER = (ALPHA, IDEST)  # by their papers, for α of 1 or more


def epochs_of(data: Path, out: Path, task: str, epochs: int, seeds: int, **options: object) -> None:
    """Train a run a seed, and write a JSON file for each of its kept encoders: measures without labels, and mIoU."""
    results = out / "measured"
    results.mkdir(parents=True, exist_ok=True)
    settings = EvalSettings(device="cpu", workers=0, cache=False)
    every = max(1, epochs // KEPT)
    for seed in range(seeds):
        run = out / f"{task}-{seed}"
        if not (run / "summary.txt").exists():
            given = DENSE_SAME | options
            patchloom.pretrain(
                data / "images" / "train", task, out=run, epochs=epochs, seed=seed, keep_every=every, **given
            )
        test = open_data(str(data / "images" / "test")).train
        for file in sorted((run / "encoders").glob("epoch-*.safetensors")):
            kept = results / f"{task}-{int(file.stem.removeprefix('epoch-'))}-{seed}.json"
            if kept.exists():
                continue
            vit, card = patchloom.load_encoder(file)
            found = {row.measure: row.value for row in label_free_rows(file.stem, vit, card, test, settings)}
            segmented = patchloom.evaluate("segment", file, data, **PROBED)
            found[MIOU] = segmented.quoted[0].value
            kept.write_text(json.dumps(found, indent=1))
            print(f"{kept.stem}: mIoU {found[MIOU]:.1%}, DSE {found[DSE]:.3f}, RankMe {found[RANKME]:.1f}", flush=True)


def chosen(x: np.ndarray, score: np.ndarray) -> float:
    """Return how far the score [n] of the epoch with the largest ``x`` [n] lies below the best one."""
    return float(score.max() - score[int(x.argmax())])


def epochs_table(results: Path) -> None:
    """Print the agreement of each measure with mIoU over the epochs of a run, and what its choice lacks."""
    runs: dict[tuple[str, int], list[tuple[int, dict[str, float]]]] = {}
    for path in sorted(results.glob("*.json")):
        task, epochs, seed = path.stem.rsplit("-", 2)
        runs.setdefault((task, int(seed)), []).append((int(epochs), json.loads(path.read_text())))
    columns: dict[str, list[tuple[float, float, float]]] = {}
    for found in runs.values():
        found.sort(key=lambda one: one[0])
        values = [one for _, one in found]
        score = np.array([one[MIOU] for one in values])
        parts = [DenseStructure(one[SEPARATION], one[DENSE_DIMENSIONS]) for one in values]
        measured = {name: np.array([one.get(name, np.nan) for one in values]) for name in MEASURES}
        measured = {name: -x if name in LESS_IS_BETTER else x for name, x in measured.items()}
        measured |= {WEIGHTED: np.array(weighted_dse(parts)), LAST: np.array([epoch for epoch, _ in found], float)}
        for name, x in measured.items():
            if np.isfinite(x).all():
                tau = float(kendalltau(x, score).statistic)
                columns.setdefault(name, []).append((tau, float(spearman(x, score)), chosen(x, score)))
        print(f"mIoU over epochs {[epoch for epoch, _ in found]}: {' '.join(f'{one:.1%}' for one in score)}")
    print(f"\n{len(runs)} runs\n\n| measure | Kendall's τ | Spearman's ρ | points below the best | best chosen |")
    print("| --- | --- | --- | --- | --- |")
    for name, each in columns.items():
        tau, rho, lacks = (np.array(one) for one in zip(*each, strict=True))
        cells = [f"{one.mean():+.2f} ({one.min():+.2f} to {one.max():+.2f})" for one in (tau, rho)]
        cells.append(f"{100 * lacks.mean():.1f} ({100 * lacks.min():.1f} to {100 * lacks.max():.1f})")
        print(f"| {name} | {' | '.join(cells)} | {int((lacks == 0).sum())} of {len(lacks)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure", "table", "epochs", "epochs-table"))
    parser.add_argument("paths", nargs="+", help="data and folder of the runs; for table, folder of the results")
    parser.add_argument("--results", type=Path, help="folder of the results (default: measured/ in that of the runs)")
    parser.add_argument("--task", default="mae", help="task of epochs")
    parser.add_argument("--epochs", type=int, default=160, help="length of the runs of epochs")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs of epochs")
    asked = parser.parse_args()
    if asked.what == "table":
        table(Path(asked.paths[0]))
    elif asked.what == "epochs-table":
        epochs_table(Path(asked.paths[0]))
    elif asked.what == "epochs":
        epochs_of(Path(asked.paths[0]), Path(asked.paths[1]), asked.task, asked.epochs, asked.seeds)
    else:
        source, folder = asked.paths[0], Path(asked.paths[1])
        if asked.what == "train":
            train(source, folder)
        else:
            measure(source, folder, asked.results or folder / "measured")
