"""What is no picture in a sheet is hatched, and a legend says what the hatching means."""

from __future__ import annotations

import math

import numpy as np
from PIL import ImageFont
from torch import Tensor

# What is no picture is hatched: of any one colour, a night or a sky may be.
EMPTY, WRONG = 1, 2
HATCHES = {EMPTY: ((238, 238, 238), (172, 172, 172)), WRONG: ((255, 246, 232), (228, 138, 70))}  # ground, lines
STEP = {EMPTY: 6, WRONG: 8}  # pixels from line to line
KEY = 14  # side of a hatched square in the legend
GAP = 8  # pixels between a square and its words


def to_marks(images: Tensor) -> np.ndarray:
    """Of each pixel of ``images`` [b c h w], uint8 [b h w]: EMPTY where it is nan, WRONG where it is inf, else 0."""
    images = images.detach().float().cpu()
    empty, wrong = images.isnan().any(1), images.isinf().any(1)
    return (EMPTY * empty.byte() + WRONG * (wrong & ~empty).byte()).numpy()


def hatch(mark: int, h: int, w: int) -> np.ndarray:
    """A hatched ground uint8 [h w 3]: EMPTY has lines in one direction, WRONG in both."""
    y, x = np.mgrid[:h, :w]
    lines = (x + y) % STEP[mark] == 0
    if mark == WRONG:
        lines |= (x - y) % STEP[mark] == 0
    return np.where(lines[..., None], *(np.uint8(colour) for colour in reversed(HATCHES[mark])))


def key_width(text: str, type_face: ImageFont.FreeTypeFont) -> int:
    """Width of a hatched square with its words, and of the gap after them."""
    return KEY + GAP + math.ceil(type_face.getlength(text)) + 3 * GAP


def wrap_keys(legend: dict[int, str], type_face: ImageFont.FreeTypeFont, width: int) -> list[list[tuple[int, str]]]:
    """The entries of a legend, in lines that are at most ``width`` pixels wide unless one holds a single entry."""
    lines: list[list[tuple[int, str]]] = []
    for mark, text in legend.items():
        if lines and sum(key_width(words, type_face) for _, words in [*lines[-1], (mark, text)]) <= width:
            lines[-1].append((mark, text))
        else:
            lines.append([(mark, text)])
    return lines
