import contextlib
import sys
from io import BytesIO

import imagecodecs
import numpy as np
import pytest
import tifffile
import torch
from encoding import assert_unreadable, encoded, npy, tiff
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from refusing import refusal

from patchloom.data.decode import Unreadable, _read_jpeg, decode_image, from_pil, read_image, to_channels

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)
GREY = RNG.integers(0, 256, (5, 7), dtype=np.uint8)
DEEP = RNG.integers(0, 65536, (5, 7, 3), dtype=np.uint16)


def hwc(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "tiff", "webp"])
@pytest.mark.parametrize("array", [RGB, GREY], ids=["rgb", "grey"])
def test_lossless_8_bit_files_come_back_exactly(tmp_path, suffix, array):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(array).save(path, **({"lossless": True} if suffix == "webp" else {}))
    image = read_image(path)
    assert image.dtype == torch.uint8
    if suffix == "webp" and array.ndim == 2:  # WebP has no grey images
        array = np.repeat(array[..., None], 3, 2)
    np.testing.assert_array_equal(hwc(image), array.reshape(5, 7, -1))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg(tmp_path, mode):
    Image.new("RGB", (20, 10), (200, 200, 200)).convert(mode).save(tmp_path / "a.JPG", quality=95)
    image = read_image(tmp_path / "a.JPG")
    assert image.shape == (1 if mode == "L" else 3, 10, 20)
    assert (image.int() - 200).abs().max() <= 3


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("layout", ["contig", "separate", "pages"])
def test_tiff_of_5_channels(tmp_path, dtype, layout):
    array = RNG.integers(0, 256, (6, 9, 5)).astype(dtype)
    planes = np.ascontiguousarray(array.transpose(2, 0, 1))
    if layout == "contig":
        tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack", planarconfig="contig")
    elif layout == "separate":
        tifffile.imwrite(tmp_path / "a.tif", planes, photometric="minisblack", planarconfig="separate")
    else:
        tifffile.imwrite(tmp_path / "a.tif", planes, photometric="minisblack", metadata={"axes": "CYX"})
    image = read_image(tmp_path / "a.tif")
    expected = array if dtype == np.uint8 else array / np.float32(65535)
    np.testing.assert_allclose(hwc(image), expected, rtol=1e-6)


def test_of_frames_and_of_pages_that_are_no_channels_the_first_is_read(tmp_path):
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read_image(tmp_path / "a.gif")[:, 0, 0].tolist() == [255, 0, 0]
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        for value in (10, 20):
            tiff.write(np.full((4, 6), value, np.uint8), metadata=None)
    image = read_image(tmp_path / "a.tif")
    assert image.shape == (1, 4, 6) and (image == 10).all()


def test_floats_and_a_fourth_channel_that_is_not_transparency_stay(tmp_path):
    array = RNG.random((4, 6), np.float32)
    tifffile.imwrite(tmp_path / "a.tif", array)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif")[0].numpy(), array)
    array = RNG.integers(0, 256, (4, 6, 4), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", extrasamples=["unspecified"])
    np.testing.assert_array_equal(hwc(read_image(tmp_path / "a.tif")), array)


@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_a_tiff_of_12_bits_has_their_whole_range(tmp_path, photometric):
    array = np.array([[0, 2048, 4095]], np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", array, bitspersample=12, photometric=photometric)
    expected = array / 4095 if photometric == "minisblack" else 1 - array / 4095
    np.testing.assert_allclose(read_image(tmp_path / "a.tif")[0].numpy(), expected, atol=1e-6)


def test_16_bit_png_keeps_its_low_bytes(tmp_path):
    alpha = np.array([0, 65535, 13107, 0, 65535, 0, 0], np.uint16)
    share = (alpha / 65535)[None, :, None]
    for array, expected in (
        (DEEP[..., 0].copy(), DEEP[..., :1] / 65535),
        (DEEP, DEEP / 65535),
        (np.dstack([DEEP, np.tile(alpha, (5, 1))]), DEEP / 65535 * share + 1 - share),
    ):
        (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(array))
        np.testing.assert_allclose(hwc(read_image(tmp_path / "a.png")), expected, atol=1e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "8-bit tif", "16-bit tif"])
def test_exif_rotation(tmp_path, orientation, kind):
    upright = np.zeros((16, 32), np.uint8)
    upright[:8, :16], upright[:8, 16:] = 200, 100
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    stored = np.ascontiguousarray(stored)
    path = tmp_path / f"a.{kind[-3:]}"
    if kind == "jpg":
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(stored).save(path, exif=exif, quality=100)
    else:
        deep = kind.startswith("16")
        array = stored.astype(np.uint16) * 257 if deep else stored
        tifffile.imwrite(path, array, extratags=[(274, 3, 1, orientation, True)])
    image = read_image(path)
    image = image.float() * (255 if image.is_floating_point() else 1)
    assert image.shape == (1, 16, 32)
    assert np.abs(image[0].numpy() - upright).max() < 4


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_composited_over_white(tmp_path, mode):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((50, 50, 50, 255), (0, 0, 2, 4))
    image.paste((0, 0, 0, 51), (2, 0, 3, 4))
    if mode == "P":
        image = Image.new("P", (4, 4), 0)
        image.putpalette([50, 50, 50, 9, 9, 9])
        image.paste(1, (2, 0, 4, 4))
        image.save(tmp_path / "a.png", transparency=1)
    else:
        image.convert(mode).save(tmp_path / "a.png")
    out = read_image(tmp_path / "a.png")
    assert out.shape == (1 if mode == "LA" else 3, 4, 4)
    assert out[:, 0, 0].unique().tolist() == [50] and out[:, 0, 3].unique().tolist() == [255]
    if mode != "P":
        assert out[:, 0, 2].unique().tolist() == [204]  # a fifth of black


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32, np.float64, ">u2"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 6)])
def test_npy(tmp_path, dtype, shape):
    top = 1 if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max
    array = (RNG.random(shape) * top).astype(dtype)
    np.save(tmp_path / "a.npy", array)
    image = read_image(tmp_path / "a.npy")
    assert image.dtype == (torch.uint8 if dtype == np.uint8 else torch.float32)
    expected = array if dtype == np.uint8 else array.astype(np.float64) / top
    np.testing.assert_allclose(hwc(image), expected.reshape(3, 4, -1), atol=1e-6)


PALETTE = {"photometric": "palette", "colormap": np.zeros((3, 256), np.uint16), "compression": "LERC"}


@pytest.mark.parametrize(
    "content, why",
    [
        (npy(np.zeros((3,), np.uint8)), "1 dimensions"),
        (npy(np.zeros((2, 3, 4, 5), np.uint8)), "4 dimensions"),
        (npy(np.zeros((0, 3), np.uint8)), "no pixels"),
        (npy(np.zeros((2, 3), np.int64)), "int64"),
        (npy(np.full((2, 3), -0.1)), "scale"),
        (npy(np.array([[None]])), "Object arrays"),
        (tiff(np.array([[0.5, 2]], np.float32)), r"from 0.5 to 2; .* @window=.* scale it to \[0, 1\]"),
        (tiff(np.array([[-5, 5]], np.int8)), "signed; give the values that become 0 and 1 .*@window"),
        (tiff(np.array([[-5, 5]], np.int16)), "signed; give the values that become 0 and 1 .*@window"),
        (tiff(np.zeros((48, 80), np.uint8), **PALETTE), "PALETTE compressed by LERC"),
    ],
)
def test_arrays_that_are_no_image(tmp_path, content, why):
    path = tmp_path / f"a.{'npy' if content[1:6] == b'NUMPY' else 'tif'}"
    path.write_bytes(content)
    assert_unreadable(content, why)
    assert_unreadable(path, why)


PIXELS = RNG.integers(0, 256, (30, 40, 3), dtype=np.uint8)
LAST = [Image.fromarray(255 - PIXELS)]
KINDS = {
    **{f"a.{kind.lower()}": encoded(PIXELS, kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")},
    "frames.gif": encoded(PIXELS, "GIF", save_all=True, append_images=LAST, comment=b"words" * 100),
    "deep.tif": tiff(RNG.integers(0, 65536, (30, 40), dtype=np.uint16)),
    "deep.png": imagecodecs.png_encode(PIXELS.astype(np.uint16) * 257),
    "a.npy": npy(RNG.integers(0, 256, (30, 40, 4), dtype=np.uint8)),
    "deep.npy": npy(RNG.integers(0, 256, (30, 40, 4)).astype(np.uint16)),
}
CHANNELS = {
    "imagej": {"imagej": True, "metadata": {"axes": "CYX"}},
    "ome": {"ome": True, "metadata": {"axes": "CYX"}},
    "ome packed": {"ome": True, "metadata": {"axes": "CYX"}, "compression": "zlib"},
    "ome big": {"ome": True, "metadata": {"axes": "CYX"}, "bigtiff": True},
    "tifffile": {"metadata": {"axes": "CYX"}},
    "tifffile packed": {"metadata": {"axes": "CYX"}, "compression": "zlib"},
    "planes": {"planarconfig": "separate", "photometric": "minisblack"},
    "planes big": {"planarconfig": "separate", "photometric": "minisblack", "bigtiff": True},
}
FIVE = RNG.integers(0, 255, (5, 40, 40))
for kind, how in CHANNELS.items():
    KINDS |= {f"{kind} {d.__name__}.tif": tiff(FIVE.astype(d), **how) for d in (np.uint8, np.uint16)}


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_read_as_files_are_and_cut_or_huge_ones_are_refused(tmp_path, monkeypatch, name):
    path, content = tmp_path / name, KINDS[name]
    path.write_bytes(content)
    image, expected = decode_image(content, "it"), read_image(path)
    assert image.dtype == expected.dtype and torch.equal(image, expected)
    assert len(image) == 5 or "int" not in name, "pages that are channels"
    cut = (0.99, 0.95, 0.9, 0.7, 0.6, 0.5, 0.3, 0.1, 0.02, 0)
    for some, why in [*((content[: int(keep * len(content))], "") for keep in cut), (content, "bomb")]:
        if why:
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
        path.write_bytes(some)
        assert_unreadable(some, why)
        assert_unreadable(path, why)


def test_to_channels():
    white = torch.full((3, 2, 2), 255, dtype=torch.uint8)
    assert (to_channels(white, 1) == 255).all() and to_channels(white, 1).shape == (1, 2, 2)
    colours = torch.eye(3).view(3, 1, 3)
    torch.testing.assert_close(to_channels(colours, 1), torch.tensor([[[0.299, 0.587, 0.114]]]))
    grey = torch.arange(4, dtype=torch.uint8).view(1, 2, 2)
    assert to_channels(grey, 3).shape == (3, 2, 2) and (to_channels(grey, 3) == grey).all()
    five = torch.zeros(5, 2, 2)
    assert to_channels(five, 5) is five
    for have, want in ((1, 2), (2, 1), (3, 2), (2, 3), (5, 3), (1, 4), (4, 3)):
        assert f"channels where {want}" in refusal(to_channels, torch.zeros(have, 2, 2, dtype=torch.uint8), want)


# JPEG files are decoded faster than by PIL, with the same results.


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.sampled_from(["RGB", "L", "CMYK"]),
    st.integers(1, 100),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 9),
    st.sampled_from([b"", b"trailer", b"\0" * 8, b"\xff\xd9"]),
)
@example((1, 9), "RGB", 75, False, 2, 6, b"")
@example((9, 1), "RGB", 75, False, 2, 3, b"")
@example((1, 1), "RGB", 75, False, 2, 5, b"")
def test_jpeg_pixels_are_those_of_pil(tmp_path, size, mode, quality, progressive, subsampling, orientation, trailer):
    image = Image.fromarray(RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    how = {"subsampling": subsampling} if mode == "RGB" else {}
    image.save(tmp_path / "a.jpg", quality=quality, progressive=progressive, exif=exif, **how)
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes() + trailer)
    with open(tmp_path / "a.jpg", "rb") as file:
        quick = _read_jpeg(file)
    assert (quick is None) == (progressive or mode == "CMYK" or not (trailer == b"" or trailer == b"\xff\xd9"))
    assert torch.equal(read_image(tmp_path / "a.jpg") if quick is None else quick, pil_read(tmp_path / "a.jpg"))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    scan = content.index(b"\xff\xda")  # its head takes 14 bytes: an end marker in it is part of the data
    for length in set(range(0, len(content), 3)) - set(range(scan, scan + 14)):
        path.write_bytes(content[:length] + b"\xff\xd9")
        assert_as_pil(path)


def test_other_formats_called_jpg_and_jpeg_without_imagecodecs(tmp_path, monkeypatch):
    Image.fromarray(RGB).save(tmp_path / "a.jpg", "PNG")
    np.testing.assert_array_equal(read_image(tmp_path / "a.jpg").permute(1, 2, 0).numpy(), RGB)
    Image.fromarray(RGB).save(tmp_path / "a.jpg")
    quick = read_image(tmp_path / "a.jpg")
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with open(tmp_path / "a.jpg", "rb") as file:
        assert _read_jpeg(file) is None
    assert torch.equal(read_image(tmp_path / "a.jpg"), quick)


# Compressions of TIFF, beside tifffile's own reading, and files that were cut short.

LOSSLESS = ["NONE", "LZW", "ADOBE_DEFLATE", "DEFLATE", "PACKBITS", "LZMA", "ZSTD", "PNG", "PIXTIFF"]
MODERN = ["JPEG2000", "JPEG_2000_LOSSY", "APERIO_JP2000_RGB", "LERC", "JPEGXL", "JPEGXL_DNG", "JPEGXR"]
CASES = [(name, kind, depth) for name in LOSSLESS + MODERN for kind in ("grey", "rgb", "rgba") for depth in (8, 16)]
CASES += [("JPEG", "grey", 8), ("JPEG", "rgb", 8), ("JPEG_LOSSY", "rgb", 8), ("WEBP", "rgb", 8), ("WEBP", "rgba", 8)]


def a_picture(kind: str, depth: int) -> np.ndarray:
    """Return smooth values [48 80] or [48 80 c] of unsigned integers."""
    y, x = np.mgrid[:48, :80]
    wave = (np.sin(x / 9) + np.cos(y / 7) + 2) / 4
    planes = np.stack([wave * (i + 1) / 4 for i in range({"grey": 1, "rgb": 3, "rgba": 4}[kind])], -1)
    array = (planes * (2**depth - 1)).astype(f"uint{depth}")
    return array[..., 0] if kind == "grey" else array


@pytest.mark.parametrize("tile", [None, (32, 32)], ids=["strips", "tiles"])
@pytest.mark.parametrize("compression, kind, depth", CASES)
def test_every_compression_is_read_as_tifffile_reads_it(compression, kind, depth, tile, capfd):
    colours = {"photometric": "minisblack" if kind == "grey" else "rgb"}
    colours |= {"extrasamples": ["unassalpha"]} if kind == "rgba" else {}
    content = tiff(a_picture(kind, depth), compression=compression, tile=tile, **colours)
    image = decode_image(content, "a.tif")
    values = tifffile.imread(BytesIO(content)) / np.float32(2**depth - 1)
    values = values.reshape(48, 80, -1)
    if kind == "rgba":
        values = values[..., :3] * values[..., 3:] + 1 - values[..., 3:]
    own = image.permute(1, 2, 0).numpy() / (np.float32(1) if depth == 16 else np.float32(255))
    assert own.shape == values.shape
    # composited values of 8 bits are rounded, by Pillow to either side
    np.testing.assert_allclose(own, values, atol=1.01 / 255 if (kind, depth) == ("rgba", 8) else 1e-6)
    assert capfd.readouterr() == ("", ""), "libtiff prints lines that name no file"


def test_libtiff_prints_nothing_about_broken_files(capfd):
    broken = bytearray(encoded(Image.fromarray(np.resize(RGB, (64, 64))).convert("1"), "TIFF", compression="group4"))
    for place in range(100, 400, 25):
        broken[place] ^= 0xFF
    with contextlib.suppress(Unreadable):
        decode_image(bytes(broken), "a.tif")
    assert capfd.readouterr() == ("", "")
