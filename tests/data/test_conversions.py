"""Conversions of images on reading are recorded, counted and reported."""

from __future__ import annotations

import numpy as np
import pytest
import tifffile
from PIL import Image

from patchloom.check import check
from patchloom.data.conversions import (
    CONVERSIONS,
    ConversionCounts,
    collect_conversions,
    is_collecting,
    record_conversion,
)
from patchloom.data.decode import decode_image, read_image
from patchloom.data.scan import survey
from patchloom.data.sources.open import open_data
from patchloom.data.stats import statistics_of

RNG = np.random.default_rng(0)
DATA = RNG.integers(0, 256, (12, 16, 4), dtype=np.uint8)


def save(path, kind):
    """Write an image of a kind, and return the keywords of its conversions."""
    rgb = Image.fromarray(DATA[..., :3])
    match kind:
        case "plain.png" | "plain.jpg" | "plain.tif":
            rgb.save(path)
            return set()
        case "opaque.png":
            Image.fromarray(np.dstack([DATA[..., :3], np.full_like(DATA[..., 0], 255)])).save(path)
            return set()
        case "alpha.png" | "alpha.tif" | "alpha.webp":
            alpha = np.zeros_like(DATA[..., 0])
            alpha[:, 4:] = 255
            Image.fromarray(np.dstack([DATA[..., :3], alpha])).save(path)
            return {"alpha"}
        case "marked.tif":  # the default of tifffile and GDAL for a fourth band
            tifffile.imwrite(path, DATA)
            return {"doubtful alpha"}
        case "deep marked.tif":
            tifffile.imwrite(path, DATA.astype(np.uint16) * 257, photometric="rgb", extrasamples=["unassalpha"])
            return {"doubtful alpha", "deep"}
        case "bands.tif":
            tifffile.imwrite(path, DATA, photometric="rgb", extrasamples=["unspecified"])
            return {"bands"}
        case "bands.npy":
            np.save(path, DATA)
            return {"bands"}
        case "cmyk.jpg" | "cmyk.tif":
            rgb.convert("CMYK").save(path)
            return {"colours"}
        case "palette.png":
            rgb.convert("P").save(path)
            return {"palette"}
        case "turned.jpg" | "turned.png":
            exif = Image.Exif()
            exif[274] = 6
            rgb.save(path, exif=exif)
            return {"turned"}
        case "turned.tif":
            tifffile.imwrite(path, DATA[..., 0].astype(np.uint16), extratags=[(274, 3, 1, 6, True)])
            return {"turned", "deep"}
        case "deep.png":
            Image.fromarray(DATA[..., 0].astype(np.uint16) * 257).save(path)
            return {"deep"}
        case "white.tif":
            tifffile.imwrite(path, DATA[..., 0], photometric="miniswhite")
            return {"inverted"}
        case "pages.tif":
            tifffile.imwrite(path, np.stack([DATA[..., :3]] * 3), photometric="rgb")
            return {"pages"}
        case "channel pages.tif":  # tifffile's default for a stack
            tifffile.imwrite(path, np.stack([DATA[..., 0]] * 5), photometric="minisblack")
            return {"channel pages"}
        case "channels first.npy":
            np.save(path, np.stack([DATA[..., 0]] * 5))
            return {"many channels"}
        case "film.gif" | "film.webp":
            rgb.save(path, save_all=True, append_images=[Image.fromarray(255 - DATA[..., :3])])
            return {"frames"}
        case "still.gif":
            rgb.save(path)
            return set()


KINDS = """plain.png plain.jpg plain.tif opaque.png alpha.png alpha.tif alpha.webp marked.tif bands.tif bands.npy
    cmyk.jpg cmyk.tif palette.png turned.jpg turned.png turned.tif deep.png white.tif pages.tif film.gif
    film.webp still.gif"""


@pytest.mark.parametrize("kind", [*KINDS.split(), "deep marked.tif", "channel pages.tif", "channels first.npy"])
def test_recorded_conversions(tmp_path, kind):
    path = tmp_path / kind
    expected = save(path, kind)
    with collect_conversions() as found:
        read_image(path)
    assert found == expected <= set(CONVERSIONS)
    with collect_conversions() as found:
        decode_image(path.read_bytes(), "it")
    assert found == expected
    assert not is_collecting()
    record_conversion("alpha")  # nothing is collected


def test_a_fourth_band_is_data_unless_the_file_says_alpha(tmp_path):
    save(tmp_path / "bands.tif", "bands.tif")
    assert read_image(tmp_path / "bands.tif").shape == (4, 12, 16)
    save(tmp_path / "marked.tif", "marked.tif")
    assert read_image(tmp_path / "marked.tif").shape == (3, 12, 16)


def test_an_alpha_channel_after_four_bands_is_composited_at_any_depth(tmp_path):
    array = np.dstack([DATA, np.full_like(DATA[..., 0], 51)])
    how = dict(photometric="rgb", planarconfig="contig", extrasamples=["unspecified", "unassalpha"])
    tifffile.imwrite(tmp_path / "a.tif", array, **how)
    tifffile.imwrite(tmp_path / "b.tif", array.astype(np.uint16) * 257, **how)
    flat, deep = (read_image(tmp_path / f"{name}.tif") for name in "ab")
    assert flat.shape == deep.shape == (4, 12, 16)
    expected = DATA / 255 * 0.2 + 0.8
    np.testing.assert_allclose(deep.permute(1, 2, 0).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(flat.permute(1, 2, 0).numpy() / 255, expected, atol=0.5 / 255 + 1e-6)


def test_sentences_count_and_name():
    noticed, more = ConversionCounts(), ConversionCounts()
    for i in (7, 3):
        more.add(i, {"alpha"})
    noticed.add(5, {"alpha", "turned"})
    noticed.add(9, {"alpha"})
    noticed.join(more)
    assert noticed.sentences("image {}".format, 10) == [
        "4 of 10 images have an alpha channel, composited over white (image 3, image 5, image 7, ...)",
        "1 of 10 images is rotated or mirrored according to EXIF (image 5)",
    ]
    assert ConversionCounts().sentences(str, 10) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_survey_records_and_check_reports(tmp_path, workers, monkeypatch):
    monkeypatch.setattr("patchloom.data.scan._EACH", 2)
    for name in ("turned.jpg", "alpha.png", "cmyk.jpg", "plain.png", "palette.png"):
        save(tmp_path / name, name)
    found = survey(open_data(tmp_path).train, workers=workers)
    assert found.noticed.counts == {"turned": 1, "alpha": 1, "colours": 1, "palette": 1}
    said = check(str(tmp_path), estimate=False).sentences()
    assert f"1 of 5 images has an alpha channel, composited over white ({tmp_path}/alpha.png)." in said
    assert f"1 of 5 images is in CMYK or another colour space, and converted to RGB ({tmp_path}/cmyk.jpg)." in said


def test_statistics_record_too(tmp_path):
    for name in ("alpha.png", "plain.png", "plain.jpg"):
        save(tmp_path / name, name)
    train = open_data(tmp_path).train
    (said,) = statistics_of(train, 3).noticed
    assert said == f"1 of 3 images has an alpha channel, composited over white ({tmp_path}/alpha.png)"
    (said,) = statistics_of(train.subset([0]), 3).noticed
    assert said.startswith("1 of 1 images has")
    (said,) = statistics_of(train.subset([0, 0]), 3, sample=1).noticed
    assert said.startswith("1 of 1 sampled images has")
