"""Writer of claims.md, from the results of a study of `claims.py`."""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from claims_arms import ARMS, FROZEN, MEASURES, SAME, SCRATCH, SEEDS, UNTRAINED
from claims_declared import CLAIMS, Claim, Comparison
from claims_free import SAID, SECTION, TITLE, free_summary, free_table, how
from claims_judge import CONTRADICTED, HOLDS, UNDECIDED, Decided, Noise, Scores, decide, noise_of
from claims_kept import Part, joined, kept_on
from claims_probes import PROBES, probes_part, probes_section
from claims_runs import WHERE, Study

from patchloom.results.verdict import Verdict, read_health
from patchloom.system.files import write_whole

NOT_RUN = "not run yet"
UNREST = 1.5  # a spread this many times that of other arms is marked
# remarks on a comparison, each with its mark
RESTLESS = f"¹ Its spread over seeds is more than {UNREST:g} times that of other differences: see the end."
UNLEARNT = "² A run of one of the two did not learn its task, or too little to judge."
ADDED = "³ Added when results had been seen."
FREE = "label-free"  # name of the claim on measures without labels


def write_page(study: Study, page: Path) -> None:
    """Write all claims as a page, finished or not, and print a line for each.

    If the study has fewer results of a claim than the page, the page keeps its results. So one claim can be run alone,
    on another machine, or again.
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
        sections.append(joined(f"## {SECTION}", how(free.tables), free.text(FREE)))
    probes = probes_part(study) or kept.get(PROBES)
    if probes:
        sections.append(probes_section(probes))
    text = [beginning(study), "\n".join([*SUMMARY, *rows]), *sections, chance(count)]
    write_whole(page, joined(*text) + "\n")


def scores_of(study: Study, measure: str) -> Scores:
    """Return the results of every arm that has this measure with every seed."""
    found = {arm: study.read(arm, measure) for arm in ARMS}
    return {arm: right for arm, right in found.items() if right is not None}


def trained(scores: Scores) -> Scores:
    """Return the arms with independent seeds: neither an ensemble nor another use of a measured encoder."""

    def independent(arm: str) -> bool:
        of = ARMS[arm]
        return bool(of.task) or arm == SCRATCH or (bool(of.of) and of.of not in scores)

    return {arm: right for arm, right in scores.items() if independent(arm)}


def decided(claim: Claim, scores: Mapping[str, Scores], noises: Mapping[str, Noise]) -> list[Decided | None]:
    """Decide each comparison; None if it is not run yet."""
    found: list[Decided | None] = []
    for one in claim.comparisons:
        there = scores[one.measure]
        ready = one.better in there and one.worse in there and one.measure in noises
        found.append(decide(there[one.better], there[one.worse], noises[one.measure]) if ready else None)
    return found


def verdict_of(claim: Claim, found: list[Decided | None]) -> str:
    """Count the verdicts of a claim's comparisons, separately for those that were added later."""
    pairs = list(zip(claim.comparisons, found, strict=True))
    declared, later = ([its for one, its in pairs if one.added is added] for added in (False, True))
    said = [counted(declared)] * bool(declared) + [f"of {len(later)} added later, {counted(later)}"] * bool(later)
    return "; ".join(said)


def counted(found: list[Decided | None]) -> str:
    """Count the comparisons by verdict."""
    counts = Counter(NOT_RUN if one is None else one.verdict for one in found)
    if len(counts) == 1:
        return f"**{next(iter(counts))}**" + f" in all {len(found)}" * (len(found) > 1)
    words = (HOLDS, UNDECIDED, CONTRADICTED, NOT_RUN)
    return ", ".join(f"**{word}** in {counts[word]} of {len(found)}" for word in words if counts[word])


def beginning(study: Study) -> str:
    """Return the first part of the page: commands, sizes, measures and the rule."""
    model = SAME["model"]
    measures = "\n".join(f"| `{name}` | {what} |" for name, what in MEASURES.items())
    return f"""# The papers' claims in miniature

```bash
python benchmarks/get_data.py cifar10 /tmp/data
python benchmarks/claims.py                  # all claims; resumes where it was stopped
python benchmarks/claims.py droppos mp3      # some claims
python benchmarks/claims.py --table          # only this page, from the results in --out
```

`claims.py` writes this page. `claims_arms.py` defines what is trained, `claims_declared.py` what is claimed, and
`claims_judge.py` how it is decided. All of it was committed while the first seed of the first claim was running (23
November, 10:22), and reviewed until half of its second was run (11:06). The claims of the papers from CrossMAE on were
committed on 25 November, before their runs; each of these arms trains for the seconds of `mae`. Comparisons that were
added after results were seen are marked. Each claim names the date and machine of its measurement. If a new run covers
only part of a claim, the earlier results stay. A run has {SAME["threads"]} thread.

**Everything here is small.** The ViTs have width {model["embed_dim"]} and depth {model["depth"]}; the images have
{SAME["img_size"]} pixels in patches of {SAME["patch_size"]} (64 positions, as in MP3's runs on CIFAR-100). Pre-training
takes {study.epochs:g} epochs of {9.8 * study.images:,.0f} of CIFAR-10's training images without labels, in batches of
{SAME["batch_size"]}; the papers train for hundreds of epochs of a million images. A verdict therefore describes *the
beginning of training*; effects that need longer training cannot be seen. {SEEDS} seeds vary the weights, the held-out
images, the random draws, the choice of 500 labels, and the fine-tuning. There is one set of training and test images,
so the verdicts do not extend to other data. All arms have the learning rates of `auto`, which are tuned for none of
them; an order of arms may be due to them.

The measures use {10 * study.images:,} test images. The labelled images are those of the pre-training. Fine-tuning is
`patchloom evaluate finetune` with the recipe `small`, 20 epochs of 500 images or 4 of 5,000.

| measure | meaning |
| --- | --- |
{measures}

**The rule.** Differences are paired over seeds and over test images. A comparison **holds** if the 95 % interval of the
difference lies above zero, is **contradicted** if it lies below, and is **undecided** otherwise. The last column,
"detectable", is the true difference that four of five such studies would distinguish from zero. The column before it is
the paper's difference; if that is far smaller, "undecided" is no evidence against the paper. Intervals are bootstraps
over test images, and over seeds with the common spread of all arms that were measured together; three seeds alone would
give none. An end that rounds to zero has two decimals: there, the random draws and further arms can change the
verdict."""


SUMMARY = (
    "## Verdicts",
    "",
    f"Accuracies in %: mean over {SEEDS} seeds, and their range.",
    "",
    "| claim | published | measured | verdict |",
    "| --- | --- | --- | --- |",
)


def summary(claim: Claim, found: list[Decided | None], scores: Mapping[str, Scores]) -> str:
    """Return two cells of a claim's row: the results, if a comparison is decided, and the verdict."""
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
    """Return the tables of a claim: comparisons and, if one is decided, all measures, the arms, dates and machines."""
    lines = ["| measure | claimed better | than | difference, points | by seed | verdict | paper's | detectable |"]
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
    for arm in dict.fromkeys((*claim.arms, UNTRAINED)):
        cells = [mean_and_range(scores[measure].get(encoder_of(arm, measure))) for measure in shown]
        lines += [f"| {arm} | {' | '.join(cells)} |"] * any(cells)
    lines += ["", *arms_rows(study, claim), ""]
    spreads = "; ".join(
        f"`{name}` {100 * its.deviation:.2f} points ({its.arms} arms)" for name, its in noises.items() if name in shown
    )
    paths = (study.result_path(arm, seed, WHERE) for arm in claim.arms for seed in range(SEEDS))
    places = "; ".join(sorted({path.read_text() for path in paths if path.exists()}))
    said = f"Measured {places}. " * bool(places)
    said += f"Standard deviation over seeds of a single run, pooled over all arms measured together: {spreads}."
    return "\n".join([*lines, said])


def in_points(published: float | None) -> str:
    """Format a paper's difference with its number of decimals."""
    if published is None:
        return ""
    return f"{published:+.2f}" if round(published, 1) != published else f"{published:+.1f}"


def with_published(part: Part, claim: Claim) -> Part:
    """Return the kept results of a claim, with the papers' differences from the current declarations."""
    published = {(one.measure, one.better, one.worse): in_points(one.published) for one in claim.comparisons}
    lines = []
    for line in part.tables.splitlines():
        cells = line.split(" | ")
        if len(cells) == 8 and (key := (cells[0].removeprefix("| "), cells[1], cells[2])) in published:
            line = " | ".join([*cells[:6], published[key], cells[7]])
        lines.append(line)
    return part._replace(tables="\n".join(lines))


def encoder_of(arm: str, measure: str) -> str:
    """Return the arm whose result is shown: for frozen features, the arm that trained the encoder."""
    of = ARMS[arm]
    return of.of if of.of and not of.fresh and measure in FROZEN else arm


def end(share: float) -> str:
    """Format an end of an interval in points, with two decimals if one would hide its sign."""
    points = f"{100 * share:+.1f}"
    return points if points.strip("+-0.") else f"{100 * share:+.2f}"


def remarks_on(study: Study, one: Comparison, its: Decided | None) -> list[str]:
    """Return the remarks that apply to a comparison."""
    restless = its is not None and its.unrest > UNREST
    found = {RESTLESS: restless, UNLEARNT: unlearnt(study, (one.better, one.worse)), ADDED: one.added}
    return [remark for remark, holds in found.items() if holds]


def verdicts(study: Study, arm: str) -> list[str]:
    """Return the verdicts of `patchloom pretrain` on the runs of an arm that trains an encoder."""
    found = [read_health(study.run(arm, seed)) for seed in range(SEEDS) if ARMS[arm].task]
    return [health.verdict for health in found if health is not None]


def unlearnt(study: Study, arms: Iterable[str]) -> bool:
    """Return whether a run of some arms, or of the arms whose encoder they take, has hardly learnt its task."""
    found = (word for arm in arms if not ARMS[arm].fresh for word in verdicts(study, ARMS[arm].of or arm))
    return not {Verdict.NOT_LEARNING, Verdict.EARLY}.isdisjoint(found)


def arms_rows(study: Study, claim: Claim) -> list[str]:
    """Return the table of the pre-trained arms: options, updates, seconds, and the verdict on the task."""
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
    """Return the last row of a run's metrics."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))[-1]


def mean_and_range(right: np.ndarray | None) -> str:
    """Format mean and range over seeds, as "36.1 (35.8-36.4)"."""
    if right is None:
        return ""
    each = 100 * right.mean(1)
    return f"{each.mean():.1f} ({each.min():.1f}-{each.max():.1f})"


def chance(count: int) -> str:
    """Return the section on the number of verdicts that chance alone would give."""
    return f"""## What chance does

If two arms are equal, and their spread is that of the others, 3 % of such comparisons are wrongly decided (4 % if seven
arms were measured together, 5 % if four were). If the spread of both is twice that of the others, 14 % are (10 % with
seven; simulated by `python benchmarks/claims_judge.py`). {count} comparisons were made; if nothing differed, some
{0.03 * count:.0f} to {0.05 * count:.0f} would be decided. Comparisons that share an arm are right or wrong together.
If two arms share an encoder, its seeds move both, and the interval is too wide."""
