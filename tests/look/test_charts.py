"""Tests of learning curves from tables with gaps, with one row, and without rows."""

import csv
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from patchloom.errors import PatchloomError
from patchloom.look.charts import (
    LABEL_GAP,
    draw_curves,
    draw_panel,
    panel_of,
    read_metrics,
    smoothed_values,
    spread_labels,
)

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


def width_of(path: Path) -> int:
    return Image.open(path).width


def test_panels_without_data_are_left_out(tmp_path):
    full = draw_curves(table(tmp_path / "full.csv", run(100)), tmp_path / "full.png", "position accuracy")
    loss = draw_curves(table(tmp_path / "loss.csv", run(100, measured=False)), tmp_path / "loss.png")
    bare = draw_curves(table(tmp_path / "bare.csv", run(100, measured=False), NAMES), tmp_path / "new" / "bare.png")
    assert width_of(full) == 3 * width_of(loss)
    assert loss.read_bytes() == bare.read_bytes()


def test_a_table_without_measures_columns_is_drawn(tmp_path):
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": "nan"}, {"epoch": 3, "loss": 0.4}]
    assert draw_curves(table(tmp_path / "m.csv", rows, ["epoch", "loss"]), tmp_path / "m.png").exists()


@pytest.mark.parametrize("epoch", [0, 0.2])
def test_one_row_is_drawn(tmp_path, epoch):
    path = table(tmp_path / "one.csv", [{"epoch": epoch, "loss": 1.5, "held_out": 0.1, "baseline:chance": 0.1}])
    picture = np.asarray(Image.open(draw_curves(path, tmp_path / "one.png")))
    assert (picture.min(-1) < 200).any()


def test_a_run_that_has_not_logged_yet_says_so(tmp_path):
    for rows in ([], [{"step": 1, "epoch": 0.1}], [{"epoch": 1, "loss": "nan"}]):
        with pytest.raises(PatchloomError, match="nothing to draw yet"):
            draw_curves(table(tmp_path / "m.csv", rows), tmp_path / "m.png")
    (tmp_path / "m.csv").write_text("")
    with pytest.raises(PatchloomError, match="nothing to draw yet"):
        draw_curves(tmp_path / "m.csv", tmp_path / "m.png")
    assert not (tmp_path / "m.png").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"step,loss\n1,2\n", "no column named epoch"),
        (b"epoch,loss\n1,high\n", "high"),
        (b"\xff\xfe", "could not be read"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, message):
    (tmp_path / "m.csv").write_bytes(content)
    with pytest.raises(PatchloomError, match=message):
        draw_curves(tmp_path / "m.csv", tmp_path / "m.png")


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(PatchloomError, match="could not be read"):
        draw_curves(tmp_path / "none.csv", tmp_path / "m.png")


def test_a_row_cut_short_is_read_as_empty_cells(tmp_path):
    (tmp_path / "m.csv").write_text("epoch,loss,held_out\n1,0.5,0.1\n2,0.4\n")
    columns = read_metrics(tmp_path / "m.csv")
    assert columns["loss"].tolist() == [0.5, 0.4]
    assert np.isnan(columns["held_out"][1])


def test_the_curve_says_on_which_images(tmp_path):
    path = table(tmp_path / "m.csv", run(100))
    plain = draw_curves(path, tmp_path / "plain.png").read_bytes()
    known = draw_curves(path, tmp_path / "known.png", images="images that may be known by heart").read_bytes()
    assert plain == draw_curves(path, tmp_path / "m.png", images="held-out images").read_bytes() != known


def test_lines_are_named_with_their_last_values(tmp_path):
    columns = read_metrics(table(tmp_path / "m.csv", run(100)))
    axes = Figure().subplots()
    panel = panel_of(columns, "knn", "knn:", "kNN accuracy", "", True, 0)
    draw_panel(axes, panel, longest=20)
    texts = [text.get_text() for text in axes.texts]
    assert {"this run 80.0%", "untrained 56.0%", "raw pixels 57.0%"} <= set(texts)
    # the curve, and a dashed line a baseline
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "--"]
    assert panel.epochs.tolist() == [2.0 * i for i in range(1, 11)]


def test_labels_do_not_touch():
    assert spread_labels([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    for crowd in ([0.5, 0.5, 0.51], [0.1, 0.12, 0.19, 0.2, 0.9]):
        moved = spread_labels(crowd, LABEL_GAP)
        assert len(moved) == len(crowd)
        assert np.diff(moved).min() >= LABEL_GAP - 1e-9
        assert np.mean(moved) == pytest.approx(np.mean(crowd))


def test_smoothing_keeps_length_and_level():
    assert smoothed_values(np.full(200, 3.0), 0.05) == pytest.approx(np.full(200, 3.0))
    noisy = np.random.default_rng(0).standard_normal(1000)
    assert smoothed_values(noisy, 0.02).std() < 0.3
    few = np.arange(5.0)
    assert smoothed_values(few, 0.02) is few
    # a kernel wider than the curve
    assert smoothed_values(np.arange(10.0), 0.9).shape == (10,)


def test_the_same_table_gives_the_same_bytes_and_leaves_matplotlib_alone(tmp_path):
    before = matplotlib.rcParams["font.size"]
    first, second = (draw_curves(table(tmp_path / "m.csv", run(50)), tmp_path / name) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes()
    assert matplotlib.rcParams["font.size"] == before
