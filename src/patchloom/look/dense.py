"""Pictures of segmentation and detection: the image, what is there, and what a model says, row by row.

Letters: c channels, h w height and width of an image, m objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from patchloom.data.annotated.base import IGNORED, Objects
from patchloom.data.crop import resize_part
from patchloom.files import write_whole
from patchloom.look.apart import Pair, keep_apart
from patchloom.look.boxes import draw_boxes
from patchloom.look.class_colours import class_colours
from patchloom.look.hatching import EMPTY, GAP, KEY, hatch, wrap_keys
from patchloom.look.sheets import (
    CAPTION_LINE,
    CAPTION_SIZE,
    HEADING_LINE,
    HEADING_SIZE,
    INK,
    MARGIN,
    MOST_BYTES,
    PAGE,
    ROWS,
    brightness,
    font,
    framed,
    tile_size,
    to_pixels,
    to_png,
    widest_word,
    wrap,
    write_beneath,
)

_MAP_SIDES = (280, 224, 176, 128)  # of tiles, tried in turn until the file is small enough
_BOX_SIDES = (360, 300, 240)  # words have to be read in these
_WIDEST = 1600  # pixels of an image that is drawn by itself
_NARROWEST = 320
_APART = 640  # pixels of the longer side where truth and answer lie over one another
_OVER = 0.55  # how much of an overlay is the colour of its class
_SURE = 0.5  # lowest score of what is drawn


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


def segmentation_picture(rows: Sequence[MapRow], classes: Sequence[str], out: Path) -> Path:
    """Draw images, their label maps and a model's, with the names of the classes that occur.

    Truth and answer of each are written apart, too, into a folder of the file's name (see `patchloom.look.apart`).

    Args:
        rows: at most 8 are drawn.
        classes: their names.
        out: the file, a PNG.
    """
    rows = [MapRow(*row) for row in rows[:ROWS]]
    maps = [one for row in rows for one in (row.truth, row.answer) if one is not None]
    headings = ["image", *["truth"] * any(row.truth is not None for row in rows), "answer"]
    keys = _keys(maps, classes)

    def tiles(row: MapRow, side: int) -> list[np.ndarray]:
        h, w = tile_size(*row.image.shape[1:], side, side)
        drawn = [_resized(one, h, w) for one in (row.truth, row.answer) if one is not None]
        return [_shown(row.image, h, w), *(_painted(one, len(classes)) for one in drawn)]

    for side in _MAP_SIDES:
        page = _page(headings, [(row.title, tiles(row, side)) for row in rows], keys, classes, "")
        if _written(page, out, side == _MAP_SIDES[-1]):
            break
    keep_apart([_maps_apart(row, len(classes)) for row in rows if row.truth is not None], out.with_suffix(""))
    return out


def detection_picture(rows: Sequence[BoxRow], classes: Sequence[str], out: Path, score: float = _SURE) -> Path:
    """Draw images with their objects, beside them with what a model found: boxes, names, scores, and masks as tints.

    Truth and answer of each are written apart, too, as by `segmentation_picture`.

    Args:
        rows: at most 8 are drawn.
        classes: their names.
        out: the file, a PNG.
        score: the lowest of what is drawn; where no answer has it, the surest of each image is.
    """
    rows = [BoxRow(*row) for row in rows[:ROWS]]
    reached = any(bool((row.scores >= score).any()) for row in rows)
    caption = f"Answers with a score of at least {score:g} are drawn."
    if not reached:
        caption = f"No answer has a score of {score:g}: the surest one of each image is drawn."
        rows = [row._replace(**_chosen(row, row.scores >= row.scores.max()) if len(row.scores) else {}) for row in rows]
    rows = [row._replace(**_chosen(row, row.scores >= score)) for row in rows] if reached else rows
    known = any(row.truth is not None for row in rows)
    if any(row.truth is not None and bool(row.truth.crowd.any()) for row in rows):
        caption += " Dashed: groups, in which answers are neither right nor wrong."

    def tiles(row: BoxRow, side: int) -> list[np.ndarray]:
        h, w = tile_size(*row.image.shape[1:], side, side)
        shown, scale = _shown(row.image, h, w), w / row.image.shape[2]
        there = [] if row.truth is None else [draw_boxes(shown, row.truth, classes, None, scale)]
        return [np.asarray(one) for one in (*there, draw_boxes(shown, row.answer, classes, row.scores, scale))]

    headings = ["truth", "answer"] if known else ["answer"]
    for side in _BOX_SIDES:
        page = _page(headings, [(row.title, tiles(row, side)) for row in rows], {}, classes, caption)
        if _written(page, out, side == _BOX_SIDES[-1]):
            break
    keep_apart([_boxes_apart(row, classes) for row in rows if row.truth is not None], out.with_suffix(""))
    return out


def draw_label_map(image: Tensor, answer: Tensor, classes: Sequence[str], out: Path) -> Path:
    """Draw an image [c h w] in the colours of the classes of its pixels, answer [h w], with their names beneath."""
    mixed = _overlaid(_shown(image, *_alone(image)), answer, len(classes))
    page = _page([], [("", [mixed])], _keys([answer], classes), classes, "")
    write_whole(out, to_png(page))
    return out


def draw_objects(image: Tensor, answer: Objects, scores: Tensor, classes: Sequence[str], out: Path) -> Path:
    """Draw an image [c h w] with the objects that were found in it, and their scores [m]."""
    h, w = _alone(image)
    drawn = draw_boxes(_shown(image, h, w), answer, classes, scores, w / image.shape[2])
    write_whole(out, to_png(drawn))
    return out


def _overlaid(shown: np.ndarray, labels: Tensor, classes: int) -> np.ndarray:
    """Colours uint8 [h w 3] under those of the classes of their pixels; the label map may be of another size."""
    colours = _painted(_resized(labels, *shown.shape[:2]), classes).astype(np.float32)
    mixed: np.ndarray = ((1 - _OVER) * shown + _OVER * colours).round().astype(np.uint8)
    return mixed


def _maps_apart(row: MapRow, classes: int) -> Pair:
    """A row with a known label map, as truth and answer over the image."""
    assert row.truth is not None
    shown = _shown(row.image, *tile_size(*row.image.shape[1:], _APART, _APART))
    truth, answer = (Image.fromarray(_overlaid(shown, labels, classes)) for labels in (row.truth, row.answer))
    return Pair(row.title, truth, answer)


def _boxes_apart(row: BoxRow, classes: Sequence[str]) -> Pair:
    """A row with known objects, as truth and answer on the image."""
    assert row.truth is not None
    shown = _shown(row.image, *tile_size(*row.image.shape[1:], _APART, _APART))
    scale = shown.shape[1] / row.image.shape[2]
    truth = draw_boxes(shown, row.truth, classes, None, scale)
    return Pair(row.title, truth, draw_boxes(shown, row.answer, classes, row.scores, scale))


def _alone(image: Tensor) -> tuple[int, int]:
    """The height and width at which an image is drawn by itself: its own, within what can be looked at."""
    h, w = image.shape[1:]
    scale = min(1.0, _WIDEST / max(h, w))
    scale = scale if max(h, w) >= _NARROWEST else _NARROWEST // max(h, w)
    return max(1, round(h * scale)), max(1, round(w * scale))


def _chosen(row: BoxRow, which: Tensor) -> dict[str, object]:
    """The finds of a row for which ``which`` [m] says so."""
    found = row.answer
    masks = None if found.masks is None else found.masks[which]
    boxes, labels, crowd = (one[which] for one in (found.boxes, found.labels, found.crowd))
    return {"answer": replace(found, boxes=boxes, labels=labels, masks=masks, crowd=crowd), "scores": row.scores[which]}


def _shown(image: Tensor, h: int, w: int) -> np.ndarray:
    """An image [c h w] as colours uint8 [h w 3] of another size; a dark one is brightened."""
    smaller = h < image.shape[1]
    if smaller:  # before anything is computed of millions of pixels
        image = resize_part(image, 0, 0, *image.shape[1:], (h, w))
    unit = (image if image.is_floating_point() else image.float() / 255)[None]
    colours = to_pixels(unit, (0.0,), (1.0,), brightness(unit, (0.0,), (1.0,)))[0]
    return colours if smaller else np.array(Image.fromarray(colours).resize((w, h), Image.Resampling.NEAREST))


def _resized(labels: Tensor, h: int, w: int) -> np.ndarray:
    """A label map of another size, int32 [h w]."""
    return np.asarray(Image.fromarray(labels.numpy().astype(np.int32)).resize((w, h), Image.Resampling.NEAREST))


def _painted(labels: np.ndarray, classes: int) -> np.ndarray:
    """A label map in the colours of its classes, uint8 [h w 3]; what does not count is hatched."""
    colours = np.concatenate([class_colours(classes), np.zeros((1, 3), np.uint8)])
    painted = colours[labels]
    ignored = labels == IGNORED
    painted[ignored] = hatch(EMPTY, *labels.shape)[ignored]
    return painted


def _keys(maps: Iterable[Tensor], classes: Sequence[str]) -> dict[int, str]:
    """Names of the classes that occur in label maps, the one with most pixels first; then what does not count."""
    counts = np.zeros(len(classes) + 1, np.int64)
    for one in maps:
        counts += np.bincount(one.numpy().ravel().astype(np.int64) - IGNORED, minlength=len(counts))
    order = 1 + np.argsort(-counts[1:], kind="stable")
    keys = {int(place) + IGNORED: classes[int(place) + IGNORED] for place in order if counts[place]}
    return keys | ({IGNORED: "does not count"} if counts[0] else {})


def _page(
    headings: Sequence[str],
    rows: Sequence[tuple[str, Sequence[np.ndarray]]],
    keys: dict[int, str],
    classes: Sequence[str],
    caption: str,
) -> Image.Image:
    """The page: headings above columns of tiles, words above each row, a legend, and a caption.

    Args:
        headings: of the columns; empty for none.
        rows: words, and a tile uint8 [h w 3] for each column.
        keys: names by number of class, or of what does not count.
        classes: names of all.
        caption: beneath all.
    """
    heading_font, caption_font = font(HEADING_SIZE), font(CAPTION_SIZE)
    tiles = [[framed(tile) for tile in row] for _, row in rows]
    columns = max(map(len, tiles))
    widths = [
        max(
            [row[i].width for row in tiles if i < len(row)]
            + [widest_word(head, heading_font) for head in headings[i : i + 1]]
        )
        for i in range(columns)
    ]
    inner = max(sum(widths) + GAP * (columns - 1), _NARROWEST, widest_word(caption, caption_font))
    words = [wrap(title, caption_font, inner) for title, _ in rows]
    lines, key_lines = wrap(caption, caption_font, inner), wrap_keys(keys, caption_font, inner)
    heights = [
        CAPTION_LINE * len(said) + max(tile.height for tile in row) for said, row in zip(words, tiles, strict=True)
    ]
    top = MARGIN + (HEADING_LINE + GAP) * bool(headings)
    beneath = CAPTION_LINE * (len(lines) + len(key_lines)) + GAP * bool(lines or key_lines)
    page = Image.new("RGB", (inner + 2 * MARGIN, top + sum(heights) + GAP * (len(rows) - 1) + beneath + MARGIN), PAGE)
    pen = ImageDraw.Draw(page)
    x = MARGIN
    for heading, width in zip(headings, widths, strict=False):
        pen.text((x + width / 2, top - GAP), heading, INK, heading_font, anchor="ms")
        x += width + GAP
    y = top
    for said, row, height in zip(words, tiles, heights, strict=True):
        x, base = MARGIN, y
        for line in said:
            base += CAPTION_LINE
            pen.text((MARGIN, base - 6), line, INK, caption_font, anchor="ls")
        for tile, width in zip(row, widths, strict=False):
            page.paste(tile, (x + (width - tile.width) // 2, base))
            x += width + GAP
        y += height + GAP
    square = (KEY, KEY)
    write_beneath(page, y - 4, key_lines, lambda i: _painted(np.full(square, i), len(classes)), lines, caption_font)
    return page


def _written(page: Image.Image, out: Path, last: bool) -> bool:
    """Write a page unless its file would be too large and a smaller one may be tried."""
    png = to_png(page)
    if len(png) > MOST_BYTES and not last:
        return False
    write_whole(out, png)
    return True
