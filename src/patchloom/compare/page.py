"""The page of a comparison: its verdict and tables, before what each of its runs has to tell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from patchloom.compare.outcome import Comparison
from patchloom.compare.plan import Plan, called, spelled
from patchloom.files import write_whole
from patchloom.report.content import Page, Table
from patchloom.report.render import render
from patchloom.report.verb import page_of
from patchloom.runs.folder import RunFolder
from patchloom.sides import in_pixels
from patchloom.waiting import Waiting


def write_page(found: Comparison, runs: Sequence[Path]) -> Path:
    """Write ``report.html`` to a comparison's folder.

    Args:
        found: what it found.
        runs: folders of the runs that the page tells of, the best first.

    Returns:
        The file.

    Raises:
        PatchloomError: it cannot be written, or a run cannot be read.
    """
    path = found.folder / "report.html"
    page = comparison_page(found, page_of(runs))
    with Waiting("writing the page"):
        write_whole(path, render(page))
    return path


def comparison_page(found: Comparison, page: Page) -> Page:
    """The page of its runs, headed by what the comparison found."""
    tables = []
    for title, grid, note in found.tables:
        tables.append(Table(title, grid.heading, grid.rows, note))
    if found.about:
        tables.append(Table("What was compared", ("", ""), list(found.about)))
    return replace(
        page,
        title=f"Comparison {found.folder.name}",
        lead=found.verdict,
        tone="good" if found.winner else "plain",
        tables=tables,
        notes=[*found.notes, *page.notes],
    )


def about_of(
    plan: Plan, folder: Path, labels: str | None, few: Sequence[float], beside: Sequence[str], run: Path
) -> tuple[tuple[str, str], ...]:
    """What was asked for, and the command that repeats it, as pairs of a name and a text.

    Args:
        plan: of the comparison.
        folder: of it.
        labels, few, beside: as in `patchloom.compare.verb.compare`.
        run: one of its runs.
    """
    asked, its = plan.asked, RunFolder(run).read_config()
    budget = {"minutes": f"{asked.minutes:g}"} if asked.samples is None else {"samples": str(asked.samples)}
    given = {"tasks": ",".join(asked.tasks), **budget, "seeds": str(asked.seeds), "labels": labels or ""}
    given |= {"few": ",".join(f"{one:g}" for one in few), "beside": ",".join(beside)}
    given |= spelled(asked.given)
    words = [f"--{name}={value}" for name, value in given.items() if value]
    equal = f"{asked.samples:,} samples" if asked.minutes is None else f"{asked.minutes:g} min of training"
    return (
        ("command", shlex.join(["patchloom", "compare", *asked.data, *words, f"--out={folder}"])),
        ("runs", f"{len(plan.epochs)} tasks, {asked.seeds} of each, with {equal} each"),
        *((name, f"{plan.epochs[task]:,g} epochs") for task, name in called(plan.epochs).items()),
        (
            "encoder",
            f"{its.model.get('name', '')}, images of {in_pixels(its.img_size)}, patches of {in_pixels(its.patch_size)}",
        ),
    )
