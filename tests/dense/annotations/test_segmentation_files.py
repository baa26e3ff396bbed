import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from PIL import Image
from refusing import refusal

from patchloom.data.decode import Unreadable, read_image
from patchloom.dense.annotations.base import header_of
from patchloom.dense.annotations.segmentation import read_ids

IDS = (np.arange(30).reshape(5, 6) // 4 % 4).astype(np.uint8)


def read(path, colours=None):
    return read_ids(Path(path), str(path), colours)


def palette(ids):
    image = Image.fromarray(ids).convert("P")
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


def png(path, ids, bits):
    """A grey PNG of few bits a pixel, which PIL does not write."""
    packed = np.packbits(np.unpackbits(ids[..., None], axis=2)[..., 8 - bits :].reshape(len(ids), -1), axis=1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    head = struct.pack(">IIBBBBB", ids.shape[1], ids.shape[0], bits, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        content += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["png", "tif", "bmp", "gif"])
@pytest.mark.parametrize("kind", [Image.fromarray, palette])
def test_numbers_come_back_and_no_palette_is_looked_up(tmp_path, suffix, kind):
    kind(IDS).save(tmp_path / f"a.{suffix}")
    assert np.array_equal(read(tmp_path / f"a.{suffix}"), IDS)
    assert np.array_equal(read_ids((tmp_path / f"a.{suffix}").read_bytes(), "a"), IDS)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_png_of_few_bits(tmp_path, bits):
    ids = IDS % np.uint8(min(2**bits, 255))
    png(tmp_path / "a.png", ids, bits)
    assert np.array_equal(read(tmp_path / "a.png"), ids)


def test_more_than_255_numbers(tmp_path):
    ids = IDS.astype(np.uint16) * 1000
    Image.fromarray(ids).save(tmp_path / "a.png")
    tifffile.imwrite(tmp_path / "a.tif", ids)
    tifffile.imwrite(tmp_path / "b.tif", ids.astype(np.int32), compression="zlib")
    np.save(tmp_path / "a.npy", ids.astype(np.int64)[..., None])
    for name in ("a.png", "a.tif", "b.tif", "a.npy"):
        assert np.array_equal(read(tmp_path / name), ids)


def test_colours_become_their_places(tmp_path):
    colours = np.array([[128, 0, 0], [0, 0, 0], [0, 128, 255], [0, 0, 128]], np.uint8)
    Image.fromarray(colours[IDS]).save(tmp_path / "a.png")
    assert np.array_equal(read(tmp_path / "a.png", colours), IDS)
    Image.fromarray(IDS).save(tmp_path / "b.png")  # numbers stay numbers
    assert np.array_equal(read(tmp_path / "b.png", colours), IDS)
    assert "a.png has the colour (0, 0, 128)" in refusal(read, tmp_path / "a.png", colours[:3])
    assert "a.png shows classes by colours" in refusal(read, tmp_path / "a.png")


def test_colours_that_were_saved_as_a_palette_in_another_order(tmp_path):
    """Programs that make PNGs smaller do so; with the colours at their places, or others, the indices count."""
    colours = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [9, 9, 9]], np.uint8)
    for name, order in (("same", [0, 1, 2, 3]), ("other", [2, 0, 3, 1])):
        image = Image.fromarray(np.argsort(order).astype(np.uint8)[IDS]).convert("P")
        image.putpalette(colours[order].tobytes())
        image.save(tmp_path / f"{name}.png")
        assert np.array_equal(read(tmp_path / f"{name}.png", colours), IDS)
    palette(IDS).save(tmp_path / "strange.png")
    assert np.array_equal(read(tmp_path / "strange.png", colours), IDS)


def size(stored):
    source = SimpleNamespace(
        stored=lambda _: stored, describe=lambda _: "missing.jpg", read=lambda _: read_image(stored)
    )
    return header_of(source, 0).size


def test_orientation_counts_for_maps_and_sizes(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(IDS).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read(tmp_path / "a.png"), read_image(tmp_path / "a.png")[0])
    for name in ("a.jpg", "b.png", "c.tif"):
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / name, exif=exif)
        assert size(tmp_path / name) == (30, 20) == size((tmp_path / name).read_bytes())
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "d.jpg")
    assert size(tmp_path / "d.jpg") == (20, 30)
    with pytest.raises(Unreadable, match="missing.jpg is not there"):
        size(tmp_path / "missing.jpg")


def test_files_that_are_no_label_maps(tmp_path):
    Image.fromarray(IDS).save(tmp_path / "jpeg.png", "jpeg")
    Image.fromarray(np.stack([IDS, IDS], 2), "LA").save(tmp_path / "two.png")
    np.save(tmp_path / "float.npy", IDS / 2)
    np.save(tmp_path / "minus.npy", IDS.astype(int) - 1)
    for name, said in (
        ("jpeg.png", "changes numbers"),
        ("two.png", "2 channels"),
        ("float.npy", "no whole numbers"),
        ("minus.npy", "the number -1"),
    ):
        found = refusal(read, tmp_path / name)
        assert name in found and said in found
    Image.fromarray(IDS).save(tmp_path / "short.png")
    (tmp_path / "short.png").write_bytes((tmp_path / "short.png").read_bytes()[:50])
    for name in ("short.png", "missing.png"):
        with pytest.raises(Unreadable, match=f"{name} cannot be read as a label map: ."):
            read(tmp_path / name)
