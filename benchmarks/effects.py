"""Rate of false claims of "better" and "worse" for two equal models: by simulation, and by real trainings.

    python benchmarks/effects.py images                 # over test images: accuracy, mIoU, AP
    python benchmarks/effects.py trainings              # over trainings, too
    python benchmarks/effects.py groups                 # over images that are alike within groups, such as patients
    python benchmarks/effects.py regression             # coverage of R², Spearman's ρ and MAE, and false claims
    for name in camvid raccoon; do python benchmarks/get_data.py $name /tmp/data; done
    python benchmarks/get_data.py cifar10 /tmp/data
    python benchmarks/effects.py trials /tmp/data /tmp/trials

``images`` and ``trainings`` draw test images that differ in difficulty, content and number of objects, and the results
of two models from the same distribution, so every claim is false. They measure the rule of `patchloom.results.claims`
and the earlier one: percentile bootstraps over images, and one variance for both sides. ``trials`` evaluates an encoder
with fresh weights beside training from scratch, which is the same under another name.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.special import ndtri, stdtrit

from patchloom.dense.metrics import (
    THRESHOLDS,
    ClassMatches,
    mean_iou,
    pseudo_precision,
    pseudo_values,
    resampled_precision,
)
from patchloom.evaluate.protocols import evaluate
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.results import regression
from patchloom.results.claims import Claim, Difference, difference, difference_over_splits
from patchloom.results.classes import (
    MACRO_F1,
    PRECISION,
    Answers,
    auroc,
    average_precision,
    balanced_interval,
    class_results,
    macro_f1,
)
from patchloom.results.intervals import accuracy_interval, wilson

CLASSES, PIXELS = 11, 43_200
SPREADS = {"none": (0.0, 0.0), "equal": (0.02, 0.02), "unequal": (0.04, 0.005), "one side": (0.03, 0.0)}
# groups, images in each, and their correlation
GROUPS = ((5, 13, 0.2), (20, 10, 0.1), (20, 10, 0.25), (40, 25, 0.25), (200, 1, 0.1))
_MADE = (Claim.BETTER, Claim.WORSE)
_Z = 1.959963984540054


def claimed(found: Difference) -> bool:
    """Return whether one is called better than the other."""
    return found.claim in _MADE


def right_answers(n: int, models: int, rng: np.random.Generator) -> np.ndarray:
    """Draw right answers [models n] of equal models; images are easy or hard for all of them."""
    return rng.random((models, n)) < rng.beta(0.5, 0.8, n)


def grouped_answers(
    groups: int, each: int, correlation: float, models: int, rng: np.random.Generator, share: float = 0.6
) -> np.ndarray:
    """Draw right answers [models groups*each] of equal models; each has its own easy groups (beta-binomial)."""
    odds = (1 - correlation) / correlation
    means = rng.beta(share * odds, (1 - share) * odds, (models, groups, 1))
    return (rng.random((models, groups, each)) < means).reshape(models, -1).astype(float)


def label_maps(n: int, models: int, rng: np.random.Generator, moved: Sequence[float] = ()) -> list[torch.Tensor]:
    """Draw `overlaps` [n 3 k] of equal models; rare classes are in few images, small and hard.

    Args:
        n: number of images.
        models: number of models.
        rng: random generator.
        moved: shift of each model by its seed (log odds of a pixel).
    """
    share = 1 / np.arange(1, CLASSES + 1) ** 1.3
    there = rng.random((n, CLASSES)) < share**0.35
    there[:, 0] = True
    size = there * share * rng.lognormal(0, 0.9, (n, CLASSES))
    truth = np.round(PIXELS * size / size.sum(1, keepdims=True)).astype(np.int64)
    easy = rng.normal(0, 0.6, (n, 1)) + 1.2 - 2.2 * np.arange(CLASSES) / CLASSES
    found = []
    for number in range(models):
        odds = easy + rng.normal(0, 0.8, (n, CLASSES)) + (moved[number] if moved else 0)
        common = np.round(truth / (1 + np.exp(-odds))).astype(np.int64)
        taken_for = share * rng.lognormal(0, 1, (n, CLASSES))
        wrong = rng.multinomial((truth - common).sum(1), taken_for / taken_for.sum(1, keepdims=True))
        found.append(torch.from_numpy(np.stack([common, truth + wrong, truth], 1)))
    return found


def detections(n: int, models: int, rng: np.random.Generator) -> list[tuple[ClassMatches]]:
    """Draw the matches of equal detectors of one class; most images have one or two objects, some have ten."""
    objects, easy = 1 + rng.negative_binomial(1, 0.35, n), rng.normal(0, 0.7, n)
    found = []
    for _ in range(models):
        images = np.repeat(np.arange(n), objects)
        iou = 1 / (1 + np.exp(-(0.9 + easy[images] + rng.normal(0, 0.8, len(images)))))
        scores = 0.3 + 0.5 * iou + rng.normal(0, 0.15, len(images))
        wrong = np.repeat(np.arange(n), rng.poisson(1.0, n))  # where nothing is
        order = np.argsort(-np.concatenate([scores, rng.normal(0.4, 0.18, len(wrong))]), kind="stable")
        right = np.concatenate([iou >= THRESHOLDS[:, None], np.zeros((len(THRESHOLDS), len(wrong)), bool)], 1)
        places = np.concatenate([images, wrong])[order]
        flags = torch.from_numpy(right[:, order]), torch.ones(len(THRESHOLDS), len(order), dtype=torch.bool)
        found.append((ClassMatches(torch.from_numpy(places), *flags, torch.from_numpy(objects)),))
    return found


def percentile(apart: Callable[[torch.Tensor], torch.Tensor], n: int, rng: np.random.Generator, times: int) -> bool:
    """Return whether the percentile bootstrap, the earlier rule, separates two models.

    Args:
        apart: function from the number of draws of each image [t n] to differences [t].
        n: number of images.
        rng: random generator.
        times: number of draws t.
    """
    drawn = torch.from_numpy(rng.multinomial(n, np.full(n, 1 / n), times)).double()
    low, high = np.nanquantile(apart(drawn).numpy(), (0.025, 0.975))
    return bool(low > 0 or high < 0)


def two_of_accuracy(n: int, rng: np.random.Generator) -> tuple[bool, bool]:
    """Return whether two equal classifiers are separated by the new and the earlier rule, which are equal here."""
    one, other = right_answers(n, 2, rng)
    now = claimed(difference(one, other, trained=False))
    return now, now


def two_in_groups(groups: int, each: int, correlation: float, rng: np.random.Generator) -> tuple[bool, bool]:
    """Return whether two equal classifiers are separated over groups, and over images as if these were independent."""
    one, other = grouped_answers(groups, each, correlation, 2, rng)
    names = np.repeat(np.arange(groups), each)
    return claimed(difference(one, other, trained=False, groups=names)), claimed(difference(one, other, trained=False))


def two_of_segmentation(n: int, rng: np.random.Generator, draws: int = 400) -> tuple[bool, bool]:
    """Return whether two equal segmenters are separated by mIoU, by the new and the earlier rule."""
    one, other = label_maps(n, 2, rng)
    values = tuple([float(mean_iou(side.sum(0)))] for side in (one, other))
    sides = (pseudo_values(mean_iou, side)[None] for side in (one, other))

    def score(drawn: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return mean_iou((drawn @ side.double().flatten(1)).unflatten(1, side.shape[1:]))

    before = percentile(lambda drawn: score(drawn, one) - score(drawn, other), n, rng, draws)
    return claimed(difference(*sides, values, trained=False)), before


def two_of_detection(n: int, rng: np.random.Generator, draws: int = 200) -> tuple[bool, bool]:
    """Return whether two equal detectors are separated by AP, by the new and the earlier rule."""
    one, other = detections(n, 2, rng)
    whole = torch.ones(1, n, dtype=torch.float64)
    values = tuple([float(resampled_precision(side, whole))] for side in (one, other))
    sides = (pseudo_precision(side)[None] for side in (one, other))
    before = percentile(
        lambda drawn: resampled_precision(one, drawn) - resampled_precision(other, drawn), n, rng, draws
    )
    return claimed(difference(*sides, values, n=n, trained=False)), before


def trained(n: int, seeds: int, spreads: Sequence[float], rng: np.random.Generator) -> list[np.ndarray]:
    """Draw right answers [s n] of two equally good arms with the given spreads over seeds."""
    easy, arms = rng.normal(0, 1.2, n), []
    for spread in spreads:
        own = easy + rng.normal(0, 0.3, n)  # difference of the arms on each image
        odds = own + 5 * rng.normal(0, spread, (seeds, 1))  # 5: so that accuracies move by the spread
        arms.append(rng.random((seeds, n)) < 1 / (1 + np.exp(-odds)))
    return arms


def pooled(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the earlier rule, one variance over seeds for both, separates two arms."""
    seeds, n = one.shape
    gains = one.mean(0) - other.mean(0)
    middle = gains.sum() / (n + 2)
    images = ((gains @ gains + 1) / (n + 2) - middle**2) / (n + 2)
    over_seeds = (one.mean(1).var(ddof=1) + other.mean(1).var(ddof=1)) / seeds
    reach = math.hypot(_Z * math.sqrt(images), stdtrit(2 * (seeds - 1), 0.975) * math.sqrt(over_seeds))
    return bool(abs(middle) > reach)


def arms_of_accuracy(n: int, seeds: int, spreads: Sequence[float], rng: np.random.Generator) -> tuple[bool, bool]:
    """Return whether two equal arms are separated by the new and the earlier rule."""
    one, other = trained(n, seeds, spreads, rng)
    return claimed(difference(one, other)), pooled(one, other)


def arms_of_segmentation(n: int, seeds: int, spreads: Sequence[float], rng: np.random.Generator) -> bool:
    """Return whether two equal arms are separated by mIoU."""
    moved = [4 * one for spread in spreads for one in rng.normal(0, spread, seeds)]
    maps = label_maps(n, 2 * seeds, rng, moved)
    sides, values = [], []
    for arm in (maps[:seeds], maps[seeds:]):
        sides.append(torch.stack([pseudo_values(mean_iou, one) for one in arm]).numpy())
        values.append([float(mean_iou(one.sum(0))) for one in arm])
    return claimed(difference(*sides, tuple(values)))


def arms_over_splits(n: int, seeds: int, spreads: Sequence[float], rng: np.random.Generator) -> bool:
    """Return whether two equal arms are separated if each seed tests on a different fifth of ``n`` images."""
    arms = trained(n, seeds, spreads, rng)
    splits = [rng.permutation(n)[: n // 5] for _ in range(seeds)]
    shares = [[float(arm[s, split].mean()) for s, split in enumerate(splits)] for arm in arms]
    return claimed(difference_over_splits(*shares, n // 5))


def print_rates(what: str, wrong: Sequence[bool | tuple[bool, bool]]) -> None:
    """Print the share of false claims, with its 95 % interval; the new rule comes first."""
    columns = zip(*(one if isinstance(one, tuple) else (one,) for one in wrong), strict=True)
    texts = []
    for column in columns:
        share = sum(column) / len(column)
        low, high = wilson(share, len(column))
        texts.append(f"{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
    print(f"{what}: {'; before '.join(texts)} of {len(wrong):,}", flush=True)


def images(times: int) -> None:
    """Measure false claims over test images."""
    for name, two, share in (
        ("accuracy", two_of_accuracy, 5.0),
        ("mIoU", two_of_segmentation, 1.0),
        ("AP", two_of_detection, 0.5),
    ):
        for n in (3, 5, 10, 20, 50, 500):
            rng = np.random.default_rng(n)
            print_rates(f"{name}, {n} images", [two(n, rng) for _ in range(round(share * times))])


def in_groups(times: int) -> None:
    """Measure false claims over images in groups, by number and size of the groups and the correlation within them."""
    for groups, each, correlation in GROUPS:
        rng = np.random.default_rng(groups)
        found = [two_in_groups(groups, each, correlation, rng) for _ in range(times)]
        print_rates(f"accuracy, {groups} groups of {each}, correlation {correlation}", found)


def trainings(times: int) -> None:
    """Measure false claims over trainings."""
    for n in (500, 5000):
        for seeds in (2, 3, 5):
            for name, spreads in SPREADS.items():
                rng = np.random.default_rng(seeds)
                found = [arms_of_accuracy(n, seeds, spreads, rng) for _ in range(times)]
                print_rates(f"accuracy, {n} images, {seeds} trainings, spread {name}", found)
    for what, arms, n, share in (("mIoU", arms_of_segmentation, 50, 0.5), ("own splits", arms_over_splits, 500, 1.0)):
        for seeds in (2, 3, 5):
            for name, spreads in SPREADS.items():
                rng = np.random.default_rng(seeds)
                found = [arms(n, seeds, spreads, rng) for _ in range(round(share * times))]
                print_rates(f"{what}, {n} images, {seeds} trainings, spread {name}", found)


def of_classes(times: int) -> None:
    """Measure the coverage of intervals of measures by class, and false claims about balanced accuracy.

    Of two equally good classifiers, right answers are drawn by class; scores are normal, with a spread of the rare
    classes of 1 or 2 times that of the others. Average precision and macro F1 have intervals by bootstrap.
    """
    sizes = {
        (500, 20, 5): (0.97, 0.8, 0.7),
        (400, 60, 30): (0.97, 0.8, 0.7),
        (900, 50): (0.98, 0.6),
        (950, 50): (0.99, 0.3),
        (300, 30): (0.99, 0.95),
        (200, 200, 200, 200, 200): (0.9, 0.8, 0.7, 0.6, 0.5),
    }
    for counts, shares in sizes.items():
        rng, labels = np.random.default_rng(len(counts)), np.repeat(np.arange(len(counts)), counts)
        truth, covered, wrong = float(np.mean(shares)), [], []
        rarest, of_rarest = labels == len(counts) - 1, []
        for _ in range(times):
            one, other = rng.random((2, len(labels))) < np.array(shares)[labels]
            low, high = balanced_interval(one, labels)
            covered.append(low <= truth <= high)
            low, high = accuracy_interval(one[rarest])
            of_rarest.append(low <= shares[-1] <= high)
            wrong.append(claimed(difference(one, other, trained=False, classes=labels)))
        print_rates(f"classes of {counts}: balanced accuracy covered", covered)
        print_rates(f"classes of {counts}: recall of the last class covered", of_rarest)
        print_rates(f"classes of {counts}: false claims about balanced accuracy", wrong)
    for groups, each, correlation in GROUPS[1:]:
        rng, covered = np.random.default_rng(groups), []
        names = np.repeat(np.arange(groups), each)
        for _ in range(times):
            right = grouped_answers(groups, each, correlation, 1, rng)[0]
            low, high = balanced_interval(right, rng.permutation(len(right)) % 10 // 7, names)
            covered.append(low <= 0.6 <= high)
        print_rates(f"{groups} groups of {each}, correlation {correlation}: balanced accuracy covered", covered)
    for positives, negatives in ((5, 200), (10, 200), (30, 200), (50, 950)):
        labels = np.repeat([0, 1], (negatives, positives))
        for wanted in (0.7, 0.9, 0.97):
            for spread in (1, 2):
                rng, covered = np.random.default_rng(positives), []
                for _ in range(times):
                    scores = rng.normal(0, np.where(labels, spread, 1)) + labels * ndtri(wanted) * math.hypot(1, spread)
                    _, low, high = auroc(np.stack([-scores, scores], 1), labels)
                    covered.append(low <= wanted <= high)
                print_rates(f"{positives} positives, spread {spread}: AUROC {wanted} covered", covered)
    for positives, negatives in ((10, 190), (30, 570), (50, 950)):
        labels, rng = np.repeat([0, 1], (negatives, positives)), np.random.default_rng(positives)
        many, found = np.repeat([0, 1], (1_900_000, 100_000)), dict[str, list[bool]]()
        truth = _scored_values(many, rng)
        for _ in range(times // 5):
            rows = {one.measure: one for one in class_results("", "", {}, _drawn_answers(labels, rng), every=True)}
            for measure, value in truth.items():
                found.setdefault(measure, []).append(rows[measure].low <= value <= rows[measure].high)
        for measure, covered in found.items():
            print_rates(f"{positives} positives of {len(labels)}: {measure} {truth[measure]:.3f} covered", covered)


def _drawn_answers(labels: np.ndarray, rng: np.random.Generator) -> Answers:
    scores = rng.normal(0, 1, len(labels)) + 2 * labels
    return Answers(labels, (scores > 1.5).astype(np.int64), np.stack([-scores, scores], 1))


def _scored_values(labels: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    """Return macro F1 and average precision of very many images."""
    many, once = _drawn_answers(labels, rng), np.ones((1, len(labels)), np.int64)
    assert many.scores is not None
    precision = average_precision(many.scores, labels, once)
    return {MACRO_F1: float(macro_f1(many.confusion())), PRECISION: float(precision[0])}


def predicted_numbers(
    groups: int, each: int, kind: str, spread: float, models: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw targets [groups*each] and predictions [models groups*each] of equal models.

    Half of the error is noise of the target, which is common to all models. A quarter of the variance of what is
    predicted, and of the error, lies between groups of several images.

    Args:
        groups: number of groups.
        each: images in each; 1: no groups.
        kind: "normal"; "skewed" (log-normal targets); "hard" (errors grow with the targets); "biased" (predictions are
            shrunk and shifted).
        spread: standard deviation of the error over that of what could be predicted.
        models: number of models.
        rng: random generator.
    """

    def drawn() -> np.ndarray:
        own = rng.normal(size=(groups, each))
        return (own if each == 1 else 0.5 * rng.normal(size=(groups, 1)) + 0.75**0.5 * own).ravel()

    known = drawn()
    scale = spread * 0.5**0.5 * (np.exp(0.5 * known) if kind == "hard" else 1)
    if kind == "skewed":
        known = np.exp(0.7 * known)
    # noise of the target, which no model can predict, and errors of the models
    targets = known + scale * drawn()
    found = np.stack([known + scale * drawn() for _ in range(models)])
    return targets, 0.6 * found + 0.2 if kind == "biased" else found


def of_regression(times: int) -> None:
    """Measure the coverage of the intervals of R², Spearman's ρ and MAE, and false claims about equal models."""
    for kind in ("normal", "skewed", "hard", "biased"):
        for spread in (0.3, 1.0, 2.5):
            targets, found = predicted_numbers(400_000, 1, kind, spread, 1, np.random.default_rng(9))
            truth = {name: measure(targets, found[0])[0] for name, measure in regression.MEASURES.items()}
            for groups, each in ((60, 1), (300, 1), (20, 10), (40, 25)):
                rng, names = np.random.default_rng(groups), np.repeat(np.arange(groups), each)
                those = None if each == 1 else names
                covered: dict[str, list[bool]] = {name: [] for name in regression.MEASURES}
                wrong: dict[str, list[bool]] = {name: [] for name in regression.MEASURES}
                for _ in range(times):
                    targets, found = predicted_numbers(groups, each, kind, spread, 2, rng)
                    for name, measure in regression.MEASURES.items():
                        (value, terms), (other, its) = (measure(targets, one) for one in found)
                        low, high = regression.interval(name, value, terms, those)
                        covered[name].append(low <= truth[name] <= high)
                        sides = [regression.pseudo_values(*one, those)[None] for one in ((value, terms), (other, its))]
                        apart = difference(*sides, ([value], [other]), n=len(names), trained=False, unit="")
                        wrong[name].append(claimed(apart))
                what = f"{kind}, spread {spread}, {groups} {'images' if each == 1 else f'groups of {each}'}"
                for name, value in truth.items():
                    print_rates(f"{what}: {name} {value:.2f} covered", covered[name])
                    print_rates(f"{what}: {name} false claims", wrong[name])


def some(source: Path, out: Path, counts: dict[str, int]) -> None:
    """Copy the first images of each part, and their label maps."""
    for part, count in counts.items():
        for image in sorted((source / "images" / part).iterdir())[:count]:
            for file in (image, source / "labels" / part / f"{image.stem}.png"):
                (out / file.parent.relative_to(source)).mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, out / file.relative_to(source))


def trials(data: Path, out: Path, only: Path | None = None) -> None:
    """Run some of four evaluations of an encoder with fresh weights beside training from scratch; three seeds."""
    out.mkdir(parents=True, exist_ok=True)
    spec, encoder = EncoderSpec("nano", (32, 32), 4), out / "fresh.safetensors"
    torch.manual_seed(1234)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,) * 3, (0.25,) * 3, "mae", "fresh"), encoder)
    if not (out / "camvid").exists():
        some(data / "camvid", out / "camvid", {"train": 60, "test": 40})
    dense = {"validation": 0.0, "head_width": 16, "batch_size": 4, "workers": 0, "device": "cpu", "seeds": 3}
    small = {"max_train": 500, "epochs": 5, "workers": 0, "device": "cpu", "seeds": 3}
    asked = {
        "segment": ("segment", out / "camvid", {**dense, "ignore": 11, "steps": 60, "size": 64, "side": 64}),
        "detect": ("detect", data / "raccoon", {**dense, "steps": 60, "size": 96}),
        "finetune": ("finetune", data / "cifar10", small),
        "few-shot": ("few-shot", data / "cifar10", {**small, "max_train": None, "per_class": 30}),
    }
    for name in asked if only is None else [str(only)]:
        protocol, source, options = asked[name]
        report = evaluate(protocol, encoder, source, **options)
        print(f"\n{name}: {report.spread()}\n  {report.conclusion()}", flush=True)
        for one in report.others:
            print(f"  seed {one.seed} alone: {one.conclusion()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("images", "trainings", "groups", "classes", "regression", "trials"))
    parser.add_argument(
        "folders", nargs="*", type=Path, help="for trials: folder of the data, folder of results, and perhaps a trial"
    )
    parser.add_argument("--times", type=int, default=1000, help="simulated comparisons per cell")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "trials":
        trials(*given.folders)
    else:
        modes = {"images": images, "trainings": trainings, "groups": in_groups, "classes": of_classes}
        (modes | {"regression": of_regression})[given.what](given.times)
