"""Writes claims.md from what a study of `claims.py` has made."""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from claims_arms import ARMS, FROZEN, MEASURES, SAME, SCRATCH, SEEDS, UNTRAINED
from claims_declared import CLAIMS, Claim, Comparison
from claims_free import HOW, SAID, SECTION, TITLE, free_summary, free_table
from claims_judge import CONTRADICTED, HOLDS, UNDECIDED, Decided, Noise, Scores, decide, noise_of
from claims_kept import Part, joined, kept_on
from claims_runs import WHERE, Study

from patchloom.runs.verdict import Verdict, read_health
from patchloom.system.files import write_whole

NOT_RUN = "not run yet"
UNREST = 1.5  # so many times the spread of other arms is told
# what has to be known of a comparison, each with its mark before it
RESTLESS = f"¹ Seeds move this difference more than {UNREST:g} times as far as others: see the end."
UNLEARNT = "² A run of one of the two did not learn its task, or too little to tell."
ADDED = "³ Added when results had been seen."
FREE = "label-free"  # the name of the claim on figures without labels


def write_page(study: Study, page: Path) -> None:
    """All claims as a page, those too that are not finished, and a line of each on the screen.

    Of a claim of which the study has less than the page, what the page says is measured stays: so one claim can be run
    by itself, elsewhere, or again.
    """
    kept = kept_on(page)
    scores = {measure: scores_of(study, measure) for measure in MEASURES}
    noises = {name: noise_of(runs) for name, found in scores.items() if len(runs := trained(found)) > 1}
    rows, sections, count = [], [], 0
    for name, claim in CLAIMS.items():
        found = decided(claim, scores, noises)
        part = Part(summary(claim, found, scores), measured(study, claim, found, scores, noises))
        if name in kept and part.count < kept[name].count:
            part = with_published(kept[name], claim)
        print(
            f"{claim.title}: {part.cells.split(' | ')[1]}"
            + " (as before)" * (name in kept and part.cells == kept[name].cells)
        )
        count += part.count
        rows.append(f"| {claim.title} | {claim.published} | {part.cells} |")
        said = f"{claim.source}. {claim.published}", f"Tested: {claim.hypothesis}"
        sections.append(joined(f"## {claim.title}", *said, part.text(name), claim.tries))
    free = Part(free_summary(study, scores), table) if (table := free_table(study, scores)) else kept.get(FREE)
    if free:
        rows.append(f"| {TITLE} | {SAID} | {free.cells} |")
        sections.append(joined(f"## {SECTION}", HOW, free.text(FREE)))
    text = [beginning(study), "\n".join([*SUMMARY, *rows]), *sections, chance(count)]
    write_whole(page, joined(*text) + "\n")


def scores_of(study: Study, measure: str) -> Scores:
    """Of every arm that has this measure with every seed."""
    found = {arm: study.read(arm, measure) for arm in ARMS}
    return {arm: right for arm, right in found.items() if right is not None}


def trained(scores: Scores) -> Scores:
    """Those whose seeds are independent of those of all others: neither an ensemble nor another use of an encoder."""

    def alone(arm: str) -> bool:
        of = ARMS[arm]
        return bool(of.task) or arm == SCRATCH or (bool(of.of) and of.of not in scores)

    return {arm: right for arm, right in scores.items() if alone(arm)}


def decided(claim: Claim, scores: Mapping[str, Scores], noises: Mapping[str, Noise]) -> list[Decided | None]:
    """Of each comparison; None where it is not run yet."""
    found: list[Decided | None] = []
    for one in claim.comparisons:
        there = scores[one.measure]
        ready = one.better in there and one.worse in there and one.measure in noises
        found.append(decide(there[one.better], there[one.worse], noises[one.measure]) if ready else None)
    return found


def verdict_of(claim: Claim, found: list[Decided | None]) -> str:
    """Of a claim: how many of its comparisons have which verdict, those apart that were added later."""
    pairs = list(zip(claim.comparisons, found, strict=True))
    declared, later = ([its for one, its in pairs if one.added is added] for added in (False, True))
    said = [counted(declared)] * bool(declared) + [f"of {len(later)} added later, {counted(later)}"] * bool(later)
    return "; ".join(said)


def counted(found: list[Decided | None]) -> str:
    """How many comparisons have which verdict."""
    counts = Counter(NOT_RUN if one is None else one.verdict for one in found)
    if len(counts) == 1:
        return f"**{next(iter(counts))}**" + f" in all {len(found)}" * (len(found) > 1)
    words = (HOLDS, UNDECIDED, CONTRADICTED, NOT_RUN)
    return ", ".join(f"**{word}** in {counts[word]} of {len(found)}" for word in words if counts[word])


def beginning(study: Study) -> str:
    """What was run, on what, and by which rule."""
    model = SAME["model"]
    measures = "; ".join(f"`{name}`: {what}" for name, what in MEASURES.items())
    return f"""# The papers' claims in miniature

```bash
python benchmarks/get_data.py cifar10 /tmp/data
python benchmarks/claims.py                  # all of it; goes on where it was stopped
python benchmarks/claims.py droppos mp3      # some of it
python benchmarks/claims.py --table          # this page again, from what is there
```

This page is written by `claims.py`. What is trained stands in `claims_arms.py`, what is claimed in
`claims_declared.py`, and how it is decided in `claims_judge.py`. All of it was committed while the first seed of the
first claim was running (23 November, 10:22), and reviewed until its second was half made (11:06); comparisons that were
added later, when results had been seen, are marked. Each claim says when and where it was measured: of one of which a
study has less than this page, the page keeps what it says. A run has {SAME["threads"]} thread.

**Everything here is small.** ViTs of width {model["embed_dim"]} and depth {model["depth"]}, images of
{SAME["img_size"]} pixels in patches of {SAME["patch_size"]} (64 positions, as in MP3's runs on CIFAR-100);
{study.epochs:g} epochs of {9.8 * study.images:,.0f} of CIFAR-10's training images without labels, in batches of
{SAME["batch_size"]}, where the papers train for hundreds of epochs of a million images. So a verdict says what holds
*at the beginning of a training*, and an effect that needs a longer one cannot be seen. {SEEDS} seeds of everything:
weights, held-out images, draws, which 500 labels, and the fine-tuning; but one set of training and test images, so that
nothing here speaks of other data. All arms have the learning rates that `auto` takes, tuned for none of them, so that
an order of arms may be one of rates.

Measured on {10 * study.images:,} test images: {measures}. The labelled images are those of the pre-training.
Fine-tuning is `patchloom evaluate finetune` with the recipe `small`, 20 epochs of 500 images or 4 of 5,000.

**The rule.** Differences are paired over seeds and over test images. A comparison **holds** where the 95 % interval of
the difference lies above zero, is **contradicted** where it lies below, and is **undecided** otherwise. The last column
says which true difference four of five such studies would tell from zero; the paper's, where it is at hand, stands
before it, and where it is far smaller, undecided says nothing against the paper. Intervals are bootstraps over test
images, and over seeds with the spread that all arms that were measured together have in common; three seeds alone
would give none. An end that rounds to zero has two places: there draws and further arms move the verdict."""


SUMMARY = (
    "## Verdicts",
    "",
    f"Accuracies in %: mean over {SEEDS} seeds, and their range.",
    "",
    "| claim | published | measured | verdict |",
    "| --- | --- | --- | --- |",
)


def summary(claim: Claim, found: list[Decided | None], scores: Mapping[str, Scores]) -> str:
    """Two cells of a claim's row: what was measured, where a comparison is decided, and the verdict."""
    measure = claim.comparisons[0].measure
    cells = {arm: mean_and_range(scores[measure].get(arm)) for arm in claim.arms}
    measured = "; ".join(f"{arm} {cell}" for arm, cell in cells.items() if cell)
    return f"`{measure}`: {measured}" * any(found) + f" | {verdict_of(claim, found)}"


def measured(
    study: Study,
    claim: Claim,
    found: list[Decided | None],
    scores: Mapping[str, Scores],
    noises: Mapping[str, Noise],
) -> str:
    """A row a comparison; then, where one is decided, what else was measured of its arms, the arms, when and where."""
    lines = ["| measure | said to be better | than | difference, points | by seed | verdict | paper's | could see |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    notes: set[str] = set()
    for one, its in zip(claim.comparisons, found, strict=True):
        notes.update(remarks := remarks_on(study, one, its))
        marks = "".join(f" {remark[0]}" for remark in remarks)
        published = in_points(one.published)
        cells = [f"{NOT_RUN}{marks}", "", "", published, ""]
        if its is not None:
            each = ", ".join(f"{100 * value:+.1f}" for value in its.each)
            interval = f"{100 * its.points:+.1f} [{end(its.low)}, {end(its.high)}]"
            cells = [interval, each, f"**{its.verdict}**{marks}", published, f"{100 * its.could_see:.1f}"]
        lines.append(f"| {one.measure} | {one.better} | {one.worse} | {' | '.join(cells)} |")
    lines += ["", " ".join(note for note in (RESTLESS, UNLEARNT, ADDED) if note in notes)] * bool(notes)
    if not any(found):
        return "\n".join(lines)
    shown = list(dict.fromkeys([*(one.measure for one in claim.comparisons), *claim.beside]))
    lines += ["", f"| % | {' | '.join(shown)} |", f"| --- |{' --- |' * len(shown)}"]
    for arm in (*claim.arms, UNTRAINED):
        cells = [mean_and_range(scores[measure].get(encoder_of(arm, measure))) for measure in shown]
        lines += [f"| {arm} | {' | '.join(cells)} |"] * any(cells)
    lines += ["", *arms_rows(study, claim), ""]
    spreads = "; ".join(
        f"`{name}` {100 * its.deviation:.2f} points ({its.arms} arms)" for name, its in noises.items() if name in shown
    )
    paths = (study.kept(arm, seed, WHERE) for arm in claim.arms for seed in range(SEEDS))
    places = "; ".join(sorted({path.read_text() for path in paths if path.exists()}))
    said = f"Measured {places}. " * bool(places)
    said += f"Standard deviation of one run over seeds, of all arms that were measured together: {spreads}."
    return "\n".join([*lines, said])


def in_points(published: float | None) -> str:
    """A paper's difference with as many places as it has."""
    if published is None:
        return ""
    return f"{published:+.2f}" if round(published, 1) != published else f"{published:+.1f}"


def with_published(part: Part, claim: Claim) -> Part:
    """What a page keeps of a claim, with the papers' differences as they are declared now."""
    published = {(one.measure, one.better, one.worse): in_points(one.published) for one in claim.comparisons}
    lines = []
    for line in part.tables.splitlines():
        cells = line.split(" | ")
        if len(cells) == 8 and (key := (cells[0].removeprefix("| "), cells[1], cells[2])) in published:
            line = " | ".join([*cells[:6], published[key], cells[7]])
        lines.append(line)
    return part._replace(tables="\n".join(lines))


def encoder_of(arm: str, measure: str) -> str:
    """The arm of which a measure is shown: of frozen features that whose encoder it takes."""
    of = ARMS[arm]
    return of.of if of.of and not of.fresh and measure in FROZEN else arm


def end(share: float) -> str:
    """An end of an interval in points; with two places where one would not say on which side of zero it is."""
    points = f"{100 * share:+.1f}"
    return points if points.strip("+-0.") else f"{100 * share:+.2f}"


def remarks_on(study: Study, one: Comparison, its: Decided | None) -> list[str]:
    """Those of the three remarks that are true of a comparison."""
    restless = its is not None and its.unrest > UNREST
    found = {RESTLESS: restless, UNLEARNT: unlearnt(study, (one.better, one.worse)), ADDED: one.added}
    return [remark for remark, holds in found.items() if holds]


def verdicts(study: Study, arm: str) -> list[str]:
    """Of the runs of an arm whose encoder is its own, the words of `patchloom pretrain` on them."""
    found = [read_health(study.run(arm, seed)) for seed in range(SEEDS) if ARMS[arm].task]
    return [health.verdict for health in found if health is not None]


def unlearnt(study: Study, arms: Iterable[str]) -> bool:
    """Whether a run of one of some arms, or of those whose encoder they take, has hardly learnt its task."""
    found = (word for arm in arms if not ARMS[arm].fresh for word in verdicts(study, ARMS[arm].of or arm))
    return not {Verdict.NOT_LEARNING, Verdict.EARLY}.isdisjoint(found)


def arms_rows(study: Study, claim: Claim) -> list[str]:
    """Of each arm that was pre-trained: options, length, time, and what the run says of its task."""
    lines = ["| arm | task and options | updates | seconds | its task |", "| --- |" + " --- |" * 4]
    for arm in dict.fromkeys(ARMS[arm].of or arm for arm in claim.arms):
        of = ARMS[arm]
        if not of.task or not all(study.is_done(arm, seed) for seed in range(SEEDS)):
            continue
        ends = [last_row(study.run(arm, seed) / "metrics.csv") for seed in range(SEEDS)]
        options = ", ".join(f"{name} {value}" for name, value in of.task.items() if name != "name")
        task = f"`{of.task['name']}` {options}".strip() + f", features of {of.teacher}" * bool(of.teacher)
        updates, seconds = (statistics.median(float(end[name]) for end in ends) for name in ("step", "seconds"))
        said = ", ".join(f"{word} ({count})" for word, count in Counter(verdicts(study, arm)).items())
        lines.append(f"| {arm} | {task} | {updates:,.0f} | {seconds:,.0f} | {said} |")
    return lines if len(lines) > 2 else []


def last_row(path: Path) -> dict[str, str]:
    """Of a run's metrics."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))[-1]


def mean_and_range(right: np.ndarray | None) -> str:
    """Over seeds, as "36.1 (35.8-36.4)"."""
    if right is None:
        return ""
    each = 100 * right.mean(1)
    return f"{each.mean():.1f} ({each.min():.1f}-{each.max():.1f})"


def chance(count: int) -> str:
    """How many verdicts chance alone would give, of so many comparisons."""
    return f"""## What chance does

Where two arms are alike, and vary as the others do, 3 % of such comparisons are wrongly decided (4 % where seven arms
were measured together, 5 % where four were); where both vary twice as far as the others, 14 % (10 % of seven;
simulated: `python benchmarks/claims_judge.py`). {count} comparisons were made; if nothing differed, some
{0.03 * count:.0f} to {0.05 * count:.0f} would be decided. Those that share an arm are right or wrong together.
Where two arms share an encoder, its seeds move both, and the interval is too wide."""
