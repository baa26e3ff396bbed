"""Picture sheets: a row an image, a column a stage of what was withheld and what came back."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.files import write_whole
from patchloom.look.hatching import EMPTY, GAP, HATCHES, KEY, WRONG, hatch, key_width, to_marks, wrap_keys

ROWS = 8
MOST_BYTES = 2_000_000
# Tiles of large images, tried in turn until the file is small enough: photographs and noise hardly compress.
SIDES = (224, 192, 160, 128)
ENLARGED = 160
NARROWEST = 420  # a caption under one narrow column would be a tower of words

# Images are dark if hardly a pixel has a quarter of white, as where 16 bits hold 12 or 14. Below one level of 16 bits
# there is nothing to see.
DARK, HARDLY, LEAST = 0.25, 0.001, 1 / 65535

DPI = 130
MARGIN, FRAME = 20, 1
TITLE_SIZE, TITLE_LINE = 20, 28
HEADING_SIZE, HEADING_LINE = 17, 22
CAPTION_SIZE, CAPTION_LINE = 15, 21
PAGE, INK, QUIET_INK, FRAME_GREY = (255, 255, 255), (20, 20, 20), (85, 85, 85), (150, 150, 150)


class Stages(Protocol):
    """What is drawn: a task's `Sheet`, or anything else with these four."""

    @property
    def name(self) -> str: ...
    @property
    def caption(self) -> str: ...
    @property
    def columns(self) -> dict[str, Tensor]: ...
    @property
    def empty(self) -> str: ...


class Column(NamedTuple):
    """One stage, ready for the page: a heading broken into lines, tiles of one size, and the room they take."""

    heading: list[str]
    tiles: list[Image.Image]
    width: int


class Title(NamedTuple):
    """What stands above a sheet: whose it is, and how well that does."""

    name: str
    result: str = ""


def draw_sheet(
    sheet: Stages,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    folder: Path,
    title: Title | None = None,
    rows: int = ROWS,
) -> Path:
    """Write ``sheet`` as ``folder``/NAME.png: the first images as rows, stages as columns, the caption beneath.

    Images of up to about 100 pixels are enlarged by a whole factor, so that every pixel stays a sharp square; those
    larger than a 224 x 224 tile are reduced to its area, or to less where the file would pass 2 MB. If the images of
    the first column are dark, all columns are drawn brighter, and the caption says by how much.

    Args:
        sheet: name, caption, what is empty in it, and by heading images [b c h w] in normalised pixels; nan is hatched
            as empty, inf crossed as wrong. One channel is drawn grey and three as red, green, blue; of any other number
            the first ones are, and the caption says so. Sizes may differ between columns.
        mean: of each channel [c], as subtracted in normalising pixels in [0, 1].
        std: of each channel [c], as divided by.
        folder: made if it is missing.
        title: stands above.
        rows: at most so many, and at most 8.

    Returns:
        The file's path.

    Raises:
        PatchloomError: no columns or images, columns of different batch or channels, or the file cannot be written.
    """
    channels = len(mean)
    shapes = {heading: tuple(images.shape) for heading, images in sheet.columns.items()}
    batch = next(iter(shapes.values()), (0,))[0]
    if batch == 0 or any(len(s) != 4 or s[:2] != (batch, channels) or 0 in s for s in shapes.values()):
        raise PatchloomError(
            f"the sheet {sheet.name!r} cannot be drawn from {shapes or 'no columns'}: every column must be "
            f"[b {channels} h w], because the normalisation has {channels} channels, with the same b of at least 1"
        )
    columns = {heading: images[: min(rows, ROWS)] for heading, images in sheet.columns.items()}
    gain = brightness(next(iter(columns.values())), mean, std)
    pixels = {heading: to_pixels(images, mean, std, gain) for heading, images in columns.items()}
    marks = {heading: to_marks(images) for heading, images in columns.items()}
    words = {EMPTY: sheet.empty, WRONG: "placed wrongly"}
    legend = {mark: text for mark, text in words.items() if any((one == mark).any() for one in marks.values())}
    brighter = "" if gain == 1 else f"The images are dark: all is drawn {gain:,.3g} times as bright as it is."
    caption = " ".join(filter(None, [sheet.caption, channels_shown(channels), brighter]))
    for side in SIDES:
        png = to_png(lay_out(pixels, marks, caption, side, title, legend))
        if len(png) <= MOST_BYTES:
            break
    path = folder / f"{sheet.name}.png"
    write_whole(path, png)
    return path


def channels_shown(channels: int) -> str:
    """The sentence a caption needs when not every channel is seen, else an empty one."""
    if channels in (1, 3):
        return ""
    if channels == 2:
        return "Shown in grey: channel 1 of 2."
    return f"Shown as red, green, blue: channels 1 to 3 of {channels}."


def in_colour(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """Red, green and blue [b 3 h w] of normalised ``images`` [b c h w], as far as they lie in [0, 1]."""
    mean, std = (torch.as_tensor(x, dtype=torch.float32, device="cpu").view(-1, 1, 1) for x in (mean, std))
    shown = images.detach().float().cpu() * std + mean
    return shown[:, :3] if shown.shape[1] >= 3 else shown[:, :1].expand(-1, 3, -1, -1)


def brightness(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> float:
    """By what to multiply the colours of dark ``images`` [b c h w], so that they can be seen; 1 for all others."""
    shown = in_colour(images, mean, std).numpy()
    brightest = float(np.quantile(shown[np.isfinite(shown)], 1 - HARDLY)) if np.isfinite(shown).any() else 0.0
    return 1 / brightest if LEAST <= brightest < DARK else 1.0


def to_pixels(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, gain: float = 1.0
) -> np.ndarray:
    """Colours uint8 [b h w 3] of normalised ``images`` [b c h w], ``gain`` times as bright.

    nan is black, inf white, and the rest is clamped.
    """
    shown = (gain * in_colour(images, mean, std)).clamp(0, 1).nan_to_num(nan=0.0)  # clamp brings inf to 1, leaves nan
    return (shown * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def tile_size(h: int, w: int, side: int, enlarged: int = ENLARGED) -> tuple[int, int]:
    """Height and width at which an image [h w] is shown, where ``side`` is what a square may have at most.

    Others get the same area, so that a spectrogram is not reduced to a stripe, up to twice the length. Small images are
    enlarged by a whole factor, to about ``enlarged``.
    """

    def fit(side: int) -> float:
        return min(side / math.sqrt(h * w), 2 * side / max(h, w))

    scale = fit(side) if fit(side) < 1 else max(1, round(fit(enlarged)))
    return max(1, round(h * scale)), max(1, round(w * scale))


def lay_out(
    pixels: dict[str, np.ndarray],
    marks: dict[str, np.ndarray],
    caption: str,
    side: int,
    title: Title | None = None,
    legend: dict[int, str] | None = None,
) -> Image.Image:
    """The page: title, headings above their columns of framed tiles, the legend of what is hatched, the caption.

    Args:
        pixels, marks: by heading [b h w 3] and [b h w].
        caption: beneath all.
        side: of a square tile at most.
        title: above all.
        legend: words by mark.
    """
    heading_font, caption_font, title_font = font(HEADING_SIZE), font(CAPTION_SIZE), font(TITLE_SIZE, bold=True)
    columns = [set_column(heading, images, marks[heading], heading_font, side) for heading, images in pixels.items()]
    row_height = max(column.tiles[0].height for column in columns)
    rows = len(columns[0].tiles)
    grid_width = sum(column.width for column in columns) + GAP * (len(columns) - 1)
    words = "" if title is None else f"{title.name} {title.result}"
    inner = max(grid_width, NARROWEST, widest_word(caption, caption_font), widest_word(words, title_font))
    lines = wrap(caption, caption_font, inner)
    above = [] if title is None else [(line, INK, title_font) for line in wrap(title.name, title_font, inner)]
    above += [] if title is None else [(line, INK, heading_font) for line in wrap(title.result, heading_font, inner)]
    keys = wrap_keys(legend or {}, caption_font, inner)

    top = MARGIN + TITLE_LINE * len(above) + GAP * bool(above)
    top += HEADING_LINE * max(len(column.heading) for column in columns) + GAP
    bottom = top + rows * (row_height + GAP) - GAP
    height = bottom + (GAP if lines or keys else 0) + CAPTION_LINE * (len(lines) + len(keys)) + MARGIN
    page = Image.new("RGB", (inner + 2 * MARGIN, height), PAGE)
    pen = ImageDraw.Draw(page)

    for i, (line, ink, type_face) in enumerate(above):
        pen.text((MARGIN, MARGIN + TITLE_LINE * (i + 1) - 8), line, ink, type_face, anchor="ls")
    x = MARGIN
    for column in columns:
        for i, line in enumerate(reversed(column.heading)):
            # "s" is the baseline: letters with tails must not move a heading against its neighbours
            base = top - GAP - HEADING_LINE * i
            pen.text((x + column.width / 2, base), line, INK, heading_font, anchor="ms")
        for row, tile in enumerate(column.tiles):
            room = row_height - tile.height
            page.paste(tile, (x + (column.width - tile.width) // 2, top + row * (row_height + GAP) + room // 2))
        x += column.width + GAP
    write_beneath(page, bottom + GAP - 4, keys, lambda mark: hatch(mark, KEY, KEY), lines, caption_font)
    return page


def write_beneath(
    page: Image.Image,
    base: int,
    keys: Iterable[Sequence[tuple[int, str]]],
    swatch: Callable[[int], np.ndarray],
    lines: Iterable[str],
    type_face: ImageFont.FreeTypeFont,
) -> None:
    """Write a legend and a caption below height ``base`` of a page; ``swatch`` draws the square [h w 3] of a key."""
    pen = ImageDraw.Draw(page)
    for key_line in keys:
        base, x = base + CAPTION_LINE, MARGIN
        for key, text in key_line:
            page.paste(framed(swatch(key)), (x, base - KEY))
            pen.text((x + KEY + GAP, base), text, QUIET_INK, type_face, anchor="ls")
            x += key_width(text, type_face)
    for line in lines:
        base += CAPTION_LINE
        pen.text((MARGIN, base), line, QUIET_INK, type_face, anchor="ls")


def set_column(
    heading: str, images: np.ndarray, marks: np.ndarray, type_face: ImageFont.FreeTypeFont, side: int
) -> Column:
    """Bring ``images`` [b h w 3] and ``marks`` [b h w] to tile size, frame them, and break the heading to their width.

    What is marked is hatched in the pixels of the tile, so that the lines are as wide in every sheet.
    """
    h, w = tile_size(*images.shape[1:3], side)
    # hamming is sharp without the halos that lanczos draws around black patches
    resampling = Image.Resampling.NEAREST if h >= images.shape[1] else Image.Resampling.HAMMING
    hatches = {mark: hatch(mark, h, w) for mark in HATCHES}
    tiles = []
    for image, marked in zip(images, marks, strict=True):
        shown = np.array(Image.fromarray(image).resize((w, h), resampling))
        where = np.array(Image.fromarray(marked).resize((w, h), Image.Resampling.NEAREST))
        for mark, hatched in hatches.items():
            shown[where == mark] = hatched[where == mark]
        tiles.append(framed(shown))
    width = max(tiles[0].width, widest_word(heading, type_face))
    return Column(wrap(heading, type_face, width), tiles, width)


def framed(image: np.ndarray) -> Image.Image:
    """An image [h w 3] in a frame."""
    h, w = image.shape[:2]
    tile = Image.new("RGB", (w + 2 * FRAME, h + 2 * FRAME), FRAME_GREY)
    tile.paste(Image.fromarray(image), (FRAME, FRAME))
    return tile


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings along: it has Greek letters, and is the same on every machine."""
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"DejaVuSans{'-Bold' * bold}.ttf")
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def widest_word(text: str, type_face: ImageFont.FreeTypeFont) -> int:
    """Width in pixels of the longest word of ``text``, which cannot be broken."""
    return math.ceil(max((type_face.getlength(word) for word in text.split()), default=0))


def wrap(text: str, type_face: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Lines of ``text``, each at most ``width`` pixels wide unless it is a single word."""
    lines: list[str] = []
    for word in text.split():
        if lines and type_face.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def to_png(page: Image.Image) -> bytes:
    """The page as a PNG file, the same bytes every time."""
    buffer = io.BytesIO()
    page.save(buffer, "PNG", dpi=(DPI, DPI))
    return buffer.getvalue()
