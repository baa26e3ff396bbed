"""Picture sheets: rows of images with columns for the stages of a task, and pages of tiles."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.look.captions import Caption, write_picture
from patchloom.look.charts import DPI, INK, QUIET, styled_figure, write_figure
from patchloom.options.verbs import SHEET_ROWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from patchloom.questions.question import Sheet

# Hatching for areas without a picture, because any plain colour may occur in an image.


EMPTY_MARK, WRONG_MARK = 1, 2
HATCHES = {
    EMPTY_MARK: ((238, 238, 238), (172, 172, 172)),
    WRONG_MARK: ((255, 246, 232), (228, 138, 70)),
}  # ground, lines
_STEP = {EMPTY_MARK: 6, WRONG_MARK: 8}  # pixels between lines
SWATCH_SIZE = 14  # side of a hatched square in the legend
_SWATCH_GAP = 8  # pixels between a square and its text


def to_marks(images: Tensor) -> np.ndarray:
    """Mark the pixels of ``images`` [b c h w] as uint8 [b h w]: EMPTY for NaN, WRONG for inf, else 0."""
    images = images.detach().float().cpu()
    empty, wrong = images.isnan().any(1), images.isinf().any(1)
    return (EMPTY_MARK * empty.byte() + WRONG_MARK * (wrong & ~empty).byte()).numpy()


def hatch(mark: int, h: int, w: int) -> np.ndarray:
    """Draw hatching as uint8 [h w 3]: EMPTY has lines in one direction, WRONG in both."""
    y, x = np.mgrid[:h, :w]
    lines = (x + y) % _STEP[mark] == 0
    if mark == WRONG_MARK:
        lines |= (x - y) % _STEP[mark] == 0
    behind, before = (np.array(colour, np.uint8) for colour in HATCHES[mark])
    return np.where(lines[..., None], before, behind)


def key_width(text: str, type_face: ImageFont.FreeTypeFont) -> int:
    """Return the width of a legend entry and the gap after it."""
    return SWATCH_SIZE + _SWATCH_GAP + math.ceil(type_face.getlength(text)) + 3 * _SWATCH_GAP


def wrap_keys(
    legend: Iterable[tuple[np.ndarray, str]], type_face: ImageFont.FreeTypeFont, width: int
) -> list[list[tuple[np.ndarray, str]]]:
    """Break the entries of a legend into lines of at most ``width`` pixels, with at least one entry each."""
    lines: list[list[tuple[np.ndarray, str]]] = []
    for entry in legend:
        if lines and sum(key_width(meaning, type_face) for _, meaning in [*lines[-1], entry]) <= width:
            lines[-1].append(entry)
        else:
            lines.append([entry])
    return lines


MOST_BYTES = 2_000_000
# Tile sizes for large images, tried in turn until the file is small enough: photographs and noise hardly compress.
SIDES = (224, 192, 160, 128)
_ENLARGED = 160
_MIN_SHEET_WIDTH = 420  # keeps the caption under one narrow column readable

# Images are dark if hardly any pixel reaches a quarter of white, as with 12-bit values in 16 bits. Below one level of
# 16 bits there is nothing to see.
_DARK, _HARDLY, _LEAST = 0.25, 0.001, 1 / 65535

_SHEET_DPI = 130
_MARGIN, _FRAME = 20, 1
_TITLE_SIZE, _TITLE_LINE = 20, 28
_HEADING_SIZE, _HEADING_LINE = 17, 22
_CAPTION_SIZE, _CAPTION_LINE = 15, 21
_PAGE, _SHEET_INK, _QUIET_INK, FRAME_GREY = (255, 255, 255), (20, 20, 20), (85, 85, 85), (150, 150, 150)


class Title(NamedTuple):
    """Title of a sheet: a name, and the result below it."""

    name: str
    result: str = ""


def draw_sheet(
    sheet: Sheet,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    folder: Path,
    title: Title | None = None,
    rows: int = SHEET_ROWS,
    order: int = 0,
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
    """
    channels = len(mean)
    shapes = {heading: tuple(images.shape) for heading, images in sheet.columns.items()}
    batch = next(iter(shapes.values()), (0,))[0]
    if batch == 0 or any(len(s) != 4 or s[:2] != (batch, channels) or 0 in s for s in shapes.values()):
        raise PatchloomError(
            f"the sheet {sheet.name!r} cannot be drawn from {shapes or 'no columns'}: every column must be "
            f"[b {channels} h w], because the normalisation has {channels} channels, with the same b of at least 1"
        )
    columns = {heading: images[: min(rows, SHEET_ROWS)] for heading, images in sheet.columns.items()}
    gain = brightness(next(iter(columns.values())), mean, std)
    pixels = {heading: to_pixels(images, mean, std, gain) for heading, images in columns.items()}
    marks = {heading: to_marks(images) for heading, images in columns.items()}
    meanings = {EMPTY_MARK: sheet.empty, WRONG_MARK: "placed wrongly"}
    legend = [
        (hatch(mark, SWATCH_SIZE, SWATCH_SIZE), meaning)
        for mark, meaning in meanings.items()
        if any((one == mark).any() for one in marks.values())
    ]
    brighter = "" if gain == 1 else f"The images are dark and are drawn {gain:,.3g} times brighter."
    caption = " ".join(filter(None, [sheet.caption, channels_shown(channels), brighter]))
    for side in SIDES:
        tiles = {heading: to_tiles(pixels[heading], marks[heading], side) for heading in columns}
        png = to_png(lay_out(tiles, caption, title, legend))
        if len(png) <= MOST_BYTES:
            break
    page_caption = Caption(sheet.page_title or sheet.name, " ".join(sheet.page_text.split()), order)
    return write_picture(folder / f"{sheet.name}.png", png, page_caption)


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


def to_pixels(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, gain: float = 1.0
) -> np.ndarray:
    """Convert normalised ``images`` [b c h w] to uint8 [b h w 3], multiplied by ``gain`` and clamped.

    NaN is black and inf is white.
    """
    shown = (gain * in_colour(images, mean, std)).clamp(0, 1).nan_to_num(nan=0.0)  # clamp brings inf to 1, leaves nan
    return (shown * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def tile_size(h: int, w: int, side: int, enlarged: int = _ENLARGED) -> tuple[int, int]:
    """Return the height and width at which an image [h w] is drawn; ``side`` is the largest side of a square.

    Other shapes get the same area, so that a spectrogram does not become a stripe, but at most twice the length. Small
    images are enlarged by an integer factor, to about ``enlarged``.
    """

    def fit(side: int) -> float:
        return min(side / math.sqrt(h * w), 2 * side / max(h, w))

    scale = fit(side) if fit(side) < 1 else max(1, round(fit(enlarged)))
    return max(1, round(h * scale)), max(1, round(w * scale))


def lay_out(
    columns: Mapping[str, Sequence[np.ndarray | None]],
    caption: str = "",
    title: Title | None = None,
    legend: Sequence[tuple[np.ndarray, str]] = (),
    words: Sequence[str] = (),
) -> Image.Image:
    """Draw a page with title, headings, columns of framed tiles, legend and caption.

    Args:
        columns: colours uint8 [h w 3] of the tile of each row, by heading; None where a row has none.
        caption: text below.
        title: text above.
        legend: squares uint8 [h w 3] and their meaning.
        words: text above each row.
    """
    heading_font, caption_font, title_font = font(_HEADING_SIZE), font(_CAPTION_SIZE), font(_TITLE_SIZE, bold=True)
    name, result = title or Title("")
    framed = [[None if tile is None else add_frame(tile) for tile in tiles] for tiles in columns.values()]
    widths = [
        max(widest_word(heading, heading_font), *(tile.width for tile in tiles if tile))
        for heading, tiles in zip(columns, framed, strict=True)
    ]
    headings = [wrap(heading, heading_font, width) for heading, width in zip(columns, widths, strict=True)]
    inner = max(
        sum(widths) + _SWATCH_GAP * (len(widths) - 1),
        _MIN_SHEET_WIDTH,
        widest_word(caption, caption_font),
        widest_word(f"{name} {result}", title_font),
    )
    above = [(line, title_font) for line in wrap(name, title_font, inner)]
    above += [(line, heading_font) for line in wrap(result, heading_font, inner)]
    lines, keys = wrap(caption, caption_font, inner), wrap_keys(legend, caption_font, inner)
    rows = [*zip(*framed, strict=True)]
    said = [wrap(text, caption_font, inner) for text in words] or [[]] * len(rows)
    heights = [max(tile.height for tile in row if tile) for row in rows]

    top = _MARGIN + _TITLE_LINE * len(above) + _SWATCH_GAP * bool(above)
    top += _HEADING_LINE * max(map(len, headings)) + _SWATCH_GAP
    height = top + sum(heights) + _CAPTION_LINE * (sum(map(len, said)) + len(lines) + len(keys))
    height += _SWATCH_GAP * (len(rows) - 1 + bool(lines or keys)) + _MARGIN
    page = Image.new("RGB", (inner + 2 * _MARGIN, height), _PAGE)
    pen = ImageDraw.Draw(page)
    for i, (line, type_face) in enumerate(above):
        pen.text((_MARGIN, _MARGIN + _TITLE_LINE * (i + 1) - 8), line, _SHEET_INK, type_face, anchor="ls")
    x, lefts = _MARGIN, []
    for heading, width in zip(headings, widths, strict=True):
        for i, line in enumerate(reversed(heading)):
            # "s" aligns baselines: letters with descenders must not shift a heading
            base = top - _SWATCH_GAP - _HEADING_LINE * i
            pen.text((x + width / 2, base), line, _SHEET_INK, heading_font, anchor="ms")
        lefts.append(x)
        x += width + _SWATCH_GAP
    y = top
    for text, row, tall in zip(said, rows, heights, strict=True):
        for line in text:
            y += _CAPTION_LINE
            pen.text((_MARGIN, y - 6), line, _SHEET_INK, caption_font, anchor="ls")
        for tile, left, width in zip(row, lefts, widths, strict=True):
            if tile:
                page.paste(tile, (left + (width - tile.width) // 2, y + (tall - tile.height) // 2))
        y += tall + _SWATCH_GAP
    y -= 4
    for key_line in keys:
        x, y = _MARGIN, y + _CAPTION_LINE
        for swatch, meaning in key_line:
            page.paste(add_frame(swatch), (x, y - SWATCH_SIZE))
            pen.text((x + SWATCH_SIZE + _SWATCH_GAP, y), meaning, _QUIET_INK, caption_font, anchor="ls")
            x += key_width(meaning, caption_font)
    for line in lines:
        y += _CAPTION_LINE
        pen.text((_MARGIN, y), line, _QUIET_INK, caption_font, anchor="ls")
    return page


def to_tiles(images: np.ndarray, marks: np.ndarray, side: int) -> list[np.ndarray]:
    """Resize ``images`` [b h w 3] to tiles, whose squares have at most ``side``, and hatch ``marks`` [b h w].

    Marks are hatched in pixels of the tile, so that the lines have the same width in every sheet.
    """
    h, w = tile_size(images.shape[1], images.shape[2], side)
    # Hamming is sharp without the halos of Lanczos around black patches
    resampling = Image.Resampling.NEAREST if h >= images.shape[1] else Image.Resampling.HAMMING
    tiles = []
    for image, marked in zip(images, marks, strict=True):
        shown = np.array(Image.fromarray(image).resize((w, h), resampling))
        where = np.array(Image.fromarray(marked).resize((w, h), Image.Resampling.NEAREST))
        for mark in HATCHES:
            shown[where == mark] = hatch(mark, h, w)[where == mark]
        tiles.append(shown)
    return tiles


def add_frame(image: np.ndarray) -> Image.Image:
    """Draw a frame around an image [h w 3]."""
    h, w = image.shape[:2]
    tile = Image.new("RGB", (w + 2 * _FRAME, h + 2 * _FRAME), FRAME_GREY)
    tile.paste(Image.fromarray(image), (_FRAME, _FRAME))
    return tile


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans from matplotlib: it has Greek letters and is the same on every machine."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"DejaVuSans{'-Bold' * bold}.ttf")
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def widest_word(text: str, type_face: ImageFont.FreeTypeFont) -> int:
    """Return the width in pixels of the longest word of ``text``."""
    return math.ceil(max((type_face.getlength(word) for word in text.split()), default=0))


def wrap(text: str, type_face: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break ``text`` into lines of at most ``width`` pixels, with at least one word each."""
    lines: list[str] = []
    for word in text.split():
        if lines and type_face.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def to_png(page: Image.Image) -> bytes:
    """Encode a page as PNG, deterministically."""
    buffer = io.BytesIO()
    page.save(buffer, "PNG", dpi=(_SHEET_DPI, _SHEET_DPI))
    return buffer.getvalue()


# A page of tiles: rows of small pictures with text above, marked patches, frames, and colour scales below.


_MARK = "#ffd400"
TILE_SIDE, GAP, _GROUP_GAP, TILE_MARGIN = (
    1.2,
    0.08,
    0.2,
    0.15,
)  # inches: a square tile, between tiles, between groups, around all
_LINE = 0.155  # inches of a line of small text
SMALL_TEXT, TITLE = 8, 11  # points
_MIN_TILES_WIDTH = 4.6  # inches
_BAR, _BAR_HEIGHT = 2.2, 0.1  # inches of a colour scale
_THIN = 0.03  # fraction of a tile's side below which a mark needs thin lines
_MISSING_COLOUR = (0.85, 0.85, 0.85)


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


class Tile(NamedTuple):
    """Small picture on a page.

    Attributes:
        picture: colours uint8 [h w 3], resized to the tile.
        words: text above.
        mark: rectangle (top, left, height, width) in fractions of the tile's sides.
        frame: colour of the frame.
        coloured: further rectangles, each with its colour.
    """

    picture: np.ndarray
    words: str = ""
    mark: tuple[float, float, float, float] | None = None
    frame: str | None = None
    coloured: tuple[tuple[tuple[float, float, float, float], str], ...] = ()


def draw_tiles(
    rows: Sequence[Sequence[Tile]],
    headings: Sequence[str],
    size: tuple[int, int],
    title: str,
    caption: str,
    out: Path,
    scales: Sequence[Scale] = (),
    groups: Sequence[tuple[str, int]] = (),
    side: float = TILE_SIDE,
    page_caption: Caption | None = None,
) -> Path:
    """Draw rows of tiles as a PNG file."""
    small, bold = (font(round(SMALL_TEXT * DPI / 72), heavy) for heavy in (False, True))
    large = font(round(TITLE * DPI / 72), bold=True)
    tall, wide = (side * pixels / 1000 for pixels in tile_size(1000 * size[0], 1000 * size[1], 1000))
    heads = [wrap(heading, small, round((wide + GAP / 2) * DPI)) for heading in headings]
    wide = max(wide, *(widest_word(heading, small) / DPI for heading in headings))
    lefts, names, x = [], [], TILE_MARGIN
    for name, count in groups or [("", len(headings))]:
        span = count * (wide + GAP) - GAP
        names.append((wrap(name, bold, round(span * DPI)), x + span / 2))
        lefts += [x + i * (wide + GAP) for i in range(count)]
        x += count * (wide + GAP) + _GROUP_GAP
    width = max(_MIN_TILES_WIDTH, x - _GROUP_GAP - GAP + TILE_MARGIN, 2 * TILE_MARGIN + widest_word(title, large) / DPI)
    above, beneath = wrap(title, large, _pixels(width)), wrap(caption, small, _pixels(width))
    spoken = _LINE if any(tile.words for row in rows for tile in row) else 0.0
    per_line = max(1, int((width - 2 * TILE_MARGIN) // (_BAR + 4 * TILE_MARGIN)))
    bars = -(-len(scales) // per_line)
    header = _LINE * (max(len(lines) for lines, _ in names) + 0.2 * bool(groups) + max(map(len, heads)))
    top = TILE_MARGIN + 1.4 * _LINE * len(above) + header + GAP
    bottom = top + len(rows) * (tall + spoken + GAP)
    height = bottom + bars * (3 * _LINE + _BAR_HEIGHT) + GAP + _LINE * len(beneath) + TILE_MARGIN
    with styled_figure((width, height)) as figure:

        def write(x: float, y: float, text: str, **style: Any) -> None:
            usual: dict[str, Any] = {"fontsize": SMALL_TEXT, "color": INK, "va": "top"}
            figure.text(x / width, 1 - y / height, text, **usual | style)

        def place(x: float, y: float, wide: float, tall: float) -> Axes:
            return figure.add_axes((x / width, 1 - (y + tall) / height, wide / width, tall / height))

        for i, line in enumerate(above):
            write(TILE_MARGIN, TILE_MARGIN + 1.4 * _LINE * i, line, fontsize=TITLE, fontweight="bold")
        y = TILE_MARGIN + 1.4 * _LINE * len(above)
        for lines, middle in names:
            for i, line in enumerate(lines):
                write(middle, y + _LINE * i, line, ha="center", fontweight="bold")
        for left, lines in zip(lefts, heads, strict=True):
            for i, line in enumerate(reversed(lines)):
                write(left + wide / 2, top - GAP - _LINE * (i + 1), line, ha="center")
        for i, row in enumerate(rows):
            for left, tile in zip(lefts, row, strict=True):
                y = top + i * (tall + spoken + GAP)
                write(left + wide / 2, y, tile.words, ha="center")
                _draw_tile(place(left, y + spoken, wide, tall), tile, tall)
        for i, scale in enumerate(scales):
            x = TILE_MARGIN + i % per_line * (_BAR + 4 * TILE_MARGIN)
            y = bottom + i // per_line * (3 * _LINE + _BAR_HEIGHT)
            write(x, y, scale.name, color=QUIET)
            _draw_scale(place(x, y + _LINE, _BAR, _BAR_HEIGHT), scale)
        for i, line in enumerate(beneath):
            write(TILE_MARGIN, height - TILE_MARGIN - _LINE * (len(beneath) - i), line, color=QUIET)
        return write_figure(figure, out, page_caption)


def wrap_caption(text: str, width: float) -> str:
    """Break a small text into lines for a page of ``width`` inches."""
    return "\n".join(wrap(text, font(round(SMALL_TEXT * DPI / 72)), _pixels(width)))


def _pixels(width: float) -> int:
    return round((width - 2 * TILE_MARGIN) * DPI)


def _draw_tile(at: Axes, tile: Tile, height: float) -> None:
    """Draw a tile of ``height`` inches."""
    from matplotlib.patches import Rectangle

    enlarged = tile.picture.shape[0] <= height * DPI
    at.imshow(tile.picture, extent=(0, 1, 1, 0), aspect="auto", interpolation="nearest" if enlarged else "hamming")
    at.set(xticks=[], yticks=[])
    at.spines[:].set(visible=True, edgecolor=tile.frame or "#999999", linewidth=2.5 if tile.frame else 0.6)
    marks = [((tile.mark, _MARK),) if tile.mark is not None else (), tile.coloured]
    for (top, left, tall, wide), own in (one for each in marks for one in each):
        thin = min(tall, wide) < _THIN
        for colour, line in ((INK, 1.4 if thin else 2.6), (own, 0.8 if thin else 1.4)):  # visible on light and dark
            at.add_patch(Rectangle((left, top), wide, tall, fill=False, edgecolor=colour, linewidth=line))


def _draw_scale(at: Axes, scale: Scale) -> None:
    at.imshow(
        scale.shade(np.linspace(scale.low, scale.high, 256)[None]), aspect="auto",
        extent=(scale.low, scale.high, 0, 1),
    )  # fmt: skip
    at.spines[:].set_visible(False)
    ends = scale.ends or (f"{scale.low:.2g}", f"{scale.high:.2g}")
    at.set(yticks=[])
    at.set_xticks([scale.low, scale.high], ends, fontsize=SMALL_TEXT)
    at.tick_params(length=2)
    left, right = at.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
