"""Writes claims.md from what a study of `claims.py` has made."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from claims_declared import ARMS, CLAIMS, MEASURES, SAME, SCRATCH, SEEDS, Claim
from claims_judge import CONTRADICTED, HOLDS, UNDECIDED, Decided, Noise, decide, noise_of
from claims_runs import UNTRAINED, Study
from label_free import by_tasks, spearman

from patchloom.evaluate.label_free.rows import MEASURES as LABEL_FREE
from patchloom.files import write_whole
from patchloom.machine import processor

# [s n] which test images are right, by arm
Scores = Mapping[str, np.ndarray]
NOT_RUN = "not run yet"


def write_page(study: Study, page: Path) -> None:
    """All claims as a page, those too that are not finished, and a line of each on the screen."""
    scores = {measure: scores_of(study, measure) for measure in MEASURES}
    noises = {name: noise_of(runs) for name, found in scores.items() if len(runs := trained(found)) > 1}
    found = {name: decided(claim, scores, noises) for name, claim in CLAIMS.items()}
    for name, claim in CLAIMS.items():
        print(f"{claim.title}: {verdict_of(found[name])}")
    sections = [section(claim, found[name], scores) for name, claim in CLAIMS.items()]
    labels = predicted(study, scores)
    text = [beginning(study), summary(found), *sections, labels, noise_section(noises, found)]
    write_whole(page, "\n\n".join(wrapped(part) for part in text if part) + "\n")


def wrapped(text: str) -> str:
    """With lines of at most 120 characters; those of tables, titles and code are left alone."""
    parts = text.strip().split("\n\n")
    plain = [part if part.startswith(("|", "#", "```")) else " ".join(part.split()) for part in parts]
    return "\n\n".join(part if "\n" in part else textwrap.fill(part, 120) for part in plain)


def scores_of(study: Study, measure: str) -> Scores:
    """Of every arm that has this measure with every seed."""
    found = {arm: study.read(arm, measure) for arm in [*ARMS, UNTRAINED]}
    return {arm: right for arm, right in found.items() if right is not None}


def trained(scores: Scores) -> Scores:
    """Those whose seeds are independent of those of all others: neither an ensemble nor another use of an encoder."""
    return {arm: right for arm, right in scores.items() if arm in ARMS and (ARMS[arm].task or arm == SCRATCH)}


def decided(claim: Claim, scores: Mapping[str, Scores], noises: Mapping[str, Noise]) -> list[Decided | None]:
    """Of each comparison; None where it is not run yet."""
    found: list[Decided | None] = []
    for one in claim.comparisons:
        there = scores[one.measure]
        ready = one.better in there and one.worse in there and one.measure in noises
        found.append(decide(there[one.better], there[one.worse], noises[one.measure]) if ready else None)
    return found


def verdict_of(found: list[Decided | None]) -> str:
    """Of a claim: how many of its comparisons have which verdict."""
    counts = Counter(NOT_RUN if one is None else one.verdict for one in found)
    if len(counts) == 1:
        return f"**{next(iter(counts))}**"
    words = (HOLDS, UNDECIDED, CONTRADICTED, NOT_RUN)
    return ", ".join(f"**{word}** in {counts[word]} of {len(found)}" for word in words if counts[word])


def beginning(study: Study) -> str:
    """What was run, on what, and by which rule."""
    model = SAME["model"]
    measures = "; ".join(f"`{name}`: {what}" for name, what in MEASURES.items())
    return f"""# The papers' claims in miniature

```bash
mkdir /tmp/data && tar -xf ../shared/data/cifar10.tar -C /tmp/data
python benchmarks/claims.py                  # all of it; goes on where it was stopped
python benchmarks/claims.py droppos mp3      # some of it
python benchmarks/claims.py --table          # this page again, from what is there
```

This page is written by `claims.py`: what is claimed and compared stands in `claims_declared.py`, and was fixed before
the runs. Written {datetime.now(timezone.utc):%Y-%m-%d}, {processor("model name")}, two runs at a time with one thread
each.

**Everything here is small.** ViTs of width {model["embed_dim"]} and depth {model["depth"]} (0.46 M parameters), images
of {SAME["img_size"]} pixels in patches of {SAME["patch_size"]} (64 positions, as in MP3's runs on CIFAR-100);
{study.epochs:g} epochs of {10 * study.images:,} of CIFAR-10's training images without labels, in batches of
{SAME["batch_size"]}, where the papers train for hundreds of epochs of a million images. So a verdict says what holds
*at the beginning of a training*, and an effect that needs a longer one cannot be seen. {SEEDS} seeds of everything: weights, held-out images, draws, and
the fine-tuning. Measured on {10 * study.images:,} test images: {measures}. Fine-tuning is `patchloom evaluate finetune`
with the recipe `small`, 20 epochs of 500 labelled images or 4 of all; frozen features are the mean of the patch tokens.

**The rule.** Differences are paired over seeds and over test images. A comparison **holds** where the 95 % interval of
the difference lies above zero, is **contradicted** where it lies below, and is **undecided** otherwise; then the last
column says how large the difference would have had to be. Intervals are bootstraps over test images, and over seeds
with the spread that all arms have in common; three seeds alone would give none (`claims_judge.py` says why)."""


def summary(found: Mapping[str, list[Decided | None]]) -> str:
    """A row a claim."""
    lines = ["## Verdicts", "", "| claim | published | measured, points | verdict |", "| --- | --- | --- | --- |"]
    for name, claim in CLAIMS.items():
        there = [one.points for one in found[name] if one is not None]
        measured = f"{len(there)} differences of {min(there):+.1%} to {max(there):+.1%}" if there else ""
        measured = measured.replace("%", "") + f", {SEEDS} seeds" * bool(there)
        lines.append(f"| {claim.title} | {claim.published} | {measured} | {verdict_of(found[name])} |")
    return "\n".join(lines)


def section(claim: Claim, found: list[Decided | None], scores: Mapping[str, Scores]) -> str:
    """A claim: a row a comparison, then what else was measured of its arms."""
    lines = [f"## {claim.title}", "", f"{claim.source}. {claim.published}", "", f"Tested: {claim.hypothesis}", ""]
    lines += ["| measure | said to be better | than | difference | by seed | verdict | could see |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for one, its in zip(claim.comparisons, found, strict=True):
        cells = [NOT_RUN, "", "", ""]
        if its is not None:
            each = ", ".join(f"{100 * value:+.1f}" for value in its.each)
            interval = f"{100 * its.points:+.1f} [{100 * its.low:+.1f}, {100 * its.high:+.1f}]"
            cells = [interval, each, f"**{its.verdict}**", f"{100 * its.could_see:.1f}"]
        lines.append(f"| {one.measure} | {one.better} | {one.worse} | {' | '.join(cells)} |")
    shown = list(dict.fromkeys([*(one.measure for one in claim.comparisons), *claim.beside]))
    lines += ["", f"| accuracy, % | {' | '.join(shown)} |", f"| --- |{' --- |' * len(shown)}"]
    for arm in (*claim.arms, UNTRAINED):
        cells = [mean_and_range(scores[measure].get(arm)) for measure in shown]
        lines += [f"| {arm} | {' | '.join(cells)} |"] * any(cells)
    return "\n".join([*lines, *(("", claim.tries) if claim.tries else ())])


def mean_and_range(right: np.ndarray | None) -> str:
    """Over seeds, as "36.1 (35.8-36.4)"."""
    if right is None:
        return ""
    each = 100 * right.mean(1)
    return f"{each.mean():.1f} ({each.min():.1f}-{each.max():.1f})"


def predicted(study: Study, scores: Mapping[str, Scores]) -> str:
    """Which measure without labels goes with which accuracy, over all encoders of the study."""
    places = [(arm, seed) for arm in ARMS for seed in range(SEEDS) if ARMS[arm].task]
    places = [(arm, seed) for arm, seed in places if study.label_free(arm, seed).exists()]
    kinds = {
        measure: [place for place in places if place[0] in scores[measure]] for measure in ("few", "linear", "knn")
    }
    if any(len({ARMS[arm].task["name"] for arm, _ in kind}) < 4 for kind in kinds.values()):
        return ""
    lines = ["## Which figure without labels predicts quality", "", _LABEL_FREE, ""]
    lines += [f"| Spearman's ρ | {' | '.join(kinds)} |", f"| --- |{' --- |' * len(kinds)}"]
    for figure in LABEL_FREE:
        cells = []
        for measure, kind in kinds.items():
            values = [json.loads(study.label_free(arm, seed).read_text())[figure] for arm, seed in kind]
            x, y = np.array(values), np.array([scores[measure][arm][seed].mean() for arm, seed in kind])
            tasks = [ARMS[arm].task["name"] for arm, _ in kind]
            interval = by_tasks(x, y, [np.arange(len(kind))], tasks, np.random.default_rng(0))
            cells.append(f"{float(spearman(x, y)):+.2f} {interval}")
        lines.append(f"| {figure} | {' | '.join(cells)} |")
    counts = " and ".join(dict.fromkeys(f"{len(kind)}" for kind in kinds.values()))
    return "\n".join([*lines, "", f"{counts} encoders."])


_LABEL_FREE = """Measured on 500 test images of every encoder of this page (`patchloom evaluate label-free`), beside its
accuracies. The intervals are of draws of tasks with all their arms and seeds, since the arms of one task are alike. A
figure goes with quality where its interval excludes zero. [Another study](README.md) has lengths and data besides."""


def noise_section(noises: Mapping[str, Noise], found: Mapping[str, list[Decided | None]]) -> str:
    """What seeds do to each measure, and how many verdicts chance alone would give."""
    if not noises:
        return ""
    said = "; ".join(
        f"`{name}` {100 * noise.deviation:.2f} points ({noise.freedom} degrees of freedom)"
        for name, noise in noises.items()
    )
    count = sum(one is not None for each in found.values() for one in each)
    return f"""## What chance does

Standard deviation of one run over seeds, of all arms of a measure: {said}. Of {count} comparisons without any
difference, about {0.025 * count:.1f} would be said to hold, and as many to be contradicted."""
