"""Names in backticks in docstrings exist in the code."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FOREIGN = {"RelPosAttention", "save_to_disk", "sklearn.linear_model.LogisticRegression", "torch.amp.GradScaler"}
FILES = sorted((SOURCE / "patchloom").rglob("*.py"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FIELDS = {  # of the nodes that have a name
    **{ast.Name: ("id",), ast.Attribute: ("attr",), ast.arg: ("arg",), ast.keyword: ("arg",)},
    **{ast.alias: ("name", "asname"), ast.ImportFrom: ("module",)},
    **dict.fromkeys((ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler), ("name",)),
}


def read(path: Path) -> tuple[list[str], set[str]]:
    """Return a file's docstrings, and its names, among them words of short strings."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    documented = [node for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    docstrings = {id(node.body[0].value) for node in documented}
    found = {*path.relative_to(SOURCE).with_suffix("").parts}
    for node in nodes:
        for field in FIELDS.get(type(node), ()):
            found |= {*(getattr(node, field) or "").split(".")}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found |= {*re.findall(r"\w+", node.value)} if len(node.value) < 40 else set()  # options, keys, paths
    return [ast.get_docstring(node) for node in documented], found


def missing(text: str, names: set[str]) -> list[str]:
    """Return the names in single backticks that do not exist."""
    quoted = re.findall(r"`([A-Za-z_][\w.]*)`", re.sub(r"``.*?``", "", text, flags=re.DOTALL))
    return [name for name in quoted if name not in FOREIGN and not {*name.split(".")} <= names]


def test_names_in_docstrings_exist():
    files = {str(path.relative_to(SOURCE)): read(path) for path in FILES}
    names = set().union(*(found for _, found in files.values()))
    assert not [
        f"{path}: {name}" for path, (texts, _) in files.items() for text in texts for name in missing(text, names)
    ]
    assert missing("As `OldName` and `encode` and ``anything``.", names) == ["OldName"]
