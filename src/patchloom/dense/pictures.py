"""Pictures of segmentation and detection: image, ground truth and prediction, row by row.

Letters: c channels, h w height and width of an image, m objects.
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from patchloom.data.augment import resize_part
from patchloom.dense.annotations.base import IGNORED, Objects
from patchloom.display import truncate_middle
from patchloom.look.sheet import (
    EMPTY_MARK,
    SWATCH,
    Caption,
    Page,
    Tile,
    brightness,
    font,
    hatch,
    lay_out,
    tile_size,
    to_pixels,
    to_png,
    write_picture,
    write_sheet,
)
from patchloom.options.verbs import SHEET_ROWS
from patchloom.system.files import write_whole

# A colour for each class, the same in every picture of the same classes.


# The first seven are Okabe and Ito's (2008). Each further one was the farthest in CIELAB from all before it, as seen
# with full colour vision, by protanopes and by deuteranopes (Machado et al. 2009), at once; pale ones were left out.
_FIRST = (
    *("e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7", "0000ff", "2d0f87", "3c2d00"),
    *("00ff87", "ff005a", "d24bff", "5a0f2d", "a50087", "b4f0c3", "00f0ff", "2d5a00", "b4b45a", "004bf0"),
)
_GOLDEN = 0.618033988749895  # of a turn, so that hues never come back
_SHADES = ((0.9, 0.9), (0.55, 0.95), (0.9, 0.6), (0.45, 0.7), (0.75, 0.4))  # saturation, value


def class_colours(classes: int) -> np.ndarray:
    """Return a colour per class, uint8 [classes 3]: 20 that are easy to distinguish, then generated ones."""
    known = [tuple(bytes.fromhex(one)) for one in _FIRST[:classes]]
    rest = (colorsys.hsv_to_rgb(i * _GOLDEN % 1, *_SHADES[i % len(_SHADES)]) for i in range(classes - len(known)))
    return np.array([*known, *(tuple(round(255 * part) for part in one) for one in rest)], np.uint8).reshape(-1, 3)


def ink_on(colour: np.ndarray) -> tuple[int, int, int]:
    """Black or white, whichever is read more easily on a colour [3]."""
    light = float(np.dot((colour / 255.0) ** 2.2, (0.2126, 0.7152, 0.0722)))
    return (0, 0, 0) if light > 0.18 else (255, 255, 255)


def pair_files(picture: Path, number: int) -> tuple[Path, Path]:
    """Return the files of truth and answer of an image of a picture, by its number from 1."""
    folder = picture.with_suffix("")
    return folder / f"{number}-truth.jpg", folder / f"{number}-answer.jpg"


# Boxes with names and scores, drawn on an image so that they can be read on any ground.


_TINT = 0.4  # how much of a mask's pixels is its colour
_LINE, _DASH = 3, 7  # pixels: width of a line, length of a dash and of the gap after it
_TEXT, _AROUND = 14, 2  # pixels: size of the letters, ground around them
_LONGEST = 22  # letters of a name


def draw_boxes(
    image: np.ndarray,
    objects: Objects,
    classes: Sequence[str],
    scores: Tensor | None = None,
    scale: float = 1.0,
) -> Image.Image:
    """Draw objects on an image uint8 [h w 3]: boxes in the colours of their classes, masks as tints, crowds dashed.

    Args:
        image: image to draw on.
        objects: objects in pixels of the original image.
        classes: names of the classes.
        scores: [m], scores to print beside the names.
        scale: resize factor of the image.
    """
    colours, page = class_colours(len(classes)), image.astype(np.float32)
    labels = objects.labels.tolist()
    # the surest on top
    order = range(len(labels)) if scores is None else scores.argsort(stable=True).tolist()
    if objects.has_masks:
        for i in order:
            where = _resized(objects.mask(i), *image.shape[:2]) > 0
            page[where] += _TINT * (colours[labels[i]] - page[where])
    canvas = Image.fromarray(page.round().astype(np.uint8))
    pen, type_face = ImageDraw.Draw(canvas), font(_TEXT, bold=True)
    boxes = [[side * scale for side in box] for box in objects.boxes.tolist()]
    for i in order:
        _frame(pen, boxes[i], tuple(colours[labels[i]].tolist()), bool(objects.crowd[i]))
    taken: list[tuple[float, float, float, float]] = []
    for i in reversed(order):
        name = truncate_middle(classes[labels[i]], _LONGEST)
        text = name if scores is None else f"{name} {scores[i]:.2f}"
        place = _free_place(boxes[i], pen.textbbox((0, 0), text, type_face), canvas.size, taken)
        taken.append(place)
        pen.rectangle(place, tuple(colours[labels[i]].tolist()))
        pen.text((place[0] + _AROUND, place[1] + _AROUND), text, ink_on(colours[labels[i]]), type_face, anchor="la")
    return canvas


def _frame(pen: ImageDraw.ImageDraw, box: Sequence[float], colour: tuple[int, ...], dashed: bool) -> None:
    x0, y0, x1, y1 = (round(side) for side in box)
    x1, y1 = max(x0, x1 - 1), max(y0, y1 - 1)  # they are exclusive
    if not dashed:
        # a thin dark line around, without which a light box is lost on a light ground
        pen.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline=(0, 0, 0))
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=_LINE)
        return
    for begin in range(x0, x1 + 1, 2 * _DASH):
        for y in (y0, y1):
            pen.line((begin, y, min(begin + _DASH, x1), y), colour, _LINE)
    for begin in range(y0, y1 + 1, 2 * _DASH):
        for x in (x0, x1):
            pen.line((x, begin, x, min(begin + _DASH, y1)), colour, _LINE)


def _free_place(
    box: Sequence[float],
    text: tuple[float, float, float, float],
    size: tuple[int, int],
    taken: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float, float, float]:
    """Return the position of a box's label: above it, or elsewhere if that is taken."""
    w, h = text[2] + 2 * _AROUND, text[3] + 2 * _AROUND
    x0, y0, x1, y1 = box
    tried = [(x0, y0 - h), (x0, y0), (x0, y1 - h), (x0, y1), (x1 - w, y0 - h), (x1 - w, y0), (x1 - w, y1 - h)]
    tried += [(x0, y0 + line * h) for line in range(1, int(size[1] / h))]  # many in one place: one below the other
    places = []
    for left, top in tried:
        left, top = max(0, min(left, size[0] - 1 - w)), max(0, min(top, size[1] - 1 - h))
        places.append((left, top, left + w, top + h))
    for one in places:
        if all(one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3] for other in taken):
            return one
    return places[0]


_MAP_SIDES = (280, 224, 176, 128)  # of tiles, tried in turn until the file is small enough
_BOX_SIDES = (360, 300, 240)  # words have to be read in these
_WIDEST = 1600  # pixels of an image that is drawn by itself
_NARROWEST = 320
_APART = 640  # pixels of the longer side where truth and answer lie over one another
_OVER = 0.55  # how much of an overlay is the colour of its class
_SURE = 0.5  # lowest score of what is drawn
_QUALITY = 90  # of JPEG files


class MapRow(NamedTuple):
    """An image [c h w], its label map [h w] if that is known, the answer [h w], and words above them."""

    image: Tensor
    truth: Tensor | None
    answer: Tensor
    title: str


class BoxRow(NamedTuple):
    """An image [c h w], its objects if they are known, those that were found, their scores [m], and words above."""

    image: Tensor
    truth: Objects | None
    answer: Objects
    scores: Tensor
    title: str


Row = TypeVar("Row", MapRow, BoxRow)


def segmentation_picture(rows: Sequence[MapRow], classes: Sequence[str], out: Path) -> Path:
    """Draw images, their label maps and a model's, with the names of the classes that occur.

    Truth and answer of each are written apart, too, into a folder of the file's name (see `pair_files`).
    """
    rows = [MapRow(*row) for row in rows[:SHEET_ROWS]]

    def maps_of(row: MapRow) -> dict[str, Tensor]:
        known = {"truth": row.truth, "answer": row.answer}
        return {name: one for name, one in known.items() if one is not None}

    def tiles(row: MapRow, side: int) -> dict[str, np.ndarray]:
        shown = _tile(row.image, side)
        maps = {name: _resized(one, *shown.shape[:2]) for name, one in maps_of(row).items()}
        return {"image": shown} | {name: _painted(one, len(classes)) for name, one in maps.items()}

    def overlays(row: MapRow) -> dict[str, np.ndarray]:
        shown = _tile(row.image, _APART)
        return {name: _overlaid(shown, one, len(classes)) for name, one in maps_of(row).items()}

    caption = Caption(
        "Segmentation: the best and the worst test images",
        "The image, its true label map and the predicted one. Look which classes are confused, and whether borders are "
        "sharp.",
        203,
        _save_pairs(rows, overlays, out),
    )
    legend = _legend([one for row in rows for one in maps_of(row).values()], classes)
    return write_sheet(out, lambda side: _page(rows, tiles, side, legend), caption, _MAP_SIDES)


def detection_picture(rows: Sequence[BoxRow], classes: Sequence[str], out: Path, score: float = _SURE) -> Path:
    """Draw images with their objects, beside them with what a model found: boxes, names, scores, and masks as tints.

    Truth and answer of each are written apart, too, as by `segmentation_picture`.
    """
    rows = [BoxRow(*row) for row in rows[:SHEET_ROWS]]
    if any(bool((row.scores >= score).any()) for row in rows):
        below = f"Answers with a score of at least {score:g} are drawn."
        rows = [_chosen(row, row.scores >= score) for row in rows]
    else:
        below = f"No answer has a score of {score:g}: the surest one of each image is drawn."
        rows = [_chosen(row, row.scores >= row.scores.max()) if len(row.scores) else row for row in rows]
    if any(row.truth is not None and bool(row.truth.crowd.any()) for row in rows):
        below += " Dashed: groups, in which answers are neither right nor wrong."

    def tiles(row: BoxRow, side: int) -> dict[str, np.ndarray]:
        shown = _tile(row.image, side)
        scale = shown.shape[1] / row.image.shape[2]
        answer = {"answer": np.asarray(draw_boxes(shown, row.answer, classes, row.scores, scale))}
        if row.truth is None:
            return answer
        return {"truth": np.asarray(draw_boxes(shown, row.truth, classes, None, scale))} | answer

    caption = Caption(
        "Detection: the best and the worst test images",
        "True and predicted objects. Look for objects that are missed, and for boxes without an object.",
        204,
        _save_pairs(rows, lambda row: tiles(row, _APART), out),
    )
    return write_sheet(out, lambda side: _page(rows, tiles, side, (), below), caption, _BOX_SIDES)


def _page(
    rows: Sequence[Row],
    drawn: Callable[[Row, int], dict[str, np.ndarray]],
    side: int,
    legend: Sequence[tuple[np.ndarray, str]],
    caption: str = "",
) -> Page:
    """Return the page with the tiles by heading that ``drawn`` returns for each row."""
    tiles = [drawn(row, side) for row in rows]
    headings = [name for name in ("image", "truth", "answer") if any(name in its for its in tiles)]
    shown = [[Tile(its[name]) if name in its else None for name in headings] for its in tiles]
    return Page(shown, headings, caption=caption, above=[row.title for row in rows], legend=legend)


def _save_pairs(rows: Sequence[Row], drawn: Callable[[Row], dict[str, np.ndarray]], picture: Path) -> tuple[str, ...]:
    """Write truth and answer of each row with a known truth as files of one size, so that a page can overlay them.

    Args:
        rows: rows of a picture.
        drawn: function that draws ``truth`` and ``answer`` of a row.
        picture: file of the picture, which is written after them.

    Returns:
        The titles of these rows, for the caption of the picture.
    """
    known = [row for row in rows if row.truth is not None]
    for number, row in enumerate(known, start=1):
        images = drawn(row)
        for name, path in zip(("truth", "answer"), pair_files(picture, number), strict=True):
            buffer = io.BytesIO()
            Image.fromarray(images[name]).save(buffer, "JPEG", quality=_QUALITY)
            write_whole(path, buffer.getvalue())
    return tuple(row.title for row in known)


def draw_label_map(image: Tensor, answer: Tensor, classes: Sequence[str], out: Path) -> Path:
    """Draw an image [c h w] in the colours of the classes of its pixels, answer [h w], with their names beneath."""
    mixed = _overlaid(_resized_pixels(image, *_single_size(image)), answer, len(classes))
    return write_picture(out, to_png(lay_out(Page([[Tile(mixed)]], [""], legend=_legend([answer], classes)))), None)


def draw_objects(image: Tensor, answer: Objects, scores: Tensor, classes: Sequence[str], out: Path) -> Path:
    """Draw an image [c h w] with the objects that were found in it, and their scores [m]."""
    h, w = _single_size(image)
    drawn = draw_boxes(_resized_pixels(image, h, w), answer, classes, scores, w / image.shape[2])
    return write_picture(out, to_png(drawn), None)


def _overlaid(shown: np.ndarray, labels: Tensor, classes: int) -> np.ndarray:
    """Colours uint8 [h w 3] under those of the classes of their pixels; the label map may be of another size."""
    colours = _painted(_resized(labels, *shown.shape[:2]), classes).astype(np.float32)
    mixed: np.ndarray = ((1 - _OVER) * shown + _OVER * colours).round().astype(np.uint8)
    return mixed


def _tile(image: Tensor, side: int) -> np.ndarray:
    """Return colours uint8 [h w 3] of an image [c h w] as it is shown; a small one is enlarged to ``side``, too."""
    return _resized_pixels(image, *tile_size(image.shape[1], image.shape[2], side, side))


def _single_size(image: Tensor) -> tuple[int, int]:
    """Return the height and width for drawing a single image: its own, within limits."""
    h, w = image.shape[1:]
    scale = min(1.0, _WIDEST / max(h, w))
    scale = scale if max(h, w) >= _NARROWEST else _NARROWEST // max(h, w)
    return max(1, round(h * scale)), max(1, round(w * scale))


def _chosen(row: BoxRow, which: Tensor) -> BoxRow:
    """Return a row with those of its finds for which ``which`` [m] says so."""
    found = row.answer
    masks = None if found.masks is None else found.masks[which]
    boxes, labels, crowd = (one[which] for one in (found.boxes, found.labels, found.crowd))
    answer = replace(found, boxes=boxes, labels=labels, masks=masks, crowd=crowd)
    return row._replace(answer=answer, scores=row.scores[which])


def _resized_pixels(image: Tensor, h: int, w: int) -> np.ndarray:
    """Convert an image [c h w] to colours uint8 [h w 3] of another size; dark images are brightened."""
    smaller = h < image.shape[1]
    if smaller:  # before anything is computed of millions of pixels
        image = resize_part(image, 0, 0, image.shape[1], image.shape[2], (h, w))
    unit = (image if image.is_floating_point() else image.float() / 255)[None]
    colours = to_pixels(unit, (0.0,), (1.0,), brightness(unit, (0.0,), (1.0,)))[0]
    return colours if smaller else np.array(Image.fromarray(colours).resize((w, h), Image.Resampling.NEAREST))


def _resized(labels: Tensor, h: int, w: int) -> np.ndarray:
    """Return a label map of another size, int32 [h w]."""
    return np.asarray(Image.fromarray(labels.numpy().astype(np.int32)).resize((w, h), Image.Resampling.NEAREST))


def _painted(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return a label map in the colours of its classes, uint8 [h w 3]; what does not count is hatched."""
    colours = np.concatenate([class_colours(classes), np.zeros((1, 3), np.uint8)])
    painted = colours[labels]
    ignored = labels == IGNORED
    painted[ignored] = hatch(EMPTY_MARK, *labels.shape)[ignored]
    return painted


def _legend(maps: Iterable[Tensor], classes: Sequence[str]) -> list[tuple[np.ndarray, str]]:
    """Return colours and names of the classes in label maps, most pixels first; then what does not count."""
    counts = np.zeros(len(classes) + 1, np.int64)
    for one in maps:
        counts += np.bincount(one.numpy().ravel().astype(np.int64) - IGNORED, minlength=len(counts))
    order = [*(1 + np.argsort(-counts[1:], kind="stable")).tolist(), 0]
    labels = [place + IGNORED for place in order if counts[place]]
    names = ["does not count" if label == IGNORED else classes[label] for label in labels]
    return [(_painted(np.full((SWATCH, SWATCH), i), len(classes)), name) for i, name in zip(labels, names, strict=True)]
