"""Imports run one way: patches <- withhold <- nets <- questions <- tasks <- runs <- evaluate, train <- cli."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "patchloom"

# what each package may import besides itself; those of COMMON are for all
MAY = {
    "patches": set(),
    "withhold": {"patches"},
    "data": set(),
    "nets": {"patches", "withhold"},
    "questions": {"patches", "withhold", "nets"},
    "tasks": {"patches", "withhold", "nets", "questions", "data"},
    "runs": {"nets", "data", "tasks", "recipes"},
    "look": {"patches", "withhold", "nets", "data", "questions", "tasks", "runs"},
    "evaluate": {"patches", "withhold", "nets", "questions", "data", "runs", "look", "launch"},
    "report": {"patches", "withhold", "nets", "data", "questions", "tasks", "runs", "look", "evaluate"},
    "track": {"runs"},
    "train": {"nets", "questions", "data", "tasks", "recipes", "runs", "look", "evaluate", "track", "launch"},
    "embed": {"withhold", "nets", "data", "runs", "evaluate"},
    "export": {"withhold", "nets", "data", "tasks", "runs", "report"},
    "predict": {"nets", "data", "runs", "look", "evaluate"},
    "compare": {"nets", "data", "tasks", "runs", "evaluate", "train", "report"},
    "bench": {"nets", "data", "tasks", "runs", "train"},
    "propose": {"data", "tasks", "runs", "train", "bench"},
    "check": {"data", "tasks", "runs", "train", "propose"},
    "rendezvous": set(),
    "launch": {"rendezvous"},
    "recipes": set(),
    "signatures": set(),
    "verbs": {"tasks", "signatures"},
    "typos": set(),
    "calls": set(),
    "options": {"tasks", "track", "recipes", "signatures", "verbs", "typos", "data"},
    "usage": {"tasks", "signatures", "verbs", "typos", "options"},
    "cli": {
        *(
            "tasks",
            "recipes",
            "train",
            "evaluate",
            "export",
            "predict",
            "look",
            "report",
            "bench",
            "check",
            "compare",
            "embed",
        ),
        *("verbs", "options", "usage"),
    },
    "__main__": {"cli"},
    "__init__": {
        *("data", "tasks", "runs", "train", "look", "evaluate", "report", "export", "predict", "bench", "check"),
        *("compare", "embed"),
    },
    "errors": set(),
    "processes": set(),
    "rates": set(),
    "hints": set(),
    "files": set(),
    "machine": set(),
    "memory": set(),
    "stopping": set(),
    "shown": set(),
    "sound": set(),
    "sides": set(),
    "verdict": set(),
    "version": set(),
    "waiting": set(),
}
# timm's insides; a decoder has blocks of its own
KNOWING = [
    SOURCE / "nets" / name
    for name in (
        *("attention.py", "build.py", "encode.py", "hierarchical.py", "performance.py", "partial.py", "queries.py"),
        *("native/blocks.py", "decode.py", "dense/blocks.py", "servable.py", "last_blocks.py", "fitting.py"),
    )
]
COMMON = {
    *("calls", "errors", "files", "hints", "machine", "memory", "processes", "rates"),
    *("shown", "sides", "sound", "stopping", "typos", "verdict", "version", "waiting"),
}
FILES = sorted(SOURCE.rglob("*.py"))
NAMING = re.compile(r"patchloom\.\w+[\w.]*")  # a string that names a module, or something in one


def imported(path: Path) -> set[str]:
    """The parts of patchloom that a file imports, anywhere in it, or names in strings, by which imports are lazy."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively: write the whole name"
            names = [f"patchloom.{alias.name}" for alias in node.names] if node.module == "patchloom" else [node.module]
        elif isinstance(node, ast.Import):
            assert "patchloom" not in [alias.name for alias in node.names], f"{path} imports all of patchloom"
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMING.fullmatch(node.value):
            names = [node.value]
        found |= {name.split(".")[1] for name in names if name.startswith("patchloom.")}
    return found - COMMON


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    assert imported(path) - {part_of(path)} <= MAY[part_of(path)]


def test_no_arrow_that_is_allowed_would_close_a_circle():
    list(TopologicalSorter(MAY).static_order())


def test_a_lazy_import_is_an_arrow(tmp_path):
    lazy = tmp_path / "lazy.py"
    lazy.write_text(
        '"""As `patchloom.look.maps`."""\nfrom patchloom.errors import AlreadyReported\nHOME = "patchloom.train.step"'
    )
    assert imported(lazy) == {"train"}
    lazy.write_text('import patchloom.nets.build\nfrom patchloom import data\nname = f"patchloom.tasks.{kind}"')
    assert imported(lazy) == {"nets", "data", "tasks"}


def test_only_what_builds_and_runs_encoders_knows_timms_insides():
    inside = {
        "blocks",
        "downsample",
        "window_area",
        "cls_token",
        "reg_token",
        "pos_embed",
        "norm_pre",
        "pos_drop",
        "qkv",
    }
    for path in FILES:
        attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        # the blocks of what a user asked for are numbers
        used = {node.attr for node in attributes if not (isinstance(node.value, ast.Name) and node.value.id == "asked")}
        if path not in KNOWING:
            assert not used & inside, f"{path} touches {used & inside}"
        if part_of(path) != "nets":
            assert "patch_embed" not in used, f"{path} touches patch_embed: nets/encode.py tells sizes"
