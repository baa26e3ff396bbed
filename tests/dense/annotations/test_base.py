from __future__ import annotations

import numpy as np
import pytest

from patchloom.dense.annotations.base import numbered_classes, read_ade_classes, read_classes
from patchloom.errors import PatchloomError


def written(tmp_path, text, name="classes.txt"):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "text, names, ids",
    [
        ("sky\nroad sign\nvoid\n\n", ("sky", "road sign", "void"), (0, 1, 2)),  # void stays
        ("\ufeffsky\r\nroad\r\n", ("sky", "road"), (0, 1)),
        ("7 road\n8 sidewalk\n255 car", ("road", "sidewalk", "car"), (7, 8, 255)),
        ("2: road\n0: sky", ("road", "sky"), (2, 0)),
        ("0,sky\n1,road", ("sky", "road"), (0, 1)),
        ("sky\n4 wheels", ("sky", "4 wheels"), (0, 1)),  # not all lines begin with a number
    ],
)
def test_names_and_numbers(tmp_path, text, names, ids):
    classes = read_classes(written(tmp_path, text))
    assert (classes.names, classes.ids, classes.colours) == (names, ids, None)


@pytest.mark.parametrize("text", ["128 128 128 sky\n64 0 128\troad sign", "128,128,128,sky\n64,0,128,road sign"])
def test_colours(tmp_path, text):
    classes = read_classes(written(tmp_path, text))
    assert classes.names == ("sky", "road sign") and classes.ids == (0, 1)
    assert np.array_equal(classes.colours, [[128, 128, 128], [64, 0, 128]])


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is empty: write the name of a class a line"),
        ("sky\n\nroad", "line 2 of .* is empty"),
        ("sky\nroad\nsky", "the name sky twice"),
        ("0 sky\n0 road", "the number 0 twice"),
        ("1 2 3 sky\n1 2 3 road", r"the colour \(1, 2, 3\) twice"),
        ("1 2 3 sky\n1 2 300 road", "the line 1 2 300 road: colours are three numbers from 0 to 255"),
        ("70000 sky\n1 road", "classes up to 70,000"),
    ],
)
def test_unclear_lists(tmp_path, text, said):
    with pytest.raises(PatchloomError, match=said):
        read_classes(written(tmp_path, text))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PatchloomError, match="cannot be read as text"):
        read_classes(binary)


def test_ade20ks_list(tmp_path):
    rows = [f"{i}\t0.1\t10\t2\t0\tthing {i}, object {i}" for i in range(1, 151)]
    rows[1], rows[2] = "2\t0\t1\t1\t0\tscreen, CRT", "3\t0\t1\t1\t0\tscreen, silver"
    text = "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows])
    classes = read_ade_classes(written(tmp_path, text))
    assert classes.names[:4] == ("thing 1", "screen, CRT", "screen, silver", "thing 4")
    assert classes.ids == tuple(range(1, 151))
    with pytest.raises(PatchloomError, match="not ADE20K's list"):
        read_ade_classes(written(tmp_path, "\n".join(["Idx", *rows[:-1]])))


def test_numbers_without_a_list():
    assert numbered_classes([0, 1, 4, 255], {255}, "frames").names == ("0", "1", "2", "3", "4")
    assert numbered_classes([0, 1, 4], {0}, "frames").ids == (1, 2, 3, 4)
    assert numbered_classes([255], {255}, "frames").names == ()
    with pytest.raises(PatchloomError, match="2 numbers up to 255: say in classes.txt which are .* by --threshold 128"):
        numbered_classes([0, 255], {-1}, "frames")


def test_a_class_that_does_not_count_is_taken_out(tmp_path):
    classes = read_classes(written(tmp_path, "sky\nvoid\nroad")).without({1, 255})
    assert classes.names == ("sky", "road") and classes.ids == (0, 2)
