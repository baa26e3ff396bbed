"""Methods paragraphs of runs, for a paper, and the BibTeX of what they used.

Facts are collected as values from a run's settings, results and record of training images; the sentences come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from patchloom.data.sources.in_memory import is_object, is_object_name
from patchloom.errors import PatchloomError, listing
from patchloom.report.papers import (
    PAPERS,
    Paper,
    bibliography,
    papers_of_encoder,
    papers_of_protocol,
    papers_of_task,
)
from patchloom.report.results import Row
from patchloom.report.settings import versions
from patchloom.results.result import ACCURACY
from patchloom.results.table import describe_settings
from patchloom.runs.folder import data_slug
from patchloom.runs.past import RunData
from patchloom.runs.settings import ResolvedSettings
from patchloom.runs.training_set import read_record
from patchloom.sizes import in_pixels
from patchloom.tasks import TASKS
from patchloom.tasks.custom import label


@dataclass(frozen=True)
class Evaluated:
    """Quoted results of one protocol on one set of test images.

    Attributes:
        protocol: name of the protocol.
        data: short name of the test images.
        n: number of test images, or of ``noun``; 0 if unknown.
        noun: "images" or "recordings".
        measures: names of the quoted measures.
        settings: settings of the protocol in words; "" without any.
        controls: encoders and answers beside it.
        trainings: number of seeds.
        intervals: what the intervals cover: "accuracies", "groups", "others" or "seeds".
        compared: whether there are differences from controls.
        papers: papers of the protocol.
    """

    protocol: str
    data: str
    n: int
    noun: str
    measures: tuple[str, ...]
    settings: str
    controls: tuple[str, ...]
    trainings: int
    intervals: frozenset[str]
    compared: bool
    papers: tuple[Paper, ...]


@dataclass(frozen=True)
class Methods:
    """Facts of one run, or of several that differ in their seeds alone.

    Attributes:
        names: names of the runs.
        seeds: seed of each.
        settings: settings, with a seed of 0.
        epoch: epochs that were trained.
        noun: "images" or "recordings".
        images: number of different training images; None if unknown.
        held_out: number of held-out images.
        evaluated: its evaluations.
    """

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: ResolvedSettings
    epoch: float
    noun: str
    images: int | None
    held_out: int
    evaluated: tuple[Evaluated, ...]

    def papers(self) -> list[Paper]:
        """Return the papers that it used, each once."""
        s = self.settings
        found = [*papers_of_task(s.task["name"], s.recipe), *papers_of_encoder(s.model["name"])]
        found.append(PAPERS["loshchilov2019adamw"])
        found += [PAPERS["cubuk2020randaugment"]] * bool(s.randaugment) + [PAPERS["hu2022lora"]] * (s.adapt == "lora")
        return list(dict.fromkeys([*found, *(paper for one in self.evaluated for paper in one.papers)]))


def methods_of(run: RunData, groups: Sequence[Sequence[Row]]) -> Methods:
    """Collect the facts of a run; ``groups`` are those of `patchloom.report.results.rows_of`."""
    s, images = run.settings, None
    with suppress(PatchloomError):
        record = read_record(run.folder.trained_on)
        if record is not None and not record.unknown and not s.weights_before:
            images = len(record.contents)
    epoch = s.epochs if run.finished else min(run.epoch, s.epochs)
    held = len(run.data.get("held_out", ()))
    evaluated = tuple(_evaluated(run, rows) for rows in groups if rows)
    plain = replace(s, seed=0, split_seed=None)
    return Methods((run.name,), (s.seed,), plain, epoch, run.modality.noun, images, held, evaluated)


def _evaluated(run: RunData, rows: Sequence[Row]) -> Evaluated:
    own = rows[0].result
    beside = [row.result.encoder for row in rows[1:] if row.result.encoder != own.encoder]
    intervals = set()
    for row in rows:
        one = row.result
        if row.over == "seeds":
            intervals.add("seeds")
        elif one.groups and one.interval():
            intervals.add("groups")
        elif one.interval():
            intervals.add("accuracies" if one.measure == ACCURACY else "others")
    against = [difference for row in rows for difference in row.result.against]
    together = [one for one in run.results if (one.protocol, one.date) == (own.protocol, own.date)]
    measures = [*dict.fromkeys(one.measure for one in together)]
    quoted = dict.fromkeys(row.result.measure for row in rows)  # label-free quotes one of many
    return Evaluated(
        own.protocol,
        _data(own.data),
        own.n or max((row.result.n for row in rows), default=0),
        own.noun,
        tuple(measures if own.protocol == "label-free" else quoted),
        describe_settings(own, list(own.settings)),
        tuple(dict.fromkeys([*beside, *(difference.control for difference in against)])),
        rows[0].seeds,
        frozenset(intervals),
        bool(against),
        tuple(papers_of_protocol(own.protocol, own.settings, measures)),
    )


def _data(data: str | list[str]) -> str:
    """Return a name of data without its folders."""
    return "images in memory" if is_object(data) or is_object_name(data) else data_slug(data)


def merge(each: Sequence[Methods]) -> list[Methods]:
    """Merge runs that differ in names and seeds alone."""
    found: list[Methods] = []
    for one in each:
        for i, other in enumerate(found):
            if replace(other, names=one.names, seeds=one.seeds) == one:
                found[i] = replace(other, names=(*other.names, *one.names), seeds=(*other.seeds, *one.seeds))
                break
        else:
            found.append(one)
    return found


# Sentences.


def paragraphs(each: Sequence[Methods]) -> list[str]:
    """Return a methods paragraph for each, named by its runs if there are several, and one on what all share."""
    found = [" ".join(_sentences(one)) for one in each]
    if len(found) > 1:
        found = [f"{listing(one.names, 'and')}: {text}" for one, text in zip(each, found, strict=True)]
    evaluated = [one for methods in each for one in methods.evaluated]
    said, kinds = list[str](), {kind for one in evaluated for kind in one.intervals}
    if covered := [text for kind, text in _COVERED.items() if kind in kinds]:
        said.append(f"Intervals are at 95 %: {'; '.join(covered)}.")
    if any(one.compared for one in evaluated):
        said.append("Differences from controls are paired by test image where both have the same ones.")
    return [*found, " ".join([*said, f"This report was written with {versions()}."])]


def references(each: Sequence[Methods]) -> str:
    """Return the BibTeX of patchloom and of all papers that were used."""
    return bibliography(paper for one in each for paper in one.papers())


def _sentences(one: Methods) -> list[str]:
    s = one.settings
    options = [f"{name.replace('_', ' ')} {value}" for name, value in s.model.items() if name != "name"]
    channels = f"{s.channels} channel{'s' * (s.channels != 1)}"
    model = listing([s.model["name"], *options], "and")
    kind = "Swin Transformer" if "swin" in s.model["name"] else "vision transformer"
    begun = s.from_run or s.init
    known = begun if begun is None or begun.startswith("timm:") else _data(begun)
    start = f", and began with the weights of {known}" if begun else ", and was initialised at random"
    cited = "; ".join(paper.cited for paper in papers_of_encoder(s.model["name"]))
    encoder = (
        f"The encoder is a {kind}, {model} ({cited}). It takes inputs of {in_pixels(s.img_size)} and {channels} in "
        f"patches of {in_pixels(s.patch_size)}{start}."
    )

    # ---- data and length
    count = "" if one.images is None else f"{one.images:,} different "
    data, held = f"It was trained on {count}{one.noun} of {_data(s.data)}", "none were held out"
    if one.held_out:
        held = f"{one.held_out:,} others were held out ({100 * s.held_out:.3g} %)"
    update = min(s.batch_size, one.images or s.batch_size) * s.accumulate
    epochs = f"{s.epochs:g} epoch{'s' * (s.epochs != 1)}"
    if one.epoch < s.epochs:
        epochs = f"{one.epoch:.3g} of {epochs} so far"
    decay = f"halved every {s.halve_every:,} updates" if s.halve_every else "cosine decay"
    clip = f"; gradients were clipped at a norm of {s.clip:g}" if s.clip else ""
    peak = f"{s.blr:g} per 256 {one.noun} (peak {s.blr * update / 256:.3g})"
    adamw = f"a weight decay of {s.weight_decay:g} and betas of {s.betas[0]:g} and {s.betas[1]:g}"
    training = (
        f"Training took {epochs} of AdamW ({PAPERS['loshchilov2019adamw'].cited}) with {update:,} {one.noun} per "
        f"update, a base learning rate of {peak}, {s.warmup_epochs:g} epochs of warm-up, {decay}, {adamw}{clip}."
    )
    said, changes = [encoder, _task(s, one.noun), f"{data}; {held}.", training], list[str]()
    if isinstance(s.crop_scale, float | int):
        changes.append(f"random crops of {100 * s.crop_scale:g} to 100 % of the area")
    if s.flip:
        changes.append("horizontal flips")
    if s.randaugment:
        changes.append(f"RandAugment of magnitude {s.randaugment:g} ({PAPERS['cubuk2020randaugment'].cited})")
    if changes:
        said.append(f"Augmentation: {listing(changes, 'and')}.")
    devices = f", {s.threads} thread{'s' * (s.threads != 1)}" if s.device == "cpu" else ""
    if s.devices != 1:
        devices = f", {s.devices} devices"
    seeds = f"Seed{'s' * (len(one.seeds) != 1)} {listing(one.seeds, 'and')}"
    return [*said, f"{seeds}; {s.device}, {s.precision}{devices}.", *map(_evaluation, one.evaluated)]


def _task(s: ResolvedSettings, noun: str) -> str:
    name, entry = s.task["name"], TASKS.get(s.task["name"])
    papers = papers_of_task(name, s.recipe)
    cited = f" ({'; '.join(paper.cited for paper in papers)})" if papers else ""
    said = f"It was pre-trained without labels by the task {label(name)}{cited}"
    if s.recipe:
        said += f" with the recipe {s.recipe}"
    if papers and entry is not None and noun == "images":  # whose words these are
        said += f"; withheld: {entry.withheld}; predicted: {entry.asked}"
    given = [f"{key} {value}" for key, value in s.task.items() if key != "name" and isinstance(value, int | float)]
    return f"{said}. Options of the task: {', '.join(given)}." if given else f"{said}."


def _evaluation(one: Evaluated) -> str:
    cited = f" ({'; '.join(paper.cited for paper in one.papers)})" if one.papers else ""
    n = f"{one.n:,} " if one.n else ""
    said = (
        f"It was evaluated by {one.protocol}{cited} on {n}test {one.noun} of {one.data}: {listing(one.measures, 'and')}"
    )
    if one.settings:
        said += f" ({one.settings})"
    if one.trainings > 1:
        said += f", mean over {one.trainings} seeds"
    return f"{said}, beside {listing(one.controls, 'and')}." if one.controls else f"{said}."


_COVERED = {
    "accuracies": "those of accuracies are Wilson's score intervals over test images",
    "groups": "those of grouped images vary over whole groups",
    "others": "those of other measures vary over test images",
    "seeds": "those of means over seeds are Student's over seeds",
}
