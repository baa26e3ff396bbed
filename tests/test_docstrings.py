"""Names in backticks in docstrings exist in the code."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FOREIGN = {"RelPosAttention", "save_to_disk", "sklearn.linear_model.LogisticRegression", "torch.amp.GradScaler"}
FILES = sorted((SOURCE / "patchloom").rglob("*.py"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def names_of(path: Path, tree: ast.Module) -> set[str]:
    """Return all names in a file: modules, classes, functions, attributes, arguments, and words in strings."""
    found = {*path.relative_to(SOURCE).with_suffix("").parts}
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if described(node)}
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                found |= {*value.split(".")}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found |= {*re.findall(r"\w+", node.value)} if len(node.value) < 40 else set()  # options, keys, paths
    return found


def described(node: ast.AST) -> str | None:
    return ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None


def missing(text: str, names: set[str]) -> list[str]:
    """Return the names in single backticks that do not exist."""
    quoted = re.findall(r"`([A-Za-z_][\w.]*)`", re.sub(r"``.*?``", "", text, flags=re.DOTALL))
    return [name for name in quoted if name not in FOREIGN and not {*name.split(".")} <= names]


def test_names_in_docstrings_exist():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    names = set().union(*(names_of(path, tree) for path, tree in trees.items()))
    stale = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for name in missing(described(node) or "", names)
    ]
    assert not stale
    assert missing("As `OldName` and `encode` and ``anything``.", names) == ["OldName"]
