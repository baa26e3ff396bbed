"""Maps over the patch grid: right colours at the right places, the same file every time."""

from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.look import Map, draw_maps


def colours(path: Path) -> set[tuple[int, ...]]:
    """Those of which there is much."""
    found = Image.open(path).convert("RGB").getcolors(2**20)
    return {colour for count, colour in found if count > 2000}


def test_colours_are_of_one_scale_and_nothing_is_grey(tmp_path: Path) -> None:
    low, high = np.full((2, 3), 0.25), np.full((2, 3), 0.5)
    low[0, 0] = np.nan
    path = draw_maps([[Map(low, "low"), Map(high, "high")]], [""], ["a", "b"], "caption", tmp_path / "new" / "maps.png")
    viridis = {"grey": (217, 217, 217), "half": (33, 145, 140), "most": (253, 231, 37), "page": (255, 255, 255)}
    shown = colours(path)
    for name, colour in viridis.items():
        assert any(np.abs(np.subtract(colour, one)).max() < 6 for one in shown), (name, shown)
    again = draw_maps([[Map(low, "low"), Map(high, "high")]], [""], ["a", "b"], "caption", tmp_path / "again.png")
    assert path.read_bytes() == again.read_bytes()


def test_maps_of_nothing_and_of_zeros_are_drawn(tmp_path: Path) -> None:
    rows = [[Map(np.full((8, 2), np.nan), "")], [Map(np.zeros((8, 2)), "")]]
    assert draw_maps(rows, ["above", "below"], ["a"], "", tmp_path / "maps.png").stat().st_size > 1000
