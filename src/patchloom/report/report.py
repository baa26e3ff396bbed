"""The verb ``report``: one page, as one file, that tells what a run did, or what several did."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from patchloom.arguments import PathLike, validate_arguments
from patchloom.data.near_duplicates import near_copies
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.results import forget_rows
from patchloom.report.curves import charts_of
from patchloom.report.embedding_map import MAX_MAP_IMAGES, make_embedding_map
from patchloom.report.load_run import (
    RunData,
    command_of,
    disambiguate_runs,
    expand_runs,
    is_comparison,
    load_run,
    settings_of,
)
from patchloom.report.metadata import run_metadata
from patchloom.report.metrics import gains_of, has_labelled_results, key_numbers, results_of
from patchloom.report.page import Cloud, Number, Page, Picture, Recording, RunPart, Table, Tone
from patchloom.report.pictures import COUNT, Images, collect_pictures, images_of, recordings_of, sliders_of
from patchloom.report.pictures import RECORDING_BUDGET as SOUNDS
from patchloom.report.pictures import SLIDER_BUDGET as SLIDERS
from patchloom.runs.folder import line_of
from patchloom.runs.verdict import Verdict, no_labels
from patchloom.system.files import write_whole
from patchloom.version import __version__

# Sentences on a run's files: what could not be read, and what is there more than once.


_NAMED = 10  # of files that cannot be read


def describe_data_issues(run: RunData, own: Source | None = None) -> list[str]:
    """What is to be said of the run's files."""
    return [*_broken(run), *_copies(run), *_near(own)]


def _broken(run: RunData) -> list[str]:
    try:
        names = run.folder.unreadable_names()
    except OSError as problem:
        return [f"{run.folder.unreadable.name} cannot be read ({problem.strerror})."]
    if not names:
        return ["All files that were met could be read."]
    more = f", and {len(names) - _NAMED:,} more: {run.folder.unreadable}" if len(names) > _NAMED else ""
    files = "file" if len(names) == 1 else "files"
    # names need not be UTF-8, and what cannot be written is shown as the bytes that it is
    some = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in map(line_of, names[:_NAMED]))
    return [f"{len(names):,} {files} could not be read, and left out: {some}{more}."]


def _copies(run: RunData) -> list[str]:
    if "held_out_copies" not in run.data:
        return []
    if not run.data.get("held_out_looked", True):
        return [f"Exact copies of the held-out {run.modality.noun} were not looked for."]
    count = len(run.data["held_out_copies"])
    if not count:
        return [f"No {run.modality.item} that was trained on is an exact copy of a held-out one."]
    copies, are = ("copy", "is") if count == 1 else ("copies", "are")
    return [f"{count:,} exact {copies} of held-out {run.modality.noun} {are} in the data, and not trained on."]


def _near(own: Source | None) -> list[str]:
    if own is None or not _may_be_near(own):
        return []
    try:
        with StatusMessage(f"looking for near copies in {own.name}"):
            found = near_copies(own)
    except PatchloomError as problem:
        return [f"Near copies could not be looked for: {problem}."]
    if found is None:
        return [f"{own.noun.capitalize()} whose names are neighbours show no sign of being near copies of each other."]
    said = found.sentence()
    return [f"{said[0].upper()}{said[1:]}"]


def _may_be_near(own: Source) -> bool:
    """Whether `near_copies` looks at a source at all."""
    return len(own) > 0 and own.modality.resizable and own.groups is None and own.place(0) is not None


_FILE = "report.html"
_OF_COMPARISON = "runs.html"  # its report.html has the verdict and tables, which this page has not
_RENDER = "patchloom.report.page"
_TONES: dict[Verdict, Tone] = {
    Verdict.HEALTHY: "good",
    Verdict.WEAK: "fair",
    Verdict.COLLAPSED: "bad",
    Verdict.NOT_LEARNING: "bad",
}
_POINTS = 2000  # of all maps of a page together


@validate_arguments
def report(
    runs: PathLike | Sequence[PathLike],
    *,
    out: str | Path | None = None,
    data: DataLike | None = None,
    forget: str | None = None,
) -> Path:
    """Write what a run did, or several, as one page: an HTML file that needs no network and no other file.

    It holds the verdict, key numbers beside their controls, settings with the reason of each, curves, all pictures, a
    map of embeddings, and how to repeat the run; also of one that is still training. Nothing is trained, and nothing
    changed unless an evaluation is to be forgotten.

    Args:
        runs: folders of runs; that of a comparison stands for the runs in it, also while it trains.
        out: the file; report.html in the run's folder, or, of several runs, in the current one, if left out. Of a
            comparison runs.html in its folder, where its own report.html stays as it is.
        data: images for the map of embeddings; those that the run held out, if left out.
        forget: take an evaluation out of the run's results.csv first: its date there, or its number, 1 for the oldest.

    Returns:
        The file.

    Raises:
        PatchloomError: no run there, one that is given twice, no evaluation to forget, or a file that cannot be
            written.
    """
    places = [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(run) for run in runs]
    target = Path(out) if out is not None else _target(places)
    if target.is_dir():
        raise PatchloomError(f"--out {target} is a folder: give the file, such as {target / _FILE}")
    found = expand_runs(places)
    if forget is not None:
        if len(found.runs) != 1:
            raise PatchloomError(f"--forget is of one run, and these are {len(found.runs)}: give the run alone")
        forget_rows(found.runs[0] / "results.csv", forget)
    page = page_of(found.runs, data)
    if found.said:
        title = page.title if len(places) > 1 else f"Runs of {places[0].absolute().name}"
        page = replace(page, title=title, lead=[*found.said, *page.lead])
    with StatusMessage("writing the page"):
        write_whole(target, import_module(_RENDER).render(page))
    return target


def _target(places: Sequence[Path]) -> Path:
    """Where the page of these folders is written if nobody says so."""
    if len(places) != 1:
        return Path(_FILE)
    return places[0] / (_OF_COMPARISON if is_comparison(places[0]) else _FILE)


def page_of(runs: Sequence[Path], data: DataLike | None = None) -> Page:
    """What a page of these runs holds."""
    if not runs:
        raise PatchloomError("report needs the folder of a run, as in patchloom report runs/photos-mae")
    found = [load_run(run) for run in runs]
    real = [run.folder.path.resolve() for run in found]
    for run, place in zip(found, real, strict=True):
        if real.count(place) > 1:
            raise PatchloomError(f"{run.folder.path} is given twice: give each run once")
    found = disambiguate_runs(found)
    with StatusMessage("fitting the pictures onto the page"):
        pictures, notes = collect_pictures(found)
    parts = []
    for run, its in zip(found, pictures, strict=True):
        part, said = _part(run, its, data, len(found))
        parts.append(part)
        said = [one if one.endswith(".") else f"{one}." for one in said]  # errors have no full stop
        notes += [f"{run.name}: {one}" for one in said] if len(found) > 1 else said
    alone = parts[0] if len(parts) == 1 else None
    return Page(
        title=listing([run.name for run in found], "and"),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        lead=[_lead(part) for part in parts] if alone is None else [alone.why or alone.summary or alone.state],
        tone="plain" if alone is None else alone.tone,
        charts=charts_of(found),
        runs=parts,
        notes=notes,
    )


class _OfImages(NamedTuple):
    """What a page has of a run's images."""

    cloud: Cloud | None
    recordings: list[Recording]
    files: list[str]
    notes: list[str]


def _part(run: RunData, pictures: Sequence[Picture], data: DataLike | None, count: int) -> tuple[RunPart, list[str]]:
    """What the page has of a run, one of ``count``; and sentences on what it has not."""
    notes = [*run.problems]
    gains, numbers, tables = _numbers(run, notes)
    images = images_of(run, data)
    of_images = _of_images(run, images, count)
    health = run.health
    part = RunPart(
        name=run.name,
        state=run.state(),
        verdict=_verdict(run),
        tone="plain" if health is None else _TONES.get(health.verdict, "plain"),
        why="" if health is None else health.why,
        then="" if health is None else health.then,
        summary=_summary(run),
        gains=gains,
        numbers=numbers,
        settings=settings_of(run),
        pictures=pictures,
        cloud=of_images.cloud,
        recordings=of_images.recordings,
        sliders=sliders_of(run, SLIDERS // count),
        tables=tables,
        files=of_images.files,
        about=run_metadata(run),
        command=command_of(run),
    )
    return part, notes + of_images.notes


def _verdict(run: RunData) -> str:
    """In a few words; of a run that is on the way they say that they hold so far."""
    if run.health is None:
        return ""
    verdict = run.health.verdict
    return verdict.value if run.finished or verdict is Verdict.EARLY else f"{verdict} so far"


def _summary(run: RunData) -> str:
    """The closing sentence; that the images have no labels is left out where later evaluations had some."""
    summary = run.summary or ""
    try:
        return summary.replace(no_labels(run.modality.noun), "").strip() if has_labelled_results(run) else summary
    except ValueError:  # a damaged results.csv, of which a note tells
        return summary


def _numbers(run: RunData, notes: list[str]) -> tuple[Table | None, list[Number], list[Table]]:
    try:
        return gains_of(run), key_numbers(run), results_of(run)
    except ValueError as problem:
        notes.append(str(problem))
        return None, [], []


def _of_images(run: RunData, images: Images, count: int) -> _OfImages:
    """The map of embeddings, recordings and sentences on files; of one of ``count`` runs."""
    cloud, recordings, notes = None, list[Recording](), list[str]()
    if images.shown is None:
        notes.append(f"There is no map of embeddings: {images.what}")
    else:
        try:
            cloud = make_embedding_map(
                run.folder.path, images.shown, images.what, min(MAX_MAP_IMAGES, _POINTS // count)
            )
        except PatchloomError as problem:
            notes.append(f"There is no map of embeddings: {problem}")
        if images.shown.sound is not None:
            try:
                recordings = recordings_of(images.shown, max(1, COUNT // count), SOUNDS // count)
            except PatchloomError as problem:
                notes.append(f"There are no recordings to be heard: {problem}")
    return _OfImages(cloud, recordings, describe_data_issues(run, images.train), notes)


def _lead(part: RunPart) -> str:
    """The sentence at the head of a page about one run of several: its verdict, else its summary, else where it is."""
    if part.verdict:
        return f"{part.name}: {part.verdict}. {part.why}".strip()
    return f"{part.name}: {part.summary or part.state}"
