"""Tests of the confusion matrix."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from patchloom.look import charts
from patchloom.look.charts import draw_confusion


def _texts(monkeypatch: pytest.MonkeyPatch, counts: np.ndarray, names: list[str], out: Path) -> Figure:
    """Draw a matrix and return its figure."""
    kept, write = [], charts.write_figure
    monkeypatch.setattr(charts, "write_figure", lambda figure, out: kept.append(figure) or write(figure, out))
    assert draw_confusion(counts, names, "title", "caption", out) == out
    return kept[0]


def test_rows_are_the_truth_with_numbers_and_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.array([[3, 1, 0], [0, 0, 2], [0, 0, 500]])
    figure = _texts(monkeypatch, counts, ["yes", "no", "up"], tmp_path / "new" / "c.png")
    (axes,) = figure.axes
    said = {}
    for text in axes.texts:
        place = round(text.get_position()[1]), round(text.get_position()[0])
        said.setdefault(place, []).append(text.get_text())
    assert said == {
        (0, 0): ["3", "75%"],
        (0, 1): ["1", "25%"],
        (1, 1): ["0", "0%"],
        (1, 2): ["2", "100%"],
        (2, 2): ["500", "100%"],
    }
    assert [label.get_text() for label in axes.get_yticklabels()][:3] == ["yes  (4)", "no  (2)", "up  (500)"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("prediction", "true class (count)")


@pytest.mark.parametrize("c", [2, 35])
def test_numbers_stay_legible_and_in_their_cells(c: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.where(np.eye(c) + np.eye(c, k=1), 1234, 0)
    figure = _texts(monkeypatch, counts, [f"word{i}" for i in range(c)], tmp_path / "c.png")
    (axes,) = figure.axes
    cell = axes.transData.transform([[0, 0], [1, 0]])
    width = (cell[1] - cell[0])[0]
    assert min(text.get_fontsize() for text in axes.texts) >= 4.9
    for text in axes.texts:
        assert text.get_window_extent().width < width
    with Image.open(tmp_path / "c.png") as picture:
        assert max(picture.size) < 2400
