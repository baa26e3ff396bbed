"""JPEG files are decoded faster than by PIL, with the same results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from patchloom.data.decode import Unreadable, _read_jpeg, from_pil, read_image

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)


def pil_read(path):
    with Image.open(path) as image:
        return from_pil(image)


def assert_as_pil(path):
    try:
        expected = pil_read(path)
    except Exception:  # if PIL raises any exception, ours must refuse the file, too
        with pytest.raises(Unreadable, match=path.name):
            read_image(path)
    else:
        assert torch.equal(read_image(path), expected)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.sampled_from(["RGB", "L", "CMYK"]),
    st.integers(1, 100),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 9),
    st.sampled_from([b"", b"trailer", b"\0" * 8, b"\xff\xd9"]),
)
def test_jpeg_pixels_are_those_of_pil(tmp_path, size, mode, quality, progressive, subsampling, orientation, trailer):
    image = Image.fromarray(RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    how = {"subsampling": subsampling} if mode == "RGB" else {}
    image.save(tmp_path / "a.jpg", quality=quality, progressive=progressive, exif=exif, **how)
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes() + trailer)
    assert torch.equal(read_image(tmp_path / "a.jpg"), pil_read(tmp_path / "a.jpg"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.booleans(), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4), st.floats(0.05, 1))
def test_a_damaged_jpeg_is_read_or_refused_as_pil_does(tmp_path, progressive, changes, keep):
    path = tmp_path / "a.jpg"
    Image.fromarray(RGB).resize((40, 30)).save(path, progressive=progressive)
    content = bytearray(path.read_bytes()[: int(keep * path.stat().st_size)])
    for place, value in changes:
        content[int(place * (len(content) - 1))] = value
    path.write_bytes(bytes(content))
    assert_as_pil(path)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_that_ends_too_early_is_read_or_refused_as_pil_does(tmp_path, progressive):
    Image.fromarray(RGB).resize((24, 20)).save(tmp_path / "whole.jpg", progressive=progressive)
    content, path = (tmp_path / "whole.jpg").read_bytes(), tmp_path / "a.jpg"
    head = range(
        content.index(b"\xff\xda"), content.index(b"\xff\xda") + 14
    )  # of a scan: an end marker in it is part of the data
    for length in set(range(0, len(content), 2)) - set(head):
        path.write_bytes(content[:length] + b"\xff\xd9")
        assert_as_pil(path)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1)])
def test_a_thin_jpeg_is_rotated(tmp_path, size, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(RGB).resize(size).save(tmp_path / "a.jpg", exif=exif)
    assert torch.equal(_read_jpeg(tmp_path / "a.jpg"), pil_read(tmp_path / "a.jpg"))


def test_other_formats_that_are_called_jpg(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.jpg", "PNG")
    np.testing.assert_array_equal(read_image(tmp_path / "a.jpg").permute(1, 2, 0).numpy(), RGB)
