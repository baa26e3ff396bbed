"""Memory and time of decoding in proportion to the file: refused before anything is decoded."""

import struct
import zlib
from io import BytesIO

import imagecodecs
import numpy as np
import pytest
import tifffile
from encoding import assert_unreadable as refused
from encoding import encoded, tiff
from PIL import Image

from patchloom.data import decode
from patchloom.data.codestreams import part_size
from patchloom.data.decode import check_decoded_size, decode_image


def sparse_tiff(height: int, width: int, samples: int, bits: int, compression: int, tile: int = 0) -> bytes:
    tags = {256: width, 257: height, 258: bits, 259: compression, 262: 1, 277: samples, 284: 1}
    tags |= {322: tile, 323: tile, 324: 8, 325: 10} if tile else {273: 8, 278: height, 279: 10}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4)


@pytest.mark.parametrize("samples, bits", [(6, 32), (12, 16), (4, 16), (65535, 8)])
@pytest.mark.parametrize("compression", [1, 5, 8])
def test_samples_and_depth_of_a_tiff_count(samples, bits, compression):
    refused(sparse_tiff(13_000, 13_000, samples, bits, compression), "could be a decompression bomb|beyond its end")


def test_tiles_that_are_larger_than_a_tiff_count():
    refused(sparse_tiff(8, 8, 1, 8, 8, tile=2**16), "decompression bomb")


@pytest.mark.parametrize("sizes", ['SizeC="200000"', 'SizeC="5" PlaneCount="1000000000"', 'SizeZ="3000" SizeT="3000"'])
def test_pages_of_a_tiff_that_only_its_metadata_has(sizes):
    text = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0" '
        f'DimensionOrder="XYCZT" Type="uint16" SizeX="10" SizeY="10" {sizes}><TiffData IFD="0"/></Pixels></Image></OME>'
    )
    refused(tiff(np.zeros((10, 10), np.uint16), description=text, metadata=None), "more than 16,384 pages")


PACKED = ["png", "jpeg2000", "jpegxl", "jpegxl_dng", "jpegxr", "lerc", "webp", "jpeg", "jpeg_lossy"]
GREY, NAN = np.zeros((8, 10), np.uint8), struct.pack("<f", float("nan"))


@pytest.mark.parametrize("shape", [(96, 64, 3), (1, 700, 3), (77, 33, 3), (400, 600, 3)])
@pytest.mark.parametrize("compression", PACKED)
def test_parts_of_a_tiff_that_are_larger_inside(compression, shape, monkeypatch):
    monkeypatch.setattr(decode, "_HARMLESS", 0)
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    content = tiff(array, compression=compression, photometric="rgb", metadata=None, rowsperstrip=shape[0])
    height, width, _ = shape
    assert decode_image(content, "it").shape == (3, height, width)
    with tifffile.TiffFile(BytesIO(content)) as file:
        page = file.pages.first
        data = content[page.dataoffsets[0] :][: page.databytecounts[0]]
        assert part_size(data, int(page.compression)) == (height, width)
        places = [page.tags[tag].offset + 8 for tag in (256, 257, 278)]
    if compression != "jpeg":  # which libtiff checks itself
        changed = bytearray(content)
        for place, small in zip(places, (width // 2, max(1, height // 2), max(1, height // 2)), strict=True):
            changed[place : place + 4] = struct.pack("<I", small)
        refused(bytes(changed), f" x {width // 2} pixels hold {height} x {width}")


def test_depth_of_a_png_counts(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)  # so 60,000 bytes, or 16 a byte of the file
    content = imagecodecs.png_encode(np.zeros((70, 70, 4), np.uint16))
    assert 16 * 70 * 70 > 16 * len(content) and 16 * 70 * 70 > 60_000
    refused(content, "could be a decompression bomb")
    assert decode_image(imagecodecs.png_encode(np.zeros((60, 60, 4), np.uint16)), "it").shape == (3, 60, 60)
    noise = np.random.default_rng(0).integers(0, 2**16, (140, 140)).astype(np.uint16)
    assert decode_image(imagecodecs.png_encode(noise), "it").shape == (1, 140, 140), "a large file may have many pixels"


def test_the_budget_is_pillows_for_8_bit_rgb_or_16_times_the_file():
    most = 2 * 3 * Image.MAX_IMAGE_PIXELS
    assert 2**29 - 10 < most <= 2**29
    check_decoded_size(most, 0, "")
    check_decoded_size(16 * 10**9, 10**9, "")
    for decoded, stored in ((most + 1, 0), (16 * 10**9 + 1, 10**9)):
        with pytest.raises(ValueError, match="could be a decompression bomb; cut it"):
            check_decoded_size(decoded, stored, "cut it")
    for side, each in ((13_377, 3), (13_377, 1), (11_500, 4)):  # the largest that Pillow opens
        decode.refuse_bomb(side, side, each, stored=1000)


def jpeg_of_scans(scans: int) -> bytes:
    head, *parts = encoded(Image.new("L", (64, 64)), "JPEG", progressive=True).split(b"\xff\xda")
    last = parts[-1].removesuffix(b"\xff\xd9")
    return b"\xff\xda".join([head, *parts[:-1], *[last] * (scans - len(parts) + 1)]) + b"\xff\xd9"


def test_scans_of_a_jpeg_are_limited(tmp_path):
    assert decode_image(jpeg_of_scans(12), "it").shape == (1, 64, 64)
    # a film may follow, as on phones, and its bytes hold the marker of a scan by chance
    assert decode_image(jpeg_of_scans(12) + b"\xff\xda\0\0" * 200, "it").shape == (1, 64, 64)
    refused(jpeg_of_scans(65), "65 scans")
    (tmp_path / "a.png").write_bytes(jpeg_of_scans(65))  # whatever its name is
    refused(tmp_path / "a.png", "65 scans")


def exif_segments(size: int) -> bytes:
    whole, rest = divmod(size, 60_000)
    return b"".join(b"\xff\xe1" + struct.pack(">H", 8 + n) + b"Exif\0\0" + bytes(n) for n in [60_000] * whole + [rest])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_data_is_limited(kind):
    head, plain = b"Exif\0\0II*\0", encoded(GREY, kind)
    assert decode_image(encoded(GREY, kind, exif=head + bytes(60_000)), "it").shape[1:] == (8, 10)
    if kind == "JPEG":  # of which one segment holds less
        refused(plain[:2] + exif_segments(2**20 + 1) + plain[2:], "EXIF data has 1,")
    else:
        refused(encoded(GREY, kind, exif=head + bytes(2**20)), "EXIF data has 1,")


def test_exif_data_behind_the_pixels_of_a_png_are_limited():
    content, body = encoded(GREY), b"II*\0" + bytes(2**21)
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    refused(content[:-12] + chunk + content[-12:], "EXIF data has 2,0")


def test_bytes_behind_a_gif_and_scans_of_tiff_parts_are_harmless():
    frames = [Image.fromarray(np.full((60, 60, 3), 9 * i, np.uint8)) for i in range(5)]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(content + b"more", "it").shape == (3, 60, 60)
    pixels = np.random.default_rng(0).integers(0, 255, (80, 16, 16, 3), dtype=np.uint8)
    stack = tiff(pixels, compression="jpeg", photometric="rgb", metadata=None, rowsperstrip=16)
    assert decode_image(stack, "it").shape == (3, 16, 16)


@pytest.mark.parametrize(
    "kind, count, value",
    [(1, 1, b"\1\0\0\0"), (2, 2, b"1\0\0\0"), (3, 2, b"\1\0\1\0"), (3, 1, b"\0\0\0\0"), (11, 1, NAN)],
)
def test_orientation_tags_of_other_types_are_ignored(kind, count, value):
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI", 1, 274, kind, count) + value + bytes(4)
    for form in ("JPEG", "PNG", "WEBP"):
        assert decode_image(encoded(GREY, form, exif=exif), "it").shape[1:] == (8, 10)
