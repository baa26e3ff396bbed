import numpy as np
import tifffile
from PIL import Image

from patchloom.data.sources.open import open_data
from patchloom.look.sheet import read_caption
from patchloom.look.windows import draw_windows

RED = 200, 40, 40


def test_windows_that_are_read_are_bright(tmp_path, draw):
    slide = np.full((200, 300, 3), 255, np.uint8)
    slide[:100, 200:] = RED
    slide[20:50, 220:250] = 0
    tifffile.imwrite(tmp_path / "a.tif", slide, photometric="rgb", tile=(64, 64))
    out = draw_windows(open_data(f"{tmp_path}@tile=100").train, tmp_path / "windows.png")
    assert out is not None and "left out" in read_caption(out).text
    picture = np.asarray(Image.open(out)).astype(int)
    red = (abs(picture - RED).sum(-1) < 20).sum()
    veiled = (abs(picture - 0.35 * 255).sum(-1) < 20).sum()  # white that no window covers
    assert 4 < veiled / red < 7.5  # five windows are dark, and nine hundredths of the bright one are black
    draw("photos/a.png")
    assert draw_windows(open_data(tmp_path / "photos").train, tmp_path / "no.png") is None


def test_all_planes_need_no_picture(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((3, 40, 50), np.uint16), imagej=True, metadata={"axes": "ZYX"})
    assert draw_windows(open_data(f"{tmp_path}@slices=1").train, tmp_path / "no.png") is None
