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


BAD = {
    "whose size is": [{"size": [4, 5], "counts": [20]}, {"size": 20, "counts": [20]}, {"counts": [20]}],
    "run lengths": [
        {"size": [5, 4]},
        *({"size": [5, 4], "counts": counts} for counts in (None, 20, [], [3, 4], [3, 4, 14], [30, -10])),
        *({"size": [5, 4], "counts": counts} for counts in ([2**32 + 20], [2**31, 2**31, 20], [10**400])),
        *({"size": [5, 4], "counts": counts} for counts in ([1.5, 18.5], ["20"], [[20]], "", "~", "1", "d")),
        *({"size": [5, 4], "counts": counts} for counts in ("PPPP10000", "o" * 100_000, "\u1234", "\ud800")),
    ],
    "at least three points": [
        *([[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6, 7]], [SQUARE, [1, 2, 3, 4]], [SQUARE, [SQUARE, SQUARE]]),
        *([SQUARE, ["a"] * 6], [SQUARE, [None] * 6], [SQUARE, {"size": [5, 4], "counts": [20]}]),
        *([], 7, "polygon", SQUARE),
        *([[0, 0, number, 0, 3, 3]] for number in (float("nan"), float("inf"), 10**400)),
    ],
    "pixels far": [[[0, 0, 1e9, 0, 3, 3]], [[1e300, -1e300] * 3], [[1e12, 0, 1e12 + 1, 0, 1e12, 1]]],
    "sides are longer": [[[0, 0, 1e5, 0] * 20]],
}


@pytest.mark.parametrize(("why", "outline"), [(why, outline) for why, those in BAD.items() for outline in those])
def test_bad_outlines_are_refused_at_once(outline, why):
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
