"""Tests of picture sheets and of pages of tiles, pixel by pixel."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from tiling import tiles
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.look import sheet
from patchloom.look.sheet import (
    EMPTY_MARK,
    HATCHES,
    MARK,
    MOST_BYTES,
    WRONG_MARK,
    Caption,
    Page,
    Scale,
    Tile,
    Title,
    channels_shown,
    draw_sheet,
    draw_tiles,
    fill,
    font,
    hatch,
    read_caption,
    resize,
    tile_size,
    widest_word,
    wrap,
    write_picture,
)
from patchloom.questions.question import Sheet

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def normalised(images: Tensor) -> Tensor:
    return (images - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)


def draw(folder: Path, columns: dict[str, Tensor], caption: str = "", mean=None, std=None) -> np.ndarray:
    sheet = Sheet("sheet", caption, columns, "masked")
    path = draw_sheet(sheet, mean or MEAN, std or STD, folder)
    assert path == folder / "sheet.png" and path.stat().st_size < MOST_BYTES
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


@pytest.fixture
def laid(monkeypatch):
    found, real = [], sheet.lay_out
    monkeypatch.setattr(sheet, "lay_out", lambda page: found.append((page.caption, page.legend)) or real(page))
    return found


def test_the_legend_names_what_is_hatched_and_nothing_else(tmp_path, laid):
    images = torch.zeros(1, 3, 8, 8)
    bare = draw(tmp_path, {"a": images})
    images[:, :, :2] = torch.nan
    keyed = draw(tmp_path, {"a": images})
    images[:, :, 4:] = torch.inf
    draw(tmp_path, {"a": images})
    meanings = [[meaning for _, meaning in legend] for _, legend in laid]
    assert meanings == [[], ["masked"], ["masked", "placed wrongly"]]
    assert len(keyed) > len(bare)  # a line for it
    assert fill([2, 3, 9, 1, 2], sum, 5) == [[2, 3], [9], [1, 2]]
    face, caption = font(15), "Positions were withheld from 95% of the visible patches. " * 6 + "x" * 90
    assert " ".join(wrap(caption, face, 400)) == caption and widest_word("", face) == 0
    assert all(face.getlength(line) <= 400 for line in wrap(caption, face, 400)[:-1])


@pytest.mark.parametrize("channels", [1, 5])
def test_dark_images_are_drawn_brighter_and_the_caption_says_so(tmp_path, laid, monkeypatch, channels):
    """300 of the levels of 16 bits stay distinguishable as far as 256 colours allow."""
    drawn, real = [], sheet.to_pixels
    monkeypatch.setattr(sheet, "to_pixels", lambda *given: drawn.append(real(*given)) or drawn[-1])
    levels = torch.linspace(0, 300, 32 * 32).round().view(1, 1, 32, 32).expand(2, channels, -1, -1) / 65535
    original = (levels - 0.002) / 0.001
    marked = original.clone()
    marked[..., :16, :16], marked[..., :16, 16:] = float("nan"), float("inf")
    draw(tmp_path, {"original": original, "marked": marked}, "Words.", [0.002] * channels, [0.001] * channels)
    first, second = drawn
    assert len(np.unique(first)) > 250 and first.max() == 255 and first.min() == 0
    assert (second[:, 16:] == first[:, 16:]).all()
    assert (second[:, :16, :16] == 0).all() and (second[:, :16, 16:] == 255).all()
    ((caption, _),) = laid
    assert caption.startswith("Words.") and caption.count("Shown as red") == (channels == 5)
    assert "218 times brighter" in caption


def test_what_has_bright_pixels_is_drawn_as_it_is(tmp_path, laid):
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.2
    images[0, :, :8, :8] = 0.26  # 0.8 % of all
    (row, *_) = tiles(draw(tmp_path, {"original": normalised(images), "other": normalised(images / 10)}))
    assert all(
        abs(tile.mean() / 255 - part) < 0.01
        for tile, part in zip(row, (images[0].mean(), images[0].mean() / 10), strict=True)
    )
    assert laid == [("", [])]


def test_a_few_broken_pixels_keep_no_image_dark_and_black_images_are_black(tmp_path, laid):
    images = torch.full((8, 3, 32, 32), 0.02)
    images[:, :, 3, 3] = 1.0
    ((tile, *_), *_) = tiles(draw(tmp_path, {"original": normalised(images)}))
    assert (tile[80:] == 255).all() and "50 times brighter" in laid[0][0]
    ((tile,),) = tiles(draw(tmp_path, {"original": normalised(torch.zeros(1, 3, 8, 8))}))
    assert (tile <= 1).all()
    nothing = torch.full((1, 3, 8, 8), float("nan"))
    ((tile,),) = tiles(draw(tmp_path, {"given": nothing}))
    assert (tile == hatch(EMPTY_MARK, 160, 160)).all()


def test_every_pixel_of_a_small_image_is_a_sharp_square_of_a_clamped_colour(tmp_path):
    levels = torch.randint(-50, 306, (1, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    ((tile,),) = tiles(draw(tmp_path, {"original": normalised(levels / 255)}))
    expected = levels[0].clamp(0, 255).permute(1, 2, 0).numpy().repeat(5, 0).repeat(5, 1)
    assert (tile == expected).all()


@pytest.mark.parametrize("size", [(1024, 128), (128, 1024)])
def test_large_images_are_averaged_whichever_side_is_longer(size):
    h, w = size
    board = (np.indices(size).sum(0) % 2 * 255).astype(np.uint8)  # squares of one pixel
    tile = resize(np.stack([board] * 3, -1), *tile_size(*size, 224))
    inside = tile[1:-1, 1:-1]
    assert inside.shape[0] < h and inside.shape[1] < w and 100 < inside.min() <= inside.max() < 155


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channels(tmp_path, channels):
    levels = torch.tensor([0.4, 0.3, 0.5, 0.7, 0.9])[:channels]
    images = levels.view(1, -1, 1, 1).expand(1, channels, 16, 16)
    ((tile,),) = tiles(draw(tmp_path, {"original": images}, mean=[0.0] * channels, std=[1.0] * channels))
    assert (tile == {1: [102, 102, 102], 2: [102, 76, 102], 5: [102, 76, 128]}[channels]).all()
    assert {1: "", 2: "Channel 1 is magenta", 5: "channels 1 to 3 of 5"}[channels] in channels_shown(channels)


def test_tiles_have_about_the_same_area_and_small_images_are_enlarged():
    shown = {(8, 8): (160, 160), (32, 32): (160, 160), (64, 64): (128, 128), (224, 224): (224, 224)}
    shown |= {(448, 448): (224, 224), (40, 80): (120, 240), (128, 1024): (56, 448), (1, 4000): (1, 448)}
    for (h, w), (tall, wide) in shown.items():
        assert tile_size(h, w, side=224) == (tall, wide) and tile_size(w, h, side=224) == (wide, tall)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    # no column, no image, no batch, another number of channels, another number of images
    for sizes in ([], [(0, 3, 8, 8)], [(3, 8, 8)], [(2, 1, 8, 8)], [(2, 3, 8, 8), (1, 3, 8, 8)]):
        with pytest.raises(PatchloomError, match="sheet 'sheet' cannot be drawn"):
            draw(tmp_path, {str(i): torch.zeros(size) for i, size in enumerate(sizes)})
    assert not list(tmp_path.iterdir())


RED = np.full((8, 8, 3), (200, 30, 60), np.uint8)


@pytest.fixture
def boxes(monkeypatch):
    """Record left, top, right and bottom of all words, tiles and scales on a page."""
    found, write, paste = [], ImageDraw.ImageDraw.text, Image.Image.paste

    def text(pen, place, words, ink, face, anchor):
        found.append(pen.textbbox(place, words, face, anchor))
        write(pen, place, words, ink, face, anchor=anchor)

    def pasted(page, one, place):
        if place != (1, 1):  # inside its frame
            found.append((*place, place[0] + one.width, place[1] + one.height))
        paste(page, one, place)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    monkeypatch.setattr(Image.Image, "paste", pasted)
    return found


@pytest.mark.parametrize(("size", "columns"), [((32, 32), 1), ((64, 16), 9)])
def test_no_word_or_tile_touches_another(size, columns, boxes, tmp_path):
    rows = [[Tile(RED, "0.998", frame="#0072b2") for _ in range(columns)] for _ in range(3)]
    headings = ["image", "first three, foreground", *[f"{i}." for i in range(columns)]][:columns]
    groups = [("", 1), ("an encoder with a name of some length", columns - 1)] if columns > 1 else ()
    scales = [Scale("how much", -1, 1), Scale("how little", 0, 3, ends=("none", "all"))]
    above, legend = ["a row of some name"] * 3, [(RED, "red"), (RED, "the same")]
    caption = "A caption of some words. " * 12
    page = Page(rows, headings, Title("A title", "A result"), caption, groups, above, legend, scales)
    path = draw_tiles(page, size, tmp_path / "t.png")
    width, height = Image.open(path).size
    boxes = [one for one in boxes if one[2] > one[0]]
    assert len(boxes) > 6 * columns + 12
    for i, one in enumerate(boxes):
        assert one[0] >= 0 and one[1] >= 0 and one[2] <= width and one[3] <= height
        for other in boxes[:i]:
            across = min(one[2], other[2]) - max(one[0], other[0])
            down = min(one[3], other[3]) - max(one[1], other[1])
            assert across <= 0 or down <= 0, f"{one} and {other} overlap"


def test_what_has_no_tile_has_no_column(tmp_path):
    pages = [
        np.asarray(Image.open(draw_tiles(Page(rows, ["a", "b" * 99]), (8, 8), tmp_path / "t.png")))
        for rows in ([[Tile(RED), None]], [[Tile(RED), None], [None, Tile(RED)]])
    ]
    assert [[len(row) for row in tiles(page)] for page in pages] == [[1], [1, 1]]
    assert pages[0].shape[1] < 99 * 5 + 200 < pages[1].shape[1]


def test_a_scale_shades_numbers_and_what_is_none():
    scale = Scale("cosine", -1, 1, "gray")
    shades = scale.shade(np.array([[-5.0, -1.0, 1.0, np.nan]]))
    assert shades[0, :3, 0].tolist() == [0, 0, 255] and shades[0, 3].tolist() == [217] * 3


def test_marks_and_frames_are_drawn(tmp_path):
    def colours(tile):
        page = Page([[tile]], ["image"], Title("title"), "words")
        drawn = Image.open(draw_tiles(page, (8, 8), tmp_path / "t.png")).convert("RGB")
        return Counter(map(tuple, np.asarray(drawn).reshape(-1, 3).tolist()))

    plain, tile = colours(Tile(RED)), tuple(RED[0, 0].tolist())
    assert plain[tile] == 180**2
    marked = colours(Tile(RED, marks=[((0, 0.5, 0.5, 0.5), MARK)]))
    assert 0 < marked[255, 212, 0] < plain[tile] - marked[tile] < 0.1 * plain[tile]
    assert colours(Tile(RED, frame="#0072b2"))[0, 0x72, 0xB2] > 100 and not plain[0, 0x72, 0xB2] + plain[255, 212, 0]


# Captions beside pictures, which strangers may have written.


def test_a_caption_comes_back_and_is_replaced_with_its_picture(tmp_path):
    picture = tmp_path / "new" / "position_map-birds.v2.png"
    for caption in (Caption("First", "Look here.", 3), Caption("Second é", "", 0, ("a", "b"))):
        assert write_picture(picture, b"png", caption) == picture
        assert read_caption(picture) == caption
    assert sorted(file.suffix for file in picture.parent.iterdir()) == [".json", ".png"]


@pytest.mark.parametrize("text", [None, "", "{", "[" * 10_000, "null", '["a", "b", 3]', '{"title": "a"}', " " * 40_000])
def test_without_a_valid_caption_the_title_is_the_files_name(text, tmp_path):
    if text is not None:
        (tmp_path / "a.b.caption.json").write_text(text)
    assert read_caption(tmp_path / "a.b.png").title == "a.b"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("title", ""), ("title", 3), ("title", "\ud800"), ("text", None), ("text", "b" * 2001), ("order", True)),
        *(("order", 0.5), ("pairs", 3), ("pairs", ["\ud800"]), ("more", 1)),
    ],
)
def test_values_of_a_strangers_caption_are_checked(name, value, tmp_path):
    caption = Caption("theirs", "Look.", 3)._asdict()
    for given, title in ((caption, "theirs"), (caption | {name: value}, "a")):
        (tmp_path / "a.caption.json").write_text(json.dumps(given))
        assert read_caption(tmp_path / "a.png").title == title
