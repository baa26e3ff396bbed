"""Compressions of TIFF, beside tifffile's own reading, and files that were cut short."""

from io import BytesIO

import numpy as np
import pytest
import tifffile

from patchloom.data.decode import Unreadable, decode_image, read_image

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


def a_tiff(array: np.ndarray, **options) -> bytes:
    file = BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize("tile", [None, (32, 32)], ids=["strips", "tiles"])
@pytest.mark.parametrize("compression, kind, depth", CASES)
def test_every_compression_is_read_as_tifffile_reads_it(compression, kind, depth, tile, capfd):
    colours = {"photometric": "minisblack" if kind == "grey" else "rgb"}
    colours |= {"extrasamples": ["unassalpha"]} if kind == "rgba" else {}
    content = a_tiff(a_picture(kind, depth), compression=compression, tile=tile, **colours)
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


@pytest.mark.parametrize("compression", ["JPEG2000", "LERC"])
def test_palettes_in_a_compression_that_pillow_lacks_are_refused_in_a_sentence(compression):
    content = a_tiff(
        a_picture("grey", 8), photometric="palette", colormap=np.zeros((3, 256), np.uint16), compression=compression
    )
    with pytest.raises(Unreadable, match=f"colours of kind PALETTE compressed by {compression} .*save it as RGB"):
        decode_image(content, "a.tif")


CHANNELS = {
    "imagej": {"imagej": True, "metadata": {"axes": "CYX"}},
    "ome": {"ome": True, "metadata": {"axes": "CYX"}},
    "ome packed": {"ome": True, "metadata": {"axes": "CYX"}, "compression": "zlib"},
    "ome big": {"ome": True, "metadata": {"axes": "CYX"}, "bigtiff": True},
    "tifffile": {"metadata": {"axes": "CYX"}},
    "tifffile packed": {"metadata": {"axes": "CYX"}, "compression": "zlib"},
    "planes": {"planarconfig": "separate", "photometric": "minisblack"},
}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", CHANNELS)
def test_channels_of_a_file_that_was_cut_are_never_fewer(tmp_path, kind, dtype):
    path = tmp_path / "cells.tif"
    array = np.random.default_rng(0).integers(0, 255, (5, 40, 40)).astype(dtype)
    content = a_tiff(array, **CHANNELS[kind])
    path.write_bytes(content)
    assert read_image(path).shape == (5, 40, 40)
    for keep in (0.99, 0.95, 0.9, 0.7, 0.5, 0.3, 0.1):
        path.write_bytes(content[: int(keep * len(content))])
        with pytest.raises(Unreadable, match=r"cells\.tif cannot be read as an image"):
            read_image(path)
