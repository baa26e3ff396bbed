"""Notebooks in examples/ run from the first cell to the last, with smaller parameters."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
SMALL = {  # in place of the values in the cell of parameters
    "first_hour": {"data": "drawn/", "images": 48, "epochs": 1},
    "what_it_sees": {"data": "shapes:48", "epochs": 1, "steps": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_pictures(path, tmp_path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    (parameters,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", []))
    assert {line.partition(" = ")[0] for line in parameters.source.splitlines()} == set(SMALL[path.stem])
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in SMALL[path.stem].items())
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [kind for cell in book.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    displays = sum(cell.source.count("display(Image") for cell in book.cells if cell.cell_type == "code")
    assert shown.count("image/png") >= displays > 0


def test_notebooks_are_kept_without_what_they_gave():
    for path in EXAMPLES:
        cells = nbformat.read(path, as_version=4).cells
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells), path
