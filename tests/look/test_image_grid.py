"""Tests of picture sheets, pixel by pixel."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiling import tiles
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.look import image_grid
from patchloom.look.image_grid import (
    EMPTY_MARK,
    FRAME_GREY,
    HATCHES,
    MOST_BYTES,
    WRONG_MARK,
    Title,
    channels_shown,
    draw_sheet,
    font,
    hatch,
    tile_size,
    widest_word,
    wrap,
    wrap_keys,
)

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def normalised(images: Tensor) -> Tensor:
    return (images - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)


def draw(folder: Path, columns: dict[str, Tensor], caption: str = "", mean=None, std=None) -> np.ndarray:
    """Draw ``columns`` in normalised pixels, by default with ImageNet's statistics; return the page [h w 3]."""
    path = draw_sheet(
        SimpleNamespace(name="sheet", caption=caption, columns=columns, empty="masked"),
        mean or MEAN,
        std or STD,
        folder,
    )
    assert path == folder / "sheet.png"
    assert path.stat().st_size < MOST_BYTES
    return np.asarray(Image.open(path))


def test_colours_come_back_and_what_is_empty_or_wrong_is_hatched(tmp_path):
    """Marks are hatched in two colours each, with lines in page pixels."""
    colours = torch.tensor([[0.2, 0.4, 0.6], [0.9, 0.1, 0.5]]).view(2, 3, 1, 1).expand(2, 3, 8, 8).clone()
    marked = normalised(colours)
    marked[:, :, :4, :4] = float("nan")
    marked[:, :, 4:, 4:] = float("inf")
    rows = tiles(draw(tmp_path, {"original": normalised(colours), "marked": marked}))
    assert [len(row) for row in rows] == [2, 2]
    for (original, drawn), colour in zip(rows, ([51, 102, 153], [230, 26, 128]), strict=True):
        assert original.shape == drawn.shape == (160, 160, 3)
        assert np.abs(original.astype(int) - colour).max() <= 1
        assert np.abs(drawn[:80, 80:].astype(int) - colour).max() <= 1
        assert (drawn[:80, :80] == hatch(EMPTY_MARK, 160, 160)[:80, :80]).all()
        assert (drawn[80:, 80:] == hatch(WRONG_MARK, 160, 160)[80:, 80:]).all()
    for mark, colours in HATCHES.items():
        shown = {tuple(colour) for colour in hatch(mark, 40, 40).reshape(-1, 3).tolist()}
        assert shown == set(colours) and not shown & {(0, 0, 0), (255, 255, 255)}


def test_the_legend_names_what_is_hatched_and_nothing_else(tmp_path, monkeypatch):
    legends, real = [], image_grid.lay_out

    def noted(*given):
        legends.append(given[-1])
        return real(*given)

    monkeypatch.setattr(image_grid, "lay_out", noted)
    images = torch.zeros(1, 3, 8, 8)
    bare = draw(tmp_path, {"a": images})
    images[:, :, :2] = torch.nan
    keyed = draw(tmp_path, {"a": images})
    images[:, :, 4:] = torch.inf
    draw(tmp_path, {"a": images})
    assert legends == [{}, {EMPTY_MARK: "masked"}, {EMPTY_MARK: "masked", WRONG_MARK: "placed wrongly"}]
    assert len(keyed) > len(bare)  # a line for it
    face = font(15)
    assert [len(line) for line in wrap_keys({EMPTY_MARK: "x" * 20, WRONG_MARK: "y" * 20}, face, 300)] == [1, 1]
    assert [len(line) for line in wrap_keys({EMPTY_MARK: "x", WRONG_MARK: "y"}, face, 300)] == [2]


def test_a_title_stands_above_and_is_never_cut(tmp_path):
    sheet = SimpleNamespace(name="sheet", caption="", columns={"a": torch.zeros(1, 3, 8, 8)}, empty="")
    bare, short, long = (
        np.asarray(Image.open(draw_sheet(sheet, MEAN, STD, tmp_path / str(i), title)))
        for i, title in enumerate([None, Title("photos: mae", "Epoch 1 of 2"), Title("photos " * 20, "x" * 90)])
    )
    assert len(bare) < len(short) < len(long) and (short[20:40] < 100).any() and not (bare[20:26] < 100).any()
    for page in (short, long):
        for border in (page[:10], page[-10:], page[:, :10], page[:, -10:]):
            assert (border == 255).all()


def test_values_beyond_the_colours_are_clamped(tmp_path):
    extremes = torch.full((1, 3, 8, 8), 50.0)
    extremes[..., 4:] = -50
    ((tile,),) = tiles(draw(tmp_path, {"extremes": extremes}))
    assert (tile[:, :80] == 255).all()
    assert (tile[:, 80:] == 0).all()


@pytest.fixture
def captions(monkeypatch):
    """Record the captions of the drawn sheets."""
    found, real = [], image_grid.lay_out
    monkeypatch.setattr(
        image_grid,
        "lay_out",
        lambda pixels, marks, caption, *more: found.append(caption) or real(pixels, marks, caption, *more),
    )
    return found


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_dark_images_are_drawn_brighter_and_the_caption_says_so(tmp_path, captions, monkeypatch, channels):
    """300 of the levels of 16 bits stay distinguishable as far as 256 colours allow."""
    drawn, real = [], image_grid.to_pixels
    monkeypatch.setattr(image_grid, "to_pixels", lambda *given: drawn.append(real(*given)) or drawn[-1])
    levels = torch.linspace(0, 300, 32 * 32).round().view(1, 1, 32, 32).expand(2, channels, -1, -1) / 65535
    original = (levels - 0.002) / 0.001
    marked = original.clone()
    marked[..., :16, :16], marked[..., :16, 16:] = float("nan"), float("inf")
    draw(tmp_path, {"original": original, "marked": marked}, "Words.", [0.002] * channels, [0.001] * channels)
    first, second = drawn
    assert len(np.unique(first)) > 250 and first.max() == 255 and first.min() == 0
    assert (second[:, 16:] == first[:, 16:]).all()
    assert (second[:, :16, :16] == 0).all() and (second[:, :16, 16:] == 255).all()
    assert captions[0].startswith("Words.") and captions[0].count("Shown as red") == (channels == 5)
    assert captions[0].endswith("The images are dark and are drawn 218 times brighter.")


def test_what_has_bright_pixels_is_drawn_as_it_is(tmp_path, captions):
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.2
    images[0, :, :8, :8] = 0.26  # 0.8 % of all
    (row, *_) = tiles(draw(tmp_path, {"original": normalised(images), "other": normalised(images / 10)}))
    assert all(
        abs(tile.mean() / 255 - part) < 0.01
        for tile, part in zip(row, (images[0].mean(), images[0].mean() / 10), strict=True)
    )
    assert captions == [""]


def test_a_few_broken_pixels_keep_no_image_dark(tmp_path, captions):
    images = torch.full((8, 3, 32, 32), 0.02)
    images[:, :, 3, 3] = 1.0
    ((tile, *_), *_) = tiles(draw(tmp_path, {"original": normalised(images)}))
    assert (tile[80:] == 255).all() and "drawn 50 times brighter" in captions[0]


def test_black_images_are_black(tmp_path, captions):
    ((tile,),) = tiles(draw(tmp_path, {"original": normalised(torch.zeros(1, 3, 8, 8))}))
    assert (tile <= 1).all()
    nothing = torch.full((1, 3, 8, 8), float("nan"))
    ((tile,),) = tiles(draw(tmp_path, {"given": nothing}))
    assert (tile == hatch(EMPTY_MARK, 160, 160)).all()


def test_every_pixel_of_a_small_image_is_a_sharp_square(tmp_path):
    levels = torch.randint(256, (1, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    ((tile,),) = tiles(draw(tmp_path, {"original": normalised(levels / 255)}))
    expected = levels[0].permute(1, 2, 0).numpy().repeat(5, 0).repeat(5, 1)
    assert (tile == expected).all()


def test_as_many_rows_as_were_asked_for(tmp_path):
    sheet = SimpleNamespace(name="sheet", caption="", columns={"a": torch.zeros(11, 3, 8, 8)}, empty="")
    page = np.asarray(Image.open(draw_sheet(sheet, MEAN, STD, tmp_path, rows=4)))
    assert len(tiles(page)) == 4


def test_at_most_eight_rows(tmp_path):
    rows = tiles(
        draw(tmp_path, {"a": torch.zeros(11, 3, 8, 8), "b": torch.ones(11, 3, 8, 8), "c": torch.ones(11, 3, 8, 8)})
    )
    assert [len(row) for row in rows] == [3] * 8


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channels(tmp_path, channels):
    levels = torch.tensor([0.4, 0.3, 0.5, 0.7, 0.9])[:channels]
    images = levels.view(1, -1, 1, 1).expand(1, channels, 16, 16)
    ((tile,),) = tiles(draw(tmp_path, {"original": images}, mean=[0.0] * channels, std=[1.0] * channels))
    assert (tile == {1: [102, 102, 102], 2: [102, 76, 102], 5: [102, 76, 128]}[channels]).all()


def test_the_caption_says_which_channels_are_shown(tmp_path):
    assert [channels_shown(c) for c in (1, 3)] == ["", ""]
    assert "1 is magenta, channel 2 is green" in channels_shown(2)
    assert "channels 1 to 3 of 5" in channels_shown(5)
    bare = draw(tmp_path, {"a": torch.zeros(1, 3, 8, 8)})
    noted = draw(tmp_path, {"a": torch.zeros(1, 5, 8, 8)}, mean=[0.0] * 5, std=[1.0] * 5)
    assert len(noted) > len(bare)


@pytest.mark.parametrize(
    "size, shown",
    [
        ((8, 8), (160, 160)),
        ((32, 32), (160, 160)),
        ((64, 64), (128, 128)),
        ((224, 224), (224, 224)),
        ((448, 448), (224, 224)),
        ((40, 80), (120, 240)),
        ((128, 1024), (56, 448)),
        ((1, 4000), (1, 448)),
    ],
)
def test_tile_sizes(size, shown):
    assert tile_size(*size, side=224) == shown
    assert tile_size(*reversed(size), side=224) == shown[::-1]


def test_columns_may_differ_in_size(tmp_path):
    page = draw(tmp_path, {"wide": torch.zeros(1, 3, 112, 224), "small": torch.zeros(1, 3, 8, 8)})
    edges = (page == FRAME_GREY).all(-1).sum(1)
    assert (edges > 50).sum() == 4  # two tiles of different heights


def test_large_photographs_stay_under_two_megabytes(tmp_path):
    noise = torch.rand(8, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    rows = tiles(draw(tmp_path, {str(i): normalised(noise) for i in range(5)}))
    assert [len(row) for row in rows] == [5] * 8


def test_the_same_sheet_gives_the_same_bytes(tmp_path):
    sheet = SimpleNamespace(name="γ sheet", caption="σ = 1", columns={"γ = 0.5": torch.zeros(2, 3, 8, 8)}, empty="")
    first, second = (draw_sheet(sheet, torch.tensor(MEAN), torch.tensor(STD), tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == ["γ sheet.png"]


def test_half_precision_and_gradients_are_drawn(tmp_path):
    images = torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    ((tile,),) = tiles(draw(tmp_path, {"predicted": images}))
    assert (tile == [124, 116, 104]).all()


def test_text_is_never_cut(tmp_path):
    caption = "Positions were withheld from 95% of the visible patches. " * 6 + "x" * 90
    page = draw(tmp_path, {"heading of-an-unbreakable-and-long-sort": torch.zeros(1, 3, 8, 8)}, caption)
    for border in (page[:10], page[-10:], page[:, :10], page[:, -10:]):
        assert (border == 255).all()
    face = font(15)
    assert " ".join(wrap(caption, face, 400)) == caption
    assert all(face.getlength(line) <= 400 for line in wrap(caption, face, 400)[:-1])
    assert widest_word("", face) == 0


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"a": torch.zeros(0, 3, 8, 8)},
        {"a": torch.zeros(3, 8, 8)},
        {"a": torch.zeros(2, 1, 8, 8)},
        {"a": torch.zeros(2, 3, 8, 8), "b": torch.zeros(1, 3, 8, 8)},
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, columns):
    with pytest.raises(PatchloomError, match="sheet 'sheet' cannot be drawn"):
        draw(tmp_path, columns)
    assert not list(tmp_path.iterdir())
