"""The page of a comparison: its verdict and tables, before what each of its runs has to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from patchloom.compare.outcome import Comparison
from patchloom.files import write_whole
from patchloom.report.content import Page, Table
from patchloom.report.render import render
from patchloom.report.verb import page_of
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
        rows = [tuple(cell.replace("\n", " ") for cell in row) for row in grid.rows]
        tables.append(Table(title, grid.heading, rows, note))
    return replace(
        page,
        title=f"Comparison {found.folder.name}",
        lead=found.verdict,
        tone="good" if found.winner else "plain",
        tables=tables,
        notes=[*found.notes, *page.notes],
    )
