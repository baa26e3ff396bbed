"""Boxes with names and scores, drawn on an image so that they can be read on any ground."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from patchloom.data.annotated.base import Objects
from patchloom.look.class_colours import class_colours, ink_on
from patchloom.look.sheets import font
from patchloom.shown import shortened

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
    """An image uint8 [h w 3] with objects: boxes in the colours of their classes, masks as tints, crowds dashed.

    Args:
        image: on which is drawn.
        objects: in pixels of the image as it was.
        classes: their names.
        scores: [m] beside the names.
        scale: by which the image was resized.
    """
    colours, page = class_colours(len(classes)), image.astype(np.float32)
    labels = objects.labels.tolist()
    # the surest on top
    order = range(len(labels)) if scores is None else scores.argsort(stable=True).tolist()
    if objects.has_masks:
        for i in order:
            where = _at_size(objects.mask(i), image.shape[:2])
            page[where] += _TINT * (colours[labels[i]] - page[where])
    canvas = Image.fromarray(page.round().astype(np.uint8))
    pen, type_face = ImageDraw.Draw(canvas), font(_TEXT, bold=True)
    boxes = [[side * scale for side in box] for box in objects.boxes.tolist()]
    for i in order:
        _frame(pen, boxes[i], tuple(colours[labels[i]].tolist()), bool(objects.crowd[i]))
    taken: list[tuple[float, float, float, float]] = []
    for i in reversed(order):
        name = shortened(classes[labels[i]], _LONGEST)
        text = name if scores is None else f"{name} {scores[i]:.2f}"
        place = _free_place(boxes[i], pen.textbbox((0, 0), text, type_face), canvas.size, taken)
        taken.append(place)
        pen.rectangle(place, tuple(colours[labels[i]].tolist()))
        pen.text((place[0] + _AROUND, place[1] + _AROUND), text, ink_on(colours[labels[i]]), type_face, anchor="la")
    return canvas


def _at_size(mask: Tensor, size: tuple[int, int]) -> np.ndarray:
    """A mask [h w] resized, bool."""
    if tuple(mask.shape) == tuple(size):
        return mask.numpy()
    resized = Image.fromarray(mask.to(torch.uint8).numpy() * 255).resize((size[1], size[0]), Image.Resampling.NEAREST)
    return np.asarray(resized) > 0


def _frame(pen: ImageDraw.ImageDraw, box: Sequence[float], colour: tuple[int, ...], dashed: bool) -> None:
    x0, y0, x1, y1 = (round(side) for side in box)
    x1, y1 = max(x0, x1 - 1), max(y0, y1 - 1)  # they are exclusive
    # a thin dark line around, without which a light box is lost on a light ground
    if not dashed:
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
    """Where the words about a box stand: above it, or else where nothing else is written."""
    w, h = text[2] + 2 * _AROUND, text[3] + 2 * _AROUND
    x0, y0, x1, y1 = box
    tried = [(x0, y0 - h), (x0, y0), (x0, y1 - h), (x0, y1), (x1 - w, y0 - h), (x1 - w, y0), (x1 - w, y1 - h)]
    tried += [(x0, y0 + line * h) for line in range(1, int(size[1] / h))]  # many in one place: one below the other
    places = []
    for left, top in tried:
        left, top = max(0, min(left, size[0] - 1 - w)), max(0, min(top, size[1] - 1 - h))
        places.append((left, top, left + w, top + h))
    return next((one for one in places if not any(_meet(one, other) for other in taken)), places[0])


def _meet(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
