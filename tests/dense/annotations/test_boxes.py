from __future__ import annotations

import numpy as np
import pytest
from pycocotools import mask as coco_masks

from patchloom.dense.annotations.boxes import rasterize_outline


@pytest.mark.parametrize("kind", ["floats", "whole numbers", "tiny"])
def test_polygons_have_the_pixels_of_pycocotools(kind):
    rng = np.random.default_rng(0)
    for _ in range(150):
        h, w = map(int, rng.integers(1, 60, 2))
        points = rng.uniform(-5, 65, (rng.integers(3, 12), 2))
        points = {"floats": points, "whole numbers": points.round(), "tiny": points / 30}[kind]
        outline = [points.ravel().tolist(), (points[:3] / 2).ravel().tolist()]
        theirs = coco_masks.decode(coco_masks.merge(coco_masks.frPyObjects(outline, h, w)))
        assert np.array_equal(rasterize_outline(outline, h, w), theirs)


@pytest.mark.parametrize("share", [0, 0.02, 0.5, 1])
def test_run_lengths_of_pycocotools_are_read(share):
    rng = np.random.default_rng(1)
    for _ in range(20):
        mask = rng.random(rng.integers(1, 90, 2)) < share
        written = coco_masks.encode(np.asfortranarray(mask, np.uint8))
        assert np.array_equal(rasterize_outline(written, *mask.shape), mask)
        assert np.array_equal(rasterize_outline(written | {"counts": written["counts"].decode()}, *mask.shape), mask)


@pytest.mark.parametrize(
    ("outline", "why"),
    [
        ({"size": [4, 5], "counts": [20]}, "a mask of size"),
        ({"size": [5, 4], "counts": [3, 4]}, "run lengths of 7 pixels in an image of 20"),
        ({"size": [5, 4], "counts": [30, -10]}, "run lengths"),
        ({"size": [5, 4], "counts": "~"}, "letters"),
        ({"size": [5, 4], "counts": [1.5]}, "neither"),
        ([[1, 2, 3, 4]], "at least three points"),
    ],
)
def test_what_is_no_mask_is_refused(outline, why):
    with pytest.raises(ValueError, match=why):
        rasterize_outline(outline, 5, 4)
