"""Sheets of pictures: rows of tiles with headings, legends and a caption, as PNG files with a caption file beside each.

The file beside ``recovered.png`` is ``recovered.caption.json``: what a report page says of the picture.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from patchloom.data.modality import IMAGES, Modality
from patchloom.errors import PatchloomError
from patchloom.options.verbs import SHEET_ROWS
from patchloom.system.files import read_text, write_whole

if TYPE_CHECKING:
    from patchloom.questions.question import Sheet

Item = TypeVar("Item")

# Captions for report pages.


_LONGEST = 2000  # bytes of a text
_MOST_CAPTION_BYTES = 2**15
_LAST = 1000  # order of pictures without a caption


class Caption(NamedTuple):
    """Caption of a picture.

    Attributes:
        title: a few words.
        text: one or two sentences on what the picture shows and what to look for.
        order: pictures of a run are sorted by it. The pictures of a task begin at 0, those of its encoder at 100, and
            those of evaluations at 200.
        pairs: titles of the images whose truth and answer are in separate files, too.
    """

    title: str
    text: str
    order: int
    pairs: tuple[str, ...] = ()


def write_picture(out: Path, png: bytes, caption: Caption | None) -> Path:
    """Write a PNG file ``out``, and its caption beside it; None for pictures that no report page shows."""
    write_whole(out, png)
    if caption is not None:
        write_whole(_beside(out), json.dumps(caption._asdict(), indent=1) + "\n")
    return out


def read_caption(picture: Path) -> Caption:
    """Return the caption of a picture; one that patchloom has not captioned has the file's name as its title.

    A stranger may have written the file.
    """
    try:
        caption = Caption(**json.loads(read_text(_beside(picture), most=_MOST_CAPTION_BYTES)))
        texts = [caption.title, caption.text, *caption.pairs]
        # encode refuses halves of surrogate pairs, which no page can hold
        plain = all(isinstance(text, str) and len(text.encode()) <= _LONGEST for text in texts)
        if plain and caption.title and type(caption.order) is int:
            return caption._replace(pairs=tuple(caption.pairs))
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    return Caption(picture.stem, "", _LAST)


def _beside(picture: Path) -> Path:
    return picture.with_suffix(".caption.json")


# Images as colours.


# Images are dark if hardly any pixel reaches a quarter of white, as with 12-bit values in 16 bits. Below one level of
# 16 bits there is nothing to see.
_DARK, _HARDLY, _LEAST = 0.25, 0.001, 1 / 65535
_ENLARGED = 160  # pixels of the side of a small square image
EMPTY_MARK, WRONG_MARK = 1, 2
# Hatching for areas without a picture, because any plain colour may occur in an image: ground and lines.
HATCHES = {
    EMPTY_MARK: ((238, 238, 238), (172, 172, 172)),
    WRONG_MARK: ((255, 246, 232), (228, 138, 70)),
}
_STEP = {EMPTY_MARK: 6, WRONG_MARK: 8}  # pixels between lines


def channels_shown(channels: int) -> str:
    """Return a sentence on the colours of the channels, or "" for grey and for three."""
    if channels in (1, 3):
        return ""
    if channels == 2:
        return "Channel 1 is magenta, channel 2 is green; where both are bright, white."
    return f"Shown as red, green, blue: channels 1 to 3 of {channels}."


def in_colour(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """Convert normalised ``images`` [b c h w] to red, green and blue [b 3 h w], not clamped to [0, 1]."""
    mean, std = (torch.as_tensor(x, dtype=torch.float32, device="cpu").view(-1, 1, 1) for x in (mean, std))
    shown = images.detach().float().cpu() * std + mean
    if shown.shape[1] == 2:
        return shown[:, [0, 1, 0]]  # magenta and green, which colour-blind readers can tell apart
    return shown[:, :3] if shown.shape[1] >= 3 else shown[:, :1].expand(-1, 3, -1, -1)


def brightness(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> float:
    """Return the factor that makes dark ``images`` [b c h w] visible; 1 for all others."""
    shown = in_colour(images, mean, std).numpy()
    brightest = float(np.quantile(shown[np.isfinite(shown)], 1 - _HARDLY)) if np.isfinite(shown).any() else 0.0
    return 1 / brightest if _LEAST <= brightest < _DARK else 1.0


def said_of_brightness(gain: float, noun: str = "images") -> str:
    """Return a sentence on a `brightness`; "" for 1."""
    return "" if gain == 1 else f"The {noun} are dark and are drawn {gain:,.3g} times brighter."


def to_pixels(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, gain: float = 1.0
) -> np.ndarray:
    """Convert normalised ``images`` [b c h w] to uint8 [b h w 3], multiplied by ``gain`` and clamped.

    NaN is black and inf is white.
    """
    shown = (gain * in_colour(images, mean, std)).clamp(0, 1).nan_to_num(nan=0.0)  # clamp brings inf to 1, leaves nan
    return (shown * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def to_marks(images: Tensor) -> np.ndarray:
    """Mark the pixels of ``images`` [b c h w] as uint8 [b h w]: EMPTY for NaN, WRONG for inf, else 0."""
    images = images.detach().float().cpu()
    empty, wrong = images.isnan().any(1), images.isinf().any(1)
    return (EMPTY_MARK * empty.byte() + WRONG_MARK * (wrong & ~empty).byte()).numpy()


@cache  # every tile of a sheet has the same size
def hatch(mark: int, h: int, w: int) -> np.ndarray:
    """Draw hatching as uint8 [h w 3]: EMPTY has lines in one direction, WRONG in both."""
    y, x = np.mgrid[:h, :w]
    lines = (x + y) % _STEP[mark] == 0
    if mark == WRONG_MARK:
        lines |= (x - y) % _STEP[mark] == 0
    behind, before = (np.array(colour, np.uint8) for colour in HATCHES[mark])
    return np.where(lines[..., None], before, behind)


def tile_size(h: int, w: int, side: int, enlarged: int = _ENLARGED) -> tuple[int, int]:
    """Return the height and width at which an image [h w] is drawn; ``side`` is the largest side of a square.

    Other shapes get the same area, so that a spectrogram does not become a stripe, but at most twice the length. Small
    images are enlarged by an integer factor, to about ``enlarged``.
    """

    def fit(side: int) -> float:
        return min(side / math.sqrt(h * w), 2 * side / max(h, w))

    scale = fit(side) if fit(side) < 1 else max(1, round(fit(enlarged)))
    return max(1, round(h * scale)), max(1, round(w * scale))


def resize(image: np.ndarray, h: int, w: int, marks: np.ndarray | None = None) -> np.ndarray:
    """Resize colours uint8 [h w 3], sharply if they are enlarged, and hatch ``marks`` [h w] of `to_marks`.

    Marks are hatched in pixels of the result, so that the lines have the same width in every sheet.
    """
    # Hamming is sharp without the halos of Lanczos around black patches
    resampling = Image.Resampling.NEAREST if h >= image.shape[0] else Image.Resampling.HAMMING
    shown = np.array(Image.fromarray(np.ascontiguousarray(image)).resize((w, h), resampling))
    if marks is not None:
        where = np.array(Image.fromarray(marks).resize((w, h), Image.Resampling.NEAREST))
        for mark in HATCHES:
            shown[where == mark] = hatch(mark, h, w)[where == mark]
    return shown


# Tiles, and the page that has them in rows.


MOST_BYTES = 2_000_000
# Tile sizes for large images, tried in turn until the file is small enough: photographs and noise hardly compress.
SIDES = (224, 192, 160, 128)
DPI = 150
TILE_SIDE = 180  # of the tiles of an encoder's pictures, in pixels
SWATCH = 14  # side of a square of the legend
_MIN_WIDTH = 640  # keeps the caption under few columns readable
_MARGIN, _GAP, _GROUP_GAP = 20, 8, 26
_LINE, _HEADING_LINE, _TITLE_LINE = 21, 22, 28
_PAGE, _INK, _QUIET, FRAME_GREY = (255, 255, 255), (20, 20, 20), (85, 85, 85), (150, 150, 150)
_MARK_INK, _THIN = "#141414", 0.03  # ground of a mark's line; fraction of a tile's side below which lines are thin
_BAR = (330, 15)  # width and height of a colour scale
_MISSING_COLOUR = (0.85, 0.85, 0.85)

Box = tuple[float, float, float, float]  # top, left, height and width, as fractions of a tile's sides
MARK = "#ffd400"


class Title(NamedTuple):
    """Title of a sheet: a name, and the result below it."""

    name: str
    result: str = ""


class Tile(NamedTuple):
    """Picture on a sheet.

    Attributes:
        picture: colours uint8 [h w 3].
        words: text above.
        marks: rectangles, each with its colour.
        frame: colour of a wide frame; None: a thin grey one.
    """

    picture: np.ndarray
    words: str = ""
    marks: Sequence[tuple[Box, str]] = ()
    frame: str | None = None


class Scale(NamedTuple):
    """Colour scale.

    Attributes:
        name: name of the quantity.
        low, high: ends of the scale; values beyond are clamped.
        colours: name of a colour map of matplotlib.
        ends: labels of the ends instead of the numbers.
    """

    name: str
    low: float
    high: float
    colours: str = "viridis"
    ends: tuple[str, str] | None = None

    def shade(self, values: np.ndarray) -> np.ndarray:
        """Convert numbers [h w] to colours uint8 [h w 3]; NaN is grey."""
        import matplotlib
        from matplotlib.colors import Normalize

        table = matplotlib.colormaps[self.colours].with_extremes(bad=_MISSING_COLOUR)
        shown = table(Normalize(self.low, self.high)(np.ma.masked_invalid(values)))
        return (255 * np.asarray(shown)[..., :3]).round().astype(np.uint8)


class Page(NamedTuple):
    """Contents of a sheet.

    Attributes:
        rows: the tiles of each row; None where a row has none.
        headings: text above each column; a column without tiles is left out.
        title: text above all.
        caption: text below.
        groups: bold text above consecutive columns, with their number; () without groups.
        above: text above each row; () without.
        legend: squares uint8 [h w 3] and their meaning.
        scales: colour scales.
    """

    rows: Sequence[Sequence[Tile | None]]
    headings: Sequence[str]
    title: Title = Title("")
    caption: str = ""
    groups: Sequence[tuple[str, int]] = ()
    above: Sequence[str] = ()
    legend: Sequence[tuple[np.ndarray, str]] = ()
    scales: Sequence[Scale] = ()


def write_sheet(
    out: Path, drawn: Callable[[int], Page], caption: Caption | None = None, sides: Sequence[int] = SIDES
) -> Path:
    """Write a sheet as a PNG file, with the largest tiles for which the file stays below 2 MB.

    Args:
        out: file to write; its folder is created.
        drawn: function that returns the page with tiles of a side.
        caption: caption for a report page; None for pictures that no page shows.
        sides: sides of the tiles in pixels, tried in turn.
    """
    for side in sides:
        png = to_png(lay_out(drawn(side)))
        if len(png) <= MOST_BYTES:
            break
    return write_picture(out, png, caption)


def png_path(picture: str | Path) -> Path:
    """Return the path of ``--picture``, whose name has to be that of a PNG file."""
    path = Path(picture).expanduser()
    if path.suffix.lower() != ".png":
        raise PatchloomError(f"--picture {picture} is not a PNG file: choose a name that ends in .png")
    return path


def draw_tiles(
    page: Page, size: tuple[int, int], out: Path, caption: Caption | None = None, side: int = TILE_SIDE
) -> Path:
    """Write a sheet whose tiles all have the shape of ``size`` (h, w) as a PNG file."""
    h, w = tile_size(1000 * size[0], 1000 * size[1], side)
    rows = [[tile and tile._replace(picture=resize(tile.picture, h, w)) for tile in row] for row in page.rows]
    return write_picture(out, to_png(lay_out(page._replace(rows=rows))), caption)


def lay_out(page: Page) -> Image.Image:
    """Draw a page: title, headings, rows of framed tiles, legend, colour scales and caption."""
    small, medium, bold, large = font(15), font(17), font(17, bold=True), font(20, bold=True)
    kept = [i for i in range(len(page.headings)) if any(row[i] for row in page.rows)]
    rows = [[row[i] for i in kept] for row in page.rows]
    headings = [page.headings[i] for i in kept]
    columns = [[tile for tile in column if tile] for column in zip(*rows, strict=True)]
    widths = [
        max(
            widest_word(heading, medium),
            *(max(tile.picture.shape[1] + 2, math.ceil(small.getlength(tile.words))) for tile in column),
        )
        for heading, column in zip(headings, columns, strict=True)
    ]
    lefts, spans, x = list[int](), list[tuple[str, int, int]](), _MARGIN
    for name, count in page.groups or [("", len(headings))]:
        first = len(lefts)
        for width in widths[first : first + count]:
            lefts.append(x)
            x += width + _GAP
        spans.append((name, lefts[first], x - _GAP))
        x += _GROUP_GAP - _GAP
    inner = max(
        x - _GROUP_GAP - _MARGIN,
        _MIN_WIDTH,
        widest_word(page.caption, small),
        widest_word(" ".join(page.title), large),
    )
    pictures, texts, y = list[tuple[Image.Image, int, int]](), list[tuple[Any, ...]](), _MARGIN
    for text, face in ((page.title.name, large), (page.title.result, medium)):
        for line in wrap(text, face, inner):
            y += _TITLE_LINE
            texts.append((_MARGIN, y - 8, line, _INK, face, "ls"))
    # names of groups, then headings, each from its last line upwards, so that baselines are aligned
    over = [[(wrap(name, bold, right - left), (left + right) / 2) for name, left, right in spans]]
    over += [[(wrap(text, medium, w), left + w / 2) for text, left, w in zip(headings, lefts, widths, strict=True)]]
    for names, face in zip(over, (bold, medium), strict=True):
        y += _GAP // 2 + _HEADING_LINE * max(len(lines) for lines, _ in names)
        for lines, middle in names:
            for i, line in enumerate(reversed(lines)):
                texts.append((middle, y - _HEADING_LINE * i, line, _INK, face, "ms"))
    y += _GAP
    for above, row in zip(page.above or [""] * len(rows), rows, strict=True):
        for line in wrap(above, small, inner):
            y += _LINE
            texts.append((_MARGIN, y - 6, line, _INK, small, "ls"))
        y += _LINE * any(tile.words for tile in row if tile)
        tall = max(tile.picture.shape[0] + 2 for tile in row if tile)
        for tile, left, width in zip(row, lefts, widths, strict=True):
            if tile:
                framed = draw_tile(tile)
                top = y + (tall - framed.height) // 2
                pictures.append((framed, left + (width - framed.width) // 2, top))
                texts.append((left + width / 2, top - 6, tile.words, _INK, small, "ms"))
        y += tall + _GAP
    for keys in fill(page.legend, lambda keys: sum(key_width(meaning, small) for _, meaning in keys), inner):
        x, y = _MARGIN, y + _LINE
        for swatch, meaning in keys:
            pictures.append((draw_tile(Tile(swatch)), x, y - SWATCH))
            texts.append((x + SWATCH + _GAP, y, meaning, _QUIET, small, "ls"))
            x += key_width(meaning, small)
    per_line = max(1, inner // (_BAR[0] + 3 * _MARGIN))
    for i, scale in enumerate(page.scales):
        x = _MARGIN + i % per_line * (_BAR[0] + 3 * _MARGIN)
        y += (3 * _LINE + _GAP) * (i % per_line == 0)
        shades = scale.shade(np.linspace(scale.low, scale.high, _BAR[0])[None].repeat(_BAR[1], 0))
        pictures.append((Image.fromarray(shades), x, y - 2 * _LINE - 2))
        low, high = scale.ends or (f"{scale.low:.2g}", f"{scale.high:.2g}")
        texts.append((x, y - 2 * _LINE - _GAP, scale.name, _QUIET, small, "ls"))
        texts += [(x, y - _GAP, low, _QUIET, small, "ls"), (x + _BAR[0], y - _GAP, high, _QUIET, small, "rs")]
    for line in wrap(page.caption, small, inner):
        y += _LINE
        texts.append((_MARGIN, y, line, _QUIET, small, "ls"))
    canvas = Image.new("RGB", (inner + 2 * _MARGIN, y + _MARGIN), _PAGE)
    pen = ImageDraw.Draw(canvas)
    for picture, left, top in pictures:
        canvas.paste(picture, (left, top))
    for left, bottom, line, ink, face, anchor in texts:
        pen.text((left, bottom), line, ink, face, anchor=anchor)
    return canvas


def draw_tile(tile: Tile) -> Image.Image:
    """Draw a tile with its marks and its frame."""
    h, w = tile.picture.shape[:2]
    marked = Image.fromarray(np.ascontiguousarray(tile.picture))
    pen = ImageDraw.Draw(marked)
    for (top, left, tall, wide), colour in tile.marks:
        # a dark line below is visible on light ground
        lines = ((_MARK_INK, 1, 3), (colour, 0, 1)) if min(tall, wide) < _THIN else ((_MARK_INK, 2, 5), (colour, 1, 3))
        for ink, away, width in lines:
            start = round(left * w) - away, round(top * h) - away
            end = round((left + wide) * w) - 1 + away, round((top + tall) * h) - 1 + away
            pen.rectangle((*start, *end), outline=ink, width=width)
    framed = Image.new("RGB", (w + 2, h + 2), FRAME_GREY)
    framed.paste(marked, (1, 1))
    if tile.frame is not None:
        ImageDraw.Draw(framed).rectangle((0, 0, w + 1, h + 1), outline=tile.frame, width=4)
    return framed


def key_width(text: str, face: ImageFont.FreeTypeFont) -> int:
    """Return the width of a legend entry and the gap after it."""
    return SWATCH + _GAP + math.ceil(face.getlength(text)) + 3 * _GAP


def fill(items: Iterable[Item], measure: Callable[[Sequence[Item]], float], width: int) -> list[list[Item]]:
    """Break items into lines that ``measure`` at most ``width`` pixels, with at least one item each."""
    lines: list[list[Item]] = []
    for item in items:
        if lines and measure([*lines[-1], item]) <= width:
            lines[-1].append(item)
        else:
            lines.append([item])
    return lines


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans from matplotlib: it has Greek letters and is the same on every machine."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"DejaVuSans{'-Bold' * bold}.ttf")
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def widest_word(text: str, face: ImageFont.FreeTypeFont) -> int:
    """Return the width in pixels of the longest word of ``text``."""
    return math.ceil(max((face.getlength(word) for word in text.split()), default=0))


def wrap(text: str, face: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break ``text`` into lines of at most ``width`` pixels, with at least one word each."""
    return [" ".join(line) for line in fill(text.split(), lambda words: face.getlength(" ".join(words)), width)]


def to_png(page: Image.Image) -> bytes:
    """Encode a page as PNG, deterministically."""
    buffer = io.BytesIO()
    page.save(buffer, "PNG", dpi=(DPI, DPI))
    return buffer.getvalue()


# Sheets of a task's questions.


def draw_sheet(
    sheet: Sheet,
    mean: Sequence[float],
    std: Sequence[float],
    folder: Path,
    title: Title | None = None,
    rows: int = SHEET_ROWS,
    order: int = 0,
    modality: Modality = IMAGES,
) -> Path:
    """Write ``sheet`` as ``folder``/NAME.png: rows are images, columns are stages, with the caption below.

    Images of up to about 100 pixels are enlarged by an integer factor, so that every pixel stays a sharp square. Images
    larger than a 224 x 224 tile are reduced to its area, or further to keep the file below 2 MB. If the images of the
    first column are dark, all columns are brightened, and the caption gives the factor.

    Args:
        sheet: the sheet. One channel is drawn in grey, two in magenta and green, three in red, green and blue; of
            more, the first three, and the caption says so. Sizes may differ between columns.
        mean: mean [c] of the channels, as subtracted from pixels in [0, 1].
        std: standard deviation [c] of the channels.
        folder: folder for the file; it is created.
        title: text above.
        rows: number of rows, at most 8.
        order: order on a report page, as in `Caption`.
        modality: kind of data, which converts its columns to display colours and names their axes.
    """
    channels = len(mean)
    shapes = {heading: tuple(images.shape) for heading, images in sheet.columns.items()}
    batch = next(iter(shapes.values()), (0,))[0]
    if batch == 0 or any(len(s) != 4 or s[:2] != (batch, channels) or 0 in s for s in shapes.values()):
        raise PatchloomError(
            f"the sheet {sheet.name!r} cannot be drawn from {shapes or 'no columns'}: every column must be "
            f"[b {channels} h w], because the normalisation has {channels} channels, with the same b of at least 1"
        )
    columns = [modality.colours(images[: min(rows, SHEET_ROWS)], mean, std) for images in sheet.columns.values()]
    gain = brightness(*columns[0])
    drawn = [(to_pixels(*column, gain), to_marks(column[0])) for column in columns]
    meanings = {EMPTY_MARK: sheet.empty, WRONG_MARK: "placed wrongly"}
    legend = [
        (hatch(mark, SWATCH, SWATCH), meaning)
        for mark, meaning in meanings.items()
        if any((marks == mark).any() for _, marks in drawn)
    ]
    caption = " ".join(filter(None, [sheet.caption, modality.axes, channels_shown(channels), said_of_brightness(gain)]))

    def page(side: int) -> Page:
        tiles = [
            [
                Tile(resize(image, *tile_size(len(image), image.shape[1], side), its))
                for image, its in zip(*both, strict=True)
            ]
            for both in drawn
        ]
        return Page([*zip(*tiles, strict=True)], [*sheet.columns], title or Title(""), caption, legend=legend)

    page_caption = Caption(sheet.page_title or sheet.name, " ".join(sheet.page_text.split()), order)
    return write_sheet(folder / f"{sheet.name}.png", page, page_caption)
