"""The verb ``report``: one HTML page about one or several runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from patchloom.data.near_duplicates import near_copies
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, listing
from patchloom.options.declare import verb
from patchloom.options.verbs import Report
from patchloom.report.embedding_map import MAX_MAP_IMAGES, make_embedding_map
from patchloom.report.methods import merge, methods_of, paragraphs, references
from patchloom.report.numbers import charts_of, gains_of, key_numbers, results_of
from patchloom.report.page import Cloud, Page, Picture, Recording, RunPart, Tone, render
from patchloom.report.pictures import COUNT, collect_pictures, images_of, recordings_of, sliders_of
from patchloom.report.pictures import RECORDING_BUDGET as SOUNDS
from patchloom.report.pictures import SLIDER_BUDGET as SLIDERS
from patchloom.report.results import rows_of
from patchloom.report.settings import command_of, run_metadata, settings_of
from patchloom.results import store
from patchloom.results.verdict import Verdict, no_labels
from patchloom.runs.folder import line_of
from patchloom.runs.past import RunData, expand_runs, is_comparison, load_runs
from patchloom.system.files import write_whole
from patchloom.version import __version__

# Sentences on a run's files: unreadable ones, and copies.


_NAMED = 10  # unreadable files listed by name


def describe_data_issues(run: RunData, own: Source | None = None) -> list[str]:
    """Return sentences on unreadable files, exact copies and near copies."""
    return [*_broken(run), *_copies(run), *_near(own)]


def _broken(run: RunData) -> list[str]:
    try:
        names = run.folder.unreadable_names()
    except OSError as problem:
        return [f"{run.folder.unreadable.name} cannot be read ({problem.strerror})."]
    if not names:
        return ["All files that the run opened could be read."]
    more = f", and {len(names) - _NAMED:,} more: {run.folder.unreadable}" if len(names) > _NAMED else ""
    files = "file" if len(names) == 1 else "files"
    # names need not be UTF-8: bytes that cannot be decoded are escaped
    some = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in map(line_of, names[:_NAMED]))
    return [f"{len(names):,} {files} could not be read and were skipped: {some}{more}."]


def _copies(run: RunData) -> list[str]:
    if not run.data:
        return []
    if run.settings.held_out == 0:
        return [f"No {run.modality.noun} were held out (--held_out 0): nothing was measured on unseen ones."]
    if not run.data["held_out_looked"]:
        return [f"The data were not searched for exact copies of the held-out {run.modality.noun}."]
    count = len(run.data["held_out_copies"])
    if not count:
        return [f"No training {run.modality.item} is an exact copy of a held-out one."]
    copies, were = ("copy", "was") if count == 1 else ("copies", "were")
    return [f"{count:,} exact {copies} of held-out {run.modality.noun} {were} excluded from training."]


def _near(own: Source | None) -> list[str]:
    if own is None or not len(own) or not own.modality.resizable or own.groups is not None or own.place(0) is None:
        return []
    try:
        with StatusMessage(f"searching {own.name} for near copies"):
            found = near_copies(own)
    except PatchloomError as problem:
        return [f"The search for near copies failed: {problem}."]
    if found is None:
        return [f"No near copies were found among {own.noun} with consecutive names."]
    sentence = found.sentence()
    return [f"{sentence[0].upper()}{sentence[1:]}"]


_FILE = "report.html"
_OF_COMPARISON = "runs.html"  # a comparison's own report.html has its verdict and tables
_TONES: dict[Verdict, Tone] = {
    Verdict.HEALTHY: "good",
    Verdict.WEAK: "fair",
    Verdict.COLLAPSED: "bad",
    Verdict.NOT_LEARNING: "bad",
}
_POINTS = 2000  # in all maps of a page together
_WITHOUT_LABELS = ("positions", "position-sensitivity", "label-free")  # protocols that need no labels


@verb(Report)
def report(options: Report) -> Path:
    """Write an HTML report on one or several runs: one file that needs no network and no other file.

    The page has the verdict, key numbers with their controls, settings with the reason for each, curves, pictures, a
    map of embeddings, the command that repeats the run, and a methods paragraph with the BibTeX of what was used. The
    run may still be training. The only change to a run is the removal of an evaluation by `forget`.

    Returns:
        Path of the HTML file.

    Raises:
        PatchloomError: if there is no run, one is given twice, there is no such evaluation, or the file cannot be
            written.
    """
    runs = options.runs
    places = [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(run) for run in runs]
    target = Path(options.out) if options.out is not None else _target(places)
    if target.is_dir():
        raise PatchloomError(f"--out {target} is a folder: give a file, such as {target / _FILE}")
    folders, said = expand_runs(places)
    if options.forget is not None:
        if len(folders) != 1:
            raise PatchloomError(f"--forget needs exactly one run, not {len(folders)}: give only that run")
        store.forget(folders[0], options.forget)
    page = page_of(folders, options.data)
    if said:
        title = page.title if len(places) > 1 else f"Runs of {places[0].absolute().name}"
        page = replace(page, title=title, lead=[*said, *page.lead])
    with StatusMessage("writing the page"):
        write_whole(target, render(page))
    return target


def _target(places: Sequence[Path]) -> Path:
    """Return the default path of the page about these folders."""
    if len(places) != 1:
        return Path(_FILE)
    return places[0] / (_OF_COMPARISON if is_comparison(places[0]) else _FILE)


def page_of(runs: Sequence[Path], data: DataLike | None = None) -> Page:
    """Collect the contents of a page about these runs."""
    if not runs:
        raise PatchloomError("report needs the folder of a run, as in patchloom report runs/photos-mae")
    found = load_runs(runs)
    with StatusMessage("compressing the pictures"):
        pictures, notes = collect_pictures(found)
    parts = []
    for run, its in zip(found, pictures, strict=True):
        part, its_notes = _part(run, its, data, len(found))
        parts.append(part)
        its_notes = [one if one.endswith(".") else f"{one}." for one in its_notes]  # errors have no full stop
        notes += [f"{run.name}: {one}" for one in its_notes] if len(found) > 1 else its_notes
    alone = parts[0] if len(parts) == 1 else None
    methods = merge([methods_of(run, rows_of(run.results, run.name, run.name)) for run in found])
    return Page(
        title=listing([run.name for run in found], "and"),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        lead=[_lead(part) for part in parts] if alone is None else [alone.why or alone.summary or alone.state],
        tone="plain" if alone is None else alone.tone,
        charts=charts_of(found),
        runs=parts,
        methods=paragraphs(methods),
        bibtex=references(methods),
        notes=notes,
    )


def _part(run: RunData, pictures: Sequence[Picture], data: DataLike | None, count: int) -> tuple[RunPart, list[str]]:
    """Collect the contents about one of ``count`` runs, and notes on missing parts."""
    images, health = images_of(run, data), run.health
    cloud, recordings, notes = _of_images(run, images.shown, images.what, count)
    groups = rows_of(run.results, run.name, run.name)
    part = RunPart(
        name=run.name,
        state=run.state(),
        verdict=_verdict(run),
        tone="plain" if health is None else _TONES.get(health.verdict, "plain"),
        why="" if health is None else health.why,
        then="" if health is None else health.then,
        summary=_summary(run),
        gains=gains_of(groups),
        numbers=key_numbers(run, groups),
        settings=settings_of(run),
        pictures=pictures,
        cloud=cloud,
        recordings=recordings,
        sliders=sliders_of(run, SLIDERS // count),
        tables=results_of(groups),
        files=describe_data_issues(run, images.train),
        about=run_metadata(run),
        command=command_of(run),
    )
    return part, [*run.problems.values(), *notes]


def _verdict(run: RunData) -> str:
    """Return the verdict in a few words, marked "so far" if the run is not finished."""
    if run.health is None:
        return ""
    verdict = run.health.verdict
    return verdict.value if run.finished or verdict is Verdict.EARLY else f"{verdict} so far"


def _summary(run: RunData) -> str:
    """Return the closing sentence, with a remark if no evaluation had labels."""
    labelled = any(one.quoted and one.protocol not in _WITHOUT_LABELS for one in run.results)
    remark = "" if labelled or run.health is None else no_labels(run.modality.noun)
    return " ".join(filter(None, (run.summary, remark))) if run.summary else ""


def _of_images(
    run: RunData, shown: Source | None, what: str, count: int
) -> tuple[Cloud | None, list[Recording], list[str]]:
    """Return the map of embeddings and recordings of one of ``count`` runs, and notes on missing ones."""
    if shown is None:
        return None, [], [f"There is no map of embeddings: {what}"]
    cloud, recordings, notes = None, list[Recording](), list[str]()
    try:
        cloud = make_embedding_map(run.folder.path, shown, what, min(MAX_MAP_IMAGES, _POINTS // count))
    except PatchloomError as problem:
        notes.append(f"There is no map of embeddings: {problem}")
    if shown.sound is not None:
        try:
            recordings = recordings_of(shown, max(1, COUNT // count), SOUNDS // count)
        except PatchloomError as problem:
            notes.append(f"There are no recordings to play: {problem}")
    return cloud, recordings, notes


def _lead(part: RunPart) -> str:
    """Return the sentence about one of several runs: its verdict, else its summary, else its progress."""
    if part.verdict:
        return f"{part.name}: {part.verdict}. {part.why}".strip()
    return f"{part.name}: {part.summary or part.state}"
