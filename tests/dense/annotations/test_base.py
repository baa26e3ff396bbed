import numpy as np
import pytest
from refusing import refusal

from patchloom.dense.annotations.base import numbered_classes, read_ade_classes, read_classes


def written(tmp_path, text):
    file = tmp_path / "classes.txt"
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
    kept = classes.without({ids[1], 99})
    assert (kept.names, kept.ids) == ((names[0], *names[2:]), (ids[0], *ids[2:]))


@pytest.mark.parametrize("text", ["128 128 128 sky\n64 0 255\troad sign", "128,128,128,sky\n64,0,255,road sign"])
def test_colours(tmp_path, text):
    classes = read_classes(written(tmp_path, text))
    assert classes.names == ("sky", "road sign") and classes.ids == (0, 1)
    assert np.array_equal(classes.colours, [[128, 128, 128], [64, 0, 255]])


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is empty"),
        ("sky\n\nroad", "line 2 of"),
        ("sky\nroad\nsky", "several classes with the name sky"),
        ("0 sky\n0 road", "the number 0"),
        ("1 2 3 sky\n1 2 3 road", "the colour (1, 2, 3)"),
        ("1 2 3 sky\n1 2 256 road", "the line 1 2 256 road"),
        ("65536 sky\n1 road", "classes up to 65,536"),
    ],
)
def test_unclear_lists(tmp_path, text, said):
    assert said in refusal(read_classes, written(tmp_path, text))


def test_binary_lists(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as text" in refusal(read_classes, tmp_path / "binary.txt")


def test_ade20ks_list(tmp_path):
    rows = [f"{i}\t0.1\t10\t2\t0\tthing {i}, object {i}" for i in range(1, 151)]
    rows[1], rows[2] = "2\t0\t1\t1\t0\tscreen, CRT", "3\t0\t1\t1\t0\tscreen, silver"
    classes = read_ade_classes(written(tmp_path, "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows])))
    assert classes.names[:4] == ("thing 1", "screen, CRT", "screen, silver", "thing 4")
    assert classes.ids == tuple(range(1, 151))
    assert "not ADE20K's list" in refusal(read_ade_classes, written(tmp_path, "\n".join(["Idx", *rows[:-1]])))


def test_numbers_without_a_list():
    assert numbered_classes([0, 1, 4, 255], {255}, "frames").names == ("0", "1", "2", "3", "4")
    assert numbered_classes([0, 1, 4], {0}, "frames").ids == (1, 2, 3, 4)
    assert numbered_classes([255], {255}, "frames").names == ()
    assert len(numbered_classes([0, 31], (), "frames").names) == 32  # few enough without a list
    said = refusal(numbered_classes, [0, 255], {-1}, "frames")
    assert "2 numbers up to 255" in said and "--threshold 128" in said
