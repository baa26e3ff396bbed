"""Write the references of CITATION.cff from `patchloom.report.papers`: the papers of all tasks and recipes.

python docs/make_citation.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from patchloom.report.papers import PAPERS, RECIPE_PAPERS, Paper
from patchloom.tasks import TASKS

FILE = Path(__file__).parents[1] / "CITATION.cff"


def reference(paper: Paper) -> dict[str, Any]:
    """Return a reference in the Citation File Format 1.2.0."""
    found: dict[str, Any] = {"type": "article", "title": paper.title, "year": paper.year}
    if "(TMLR)" in paper.venue:
        found["journal"] = paper.venue
    elif paper.venue:
        found |= {"type": "conference-paper", "conference": {"name": paper.venue}}
    found["identifiers"] = [{"type": "other", "value": f"arXiv:{paper.arxiv}"}]
    names = (author.split(", ") for author in paper.authors)
    return found | {"authors": [{"family-names": family, "given-names": given} for family, given in names]}


def references() -> list[dict[str, Any]]:
    """Return the references of the papers of all tasks and recipes, in the order of the tasks."""
    keys = [key for entry in TASKS.values() for key in entry.papers]
    return [reference(PAPERS[key]) for key in dict.fromkeys([*keys, *RECIPE_PAPERS.values()])]


def citation(text: str) -> str:
    """Return the text of CITATION.cff with new references, which are its end."""
    head = text.partition("references:\n")[0]
    written = yaml.safe_dump({"references": references()}, sort_keys=False, allow_unicode=True, width=1000)
    return head + written


if __name__ == "__main__":
    FILE.write_text(citation(FILE.read_text("utf-8")), "utf-8")
