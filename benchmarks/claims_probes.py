"""Section of claims.md on the linear and the attentive probe: seven tasks by both, and the verdicts that differ.

Unlike the claims, it takes the seeds that are there: with one, intervals are over the test images alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
from claims_arms import FROZEN, SEEDS, UNTRAINED
from claims_judge import CONTRADICTED, HOLDS, UNDECIDED, Decided, Noise, decide, noise_of
from claims_kept import Part, joined
from claims_runs import WHERE, Study
from scipy import stats

PROBES = "probes"
TASKS = ("mae", "simmim", "droppos", "mp3", "restore", "extrema", "lut")
PROBED = (*TASKS, UNTRAINED)
REQUIRED = ("mae", "extrema", UNTRAINED)
MASKED = ("mae", "simmim")
FEW, MANY = 3, 15  # tasks up to which a correlation says nothing; pairs from which chance decides one
LINEAR, ATTENTIVE = "linear", "attentive"
GAIN = "attentive minus linear"
WORDS = {HOLDS: "better", CONTRADICTED: "worse", UNDECIDED: "undecided"}
TITLE = "Linear and attentive probes"
SAID = """A linear probe on the mean of the patch tokens ranks masked image modelling below its worth: on ImageNet-1k
MAE's ViT-B has 67.8 % by it and 75.5 % by an attentive probe, SimMIM's 47.1 and 64.9 %, while encoders with a trained
class token gain less than a point (Psomas et al. 2025, arXiv 2506.10178, and its program's table). The encoders of the
other sections were not kept. The tasks below were therefore pre-trained again, with the sizes and the images of this
page, and measured by `python benchmarks/claims.py probes`; the other sections stay as they were measured. Everything
here is as small as there."""

Found = Mapping[str, Mapping[str, np.ndarray]]  # by measure and arm, [s n] whether each test image is correct


def measured(study: Study) -> tuple[list[int], Found]:
    """Return the seeds that all arms have, and their results; arms without the first seed are left out."""

    def has(arm: str, seed: int) -> bool:
        return study.is_as_declared(arm, seed) and all(
            study.result_path(arm, seed, f"{name}.npy").exists() for name in FROZEN
        )

    arms = [arm for arm in PROBED if has(arm, 0)]
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in (*FROZEN, GAIN)}
    if not {*REQUIRED} <= {*arms}:
        return [], found
    seeds = [seed for seed in range(SEEDS) if all(has(arm, seed) for arm in arms)]
    for name in FROZEN:
        for arm in arms:
            each = [np.load(study.result_path(arm, seed, f"{name}.npy")) for seed in seeds]
            found[name][arm] = np.stack(each).astype(np.int8)
    found[GAIN] = {arm: right - found[LINEAR][arm] for arm, right in found[ATTENTIVE].items()}
    return seeds, found


def compared(better: np.ndarray, worse: np.ndarray, noise: Noise | None) -> Decided:
    """Decide a comparison by the rule of the page; without ``noise``, of a single seed, over the test images alone."""
    if noise is not None:
        return decide(better, worse, noise)
    gains = (better.astype(float) - worse)[0]
    half = stats.norm.ppf(0.975) * gains.std(ddof=1) / np.sqrt(len(gains))
    points = float(gains.mean())
    return Decided(points, points - half, points + half, (points,), 1.0)


def probes_part(study: Study) -> Part | None:
    """Return the results of the section; None without a seed of all arms."""
    seeds, found = measured(study)
    if not seeds:
        return None
    noises = {name: noise_of(its) if len(seeds) > 1 else None for name, its in found.items()}

    def of(name: str, one: str, other: str) -> Decided:
        return compared(found[name][one], found[name][other], noises[name])

    shown = (LINEAR, ATTENTIVE, GAIN, "knn")
    lines = [f"| % or points | {' | '.join(shown)} |", f"| --- |{' --- |' * len(shown)}"]
    by_both = sorted(found[ATTENTIVE], key=lambda arm: -found[ATTENTIVE][arm].mean())
    for arm in by_both:
        lines.append(f"| {arm} | {' | '.join(cell(found[name][arm], name == GAIN) for name in shown)} |")
    heading = "| minus untrained, points | linear | | attentive | |"
    lines += ["", heading, "| --- | --- | --- | --- | --- |"]
    for arm in by_both:
        if arm != UNTRAINED:
            both = (of(name, arm, UNTRAINED) for name in (LINEAR, ATTENTIVE))
            lines.append(f"| {arm} | {' | '.join(f'{interval(its)} | {WORDS[its.verdict]}' for its in both)} |")
    pairs = [(one, other) for one, other in combinations(by_both, 2)]
    verdicts = {pair: tuple(WORDS[of(name, *pair).verdict] for name in (LINEAR, ATTENTIVE)) for pair in pairs}
    changed = {pair: words for pair, words in verdicts.items() if words[0] != words[1]}
    reversed_ = [pair for pair, words in changed.items() if UNDECIDED not in words]
    if changed:
        lines += ["", "| verdicts that differ | than | linear | attentive |", "| --- | --- | --- | --- |"]
    lines += [f"| {one} | {other} | {words[0]} | {words[1]} |" for (one, other), words in changed.items()]
    tasks = [arm for arm in by_both if arm != UNTRAINED]
    orders = [[found[name][arm].mean() for arm in tasks] for name in (LINEAR, ATTENTIVE)]
    first = ", ".join(sorted(tasks, key=lambda arm: -found[LINEAR][arm].mean()))
    gains = {arm: of(GAIN, arm, "extrema") for arm in MASKED if arm in tasks}
    lacking = ", ".join(f"`{arm}`" for arm in TASKS if arm not in tasks)
    rule = (
        "One seed: intervals are over the test images alone, and say nothing about another training."
        if len(seeds) == 1
        else f"{len(seeds)} seeds, judged by the rule of this page."
    )
    published = {HOLDS: "the order holds", CONTRADICTED: "it is contradicted", UNDECIDED: "it is undecided"}
    chance = "; one of so many may differ by chance alone" * (len(pairs) > MANY)
    alike = f" (Spearman's ρ of the {len(tasks)} tasks {stats.spearmanr(*orders).statistic:+.2f})" * (len(tasks) > FEW)
    told = (
        f"{rule} The verdicts of {len(changed)} of {len(pairs)} pairs differ between the probes, {len(reversed_)} of "
        f"them are reversed{chance}. By the linear probe the order is {first}; by the attentive one it is "
        f"{', '.join(tasks)}{alike}. In the published order masked image modelling gains more by attention than "
        f"contrastive learning does. Here the gain minus that of `extrema` is "
        + ", and ".join(f"for `{arm}` {interval(its)} points ({published[its.verdict]})" for arm, its in gains.items())
        + "."
        + f" Not measured yet: {lacking}." * bool(lacking)
    )
    paths = (study.result_path(arm, seed, WHERE) for arm in PROBED for seed in seeds)
    places = "; ".join(sorted({path.read_text() for path in paths if path.exists()}))
    lines += ["", told, *["", f"Measured {places}."] * bool(places)]
    return Part(f"seeds {', '.join(map(str, seeds))}", "\n".join(lines))


def probes_section(part: Part) -> str:
    """Return the section."""
    return joined(f"## {TITLE}", SAID, part.text(PROBES))


def cell(right: np.ndarray, signed: bool) -> str:
    """Format mean and range over seeds, as "36.1 (35.8-36.4)", or with signs; of one seed the number alone."""
    each, form = 100 * right.mean(1), "+.1f" if signed else ".1f"
    low, high = (f"{end:{form}}" for end in (each.min(), each.max()))
    between = f" ({low} to {high})" if signed else f" ({low}-{high})"
    return f"{each.mean():{form}}{between * (len(each) > 1)}"


def interval(its: Decided) -> str:
    """Format a difference in points with its interval."""
    return f"{100 * its.points:+.1f} [{100 * its.low:+.1f}, {100 * its.high:+.1f}]"
