"""Which images to label first: methods of choice against random ones, by what a classifier learns from the labels.

A pool of images without labels is represented by the frozen features of an encoder that was pre-trained on images of
its field. A method chooses a few of them to be labelled; a classifier is trained on the features of these, and tested
on other images.

    python benchmarks/curation.py measure POOL.npz TEST.npz OUT.json --name CIFAR-10   # features by patchloom embed
    python benchmarks/curation.py measure POOL.npz TEST.npz RARE.json --rare airplane --name "CIFAR-10, 5 % airplane"
    python benchmarks/curation.py frames CAMVID RUN FRAMES.json        # frames to label, by the mIoU of patches
    python benchmarks/curation.py table OUT.json RARE.json FRAMES.json
    python benchmarks/curation.py plant IMAGES RUN PLANTED             # near copies and faults that curate finds

Methods, all on features of length 1: random; the images nearest to the centroids of k-means (medoids); TypiClust
(2202.02794), the image in the densest place of each cluster; MaxHerding (2407.12212), which maximises the mean
similarity of all images to their most similar chosen one; k-centre (1708.00489). Classifiers: logistic regression
(scikit-learn, C = 1, on standardised features), the nearest chosen image, and for files of all patch tokens an
attentive probe. Each draw has its own seed of the method, and its own half of the pool; all methods of a draw choose
from the same half.

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
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, jaccard_score
from sklearn.preprocessing import StandardScaler
from torch import nn

import patchloom
from patchloom.curate import features_of
from patchloom.data.sources.open import open_data
from patchloom.embed.curation import find_neighbours, herding, near_pairs
from patchloom.embed.embed import vector_extractor
from patchloom.evaluate.features import each_batch
from patchloom.evaluate.protocols.attentive import EfficientPool
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.encode import input_size
from patchloom.options.verbs import LAST

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
    taken = [list[int]() for _ in members]
    chosen = list[int]()

    def turn(number: int) -> tuple[bool, bool, int, int]:
        size, done = len(members[number]), len(taken[number])
        return done >= size, size <= LEAST_CLUSTER, done, -size  # small clusters once the others are used up

    while len(chosen) < count:
        number = min(range(len(members)), key=turn)
        inside = units[members[number]]
        gaps = np.sqrt(np.maximum(2 - 2 * inside @ inside.T, 0))
        near = np.sort(gaps, axis=1)[:, 1 : 1 + min(NEIGHBOURS, max(1, len(inside) // 2))]
        order = near.mean(axis=1).argsort() if near.size else np.arange(len(inside))
        one = next(int(members[number][i]) for i in order if int(members[number][i]) not in taken[number])
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
) -> dict[str, float]:
    """Return the score of each classifier; of features [n d], or of tokens [n p d], of which ``attentive`` is."""
    pooled, others = (one.mean(axis=1) if one.ndim == 3 else one for one in (train, test))
    found = {"nearest": float(score(truth, labels[unit_with(pooled, others).argmax(axis=1)]))}
    if len(np.unique(labels)) == 1:
        constant = float(score(truth, np.full(len(truth), labels[0])))
        return found | dict.fromkeys(("linear", *["attentive"] * (train.ndim == 3)), constant)
    found["linear"] = float(score(truth, logistic(pooled, labels, others)))
    if train.ndim == 3:
        found["attentive"] = float(score(truth, by_attention(train, labels, test)))
    return found


def logistic(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    scale = StandardScaler().fit(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence
        fitted = LogisticRegression(C=1.0, max_iter=200).fit(scale.transform(train), labels)
    answer: np.ndarray = fitted.predict(scale.transform(test))
    return answer


def by_attention(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Return the answers of an efficient probe of 32 queries: 150 steps of AdamW at 1e-3 on all images at once."""
    torch.manual_seed(0)
    names, numbers = np.unique(labels, return_inverse=True)
    x, y, queries = torch.from_numpy(train), torch.from_numpy(numbers), torch.from_numpy(test)
    std, mean = torch.std_mean(x, (0, 1))
    x, queries = ((one - mean) / std for one in (x, queries))
    pool = EfficientPool(x.shape[2])
    net = nn.Sequential(pool, nn.BatchNorm1d(pool.out, affine=False), nn.Linear(pool.out, len(names)))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    with torch.inference_mode():
        return names[net.eval()(queries).argmax(1).numpy()]


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


def draws_of(
    name: str,
    features: np.ndarray,
    half_of: Callable[[np.random.Generator], np.ndarray],
    score_of: Callable[[np.ndarray], dict[str, float]],
    budgets: Sequence[int],
) -> dict[str, Any]:
    """Return the scores by method, budget and draw, of the images ``score_of`` is given the numbers of."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {method: {} for method in METHODS}
    for draw in range(DRAWS):
        half = half_of(np.random.default_rng(draw))
        units = unit(features[half])
        for method, choose in METHODS.items():
            for budget in budgets:
                chosen = half[choose(units, budget, np.random.default_rng([draw, budget]))]
                assert len(np.unique(chosen)) == budget
                found[method].setdefault(str(budget), []).append(score_of(chosen))
        print(f"{name}: draw {draw + 1} of {DRAWS}", flush=True)
    return {"name": name, "scores": found}


def measure(pool: Path, test: Path, out: Path, name: str, rare: str) -> None:
    """Write the scores of each method, budget and draw."""
    (features, labels), (others, truth) = load(pool), load(test)
    if rare:
        assert rare in labels and rare in truth, f"there is no class {rare}"
        labels, truth = (np.where(one == rare, rare, "others") for one in (labels, truth))

    def half_of(rng: np.random.Generator) -> np.ndarray:
        half = rng.permutation(len(features))[: len(features) // 2]
        if not rare:
            return half
        few, rest = half[labels[half] == rare], half[labels[half] != rare]
        return np.concatenate([rest, few[: int(RARE / (1 - RARE) * len(rest))]])

    def score_of(chosen: np.ndarray) -> dict[str, float]:
        return scores(features[chosen], labels[chosen], others, truth, balanced_accuracy_score)

    pooled = features.mean(axis=1) if features.ndim == 3 else features
    out.write_text(json.dumps(draws_of(name, pooled, half_of, score_of, BUDGETS)))


# Frames to label for segmentation.


FRAMES = 10, 20, 50, 100
VOID = 11  # of CamVid


def frames(camvid: Path, run: Path, out: Path) -> None:
    """Write the mIoU of patches, by a classifier of the patches of the chosen frames; a half of the frames a draw."""
    vit, card = patchloom.load_encoder(run)
    side, take = input_size(vit)[0], vector_extractor(vit, None, "patches", LAST)
    tokens, maps = {}, {}
    for split in ("train", "test"):
        source = open_data(camvid / "images" / split).train
        made = list[torch.Tensor]()

        def keep(found: dict[str, torch.Tensor], _: object, made: list[torch.Tensor] = made) -> None:
            made.append(found["patches"])

        each_batch(vit, card, source, lambda images: {"patches": take(images)}, keep, torch.device("cpu"), 64)
        tokens[split] = torch.cat(made).numpy()
        grid = round(tokens[split].shape[1] ** 0.5)
        files = [camvid / "labels" / split / f"{Path(source.describe(i)).stem}.png" for i in range(len(source))]
        maps[split] = np.stack([majority(file, side, grid) for file in files])
    truth = maps["test"].flatten()
    known = truth != VOID
    others = tokens["test"].reshape(-1, tokens["test"].shape[2])[known]

    def mean_iou(truth: np.ndarray, answer: np.ndarray) -> float:
        return float(jaccard_score(truth, answer, average="macro", labels=range(VOID), zero_division=0))

    def score_of(chosen: np.ndarray) -> dict[str, float]:
        labels = maps["train"][chosen].flatten()
        some = tokens["train"][chosen].reshape(len(labels), -1)[labels != VOID]
        return scores(some, labels[labels != VOID], others, truth[known], mean_iou)

    n = len(tokens["train"])
    found = draws_of(
        f"CamVid, {card.name}", tokens["train"].mean(axis=1), lambda rng: rng.permutation(n)[: n // 2], score_of, FRAMES
    )
    out.write_text(json.dumps(found | {"score": "mIoU of patches"}))


def majority(file: Path, side: int, grid: int) -> np.ndarray:
    """Return the commonest class of each patch [grid * grid] of the square in the middle of a label map."""
    image = Image.open(file)
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    square = image.crop((left, top, left + short, top + short)).resize((side, side), Image.Resampling.NEAREST)
    cells = np.asarray(square).reshape(grid, side // grid, grid, side // grid).swapaxes(1, 2).reshape(grid * grid, -1)
    return np.array([np.bincount(cell).argmax() for cell in cells])


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
    for kind in ("linear", "nearest", "attentive"):
        for one in found:
            if kind not in next(iter(one["scores"]["random"].values()))[0]:
                continue
            score = one.get("score", "balanced accuracy")
            print(f"\n{one['name']}, {kind}: {score} of random, and differences from it in points\n")
            print(f"| labels | random | {' | '.join(name for name in METHODS if name != 'random')} |")
            print(f"| --- | {' | '.join(['---'] * len(METHODS))} |")
            for budget in map(int, one["scores"]["random"]):
                own = {name: np.array([a[kind] for a in its[str(budget)]]) for name, its in one["scores"].items()}
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
    "without 10 % of two sides": cut,
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
    parser.add_argument("what", choices=("measure", "table", "frames", "plant"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--name", default="")
    parser.add_argument("--rare", default="", help="a class that is made rare, against all others")
    asked = parser.parse_args()
    if asked.what == "table":
        table(asked.paths)
    elif asked.what == "frames":
        frames(*asked.paths)
    elif asked.what == "plant":
        plant(*asked.paths)
    else:
        measure(*asked.paths, asked.name, asked.rare)


if __name__ == "__main__":
    main()
