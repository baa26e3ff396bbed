from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchloom.data.decode import Unreadable, decode_image, read_image, to_channels
from patchloom.errors import PatchloomError, one_line

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


def test_first_frame_of_a_gif(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read_image(tmp_path / "a.gif")[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("array", [DEEP, DEEP[..., 0]], ids=["rgb", "grey"])
@pytest.mark.parametrize("planar", [False, True])
def test_16_bit_tiff(tmp_path, array, planar):
    if planar and array.ndim == 3:
        tifffile.imwrite(tmp_path / "a.tif", array.transpose(2, 0, 1), photometric="rgb", planarconfig="separate")
    else:
        tifffile.imwrite(tmp_path / "a.tif", array)
    image = read_image(tmp_path / "a.tif")
    assert image.dtype == torch.float32
    np.testing.assert_allclose(hwc(image), array.reshape(5, 7, -1) / 65535, atol=1e-7)


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


def test_tiff_pages_that_are_not_channels_give_the_first(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        for value in (10, 20):
            tiff.write(np.full((4, 6), value, np.uint8), metadata=None)
    image = read_image(tmp_path / "a.tif")
    assert image.shape == (1, 4, 6) and (image == 10).all()


def test_white_may_be_0_in_a_tiff(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", DEEP[..., 0], photometric="miniswhite")
    np.testing.assert_allclose(read_image(tmp_path / "a.tif")[0].numpy(), 1 - DEEP[..., 0] / 65535, atol=1e-6)


def test_float_tiff(tmp_path):
    array = RNG.random((4, 6), np.float32)
    tifffile.imwrite(tmp_path / "a.tif", array)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif")[0].numpy(), array)
    for wrong, said in ((2, r"scale floating-point images to \[0, 1\]"), (np.nan, "NaN, such as missing pixels")):
        tifffile.imwrite(tmp_path / "b.tif", np.array([[0.5, wrong]], np.float32))
        with pytest.raises(Unreadable, match=rf"b\.tif.*{said}"):
            read_image(tmp_path / "b.tif")


def test_signed_tiffs_are_refused(tmp_path):
    for dtype in (np.int8, np.int16):
        tifffile.imwrite(tmp_path / "a.tif", np.array([[-5, 5]], dtype))
        with pytest.raises(Unreadable, match=r"a\.tif.*signed values are not supported"):
            read_image(tmp_path / "a.tif")


@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_a_tiff_of_12_bits_has_their_whole_range(tmp_path, photometric):
    array = np.array([[0, 2048, 4095]], np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", array, bitspersample=12, photometric=photometric)
    expected = array / 4095 if photometric == "minisblack" else 1 - array / 4095
    np.testing.assert_allclose(read_image(tmp_path / "a.tif")[0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("compression", ["lzw", "zlib"])
def test_compressed_16_bit_tiff(tmp_path, compression):
    tifffile.imwrite(tmp_path / "a.tif", DEEP, compression=compression, predictor=True)
    np.testing.assert_allclose(hwc(read_image(tmp_path / "a.tif")), DEEP / 65535, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tiff_with_transparency(tmp_path, dtype):
    top = np.iinfo(dtype).max
    array = np.zeros((4, 6, 4), dtype)
    array[:, :3, 3] = top
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", extrasamples=["unassalpha"])
    image = read_image(tmp_path / "a.tif")
    assert image.shape == (3, 4, 6) and (image[..., :3] == 0).all()
    assert (image[..., 3:] == (255 if dtype == np.uint8 else 1)).all()


def test_a_fourth_channel_that_is_not_transparency_stays(tmp_path):
    array = RNG.integers(0, 256, (4, 6, 4), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", extrasamples=["unspecified"])
    np.testing.assert_array_equal(hwc(read_image(tmp_path / "a.tif")), array)


def test_16_bit_png(tmp_path):
    Image.fromarray(DEEP[..., 0]).save(tmp_path / "grey.png")
    image = read_image(tmp_path / "grey.png")
    assert image.dtype == torch.float32
    np.testing.assert_allclose(image[0].numpy(), DEEP[..., 0] / 65535, atol=1e-7)


def write_png(path, array, colour_type):
    """Write a 16-bit PNG [h w c] by hand, since PIL writes none in colour."""
    import struct
    import zlib

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    head = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 16, colour_type, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def test_16_bit_colour_png_keeps_its_low_bytes(tmp_path):
    write_png(tmp_path / "a.png", DEEP, 2)
    np.testing.assert_allclose(hwc(read_image(tmp_path / "a.png")), DEEP / 65535, atol=1e-7)
    alpha = np.array([0, 65535, 13107, 0, 65535, 0, 0], np.uint16)
    write_png(tmp_path / "b.png", np.dstack([DEEP, np.tile(alpha, (5, 1))]), 6)
    share = (alpha / 65535)[None, :, None]
    np.testing.assert_allclose(hwc(read_image(tmp_path / "b.png")), DEEP / 65535 * share + 1 - share, atol=1e-6)


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


@pytest.mark.parametrize(
    "array, why",
    [
        (np.zeros((3,), np.uint8), "1 dimensions"),
        (np.zeros((2, 3, 4, 5), np.uint8), "4 dimensions"),
        (np.zeros((0, 3), np.uint8), "no pixels"),
        (np.zeros((2, 3), np.int64), "int64"),
        (np.full((2, 3), -0.1), "scale"),
        (np.array([[None]]), "Python objects"),
    ],
)
def test_npy_that_is_not_an_image(tmp_path, array, why):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(Unreadable, match=f"a.npy.*{why}"):
        read_image(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "name", ["a.jpg", "a.png", "a.webp", "a.bmp", "a.gif", "a.tif", "deep.tif", "deep.png", "a.npy"]
)
@pytest.mark.parametrize("keep", [0.6, 0.02, 0])
def test_truncated_files_are_unreadable_by_name(tmp_path, name, keep):
    path = tmp_path / name
    if name == "deep.tif":
        tifffile.imwrite(path, RNG.integers(0, 65536, (40, 40), dtype=np.uint16))
    elif name == "deep.png":
        write_png(path, RNG.integers(0, 65536, (40, 40, 3), dtype=np.uint16), 2)
    elif name == "a.npy":
        np.save(path, np.zeros((40, 40), np.uint8))
    else:
        Image.fromarray(RNG.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    read_image(path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(Unreadable, match=name) as caught:
        read_image(path)
    assert "\n" not in str(caught.value)


ALL = ["a.jpg", "a.png", "a.webp", "a.bmp", "a.gif", "a.tif", "planes.tif", "deep.tif", "deep.png", "a.npy", "deep.npy"]


def write_image(path):
    """Write an image of the kind that the name says."""
    if path.name == "planes.tif":
        tifffile.imwrite(path, RNG.integers(0, 256, (5, 30, 40), dtype=np.uint8), planarconfig="separate", bigtiff=True)
    elif path.name == "deep.tif":
        tifffile.imwrite(path, RNG.integers(0, 65536, (30, 40), dtype=np.uint16))
    elif path.name == "deep.png":
        write_png(path, RNG.integers(0, 65536, (30, 40, 3), dtype=np.uint16), 2)
    elif path.suffix == ".npy":
        np.save(path, RNG.integers(0, 256, (30, 40, 4)).astype(np.uint16 if "deep" in path.name else np.uint8))
    else:
        Image.fromarray(RNG.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(path)


@pytest.mark.parametrize("name", ALL)
def test_bytes_are_read_as_files_are(tmp_path, monkeypatch, name):
    path = tmp_path / name
    write_image(path)
    content = path.read_bytes()
    image, expected = decode_image(content, "it"), read_image(path)
    assert image.dtype == expected.dtype and torch.equal(image, expected)
    for broken in (content[: len(content) // 2], content[:5], b""):
        with pytest.raises(Unreadable, match="^shard:a cannot be read as an image: ") as caught:
            decode_image(broken, "shard:a")
        assert "\n" not in str(caught.value) and "BytesIO" not in str(caught.value)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    with pytest.raises(Unreadable, match="^shard:a .*bomb"):
        decode_image(content, "shard:a")


def test_missing_file(tmp_path):
    with pytest.raises(Unreadable, match="gone.png"):
        read_image(tmp_path / "gone.png")


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "deep.tif", "a.npy"])
def test_decompression_bombs_are_refused(tmp_path, monkeypatch, name):
    array = np.zeros((30, 30), np.uint16 if name == "deep.tif" else np.uint8)
    if name.endswith("tif"):
        tifffile.imwrite(tmp_path / name, array)
    elif name.endswith("npy"):
        np.save(tmp_path / name, array)
    else:
        Image.fromarray(array).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    with pytest.raises(Unreadable, match="bomb"):
        read_image(tmp_path / name)


def test_to_channels():
    white = torch.full((3, 2, 2), 255, dtype=torch.uint8)
    assert (to_channels(white, 1) == 255).all()
    colours = torch.eye(3).view(3, 1, 3)
    torch.testing.assert_close(to_channels(colours, 1), torch.tensor([[[0.299, 0.587, 0.114]]]))
    grey = torch.arange(4, dtype=torch.uint8).view(1, 2, 2)
    assert to_channels(grey, 3).shape == (3, 2, 2) and (to_channels(grey, 3) == grey).all()
    five = torch.zeros(5, 2, 2)
    assert to_channels(five, 5) is five


@given(st.integers(1, 8), st.integers(1, 8))
def test_to_channels_converts_or_refuses(have, want):
    image = torch.zeros(have, 2, 2, dtype=torch.uint8)
    if have == want or {have, want} == {1, 3}:
        assert to_channels(image, want).shape[0] == want
    else:
        with pytest.raises(PatchloomError, match=f"{have} channels where {want}"):
            to_channels(image, want)


def test_the_reason_does_not_repeat_the_path(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(Unreadable, match="cannot be read as an image: cannot identify it$"):
        read_image(tmp_path / "a.png")


@pytest.mark.parametrize("kept", [8, 12, 100, 300])
def test_a_cut_tiff_is_described(tmp_path, kept):
    """Pillow's messages are then about its own variables, such as "0" and "unpack requires a buffer of 4 bytes"."""
    Image.fromarray(np.zeros((16, 16), np.uint16)).save(tmp_path / "a.tif")
    (tmp_path / "a.tif").write_bytes((tmp_path / "a.tif").read_bytes()[:kept])
    with pytest.raises(
        Unreadable, match=r"a\.tif cannot be read as an image: (it is damaged, or|it is cut short|corrupted)"
    ):
        read_image(tmp_path / "a.tif")


def test_an_open_file_has_no_address_in_a_reason(tmp_path):
    """A 16-bit PNG is opened before PIL reads it, and PIL says <_io.BufferedReader name=...>."""
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "a.png")
    head = (tmp_path / "a.png").read_bytes()[:30]  # ends within the size
    (tmp_path / "a.png").write_bytes(head)
    for read in (lambda: read_image(tmp_path / "a.png"), lambda: decode_image(head, "shard.tar: a.png")):
        with pytest.raises(Unreadable, match=r"a\.png cannot be read as an image: [^<>]+$"):
            read()
    assert one_line(OSError("cannot identify image file <_io.BytesIO object at 0x7f>")) == (
        "cannot identify image file it"
    )


def test_libtiff_prints_nothing(tmp_path, capfd):
    """Its lines name no file, which the error does."""
    rng, path = np.random.default_rng(0), tmp_path / "x.tif"
    Image.fromarray(rng.integers(0, 255, (64, 64), np.uint8)).convert("1").save(path, compression="group4")
    whole = path.read_bytes()
    for seed in range(30):
        broken, rng = bytearray(whole), np.random.default_rng(seed)
        for place in rng.integers(8, len(whole) // 2, 20):
            broken[place] ^= 0xFF
        path.write_bytes(broken)
        with contextlib.suppress(Unreadable):
            read_image(path)
    assert capfd.readouterr().err == ""
