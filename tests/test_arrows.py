"""Imports run one way: patches <- withhold <- nets <- questions <- tasks <- runs <- evaluate, train <- cli."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "patchloom"

# the parts that each part may import besides itself and COMMON; a part is a package, or a file beside the packages
MAY = {
    "patches": set(),
    "withhold": {"patches"},
    "data": set(),
    "nets": {"patches", "withhold", "data"},
    "questions": {"patches", "withhold", "nets", "data"},
    "tasks": {"patches", "withhold", "nets", "questions", "data"},
    "recipes": set(),
    "runs": {"nets", "data", "tasks", "recipes"},
    "look": {"patches", "withhold", "nets", "data", "questions", "tasks", "runs"},
    "evaluate": {"patches", "withhold", "nets", "questions", "data", "runs", "look"},
    "dense": {"withhold", "nets", "data", "runs", "look", "evaluate"},
    "predict": {"nets", "data", "runs", "look", "evaluate", "dense"},
    "report": {"nets", "data", "recipes", "questions", "tasks", "runs", "look", "evaluate", "dense"},
    "loggers": {"runs"},
    "train": {"nets", "questions", "data", "tasks", "recipes", "runs", "look", "evaluate", "loggers"},
    "embed": {"withhold", "nets", "data", "runs", "look", "evaluate"},
    "export": {"withhold", "nets", "data", "tasks", "runs", "evaluate", "dense", "report"},
    "distill": {"nets", "data", "runs", "evaluate", "train"},
    "compare": {"nets", "data", "tasks", "recipes", "runs", "loggers", "evaluate", "train", "report", "options"},
    "curate": {"nets", "data", "runs", "look", "evaluate", "embed"},
    "bench": {"nets", "data", "tasks", "runs", "train"},
    "check": {"data", "tasks", "runs", "look", "train", "bench"},
    "options": {"data", "tasks", "recipes", "loggers"},
    "cli": {
        *("tasks", "recipes", "train", "evaluate", "export", "dense", "look", "report", "bench", "check", "compare"),
        *("embed", "options", "data", "distill", "predict", "curate"),
    },
    "__main__": {"cli"},
    "__init__": {
        *("data", "tasks", "runs", "train", "look", "evaluate", "dense", "report", "export", "bench", "check"),
        *("compare", "embed", "distill", "predict", "curate"),
    },
}
# audio is a wing of data: a recording becomes a picture inside its source
WINGS = {"audio": "data"}
# timm's insides; a decoder has blocks of its own
KNOWING = [
    *(SOURCE / "nets" / f"{name}.py" for name in ("attention", "build", "encode", "swin", "performance", "finetune")),
    *(SOURCE / "nets" / f"{name}.py" for name in ("sparse_attention", "decoders", "native/blocks", "native/ops")),
    *(SOURCE / f"{name}.py" for name in ("nets/checkpoints/resize", "nets/checkpoints/live", "dense/backbone")),
]
COMMON = {"arguments", "declarations", "display", "errors", "estimate", "pace", "results", "schedules", "sizes"}
COMMON |= {"system", "version"}
FILES = sorted(SOURCE.rglob("*.py"))
NAMING = re.compile(r"patchloom\.\w+[\w.]*")  # a string that names a module, or something in one


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> set[str]:
    """Return the parts of patchloom that a file imports, anywhere in it, or names in strings for lazy imports."""
    found, nodes = set(), [*ast.walk(ast.parse(path.read_text()))]
    # a declaration names types of torch and of data, and modules, which it does not import when it runs
    types = [
        one
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and "options" in path.parts
        for one in node.body
    ]
    for node in nodes:
        names = []
        if node in types:
            continue
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively: write the whole name"
            packages = ("patchloom", "patchloom.options")
            names = [f"{node.module}.{one.name}" for one in node.names] if node.module in packages else [node.module]
        elif isinstance(node, ast.Import):
            assert "patchloom" not in [alias.name for alias in node.names], f"{path} imports all of patchloom"
            names = [alias.name for alias in node.names]
        elif "options" not in path.parts and isinstance(node, ast.Constant) and NAMING.fullmatch(str(node.value)):
            names = [node.value]
        found |= {part for name in names if name.startswith("patchloom.") for part in [part_named(name)]}
    return found - COMMON


def part_named(name: str) -> str:
    """Return the part of a module; options only declare, except those that parse, and all parts may import them."""
    _, part, *inner = name.split(".")
    if part == "options" and inner and inner[0] not in ("parse", "help"):
        return "declarations"
    return WINGS.get(part, part)


def part_of(path: Path) -> str:
    return part_named(".".join(("patchloom", *path.relative_to(SOURCE).with_suffix("").parts)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    own = part_of(path)
    assert imported(path) - {own} <= (set() if own in COMMON else MAY[own])


def test_allowed_imports_have_no_cycle():
    list(TopologicalSorter(MAY).static_order())


def within(node: ast.stmt) -> list[ast.stmt]:
    """Return the statements inside a with or a try at the top of a file, which run at import."""
    return node.body if isinstance(node, ast.With | ast.Try) else []


def test_no_two_files_import_each_other():
    """Neither directly nor by way of others, by the imports at their tops."""
    known = {".".join(("patchloom", *path.relative_to(SOURCE).with_suffix("").parts)) for path in FILES}
    known |= {name.removesuffix(".__init__") for name in known}
    graph = {}
    for path in FILES:
        name = ".".join(("patchloom", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        top = [part for node in parsed(path).body for part in (node, *within(node))]
        taken = [node for node in top if isinstance(node, ast.ImportFrom)]
        full = [(node.module, f"{node.module}.{alias.name}") for node in taken for alias in node.names]
        graph[name] = {one if one in known else module for module, one in full if module in known} - {name}
    list(TopologicalSorter(graph).static_order())


def test_one_file_knows_the_native_kernels():
    wing = SOURCE / "nets" / "native"
    known = re.compile(r"nets\.native|nets import .*\bnative\b")
    knowing = [path for path in FILES if wing not in path.parents and known.search(path.read_text())]
    assert knowing == [SOURCE / "nets" / "performance.py"]


def test_a_lazy_import_counts_as_an_import(tmp_path):
    lazy = tmp_path / "lazy.py"
    lazy.write_text(
        '"""As `patchloom.look.maps`."""\nfrom patchloom.errors import AlreadyReported\nHOME = "patchloom.train.step"'
    )
    assert imported(lazy) == {"train"}
    lazy.write_text('import patchloom.nets.build\nfrom patchloom import data\nname = f"patchloom.tasks.{kind}"')
    assert imported(lazy) == {"nets", "data", "tasks"}


def test_only_modules_for_encoders_use_timms_internals():
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
        attributes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)]
        # the blocks of what a user asked for are numbers
        used = {
            node.attr
            for node in attributes
            if not (isinstance(node.value, ast.Name) and node.value.id in ("asked", "options"))
        }
        if path not in KNOWING:
            assert not used & inside, f"{path} touches {used & inside}"
        if path.relative_to(SOURCE).parts[0] not in ("nets", "dense"):
            assert "patch_embed" not in used, f"{path} touches patch_embed: nets/encode.py tells sizes"
