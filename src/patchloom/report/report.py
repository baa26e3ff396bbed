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
from patchloom.report.methods import Methods, merge, methods_of, paragraphs, references
from patchloom.report.numbers import charts_of, gains_of, key_numbers, results_of
from patchloom.report.page import Page, Picture, Recording, RunPart, Tone, render
from patchloom.report.pictures import COUNT, collect_pictures, images_of, recordings_of, sliders_of
from patchloom.report.pictures import RECORDING_BUDGET as SOUNDS
from patchloom.report.pictures import SLIDER_BUDGET as SLIDERS
from patchloom.report.results import Row, rows_of
from patchloom.report.settings import command_of, run_metadata, settings_of
from patchloom.results import store
from patchloom.results.verdict import Verdict, no_labels
from patchloom.runs.folder import line_of
from patchloom.runs.past import RunData, expand_runs, is_comparison, load_runs
from patchloom.system.files import write_whole
from patchloom.version import __version__

_FILE = "report.html"
_OF_COMPARISON = "runs.html"  # a comparison's own report.html has its verdict and tables
_TONES: dict[Verdict, Tone] = {
    Verdict.HEALTHY: "good",
    Verdict.WEAK: "fair",
    Verdict.COLLAPSED: "bad",
    Verdict.NOT_LEARNING: "bad",
}
_POINTS = 2000  # in all maps of a page together
_NAMED = 10  # unreadable files listed by name
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
    target = Path(_FILE)
    if options.out is not None:
        target = Path(options.out)
    elif len(places) == 1:
        target = places[0] / (_OF_COMPARISON if is_comparison(places[0]) else _FILE)
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


def page_of(runs: Sequence[Path], data: DataLike | None = None) -> Page:
    """Collect the contents of a page about these runs."""
    if not runs:
        raise PatchloomError("report needs the folder of a run, as in patchloom report runs/photos-mae")
    found = load_runs(runs)
    with StatusMessage("compressing the pictures"):
        pictures, notes = collect_pictures(found)
    parts, methods = list[RunPart](), list[Methods]()
    for run, its in zip(found, pictures, strict=True):
        groups = rows_of(run.results, run.name, run.name)
        part, its_notes = _part(run, groups, its, data, len(found))
        parts.append(part)
        methods.append(methods_of(run, groups))
        its_notes = [one if one.endswith(".") else f"{one}." for one in its_notes]  # errors have no full stop
        notes += [f"{run.name}: {one}" for one in its_notes] if len(found) > 1 else its_notes
    lead = list[str]()
    for part in parts:
        said = f"{part.verdict}. {part.why}".strip() if part.verdict else part.summary or part.state
        lead.append(f"{part.name}: {said}")
    if len(parts) == 1:
        lead = [parts[0].why or parts[0].summary or parts[0].state]
    merged = merge(methods)
    return Page(
        title=listing([run.name for run in found], "and"),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        lead=lead,
        tone=parts[0].tone if len(parts) == 1 else "plain",
        charts=charts_of(found),
        runs=parts,
        methods=paragraphs(merged),
        bibtex=references(merged),
        notes=notes,
    )


def _part(
    run: RunData, groups: Sequence[Sequence[Row]], pictures: Sequence[Picture], data: DataLike | None, count: int
) -> tuple[RunPart, list[str]]:
    """Collect the contents about one of ``count`` runs, and notes on missing parts."""
    images, health, notes = images_of(run, data), run.health, [*run.problems.values()]
    cloud, recordings = None, list[Recording]()
    if images.shown is None:
        notes.append(f"There is no map of embeddings: {images.what}")
    else:
        try:
            most = min(MAX_MAP_IMAGES, _POINTS // count)
            cloud = make_embedding_map(run.folder.path, images.shown, images.what, most)
        except PatchloomError as problem:
            notes.append(f"There is no map of embeddings: {problem}")
        try:
            if images.shown.sound is not None:
                recordings = recordings_of(images.shown, max(1, COUNT // count), SOUNDS // count)
        except PatchloomError as problem:
            notes.append(f"There are no recordings to play: {problem}")
    part = RunPart(
        name=run.name,
        state=run.state(),
        summary=run.summary or "",
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
    if health is None:
        return part, notes
    verdict = f"{health.verdict}"
    if not run.finished and health.verdict is not Verdict.EARLY:
        verdict += " so far"
    tone = _TONES.get(health.verdict, "plain")
    if part.summary and not any(one.quoted and one.protocol not in _WITHOUT_LABELS for one in run.results):
        part = replace(part, summary=f"{part.summary} {no_labels(run.modality.noun)}")
    return replace(part, verdict=verdict, tone=tone, why=health.why, then=health.then), notes


# Sentences on a run's files.


def describe_data_issues(run: RunData, own: Source | None = None) -> list[str]:
    """Return sentences on unreadable files, exact copies and near copies of a run's ``own`` data."""
    noun, folder, found = run.modality.noun, run.folder, ["All files that the run opened could be read."]
    try:
        names = folder.unreadable_names()
    except OSError as problem:
        names, found = [], [f"{folder.unreadable.name} cannot be read ({problem.strerror})."]
    if names:
        more = f", and {len(names) - _NAMED:,} more: {folder.unreadable}" if len(names) > _NAMED else ""
        # names need not be UTF-8: bytes that cannot be decoded are escaped
        some = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in map(line_of, names[:_NAMED]))
        files = "file" if len(names) == 1 else "files"
        found = [f"{len(names):,} {files} could not be read and were skipped: {some}{more}."]
    if run.data and run.settings.held_out == 0:
        found.append(f"No {noun} were held out (--held_out 0): nothing was measured on unseen ones.")
    elif run.data and not run.data["held_out_looked"]:
        found.append(f"The data were not searched for exact copies of the held-out {noun}.")
    elif run.data:
        count = len(run.data["held_out_copies"])
        copies, were = ("copy", "was") if count == 1 else ("copies", "were")
        none = f"No training {run.modality.item} is an exact copy of a held-out one."
        found.append(f"{count:,} exact {copies} of held-out {noun} {were} excluded from training." if count else none)
    if own is None or not len(own) or not own.modality.resizable or own.groups is not None or own.place(0) is None:
        return found
    try:
        with StatusMessage(f"searching {own.name} for near copies"):
            near = near_copies(own)
    except PatchloomError as problem:
        return [*found, f"The search for near copies failed: {problem}."]
    sentence = (
        f"no near copies were found among {own.noun} with consecutive names." if near is None else near.sentence()
    )
    return [*found, f"{sentence[0].upper()}{sentence[1:]}"]
