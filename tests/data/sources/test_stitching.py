import numpy as np
import pytest
import tifffile

from patchloom.data.sources.open import open_data
from patchloom.data.sources.stitching import stitch, write_map

SHAPE = 200, 330
PICTURE = np.random.default_rng(0).integers(0, 256, (*SHAPE, 3), dtype=np.uint8)


def values_of(source):
    """Return row and column of each window, as two numbers to put on a map."""
    return np.stack([source.parts["top"], source.parts["left"]], axis=1).astype(np.float32)


def test_each_cell_is_the_mean_over_the_windows_that_cover_it(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", PICTURE, photometric="rgb")
    source = open_data(f"{tmp_path}@tile=50").train
    found = stitch(source, 0, 0, values_of(source))
    assert found.values.shape == (2, 4, 7) and found.step == (50, 50)
    assert found.values[0, :, 0].tolist() == [0, 50, 100, 150]
    # the last window ends at the border: at 280, it covers half of the cell before it, which is rounded to none
    assert found.values[1, 0].tolist() == [0, 50, 100, 150, 200, 250, 280]
    half = open_data(f"{tmp_path}@tile=50,overlap=25").train
    found = stitch(half, 0, 0, values_of(half))
    assert found.values[0, :3, 0].tolist() == [0, 12.5, 37.5]
    source.parts = source.parts[1:]
    assert np.isnan(stitch(source, 0, 0, values_of(source)).values[:, 0, 0]).all()


@pytest.mark.parametrize("level", [0, 1])
def test_a_map_keeps_its_place_on_earth(tmp_path, level):
    rasterio = pytest.importorskip("rasterio")
    profile = {"driver": "GTiff", "width": 320, "height": 192, "count": 3, "dtype": "uint8", "tiled": True}
    profile |= {"crs": "EPSG:32633", "transform": rasterio.Affine(10, 0, 500_000, 0, -10, 5_200_000)}
    with rasterio.open(tmp_path / "a.tif", "w", blockxsize=64, blockysize=64, photometric="RGB", **profile) as file:
        file.write(np.moveaxis(PICTURE[:192, :320], -1, 0))
        file.build_overviews([2])
        want, crs = file.bounds, file.crs
    source = open_data(f"{tmp_path}/a.tif@tile=32,level={level}").train
    write_map(tmp_path / "map.tif", stitch(source, 0, 0, values_of(source)))
    with rasterio.open(tmp_path / "map.tif") as file:
        assert file.bounds == want and file.crs == crs and file.dtypes == ("float32", "float32")
        assert file.shape == (6 >> level, 10 >> level)
        assert file.read(2)[0].tolist() == [32 * i for i in range(10 >> level)]
