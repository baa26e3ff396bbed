"""Which images to label first: methods of choice against random ones, by what a classifier learns from the labels.

A pool of images without labels is represented by the frozen features of an encoder that was pre-trained on images of
its field. A method chooses a few of them to be labelled; a classifier is trained on the features of these, and tested
on other images.

    python benchmarks/curation.py measure POOL.npz TEST.npz OUT.json --name CIFAR-10   # features by patchloom embed
    python benchmarks/curation.py measure POOL.npz TEST.npz RARE.json --rare airplane --name "CIFAR-10, 5 % airplane"
    python benchmarks/curation.py table OUT.json RARE.json

Methods, all on features of length 1: random; the images nearest to the centroids of k-means (medoids); TypiClust
(2202.02794), the image in the densest place of each cluster; MaxHerding (2407.12212), which maximises the mean
similarity of all images to their most similar chosen one; k-centre (1708.00489). Classifiers: logistic regression
(scikit-learn, C = 1, on standardised features) and the nearest chosen image. Each draw has its own seed of the method,
and its own half of the pool; all methods of a draw choose from the same half.

THE RULE, fixed on 2026-11-28 before any figure was seen: a method is advised at a budget if, by the linear classifier,
its difference from random over the draws has a 95 % interval (Student, paired by draw) above zero in at least two
thirds of the sets and encoders, and below zero in none. If several are, the one with the largest mean difference is. If
none is, "random" is the advice.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.preprocessing import StandardScaler

import patchloom
from patchloom.curate import features_of
from patchloom.data.sources.open import open_data
from patchloom.embed.curation import find_neighbours, herding, near_pairs
from patchloom.evaluate.settings import EvalSettings

BUDGETS, DRAWS = (10, 20, 50, 100, 200, 400), 10
RARE = 0.05  # share of the rare class
NEIGHBOURS, LEAST_CLUSTER = 20, 5  # TypiClust
CENTROIDS = 500


def random(units: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.choice(len(units), count, replace=False)


def _clusters(units: np.ndarray, count: int, rng: np.random.Generator) -> KMeans:
    return KMeans(count, n_init=1, random_state=int(rng.integers(2**31))).fit(units)


def medoids(units: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the images nearest to the centroids of k-means, int64 [count]."""
    found = _clusters(units, count, rng)
    gaps = found.transform(units)
    chosen = list[int]()
    for centroid in range(count):
        order = gaps[:, centroid].argsort()
        chosen.append(next(int(i) for i in order if int(i) not in chosen))
    return np.array(chosen)


def typical(units: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return TypiClust's choice, int64 [count]: of each cluster, the largest first, the image in the densest place."""
    found = _clusters(units, min(count, CENTROIDS), rng)
    members = [np.flatnonzero(found.labels_ == number) for number in range(found.n_clusters)]
    kept = [one for one in members if len(one) > LEAST_CLUSTER] or members
    taken = [list[int]() for _ in kept]
    chosen = list[int]()
    while len(chosen) < count:
        number = min(range(len(kept)), key=lambda k: (len(taken[k]) >= len(kept[k]), len(taken[k]), -len(kept[k])))
        inside = units[kept[number]]
        gaps = np.sqrt(np.maximum(2 - 2 * inside @ inside.T, 0))
        near = np.sort(gaps, axis=1)[:, 1 : 1 + min(NEIGHBOURS, max(1, len(inside) // 2))]
        order = near.mean(axis=1).argsort()
        one = next(int(kept[number][i]) for i in order if int(kept[number][i]) not in taken[number])
        taken[number].append(one)
        chosen.append(one)
    return np.array(chosen)


def max_herding(units: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return MaxHerding's choice, int64 [count]."""
    return np.array(herding(torch.from_numpy(units), count))


def centre(units: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the choice of k-centre, int64 [count]: the farthest image from all chosen ones, in turn."""
    chosen = [int(rng.integers(len(units)))]
    nearest = units @ units[chosen[0]]
    while len(chosen) < count:
        chosen.append(int(nearest.argmin()))
        nearest = np.maximum(nearest, units @ units[chosen[-1]])
    return np.array(chosen)


METHODS: dict[str, Callable[[np.ndarray, int, np.random.Generator], np.ndarray]] = {
    "random": random,
    "medoids": medoids,
    "typical": typical,
    "herding": max_herding,
    "k-centre": centre,
}


def unit(features: np.ndarray) -> np.ndarray:
    """Return features of length 1, centred on their mean."""
    centred = features - features.mean(axis=0)
    return (centred / np.linalg.norm(centred, axis=1, keepdims=True)).astype(np.float32)


def scores(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, score: Callable[..., float]
) -> tuple[float, float]:
    """Return the score of the linear classifier and of the nearest labelled image."""
    nearest = labels[(unit_with(train, test)).argmax(axis=1)]
    if len(np.unique(labels)) == 1:
        return float(score(truth, np.full(len(truth), labels[0]))), float(score(truth, nearest))
    scale = StandardScaler().fit(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence
        fitted = LogisticRegression(C=1.0, max_iter=200).fit(scale.transform(train), labels)
    return float(score(truth, fitted.predict(scale.transform(test)))), float(score(truth, nearest))


def unit_with(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Return the cosine similarities of test images to labelled ones, both centred on the mean of the test."""
    mean = test.mean(axis=0)
    one, two = (features - mean for features in (test, train))
    return (one / np.linalg.norm(one, axis=1, keepdims=True)) @ (two / np.linalg.norm(two, axis=1, keepdims=True)).T


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return features and classes of a file of embeddings, or of one split of it, as in ``FILE.npz@test``."""
    file, _, split = str(path).partition("@")
    with np.load(file) as found:
        kept = found["splits"] == split if split else np.ones(len(found["vectors"]), bool)
        return found["vectors"][kept].astype(np.float32), found["classes"][found["labels"][kept]]


def measure(pool: Path, test: Path, out: Path, name: str, rare: str) -> None:
    """Write the scores of each method, budget and draw."""
    (features, labels), (others, truth) = load(pool), load(test)
    score: Callable[..., float] = balanced_accuracy_score
    if rare:
        assert rare in labels and rare in truth, f"there is no class {rare}"
        labels, truth = (np.where(one == rare, rare, "others") for one in (labels, truth))
    found: dict[str, dict[str, list[tuple[float, float]]]] = {method: {} for method in METHODS}
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        half = rng.permutation(len(features))[: len(features) // 2]
        if rare:
            few = half[labels[half] == rare]
            half = np.concatenate([half[labels[half] != rare], few[: int(RARE / (1 - RARE) * (len(half) - len(few)))]])
        units = unit(features[half])
        for method, choose in METHODS.items():
            for budget in BUDGETS:
                chosen = half[choose(units, budget, np.random.default_rng([draw, budget]))]
                assert len(np.unique(chosen)) == budget
                got = scores(features[chosen], labels[chosen], others, truth, score)
                found[method].setdefault(str(budget), []).append(got)
        print(f"{name}: draw {draw + 1} of {DRAWS}", flush=True)
    out.write_text(json.dumps({"name": name, "classes": len(np.unique(truth)), "scores": found}))


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of paired differences, and its 95 % interval."""
    gaps = one - other
    half = float(stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps)))
    mean = float(gaps.mean())
    return mean, mean - half, mean + half


def table(files: list[Path]) -> None:
    """Print the differences from random of all sets, and the advice by the rule."""
    found = [json.loads(file.read_text()) for file in files]
    against: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for kind, number in (("linear", 0), ("nearest", 1)):
        for one in found:
            print(f"\n{one['name']}, {kind}: balanced accuracy of random, and differences from it in points\n")
            print(f"| labels | random | {' | '.join(name for name in METHODS if name != 'random')} |")
            print(f"| --- | {' | '.join(['---'] * len(METHODS))} |")
            for budget in BUDGETS:
                own = {name: np.array(its[str(budget)])[:, number] for name, its in one["scores"].items()}
                gaps = {name: difference(own[name], own["random"]) for name in METHODS if name != "random"}
                cells = [f"{100 * a:+.1f} [{100 * b:+.1f}, {100 * c:+.1f}]" for a, b, c in gaps.values()]
                print(f"| {budget} | {own['random'].mean():.1%} | {' | '.join(cells)} |")
                if kind == "linear":
                    for name, gap in gaps.items():
                        against.setdefault((name, budget), []).append(gap)
    print()
    for budget in BUDGETS:
        held = {}
        for (name, of), gaps in against.items():
            better = sum(low > 0 for _, low, _ in gaps)
            if of == budget and 3 * better >= 2 * len(gaps) and not any(high < 0 for *_, high in gaps):
                held[name] = float(np.mean([mean for mean, *_ in gaps]))
        print(f"{budget} labels: {max(held, key=lambda name: held[name]) if held else 'random'}")


# Planted near copies and faults.


COPIES, FAULTS = 50, 10  # planted of each kind: fewer faults than neighbours, since faults of one kind are alike
ASKED = (0.85, 0.9, 0.95, 0.98)


def saved_again(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=20)
    return Image.open(file)


def cut(image: Image.Image) -> Image.Image:
    width, height = image.size
    left, top = round(0.1 * width), round(0.1 * height)
    return image.crop((left, top, width, height)).resize((width, height), Image.Resampling.BICUBIC)


def half_black(image: Image.Image) -> Image.Image:
    made = image.copy()
    made.paste((0, 0, 0), (0, image.height // 2, image.width, image.height))
    return made


def noise(image: Image.Image) -> Image.Image:
    drawn = np.random.default_rng([*image.tobytes()[:8]]).integers(0, 256, (image.height, image.width, 3), np.uint8)
    return Image.fromarray(drawn)


COPIED: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG of quality 20": saved_again,
    "brighter by a third": lambda image: ImageEnhance.Brightness(image).enhance(4 / 3),
    "without 10 % of each side": cut,
    "half as large": lambda image: image.resize((image.width // 2, image.height // 2)),
}
FAULTY: dict[str, Callable[[Image.Image], Image.Image]] = {
    "half black": half_black,
    "noise": noise,
    "one colour": lambda image: Image.new("RGB", image.size, image.resize((1, 1)).getpixel((0, 0))),
    "negative": lambda image: Image.eval(image, lambda value: 255 - value),
    "upside down": lambda image: image.rotate(180),
}


def plant(images: Path, run: Path, out: Path) -> None:
    """Print how many planted copies and faults are found among the images of a folder, for several thresholds."""
    if not out.exists():
        shutil.copytree(images, out)
        files = sorted(path for path in out.rglob("*") if path.suffix in (".jpg", ".png"))
        chosen = iter(np.random.default_rng(0).permutation(len(files)).tolist())
        for number, (name, change) in enumerate((COPIED | FAULTY).items()):
            for one in islice(chosen, COPIES if name in COPIED else FAULTS):
                changed = change(Image.open(files[one]).convert("RGB"))
                changed.save(files[one].with_name(f"{files[one].stem}.planted{number}.png"))
                if name in FAULTY:
                    files[one].unlink()
    vit, card = patchloom.load_encoder(run)
    source = open_data(out).train
    found = features_of(vit, card, source, EvalSettings(device="cpu", workers=0))
    near, small = find_neighbours(found.tokens["mean"]), found.tokens["thumbnails"]
    names = [source.place(i) or "" for i in found.indices.tolist()]
    kind = np.array([int(name.split(".planted")[1][0]) if ".planted" in name else -1 for name in names])
    print(f"{len(names)} images, {COPIES} copies and {FAULTS} faults of each kind planted, by {card.name}\n")
    print(f"| correlation | {' | '.join(COPIED)} | other pairs |")
    print(f"| --- | {' | '.join('---' for _ in COPIED)} | --- |")
    for least in ASKED:
        pairs = {frozenset(pair) for pair in near_pairs(near, small, least)}
        ours = {pair for pair in pairs if len({names[i].split(".")[0] for i in pair}) == 1}
        counts = [sum(any(kind[i] == number for i in pair) for pair in ours) for number in range(len(COPIED))]
        print(f"| {least:g} | {' | '.join(map(str, counts))} | {len(pairs - ours)} |")
    order = (-near.isolation()).argsort(kind="stable")
    print("\n| fault | in the first 1 % | 5 % | 10 % | median rank, share of all |\n| --- | --- | --- | --- | --- |")
    for number, name in enumerate(FAULTY, len(COPIED)):
        ranks = np.flatnonzero(kind[order] == number) / len(order)
        cells = [f"{(ranks < share).mean():.0%}" for share in (0.01, 0.05, 0.1)]
        print(f"| {name} | {' | '.join(cells)} | {np.median(ranks):.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table", "plant"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--rare", default="", help="a class that is made rare, against all others")
    asked = parser.parse_args()
    if asked.what == "table":
        table(asked.paths)
    elif asked.what == "plant":
        plant(*asked.paths)
    else:
        measure(*asked.paths, asked.name, asked.rare)


if __name__ == "__main__":
    main()
