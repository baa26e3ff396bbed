"""Memory and time of decoding in proportion to the file: refused before anything is decoded."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
import tifffile
from PIL import Image

from patchloom.data import decode
from patchloom.data.codestreams import part_size
from patchloom.data.decode import Unreadable, check_decoded_size, decode_image, read_image


def refused(content: bytes, why: str) -> None:
    """Assert that a file is refused in one sentence, before pixels are decoded."""
    with pytest.raises(Unreadable, match=f"^it cannot be read as an image: .*{why}") as caught:
        decode_image(content, "it")
    assert "\n" not in str(caught.value)


def sparse_tiff(height: int, width: int, samples: int, bits: int, compression: int, tile: int = 0) -> bytes:
    """Return a TIFF of a hundred bytes that promises many pixels."""
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
    file = BytesIO()
    tifffile.imwrite(file, np.zeros((10, 10), np.uint16), description=text, metadata=None)
    refused(file.getvalue(), "more than 16,384 pages")


PACKED = ["png", "jpeg2000", "jpegxl", "jpegxl_dng", "jpegxr", "lerc", "webp", "jpeg", "jpeg_lossy"]


@pytest.mark.parametrize("shape", [(64, 64, 3), (96, 64, 3), (1, 700, 3), (77, 33, 3), (400, 600, 3), (90, 160, 3)])
@pytest.mark.parametrize("compression", PACKED)
def test_parts_of_a_tiff_that_are_larger_inside(compression, shape, monkeypatch):
    monkeypatch.setattr(decode, "_HARMLESS", 0)
    file = BytesIO()
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    tifffile.imwrite(file, array, compression=compression, photometric="rgb", metadata=None, rowsperstrip=shape[0])
    content = file.getvalue()
    height, width, _ = shape
    assert decode_image(content, "it").shape == (3, height, width)
    with tifffile.TiffFile(BytesIO(content)) as tiff:
        page = tiff.pages.first
        data = content[page.dataoffsets[0] :][: page.databytecounts[0]]
        assert part_size(data, int(page.compression)) == (height, width)
        places = [page.tags[tag].offset + 8 for tag in (256, 257, 278)]
    if compression != "jpeg":  # which libtiff checks itself
        changed = bytearray(content)
        for place, small in zip(places, (width // 2, max(1, height // 2), max(1, height // 2)), strict=True):
            changed[place : place + 4] = struct.pack("<I", small)
        refused(bytes(changed), f" x {width // 2} pixels hold {height} x {width}")


def write_deep_png(height: int, width: int, channels: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = zlib.compress(bytes(height * (1 + width * channels * 2)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_depth_of_a_png_counts(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)  # so 60,000 bytes, or 16 a byte of the file
    content = write_deep_png(70, 70, 4)
    assert 16 * 70 * 70 > 16 * len(content) and 16 * 70 * 70 > 60_000
    refused(content, "could be a decompression bomb")
    assert decode_image(write_deep_png(60, 60, 4), "it").shape == (3, 60, 60)
    noise = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (140, 140)).astype(np.uint16)).save(noise, "PNG")
    assert decode_image(noise.getvalue(), "it").shape == (1, 140, 140), "a large file may have many pixels"


def test_the_budget_is_pillows_for_8_bit_rgb_or_16_times_the_file():
    most = 2 * 3 * Image.MAX_IMAGE_PIXELS
    assert 2**29 - 10 < most <= 2**29
    check_decoded_size(most, 0, "")
    check_decoded_size(16 * 10**9, 10**9, "")
    for decoded, stored in ((most + 1, 0), (16 * 10**9 + 1, 10**9)):
        with pytest.raises(ValueError, match="could be a decompression bomb; cut it"):
            check_decoded_size(decoded, stored, "cut it")


@pytest.mark.parametrize("shape, each", [((13_377, 13_377), 3), ((13_377, 13_377), 1), ((11_500, 11_500), 4)])
def test_images_at_the_limit_of_pillow_are_within_it(shape, each):
    decode.refuse_bomb(*shape, each, stored=1000)


def jpeg_of_scans(scans: int) -> bytes:
    file = BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    head, *parts = file.getvalue().split(b"\xff\xda")
    last = parts[-1].removesuffix(b"\xff\xd9")
    return b"\xff\xda".join([head, *parts[:-1], *[last] * (scans - len(parts) + 1)]) + b"\xff\xd9"


def test_scans_of_a_jpeg_are_limited(tmp_path):
    assert decode_image(jpeg_of_scans(12), "it").shape == (1, 64, 64)
    refused(jpeg_of_scans(65), "65 scans")
    (tmp_path / "a.png").write_bytes(jpeg_of_scans(65))  # whatever its name is
    with pytest.raises(Unreadable, match="65 scans"):
        read_image(tmp_path / "a.png")


def exif_segments(size: int) -> bytes:
    whole, rest = divmod(size, 60_000)
    return b"".join(b"\xff\xe1" + struct.pack(">H", 8 + n) + b"Exif\0\0" + bytes(n) for n in [60_000] * whole + [rest])


def test_exif_data_is_limited(tmp_path):
    for kind in ("JPEG", "PNG", "WEBP"):
        file = BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind, exif=b"Exif\0\0II*\0" + bytes(60_000))
        assert decode_image(file.getvalue(), "it").shape == (3, 8, 8)
        file = BytesIO()
        if kind == "JPEG":
            Image.new("RGB", (8, 8)).save(file, kind)
            content = file.getvalue()
            content = content[:2] + exif_segments(2**20 + 1) + content[2:]
        else:
            Image.new("RGB", (8, 8)).save(file, kind, exif=b"Exif\0\0II*\0" + bytes(2**20))
            content = file.getvalue()
        refused(content, "EXIF data has 1,")


def test_exif_data_behind_the_pixels_of_a_png_are_limited():
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    content, body = file.getvalue(), b"II*\0" + bytes(2**21)
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    refused(content[:-12] + chunk + content[-12:], "EXIF data has 2,0")


@pytest.mark.parametrize("keep", [0.99, 0.95, 0.7, 0.5, 0.3, 0.1])
def test_a_gif_that_was_cut_behind_its_first_frame(keep):
    frames = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (60, 60, 3), dtype=np.uint8)) for i in range(5)]
    file = BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], comment=b"words" * 100)
    content = file.getvalue()
    assert decode_image(content, "it").shape == decode_image(content + b"more", "it").shape == (3, 60, 60)
    refused(content[: int(keep * len(content))], "it is cut short|cannot identify|truncated")


def test_scans_are_counted_to_the_end_of_the_picture(tmp_path):
    """A film may follow a photograph, as on phones, and its bytes hold the marker of a scan by chance."""
    buffer = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", progressive=True)
    assert decode_image(buffer.getvalue() + b"\xff\xda\0\0" * 200, "motion.jpg").shape == (3, 64, 64)


def test_scans_of_each_part_of_a_tiff_count_alone(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (80, 16, 16, 3), dtype=np.uint8)
    how = {"compression": "jpeg", "photometric": "rgb", "metadata": None}
    tifffile.imwrite(tmp_path / "stack.tif", pixels, rowsperstrip=16, **how)
    assert read_image(tmp_path / "stack.tif").shape == (3, 16, 16)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize(
    "kind, count, value",
    [
        (1, 1, b"\1\0\0\0"),
        (2, 2, b"1\0\0\0"),
        (3, 2, struct.pack("<HH", 1, 1)),
        (3, 1, struct.pack("<HH", 0, 0)),
        (7, 2, b"\1\0\0\0"),
        (11, 1, struct.pack("<f", float("nan"))),
    ],
)
def test_orientation_tags_of_other_types_are_ignored(kind, count, value, suffix, tmp_path):
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI", 1, 274, kind, count) + value + bytes(4)
    pixels = np.zeros((8, 10, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / f"image.{suffix}", exif=exif)
    assert read_image(tmp_path / f"image.{suffix}").shape == (3, 8, 10)
