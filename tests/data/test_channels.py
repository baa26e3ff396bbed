"""Channels by number and by name, in files that other libraries wrote, and pixels without a value."""

import json

import numpy as np
import pytest
import tifffile
import torch
from refusing import refused

from patchloom.check import check
from patchloom.cli import main
from patchloom.data.conversions import collect_conversions
from patchloom.data.decode import read_image
from patchloom.data.sources.open import open_data

RNG = np.random.default_rng(0)
VALUES = RNG.integers(1, 65536, (4, 40, 48), dtype=np.uint16)
NAMES = ("B02", "B03", "B04", "B08")
WHOLE = torch.from_numpy(VALUES.astype(np.float32) / 65535)


def geotiff(path, values=VALUES, names=NAMES, **how):
    rasterio = pytest.importorskip("rasterio")
    path.parent.mkdir(parents=True, exist_ok=True)
    how = {"driver": "GTiff", "tiled": True, "blockxsize": 16, "blockysize": 16, "compress": "deflate", **how}
    how |= {"count": len(values), "height": values.shape[1], "width": values.shape[2], "dtype": values.dtype}
    how |= {"transform": rasterio.Affine(10, 0, 5e5, 0, -10, 4e6), "crs": "EPSG:32633", "photometric": "minisblack"}
    with rasterio.open(path, "w", **how) as file:
        file.write(values)
        file.descriptions = names
    return path


def ome_tiff(path):
    axes = {"axes": "CYX", "Channel": {"Name": ["B02", "B03", "B04", "B<08> & more"]}}
    tifffile.imwrite(path / "a.ome.tif", VALUES, metadata=axes, photometric="minisblack")


def ome_zarr(path):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path / "a.zarr", mode="w")
    group.create_array("0", data=VALUES)
    axes = [{"name": axis} for axis in "cyx"]
    group.attrs["multiscales"] = [{"axes": axes, "datasets": [{"path": "0"}]}]
    group.attrs["omero"] = {"channels": [{"label": name} for name in NAMES]}


def czi(path):
    library = pytest.importorskip("pylibCZIrw.czi")
    with library.create_czi(str(path / "a.czi")) as file:
        for channel, plane in enumerate(VALUES):
            file.write(data=plane[..., None], plane={"C": channel})
        file.write_metadata(scale_x=1e-6, scale_y=1e-6, channel_names=dict(enumerate(NAMES)))


WRITERS = {
    "GDAL by pixel": lambda path: geotiff(path / "a.tif", interleave="pixel"),
    "GDAL by band": lambda path: geotiff(path / "a.tif", interleave="band"),
    "OME-TIFF": ome_tiff,
    "OME-Zarr": ome_zarr,
    "CZI": czi,
    "arrays": lambda path: np.save(path / "a.npy", VALUES.transpose(1, 2, 0)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_channels_are_read_in_the_order_asked_for(tmp_path, kind):
    WRITERS[kind](tmp_path)
    for words in ("3+1", "b04+1") if kind != "arrays" else ("3+1",):
        train = open_data(f"{tmp_path}@bands={words}").train
        assert torch.equal(train.read(0), WHOLE[[2, 0]])
        window = open_data(f"{tmp_path}@tile=16,blank=0,bands={words}").train
        y, x = (int(word.partition("=")[2]) for word in window.describe(3).partition("#")[2].split(","))
        assert torch.equal(window.read(3), WHOLE[[2, 0], y : y + 16, x : x + 16])
    assert train.groups is None  # an image a file
    assert train.stamp() != open_data(f"{tmp_path}@bands=1+3").train.stamp()
    refused(f"{tmp_path}@bands=2+5", "has no channel 5: it has 4 channels")
    refused(
        f"{tmp_path}@bands=NIR", "no channel NIR.*without names" if kind == "arrays" else "no channel NIR.*1 B02, 2 "
    )


@pytest.mark.parametrize("words", ["bands=", "bands=1++2"])
def test_words_that_choose_nothing(tmp_path, words):
    geotiff(tmp_path / "a.tif")
    refused(f"{tmp_path}@{words}", "bands=.* must be numbers or names")


def test_a_band_that_is_marked_as_transparency_can_be_chosen(tmp_path):
    near = RNG.integers(0, 256, (4, 40, 48), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", near.transpose(1, 2, 0), photometric="rgb", extrasamples=["unassalpha"])
    assert len(read_image(tmp_path / "a.tif")) == 3
    assert torch.equal(open_data(f"{tmp_path}@bands=4+3+2").train.read(0), torch.from_numpy(near[[3, 2, 1]]))


def test_files_with_other_channels(tmp_path, capsys):
    """Names choose each file's own order; a file that lacks one is named, and so are other orders without a choice."""
    geotiff(tmp_path / "a.tif")
    geotiff(tmp_path / "b.tif", VALUES[::-1], NAMES[::-1])
    both = open_data(f"{tmp_path}@bands=B02+B08").train
    assert torch.equal(both.read(0), WHOLE[[0, 3]]) and torch.equal(both.read(1), WHOLE[[0, 3]])
    assert main(["check", str(tmp_path), "--estimate", "no"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "b.tif has in another order the channels of" in said and "a.tif: @bands=B02+B03+B04+B08 takes" in said
    geotiff(tmp_path / "b.tif", VALUES, ("B02", "B03", "B05", "B08"))
    refused(f"{tmp_path}@bands=B04", "b.tif has no channel B04: .*3 B05")
    assert any("b.tif lacks B04 of" in one for one in check(str(tmp_path), estimate=False).sentences())


def test_check_has_a_line_for_each_of_64_channels(tmp_path, capsys):
    values = RNG.random((64, 16, 16), dtype=np.float32)
    values[5] = 0.25
    for name in "ab":
        geotiff(tmp_path / f"{name}.tif", values, [f"band {i}" for i in range(64)])
    assert main(["check", str(tmp_path), "--estimate", "no"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines if line[1:2] == ["band"]] == [[str(i + 1), "band", str(i)] for i in range(64)]
    (flat,) = (line for line in lines if line[:3] == ["6", "band", "5"])
    assert flat[3:] == ["0.2500", "0.0010", "0.2500", "0.2500", "0.0%", "100.0%"]
    found = check(str(tmp_path), estimate=False).plain()["splits"]["train"]["by_channel"][9]
    assert found["least"] == pytest.approx(values[9].min()) and found["most"] == pytest.approx(values[9].max())


class TestMissing:
    """Pixels without a value: those of GDAL's no-data value, and NaN."""

    @pytest.mark.parametrize(
        ("values", "nodata"),
        [
            (VALUES, 0),
            ((VALUES // 257).astype(np.uint8), 0),
            ((VALUES[:3] // 257).astype(np.uint8), 255),
            (VALUES / np.float32(65535), -9999.0),
            (VALUES / np.float32(65535), np.nan),
        ],
        ids=["16 bits", "8 bits", "RGB", "float", "NaN"],
    )
    def test_they_take_the_mean_of_the_others(self, tmp_path, values, nodata):
        values = np.where(values == nodata, 1, values).astype(values.dtype)
        holes = values.copy()
        holes[1, :10], holes[:, 30:, :] = nodata, nodata
        path = geotiff(tmp_path / "a.tif", holes, NAMES[: len(values)], nodata=nodata)
        with collect_conversions() as seen:
            found = read_image(path)
        assert "missing" in seen.words and "no values" not in seen.words
        scale = {"u1": 255, "u2": 65535}.get(values.dtype.str[1:], 1)
        for read in (found, open_data(f"{tmp_path}@tile=40x48,blank=0").train.read(0)):
            assert (read.dtype == torch.uint8) == (scale == 255)
            read = read.numpy() / (scale if scale == 255 else 1)
            assert np.allclose(read[1, 10:30], values[1, 10:30] / scale, atol=1e-6)
            assert np.allclose(read[1, :10], values[1, 10:30].mean() / scale, atol=0.5 / scale + 1e-6)
            assert np.allclose(read[0, 30:], values[0, :30].mean() / scale, atol=0.5 / scale + 1e-6)

    def test_their_fraction_and_channels_without_any_value_are_reported(self, tmp_path):
        holes = VALUES.copy()
        holes[1, :10], holes[3] = 0, 0
        geotiff(tmp_path / "a.tif", holes, nodata=0)
        geotiff(tmp_path / "b.tif")
        done = check(str(tmp_path), estimate=False)
        assert [one["missing"] for one in done.plain()["splits"]["train"]["by_channel"]] == [0, 0.125, 0, 0.5]
        assert any("1 of 2 images has a channel without any value, read as 0" in one for one in done.sentences())
        assert json.dumps(done.plain())

    def test_windows_without_values_are_blank(self, tmp_path):
        """Filled pixels have no contrast, also where a scene is read in several strips, of which some are empty."""
        holes = np.zeros((4, 160, 80), np.uint16)
        holes[:, 40:80, 40:] = VALUES[:, :, :40]
        geotiff(tmp_path / "a.tif", holes, nodata=0)
        train = open_data(f"{tmp_path}@tile=40").train
        assert [train.describe(i).partition("#")[2] for i in range(len(train))] == ["y=40,x=40"]


def test_pretraining_lists_the_channels_and_refuses_images_of_others(tmp_path, capsys):
    for number in range(8):
        geotiff(tmp_path / "s" / f"{number}.tif", np.roll(VALUES, number, axis=2))
    data, out = f"{tmp_path}/s@bands=B08+B04", str(tmp_path / "run")
    small = ["--model", "vit_tiny_patch16_224", "--model.depth", "1", "--img_size", "32", "--patch_size", "16"]
    words = ["pretrain", data, "--task", "mae", "--out", out, *small, "--epochs", "1", "--batch_size", "4"]
    assert main([*words, "--held_out", "0.25", "--workers", "0"]) == 0
    said = capsys.readouterr().out
    assert " 1        B08   " in said and " 2        B04   " in said
    assert main(["embed", out, f"{tmp_path}/s", "--to", str(tmp_path / "v.npz")]) == 2
    assert "has 4 channels where 2 are expected" in (said := capsys.readouterr().err) and "@bands=" in said
