"""Sizes of patches: a square is stored and displayed as its side."""

from patchloom.sizes import compact, in_pixels, to_pair


def test_sizes():
    assert (to_pair(8), to_pair([40, 1])) == ((8, 8), (40, 1))
    assert (compact(8), compact([8, 8]), compact((40, 1))) == (8, 8, (40, 1))
    assert (in_pixels(8), in_pixels((40, 1)), in_pixels([32, 32]), in_pixels("auto")) == ("8", "40x1", "32x32", "auto")
