"""Imports run one way: views <- nets <- objectives <- tasks <- train <- cli. No file holds two ideas."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "patchloom"

# what each package may import besides itself; errors, files, hints, machine, memory, processes and stopping are for all
MAY = {
    "views": set(),
    "data": set(),
    "nets": {"views"},
    "objectives": {"views", "nets"},
    "tasks": {"views", "nets", "objectives", "data"},
    "look": {"views", "nets", "data"},
    "evaluate": {"views", "nets", "data"},
    "train": {"views", "nets", "objectives", "data", "tasks", "look", "evaluate"},
    "export": {"views", "nets", "data", "train"},
    "bench": {"nets", "data", "tasks", "train"},
    "propose": {"data", "train", "bench"},
    "check": {"data", "train", "propose"},
    "options": {"tasks", "train", "evaluate"},
    "cli": {"tasks", "train", "evaluate", "export", "options", "look", "bench", "check"},
    "__main__": {"cli"},
    "__init__": {"tasks", "train", "evaluate", "export", "nets"},
    "errors": set(),
    "processes": set(),
    "hints": set(),
    "files": set(),
    "machine": set(),
    "memory": set(),
    "stopping": set(),
}
# timm's insides; a decoder has blocks of its own
KNOWING = [
    SOURCE / "nets" / name
    for name in ("build.py", "encode.py", "partial.py", "queries.py", "native/blocks.py", "decode.py")
]
FILES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The parts of patchloom that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "patchloom" else [f"patchloom.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("patchloom.")}
    return found - {"errors", "files", "hints", "processes", "machine", "memory", "stopping", "__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert imported(path) - {part} <= MAY[part]


def test_only_what_builds_and_runs_encoders_knows_timms_insides():
    inside = {"blocks", "cls_token", "reg_token", "pos_embed", "norm_pre", "pos_drop", "qkv"}
    for path in FILES:
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        if path not in KNOWING:
            assert not used & inside, f"{path} touches {used & inside}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_holds_two_ideas(path):
    assert len(path.read_text().splitlines()) <= 310
