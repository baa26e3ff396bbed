"""Every public name is unique in the whole tree."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "patchloom"
MEANT = {
    "embed",  # the verb, and the first step of an encoder
    "T", "R",  # type variables
    "Auto",  # the word "auto"
}  # fmt: skip


def public_names(path: Path) -> set[str]:
    """Return the public names that a file defines at its top."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def test_public_names_are_unique():
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in public_names(path):
            places[name].append(str(path.relative_to(SOURCE)))
    doubles = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in doubles.items() if name not in MEANT} == {}
    assert set(doubles) == MEANT, "MEANT has a name that is single by now"
