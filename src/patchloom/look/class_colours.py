"""A colour for each class, the same in every picture of the same classes."""

from __future__ import annotations

import colorsys

import numpy as np

# The first seven are Okabe and Ito's (2008). Each further one was the farthest in CIELAB from all before it, as seen
# with full colour vision, by protanopes and by deuteranopes (Machado et al. 2009), at once; pale ones were left out.
_FIRST = (
    *("e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7", "0000ff", "2d0f87", "3c2d00"),
    *("00ff87", "ff005a", "d24bff", "5a0f2d", "a50087", "b4f0c3", "00f0ff", "2d5a00", "b4b45a", "004bf0"),
)
_GOLDEN = 0.618033988749895  # of a turn, so that hues never come back
_SHADES = ((0.9, 0.9), (0.55, 0.95), (0.9, 0.6), (0.45, 0.7), (0.75, 0.4))  # saturation, value


def class_colours(classes: int) -> np.ndarray:
    """Red, green and blue of each class, uint8 [classes 3]: 20 that are told apart well, then others as they come."""
    known = [tuple(bytes.fromhex(one)) for one in _FIRST[:classes]]
    rest = (colorsys.hsv_to_rgb(i * _GOLDEN % 1, *_SHADES[i % len(_SHADES)]) for i in range(classes - len(known)))
    return np.array([*known, *(tuple(round(255 * part) for part in one) for one in rest)], np.uint8).reshape(-1, 3)


def ink_on(colour: np.ndarray) -> tuple[int, int, int]:
    """Black or white, whichever is read more easily on a colour [3]."""
    light = float(np.dot((colour / 255.0) ** 2.2, (0.2126, 0.7152, 0.0722)))
    return (0, 0, 0) if light > 0.18 else (255, 255, 255)
