"""Conversions of images on reading are recorded, counted and reported."""

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

DATA = np.random.default_rng(0).integers(0, 256, (12, 16, 4), dtype=np.uint8)
DEEP = DATA.astype(np.uint16) * 257
RGB = Image.fromarray(DATA[..., :3])
TURNED = Image.Exif()
TURNED[274] = 6


def with_alpha(left: int) -> Image.Image:
    """Return the image with an alpha channel that is 255 but for its left columns."""
    alpha = np.full_like(DATA[..., 0], 255)
    alpha[:, :4] = left
    return Image.fromarray(np.dstack([DATA[..., :3], alpha]))


def saved(image, *keywords, **how):
    return lambda path: image.save(path, **how), set(keywords)


def tiff(array, *keywords, **how):
    return lambda path: tifffile.imwrite(path, array, **how), set(keywords)


def npy(array, *keywords):
    return lambda path: np.save(path, array), set(keywords)


FILM = {"save_all": True, "append_images": [Image.fromarray(255 - DATA[..., :3])]}
KINDS = {
    **dict.fromkeys(("plain.png", "plain.jpg", "plain.tif", "still.gif"), saved(RGB)),
    "opaque.png": saved(with_alpha(255)),
    **dict.fromkeys(("alpha.png", "alpha.tif", "alpha.webp"), saved(with_alpha(0), "alpha")),
    "marked.tif": tiff(DATA, "doubtful alpha"),  # the default of tifffile and GDAL for a fourth band
    "deep marked.tif": tiff(DEEP, "doubtful alpha", "deep", photometric="rgb", extrasamples=["unassalpha"]),
    "bands.tif": tiff(DATA, "bands", photometric="rgb", extrasamples=["unspecified"]),
    "bands.npy": npy(DATA, "bands"),
    **dict.fromkeys(("cmyk.jpg", "cmyk.tif"), saved(RGB.convert("CMYK"), "colours")),
    "palette.png": saved(RGB.convert("P"), "palette"),
    **dict.fromkeys(("turned.jpg", "turned.png"), saved(RGB, "turned", exif=TURNED)),
    "turned.tif": tiff(DEEP[..., 0], "turned", "deep", extratags=[(274, 3, 1, 6, True)]),
    "deep.png": saved(Image.fromarray(DEEP[..., 0]), "deep"),
    "white.tif": tiff(DATA[..., 0], "inverted", photometric="miniswhite"),
    "pages.tif": tiff(np.stack([DATA[..., :3]] * 3), "pages", photometric="rgb"),
    "channel pages.tif": tiff(np.stack([DATA[..., 0]] * 5), "channel pages", photometric="minisblack"),
    "channels first.npy": npy(np.stack([DATA[..., 0]] * 5), "many channels"),
    **dict.fromkeys(("film.gif", "film.webp"), saved(RGB, "frames", **FILM)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_conversions(tmp_path, kind):
    path = tmp_path / kind
    save, expected = KINDS[kind]
    save(path)
    with collect_conversions() as found:
        read_image(path)
    assert found.words == expected <= set(CONVERSIONS)
    with collect_conversions() as found:
        decode_image(path.read_bytes(), "it")
    assert found.words == expected
    assert not is_collecting()
    record_conversion("alpha")  # nothing is collected


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
    noticed = ConversionCounts()
    noticed.add(5, {"alpha", "turned"})
    for i in (9, 7, 3):
        noticed.add(i, {"alpha"})
    alpha, turned = noticed.sentences("image {}".format, 10)
    assert alpha.startswith("4 of 10 images have") and alpha.endswith("(image 3, image 5, image 7, ...)")
    assert turned.startswith("1 of 10 images is") and turned.endswith("(image 5)")
    assert ConversionCounts().sentences(str, 10) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_survey_and_statistics_record_and_check_reports(tmp_path, workers, monkeypatch):
    monkeypatch.setattr("patchloom.data.reading._EACH", 2)
    for name in ("turned.jpg", "alpha.png", "cmyk.jpg", "plain.png", "palette.png"):
        KINDS[name][0](tmp_path / name)
    train = open_data(tmp_path).train
    assert survey(train, workers=workers).noticed.counts == {"turned": 1, "alpha": 1, "colours": 1, "palette": 1}
    said = check(str(tmp_path), estimate=False).sentences()
    assert sum(one.startswith("1 of 5 images") and one.endswith(f"({tmp_path}/cmyk.jpg).") for one in said) == 1
    assert sum(one.startswith("1 of 5 images has an alpha channel") for one in statistics_of(train, 3).noticed) == 1
    (sampled,) = statistics_of(train.subset([0, 0]), 3, sample=1).noticed
    assert sampled.startswith("1 of 1 sampled images has")
