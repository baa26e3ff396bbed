"""Generator of the papers' part of reference/recipes.md, from the recipes in the package.

    python docs/make_recipes.py

The text before and after this part is kept. A test fails if the page is out of date.
"""

from __future__ import annotations

import re
import textwrap
from itertools import groupby
from pathlib import Path

from patchloom.recipes import PretrainRecipe, recipe_named, recipe_names

PAGE = Path(__file__).parent / "reference" / "recipes.md"
BEGIN, END = "<!-- made by docs/make_recipes.py -->\n", "<!-- until here -->\n"
_HEADING = ["recipe", "row", "table", "epochs (effective)", "crops", "fine-tuned", "linear", "here"]


def page() -> str:
    """Return the text of recipes.md."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE} lacks the line {END.strip()}"
    return "\n".join([before + BEGIN, *_papers(), END + after])


def _papers() -> list[str]:
    found = [recipe_named(name) for name in recipe_names()]
    lines: list[str] = []
    for paper, group in groupby(found, key=lambda one: one.paper):
        recipes = list(group)
        lines += [f"### {paper}", "", *_table(recipes), "", *_remarks(recipes), ""]
    return lines


def _table(recipes: list[PretrainRecipe]) -> list[str]:
    rows = [_HEADING, ["---"] * len(_HEADING)]
    for one in recipes:
        epochs = f"{one.epochs:,} ({one.effective:,g})"
        scores = [f"{one.published[name]:.1f}" if name in one.published else "" for name in ("fine-tuned", "linear")]
        about = one.row if one.data == "ImageNet-1k" or one.data in one.row else f"{one.row}, {one.data}"
        rows.append([f"`{one.name}`", about, one.table, epochs, one.samples(), *scores, one.measured or "not run"])
    return ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in rows]


def _remarks(recipes: list[PretrainRecipe]) -> list[str]:
    """Return remarks on fine-tuning, cost and notes, each once with the recipes that share it."""
    said: dict[str, list[str]] = {}
    for remark in (lambda one: f"Fine-tuned by `{one.evaluation()}`", lambda one: one.cost, lambda one: one.note):
        for one in recipes:
            if remark(one):
                said.setdefault(remark(one).rstrip("."), []).append(one.name)
    lines = []
    for text, names in said.items():
        of = "" if len(names) == len(recipes) else f"{', '.join(f'`{name}`' for name in names)}: "
        lines += _filled(f"- {of}{text}.")
    return lines


def _filled(text: str) -> list[str]:
    text = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)  # no code over two lines
    lines = textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
