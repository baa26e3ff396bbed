"""Tests of learning curves from tables with gaps, with one row and without rows, and of confusion matrices."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusing import refusal
from scipy.ndimage import gaussian_filter1d

from patchloom.look import charts
from patchloom.look.charts import LABEL_GAP, draw_confusion, draw_curves, smoothed_values, spread_labels

NAMES = [
    "step", "epoch", "images", "loss", "lr", "seconds", "position_accuracy", "held_out", "baseline:chance",
    "knn", "knn:untrained", "knn:raw pixels",
]  # fmt: skip


def table(path: Path, rows: list[dict], names: list[str] = NAMES) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(n: int, *, measured: bool = True) -> list[dict]:
    """Return rows of a run, with held-out measures in every tenth."""
    rows = []
    for i in range(1, n + 1):
        row = {"step": i * 10, "epoch": i / 5, "loss": 2 / i, "lr": 1e-3}
        if measured and i % 10 == 0:
            row |= {"held_out": 1 - 5 / i, "baseline:chance": 1 / 64}
            row |= {"knn": 0.8, "knn:untrained": 0.56, "knn:raw pixels": 0.57}
        rows.append(row)
    return rows


def test_panels_without_data_are_left_out(tmp_path):
    full = draw_curves(table(tmp_path / "full.csv", run(100)), tmp_path / "full.png", "position accuracy")
    loss = draw_curves(table(tmp_path / "loss.csv", run(100, measured=False)), tmp_path / "new" / "loss.png")
    assert Image.open(full).width == 3 * Image.open(loss).width


def test_a_run_that_has_not_logged_yet_says_so(tmp_path):
    for rows in ([], [{"step": 1, "epoch": 0.1}], [{"epoch": 1, "loss": "nan"}]):
        assert "nothing to draw yet" in refusal(draw_curves, table(tmp_path / "m.csv", rows), tmp_path / "m.png")
    assert not (tmp_path / "m.png").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"step,loss\n1,2\n", "no column named epoch"),
        (b"epoch,loss\n1,high\n", "high"),
        (b"\xff\xfe", "could not be read"),
        (b"", "nothing to draw yet"),
        (None, "could not be read"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "m.csv").write_bytes(content)
    assert message in refusal(draw_curves, tmp_path / "m.csv", tmp_path / "m.png")


def test_lines_are_named_with_their_last_values(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(charts, "write_figure", lambda figure, out, caption: figures.append(figure) or out)
    draw_curves(table(tmp_path / "m.csv", run(100)), tmp_path / "m.png")
    axes = figures[0].axes[2]
    texts = [text.get_text() for text in axes.texts]
    assert {"this run 80.0%", "untrained 56.0%", "raw pixels 57.0%"} <= set(texts)
    # the curve, and a dashed line a baseline
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "--"]
    assert axes.lines[0].get_xdata().tolist() == [2.0 * i for i in range(1, 11)]


def test_labels_do_not_touch():
    assert spread_labels([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    for crowd in ([0.5, 0.5, 0.51], [0.1, 0.12, 0.19, 0.2, 0.9]):
        moved = spread_labels(crowd, LABEL_GAP)
        assert len(moved) == len(crowd)
        assert np.diff(moved).min() >= LABEL_GAP - 1e-9
        assert np.mean(moved) == pytest.approx(np.mean(crowd))


@pytest.mark.parametrize(("n", "share"), [(200, 0.05), (1000, 0.02), (10, 0.9)])
def test_smoothing_is_scipys_gaussian_with_renormalised_ends(n, share):
    values, sigma = np.random.default_rng(0).standard_normal(n), share * n

    def filtered(of):
        return gaussian_filter1d(of, sigma, mode="constant", radius=int(3 * sigma))

    np.testing.assert_allclose(smoothed_values(values, share), filtered(values) / filtered(np.ones(n)), rtol=1e-9)
    assert smoothed_values(few := np.arange(5.0), 0.02) is few


@pytest.fixture
def confusion(tmp_path, monkeypatch):
    kept, write = [], charts.write_figure
    monkeypatch.setattr(charts, "write_figure", lambda figure, out, _: kept.append(figure) or write(figure, out))

    def drawn(counts, names):
        out = tmp_path / "new" / "c.png"
        assert draw_confusion(np.array(counts), names, "title", "caption", out) == out
        return kept[0].axes[0]

    return drawn


def test_rows_are_the_truth_with_numbers_and_shares(confusion):
    axes = confusion([[3, 1, 0], [0, 0, 2], [0, 2, 500]], ["yes", "no", "up"])
    said = {}
    for text in axes.texts:
        place = round(text.get_position()[1]), round(text.get_position()[0])
        said.setdefault(place, []).append(text.get_text())
    assert said == {
        (0, 0): ["3", "75%"],
        (0, 1): ["1", "25%"],
        (1, 1): ["0", "0%"],
        (1, 2): ["2", "100%"],
        (2, 1): ["2", "<1%"],
        (2, 2): ["500", "100%"],
    }
    assert [label.get_text() for label in axes.get_yticklabels()][:3] == ["yes  (4)", "no  (2)", "up  (502)"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("prediction", "true class (count)")
    colours = np.rint(255 * np.asarray(axes.images[0].get_array()))[..., :3].tolist()
    assert colours[1] == [[255] * 3, [255] * 3, [0xC1, 0x44, 0x0E]]  # nothing is right, all is wrong
    assert colours[2][2] == pytest.approx([0x2A, 0x6F, 0x97], abs=2)


@pytest.mark.parametrize("c", [2, 24])
def test_numbers_stay_legible_and_in_their_cells(c, confusion, tmp_path):
    axes = confusion(np.where(np.eye(c) + np.eye(c, k=1), 1234, 0), [f"word{i}" for i in range(c)])
    cell = axes.transData.transform([[0, 0], [1, 0]])
    assert min(text.get_fontsize() for text in axes.texts) >= 4.9
    assert all(text.get_window_extent().width < (cell[1] - cell[0])[0] for text in axes.texts)
    assert max(Image.open(tmp_path / "new" / "c.png").size) < 2400
