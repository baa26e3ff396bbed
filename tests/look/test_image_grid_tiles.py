"""Tests of pages of tiles: no overlapping text, and correct marks, frames and scales."""

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from patchloom.look import image_grid
from patchloom.look.charts import DPI, STYLE
from patchloom.look.image_grid import Scale, Tile, draw_tiles


@pytest.fixture
def figures(monkeypatch):
    """Record the drawn figures."""
    seen = []
    monkeypatch.setattr(image_grid, "write_figure", lambda figure, out: seen.append(figure) or out)
    return seen


RED = np.full((8, 8, 3), (200, 30, 60), np.uint8)


@pytest.mark.parametrize(("size", "columns"), [((32, 32), 1), ((16, 64), 3), ((64, 16), 9)])
def test_no_word_or_tile_touches_another(size, columns, figures, tmp_path):
    rows = [[Tile(RED, "0.998", frame="#0072b2") for _ in range(columns)] for _ in range(3)]
    headings = ["image", "first three, foreground", *[f"{i}." for i in range(columns)]][:columns]
    groups = [("", 1), ("an encoder with a name of some length", columns - 1)] if columns > 1 else ()
    scales = [Scale("how much", -1, 1), Scale("how little", 0, 3, ends=("none", "all"))]
    draw_tiles(rows, headings, size, "A title", "A caption of some words. " * 12, tmp_path / "t.png", scales, groups)
    (figure,) = figures
    figure.set_dpi(DPI)
    renderer = FigureCanvasAgg(figure).get_renderer()
    with matplotlib.rc_context(STYLE):
        boxes = [text.get_window_extent(renderer) for text in figure.texts if text.get_text()]
        boxes += [axes.get_tightbbox(renderer) for axes in figure.axes]
    for i, one in enumerate(boxes):
        assert one.x0 >= 0 and one.y0 >= 0 and one.x1 <= figure.bbox.x1 and one.y1 <= figure.bbox.y1
        for other in boxes[:i]:
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            down = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert across <= 2 or down <= 2, f"{one} and {other} overlap"
    assert all(text.get_fontsize() >= 8 for text in figure.texts)


def test_a_scale_shades_numbers_and_what_is_none():
    scale = Scale("cosine", -1, 1, "gray")
    shades = scale.shade(np.array([[-5.0, -1.0, 1.0, np.nan]]))
    assert shades[0, :3, 0].tolist() == [0, 0, 255] and shades[0, 3].tolist() == [217] * 3


def test_marks_and_frames_are_drawn(tmp_path):
    kinds = [Tile(RED), Tile(RED, mark=(0, 0.5, 0.5, 0.5)), Tile(RED, frame="#0072b2")]
    plain, marked, framed = (
        np.asarray(
            Image.open(draw_tiles([[tile]], ["image"], (8, 8), "title", "words", tmp_path / f"{i}.png")).convert("RGB")
        )
        for i, tile in enumerate(kinds)
    )
    ((top, left), (bottom, right)) = (
        find(np.argwhere((plain == RED[0, 0]).all(-1)), axis=0) for find in (np.min, np.max)
    )
    assert right - left == pytest.approx(1.2 * DPI, abs=6) == bottom - top
    rows, columns = np.nonzero((plain != marked).any(-1))  # the upper right quarter, but for the line's width
    assert columns.min() > (left + right) / 2 - 5 and rows.max() < (top + bottom) / 2 + 5
    assert (marked == (255, 212, 0)).all(-1).any()
    assert (framed == (0, 0x72, 0xB2)).all(-1).sum() > 100
