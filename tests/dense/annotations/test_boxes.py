from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest
from pycocotools import mask as coco_masks

from patchloom.dense.annotations.boxes import compress_outline
from patchloom.dense.metrics import from_run_lengths


def mask_of(outline, height, width):
    counts = compress_outline(outline, height, width)
    return from_run_lengths([{"size": [height, width], "counts": counts}], (height, width))[0].numpy()


@pytest.mark.parametrize("kind", ["floats", "whole numbers", "tiny"])
def test_polygons_have_the_pixels_of_pycocotools(kind):
    rng = np.random.default_rng(0)
    for _ in range(150):
        h, w = map(int, rng.integers(1, 60, 2))
        points = rng.uniform(-5, 65, (rng.integers(3, 12), 2))
        points = {"floats": points, "whole numbers": points.round(), "tiny": points / 30}[kind]
        outline = [points.ravel().tolist(), (points[:3] / 2).ravel().tolist()]
        theirs = coco_masks.merge(coco_masks.frPyObjects(outline, h, w))
        assert np.array_equal(mask_of(outline, h, w), coco_masks.decode(theirs))
        assert compress_outline(outline, h, w) == theirs["counts"].decode()


@pytest.mark.parametrize("share", [0, 0.02, 0.5, 1])
def test_run_lengths_of_pycocotools_are_read(share):
    rng = np.random.default_rng(1)
    for _ in range(20):
        mask = rng.random(rng.integers(1, 90, 2)) < share
        written = coco_masks.encode(np.asfortranarray(mask, np.uint8))
        written["size"] = [int(side) for side in written["size"]]
        flat = mask.T.ravel()
        changes = np.flatnonzero(np.diff(flat)) + 1
        ends = np.diff(np.concatenate([[0], changes, [flat.size]]))
        runs = [*([0] if flat[0] else []), *ends.tolist()]
        for counts in (written["counts"], written["counts"].decode(), runs):
            assert np.array_equal(mask_of(written | {"counts": counts}, *mask.shape), mask)


SQUARE = [0, 0, 3, 0, 3, 3, 0, 3]


@pytest.mark.parametrize(
    ("outline", "why"),
    [
        ({"size": [4, 5], "counts": [20]}, "whose size is"),
        ({"size": 20, "counts": [20]}, "whose size is"),
        ({"counts": [20]}, "whose size is"),
        ({"size": [5, 4]}, "run lengths"),
        ({"size": [5, 4], "counts": None}, "run lengths"),
        ({"size": [5, 4], "counts": 20}, "run lengths"),
        ({"size": [5, 4], "counts": []}, "run lengths"),
        ({"size": [5, 4], "counts": [3, 4]}, "run lengths"),
        ({"size": [5, 4], "counts": [3, 4, 14]}, "run lengths"),
        ({"size": [5, 4], "counts": [30, -10]}, "run lengths"),
        ({"size": [5, 4], "counts": [2**32 + 20]}, "run lengths"),
        ({"size": [5, 4], "counts": [2**31, 2**31, 20]}, "run lengths"),
        ({"size": [5, 4], "counts": [10**400]}, "run lengths"),
        ({"size": [5, 4], "counts": [1.5, 18.5]}, "run lengths"),
        ({"size": [5, 4], "counts": ["20"]}, "run lengths"),
        ({"size": [5, 4], "counts": [[20]]}, "run lengths"),
        ({"size": [5, 4], "counts": ""}, "run lengths"),
        ({"size": [5, 4], "counts": "~"}, "run lengths"),
        ({"size": [5, 4], "counts": "1"}, "run lengths"),
        ({"size": [5, 4], "counts": "d"}, "run lengths"),
        ({"size": [5, 4], "counts": "PPPP10000"}, "run lengths"),
        ({"size": [5, 4], "counts": "o" * 100_000}, "run lengths"),
        ({"size": [5, 4], "counts": "\u1234"}, "run lengths"),
        ({"size": [5, 4], "counts": "\ud800"}, "run lengths"),
        ([[1, 2, 3, 4]], "at least three points"),
        ([[1, 2, 3, 4, 5, 6, 7]], "at least three points"),
        ([SQUARE, [1, 2, 3, 4]], "at least three points"),
        ([SQUARE, [SQUARE, SQUARE]], "at least three points"),
        ([SQUARE, ["a"] * 6], "at least three points"),
        ([SQUARE, [None] * 6], "at least three points"),
        ([SQUARE, {"size": [5, 4], "counts": [20]}], "at least three points"),
        ([], "at least three points"),
        (7, "at least three points"),
        ("polygon", "at least three points"),
        (SQUARE, "at least three points"),
        ([[0, 0, float("nan"), 0, 3, 3]], "at least three points"),
        ([[0, 0, float("inf"), 0, 3, 3]], "at least three points"),
        ([[0, 0, 10**400, 0, 3, 3]], "at least three points"),
        ([[0, 0, 1e9, 0, 3, 3]], "pixels far"),
        ([[1e300, -1e300] * 3], "pixels far"),
        ([[1e12, 0, 1e12 + 1, 0, 1e12, 1]], "pixels far"),
        ([[0, 0, 1e5, 0] * 20], "sides are longer"),
    ],
)
def test_what_is_no_mask_is_refused_at_once(outline, why):
    tracemalloc.start()
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=why):
        compress_outline(outline, 5, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24 and time.perf_counter() - begun < 5


def test_garbled_run_lengths_are_refused_or_fill_the_image():
    rng = np.random.default_rng(2)
    read = 0
    for _ in range(3000):
        mask = rng.random(rng.integers(1, 12, 2)) < rng.random()
        h, w = map(int, mask.shape)
        text = list(coco_masks.encode(np.asfortranarray(mask, np.uint8))["counts"].decode())
        for _ in range(rng.integers(1, 3)):
            text[rng.integers(len(text))] = chr(rng.integers(32, 127))
        outline = json.loads(json.dumps({"size": [h, w], "counts": "".join(text)}))
        try:
            found = mask_of(outline, h, w)
        except ValueError as error:
            assert "run lengths" in str(error)
            continue
        assert found.shape == (h, w)
        read += 1
    assert 0 < read < 3000
