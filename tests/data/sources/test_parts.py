"""Windows, slices and frames: compared with what other programs wrote, or read from the same files."""

import pickle
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from refusing import failed, refusal, refused
from safetensors.torch import load_file

from patchloom.data.decode import Unreadable
from patchloom.data.sources.open import absolute_name, open_data, open_stored
from patchloom.data.splits import hold_out
from patchloom.train.loop import pretrain

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (300, 420, 3), dtype=np.uint8)
STACK = RNG.integers(0, 65536, (7, 40, 50), dtype=np.uint16)
RESOLUTION = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}  # pixels a centimetre: half a micron each


def pyramid(path, picture=PICTURE, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    how = {"tile": (64, 64), "photometric": "rgb", "compression": "deflate", "metadata": None, **how}
    with tifffile.TiffWriter(path) as writer:
        writer.write(picture, subifds=2, **RESOLUTION, **how)
        for step in (2, 4):
            writer.write(picture[::step, ::step], subfiletype=1, **how)
    return path


def place_of(source, i):
    words = source.describe(i).rpartition("#")[2].split(",")
    return [int(word.partition("=")[2]) for word in words if word[0] in "yx"]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"tile": None, "rowsperstrip": 32},
        {"tile": None, "compression": None},
        {"compression": "lzw", "predictor": True},
        {"planarconfig": "separate"},
    ],
    ids=["tiles", "strips", "memory-mapped", "predictor", "separate"],
)
def test_windows_are_the_pixels_at_their_places(tmp_path, how):
    picture = np.moveaxis(PICTURE, -1, 0) if "planarconfig" in how else PICTURE
    how = {"tile": (64, 64), "photometric": "rgb", "compression": "deflate", **how}
    tifffile.imwrite(tmp_path / "a.tif", picture, **how)
    train = open_data(f"{tmp_path}@tile=48x80,overlap=8").train
    covered = np.zeros(PICTURE.shape[:2], bool)
    for i in range(len(train)):
        y, x = place_of(train, i)
        assert torch.equal(train.read(i), torch.from_numpy(PICTURE[y : y + 48, x : x + 80]).permute(2, 0, 1))
        covered[y : y + 48, x : x + 80] = True
    assert covered.all()  # the last windows end at the borders
    places = {tuple(place_of(train, i)) for i in range(len(train))}
    assert {(0, 0), (40, 0), (0, 72), (252, 340)} <= places and len(places) == len(train)


def test_levels_and_microns_choose_the_resolution(tmp_path):
    pyramid(tmp_path / "a.tif")
    half = open_data(f"{tmp_path}@tile=50,level=1").train
    y, x = place_of(half, 5)
    assert torch.equal(half.read(5), torch.from_numpy(PICTURE[::2, ::2][y : y + 50, x : x + 50]).permute(2, 0, 1))
    same = open_data(f"{tmp_path}@tile=50,microns=1")  # half a micron at the finest level
    assert torch.equal(same.train.read(5), half.read(5)) and "at 1 microns a pixel" in same.notes[0]
    between = open_data(f"{tmp_path}@tile=50,microns=1.5").train  # 75 pixels of the level before it, made smaller
    assert between.units[0].size == (75, 75) and between.read(0).shape == (3, 50, 50)
    part = torch.from_numpy(PICTURE[::2, ::2][:75, :75]).permute(2, 0, 1).float()
    assert (between.read(0).float().mean((1, 2)) - part.mean((1, 2))).abs().max() < 1


def test_openslide_reads_the_same_windows(tmp_path):
    openslide = pytest.importorskip("openslide")
    path = pyramid(tmp_path / "a.tif", compression="jpeg")
    slide = openslide.OpenSlide(path)
    for level in range(slide.level_count):
        train = open_data(f"{path}@tile=40,level={level},blank=0").train
        assert train.units[0].whole == slide.level_dimensions[level][::-1]
        scale = slide.level_downsamples[level]
        for i in (0, len(train) - 1):
            y, x = place_of(train, i)
            region = slide.read_region((round(x * scale), round(y * scale)), level, (40, 40)).convert("RGB")
            gap = train.read(i).permute(1, 2, 0).int() - torch.from_numpy(np.array(region)).int()
            assert gap.abs().max() <= 3  # two decoders of JPEG


def test_formats_of_openslide_are_read_by_it(tmp_path):
    pytest.importorskip("openslide")
    path = pyramid(tmp_path / "a.tif", compression="jpeg")
    want = open_data(f"{path}@tile=40").train
    found = open_data(f"{shutil.copy(path, tmp_path / 'b.svslide')}@tile=40").train
    assert len(found) == len(want) and found.units[0].whole == want.units[0].whole
    for i in (0, 7, len(found) - 1):
        assert (found.read(i).int() - want.read(i).int()).abs().max() <= 3  # two decoders of JPEG


def test_nd2_by_what_its_library_gives(tmp_path, monkeypatch):
    """No free program writes this format: a stand-in has the interface that the library documents."""
    values = RNG.integers(0, 65536, (2, 3, 4, 40, 50), dtype=np.uint16)  # positions, depths, channels

    class ND2File:
        sizes = {"P": 2, "Z": 3, "C": 4, "Y": 40, "X": 50}
        metadata = types.SimpleNamespace(
            channels=[types.SimpleNamespace(channel=types.SimpleNamespace(name=name)) for name in "abcd"]
        )

        def __init__(self, path):
            assert path.name == "a.nd2"

        def voxel_size(self):
            return types.SimpleNamespace(x=0.25, y=0.25, z=1.0)

        def read_frame(self, number):
            return values.reshape(6, 4, 40, 50)[number]

        def close(self):
            pass

    monkeypatch.setitem(sys.modules, "nd2", types.SimpleNamespace(ND2File=ND2File))
    monkeypatch.setattr("patchloom.data.containers.open.find_spec", lambda name: True)
    (tmp_path / "a.nd2").touch()
    opened = open_data(f"{tmp_path}@slices=1,tile=20")
    assert len(opened.train) == 6 * 2 * 3 and "at 0.25 microns" in opened.notes[0]
    at = next(i for i in range(36) if opened.train.describe(i).endswith("#slice=4,y=20,x=30"))
    want = torch.from_numpy(values[1, 1, :, 20:40, 30:50].astype(np.float32) / 65535)
    assert torch.equal(opened.train.read(at), want)
    assert torch.equal(open_data(f"{tmp_path}@slices=1,tile=20,bands=c+1").train.read(at), want[[2, 0]])


def test_blank_windows_are_left_out(tmp_path):
    glass = np.full((400, 400, 3), 240, np.uint8)
    glass[100:200, 200:300] = RNG.integers(0, 256, (10, 10, 3), dtype=np.uint8).repeat(10, 0).repeat(10, 1)
    pyramid(tmp_path / "a.tif", glass)
    opened = open_data(f"{tmp_path}@tile=100")
    assert [place_of(opened.train, i) for i in range(len(opened.train))] == [[100, 200]]
    assert "1 window of" in opened.notes[0] and "15 blank ones are left out" in opened.notes[0]
    assert len(open_data(f"{tmp_path}@tile=100,blank=0").train) == 16
    glass[:] = 240
    pyramid(tmp_path / "a.tif", glass)
    refused(f"{tmp_path}@tile=100", "all windows.*blank=0")


def test_slices_and_their_neighbours(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", STACK, imagej=True, metadata={"axes": "ZYX"})
    each = open_data(f"{tmp_path}@slices=1").train
    near = open_data(f"{tmp_path}@slices=3").train
    whole = torch.from_numpy(STACK.astype(np.float32) / 65535)
    assert len(each) == len(near) == 7
    for i in range(7):
        assert torch.equal(each.read(i), whole[i : i + 1])
        assert torch.equal(near.read(i), whole[[max(i - 1, 0), i, min(i + 1, 6)]])
    third = open_data(f"{tmp_path}@slices=1,every=3,tile=16x50").train
    assert {third.describe(i).rpartition("#")[2].partition(",")[0] for i in range(len(third))} == {
        "slice=0",
        "slice=3",
        "slice=6",
    }


def test_channels_of_ome_stay_channels(tmp_path):
    deep = RNG.integers(0, 65536, (5, 4, 40, 50), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "a.ome.tif", deep, metadata={"axes": "ZCYX"}, tile=(16, 16))
    train = open_data(f"{tmp_path}@slices=1").train
    assert len(train) == 5
    assert torch.equal(train.read(3), torch.from_numpy(deep[3].astype(np.float32) / 65535))


def test_zarr_in_several_resolutions(tmp_path):
    zarr = pytest.importorskip("zarr")
    values = RNG.integers(0, 256, (2, 3, 64, 80), dtype=np.uint8)
    group = zarr.open_group(tmp_path / "in" / "a.zarr", mode="w")
    for name, step in (("0", 1), ("1", 2)):
        group.create_array(name, data=values[..., ::step, ::step])
    axes = [{"name": "z"}, {"name": "c"}, *({"name": axis, "unit": "micrometer"} for axis in "yx")]
    scale = [{"type": "scale", "scale": [1, 1, 0.5, 0.5]}]
    sets = [{"path": "0", "coordinateTransformations": scale}, {"path": "1"}]
    group.attrs["multiscales"] = [{"axes": axes, "datasets": sets}]
    train = open_data(f"{tmp_path}/in@slices=1,tile=32,microns=1").train
    assert len(train) == 4 and train.describe(3).endswith("a.zarr#slice=1,y=0,x=8")
    assert torch.equal(train.read(3), torch.from_numpy(values[1, :, ::2, ::2][:, :32, 8:40]))


@pytest.mark.parametrize("suffix", [".tif", ".npy", ".zarr"])
def test_a_window_chooses_the_values_of_a_raster(tmp_path, suffix):
    values = RNG.integers(-100, 200, (20, 30)).astype(np.int16)
    if suffix == ".tif":
        values[3, 4] = -9999  # GDAL's no-data value
        tifffile.imwrite(tmp_path / "a.tif", values, extratags=[(42113, "s", 0, "-9999", True)])
    elif suffix == ".npy":
        np.save(tmp_path / "a.npy", values / 8)
    else:
        zarr = pytest.importorskip("zarr")
        zarr.save_array(tmp_path / "in" / "a.zarr", values)
    folder, factor = tmp_path / ("in" if suffix == ".zarr" else ""), 8 if suffix == ".npy" else 1
    low, high = -48 / factor, 152 / factor
    want = np.where(values == -9999, values[values != -9999].mean(), values).clip(-48, 152)
    whole = open_data(f"{folder}@window={low:g}:{high:g}")
    assert f"1 plane; values of {low:g} to {high:g} become 0 to 1" in whole.notes[0]
    assert np.abs(whole.train.read(0)[0].numpy() - (want + 48) / 200).max() < 0.003  # the mean is rounded
    tile = open_data(f"{folder}@window={low:g}:{high:g},tile=8").train
    y, x = place_of(tile, 5)
    assert torch.equal(tile.read(5), whole.train.read(0)[:, y : y + 8, x : x + 8])


def test_a_window_of_a_photograph_is_refused(tmp_path):
    Image.fromarray(PICTURE).save(tmp_path / "a.png")
    refused(f"{tmp_path}@window=0:100", "a.png has .* of 8 bits.*: leave out window")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_volumes_of_nifti(tmp_path, suffix, monkeypatch):
    nibabel = pytest.importorskip("nibabel")
    values = RNG.integers(-1000, 1000, (50, 40, 7)).astype(np.int16)
    header = nibabel.Nifti1Image(values, np.diag([0.5, 0.5, 2, 1]))
    nibabel.save(header, tmp_path / f"a{suffix}")
    opened = open_data(f"{tmp_path}@slices=1,window=-500:500")
    want = np.clip((values[:, :, 2].T.astype(np.float32) + 500) / 1000, 0, 1)
    assert len(opened.train) == 7 and "at 500 microns a pixel; values of -500 to 500 become 0 to 1;" in opened.notes[0]
    assert np.abs(opened.train.read(2)[0].numpy() - want).max() < 1e-6
    nibabel.save(nibabel.Nifti1Image(values // 4, np.eye(4)), tmp_path / f"b{suffix}")
    (note,) = open_data(f"{tmp_path}@slices=1").notes
    low, high = np.percentile(values, (0.5, 99.5))
    assert f"values of {low:.4g} to {high:.4g}, or " in note and "window=LOW:HIGH" in note
    own = open_data(f"{tmp_path}@slices=1").train
    monkeypatch.setattr("patchloom.data.containers.arrays.NiftiContainer._percentiles", lambda self: 1 / 0)  # known
    assert own.read(2).min() == 0 and own.read(2).max() == 1


def write_slice(path: Path, values: np.ndarray, modality: str, series: str, place: float) -> None:
    pydicom = pytest.importorskip("pydicom")
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    data.set_pixel_data(values, "MONOCHROME2", 12)
    data.Modality, data.SeriesInstanceUID, data.RescaleSlope, data.RescaleIntercept = modality, series, 1, -1024
    data.ImageOrientationPatient, data.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, place]
    data.save_as(path, enforce_file_format=True)


def test_a_window_of_ct_is_in_hounsfield_units(tmp_path):
    values = RNG.integers(0, 4096, (2, 9, 14)).astype(np.uint16)
    for number, one in enumerate(values):
        write_slice(tmp_path / f"{number}.dcm", one, "CT", "1.2.3", 2.5 * number)
    opened = open_data(f"{tmp_path}@slices=1,window=-1000:400")
    units = values.astype(np.float64) - 1024
    for i, one in enumerate(units):
        assert np.allclose(opened.train.read(i)[0], ((one + 1000) / 1400).clip(0, 1), atol=1e-5)
    assert "-1000 to 400" in opened.notes[0]
    write_slice(tmp_path / "2.dcm", values[0], "MR", "1.2.4", 0)
    refused(f"{tmp_path}@slices=1,window=-1000:400", "is no CT, so its values have no unit: leave out window")


def test_series_of_dicom_are_volumes_in_the_order_of_their_places(tmp_path):
    values = RNG.integers(0, 4096, (6, 9, 14)).astype(np.uint16)
    for number, one in enumerate(values):
        write_slice(tmp_path / f"{(number * 5) % 7}.dcm", one, "MR", f"1.2.{number // 4}", -3.0 * number)
    opened = open_data(f"{tmp_path}@slices=1")
    assert len(opened.train) == 6 and "2 volumes" in opened.notes[0]
    first = [i for i in range(6) if opened.train.groups[i] == opened.train.groups[0]]
    want = [torch.from_numpy(values[number].astype(np.float32) / 4095)[None] for number in (3, 2, 1, 0)]
    assert len(first) == 4 and all(torch.equal(opened.train.read(i), one) for i, one in zip(first, want, strict=True))
    (tmp_path / f"{(1 * 5) % 7}.dcm").unlink()
    assert any("a slice is missing" in note for note in open_data(f"{tmp_path}@slices=1").notes)


def test_frames_of_films(tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as film:
        stream = film.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(30):
            picture = np.full((48, 64, 3), 8 * number, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                film.mux(packet)
        for packet in stream.encode():
            film.mux(packet)
    train = open_data(f"{tmp_path}@fps=2").train
    assert len(train) == 6 and train.describe(3).endswith("a.mp4#second=1.5")
    for i in (5, 0, 3):  # in any order
        assert train.read(i).shape == (3, 48, 64)
        assert abs(float(train.read(i).float().mean()) - 8 * 5 * i) < 3


def test_a_playlist_that_is_called_a_film_is_not_followed(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "a.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/secret.ts\n#EXT-X-ENDLIST\n")
    refused(f"{tmp_path}@fps=1", r"a\.mp4 cannot be read")


def test_czi(tmp_path):
    czi = pytest.importorskip("pylibCZIrw.czi")
    values = RNG.integers(0, 65536, (3, 2, 40, 50), dtype=np.uint16)
    with czi.create_czi(str(tmp_path / "a.czi")) as file:
        for z, planes in enumerate(values):
            for c, plane in enumerate(planes):
                file.write(data=plane[..., None], plane={"Z": z, "C": c})
        file.write_metadata(scale_x=0.5e-6, scale_y=0.5e-6)
    opened = open_data(f"{tmp_path}@slices=1")
    assert len(opened.train) == 3 and "at 0.5 microns" in opened.notes[0]
    assert torch.equal(opened.train.read(1), torch.from_numpy(values[1].astype(np.float32) / 65535))


class TestSplits:
    def test_a_file_stays_in_one_split_and_has_one_label(self, tmp_path):
        for turns, name in enumerate(("a/1.tif", "a/2.tif", "b/3.tif", "b/4.tif")):
            pyramid(tmp_path / name, np.roll(PICTURE, turns, axis=1))
        train = open_data(f"{tmp_path}@tile=100").train
        assert train.classes == ("a", "b") and np.bincount(train.labels).tolist() == [30, 30]
        rest, held = hold_out(train, 0.3)
        assert not {*map(file_of(rest), range(len(rest)))} & {*map(file_of(held), range(len(held)))} and len(held)

    def test_blocks_of_a_single_file_stay_together(self, tmp_path):
        pyramid(tmp_path / "a.tif")
        train = open_data(f"{tmp_path}@tile=20").train
        rest, held = hold_out(train, 0.2)
        assert 0 < len(held) <= 0.2 * len(train) and len(rest) + len(held) == len(train)
        assert not {*rest.groups} & {*held.groups} and len({*train.groups}) == 64

    def test_a_table_of_slides_keeps_its_columns(self, tmp_path):
        pyramid(tmp_path / "a.tif")
        pyramid(tmp_path / "b.tif")
        (tmp_path / "m.csv").write_text("slide,grade,patient\na.tif,x,p\nb.tif,y,q\n")
        train = open_data(f"{tmp_path}/m.csv@path=slide,label=grade,tile=100").train
        assert train.classes == ("x", "y") and [*dict.fromkeys(train.column("patient"))] == ["p", "q"]


def test_a_table_of_windows_is_read_as_others_wrote_it(tmp_path):
    pyramid(tmp_path / "a.tif")
    pyramid(tmp_path / "b.tif", np.roll(PICTURE, 1, axis=0))
    whole = open_data(f"{tmp_path}@tile=100").train
    some = [29, 3, 17]
    lines = [f'"{whole.place(i)}",{"xyx"[k]}' for k, i in enumerate(some)]
    (tmp_path / "m.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    train = open_data(f"{tmp_path}/m.csv@tile=100").train
    assert [train.describe(i) for i in range(3)] == [whole.describe(i) for i in some]
    assert all(torch.equal(train.read(k), whole.read(i)) for k, i in enumerate(some))
    assert train.labels.tolist() == [0, 1, 0]
    assert train.groups[0] == train.groups[2] != train.groups[1]  # of b, of b, and of a
    refused(tmp_path / "m.csv", r"lists parts of files, such as b.tif#y=.*m\.csv@tile=256")
    refused(f"{tmp_path}/m.csv@slices=1", r"is no part by @slices=1: write its place as #slice=0")
    (tmp_path / "m.csv").write_text('path,label\n"a.tif#y=0,x=9000",x\n')
    refused(f"{tmp_path}/m.csv@tile=100", "lies outside of the file")
    (tmp_path / "m.csv").write_text('path,label\n"a.tif#y=0,x=1",x\n')
    assert open_data(f"{tmp_path}/m.csv@tile=100").train.stamp() != train.stamp()


def file_of(source):
    return lambda i: source.describe(i).partition("#")[0]


def test_copies_of_files_are_found_in_other_processes_too(tmp_path):
    pyramid(tmp_path / "a.tif")
    shutil.copy(tmp_path / "a.tif", tmp_path / "b.tif")
    train = open_data(f"{tmp_path}@tile=100").train
    assert len(np.unique(train.contents())) == len(train) // 2
    again = pickle.loads(pickle.dumps(train))
    assert torch.equal(again.read(7), train.read(7)) and again.stamp() == train.stamp()
    assert train.stamp() != open_data(f"{tmp_path}@tile=90").train.stamp()


def test_a_stored_name_is_absolute_opens_again_and_may_not_search_the_disc(tmp_path, monkeypatch):
    pyramid(tmp_path / "s" / "a.tif")
    monkeypatch.chdir(tmp_path)
    name = absolute_name("s@tile=100,overlap=4")
    assert name == f"{tmp_path}/s@tile=100,overlap=4"
    monkeypatch.chdir("/")
    assert len(open_stored(name, "a run", "give --data").train) == len(
        open_data(f"{tmp_path}/s@tile=100,overlap=4").train
    )
    assert "a whole disc" in refusal(open_stored, "/@tile=64", "a run", "give --data")


REFUSED = {
    "no size": ("@tile=big", "tile=big must be a side"),
    "tiny": ("@tile=2", "tile=2 must be a side of 8"),
    "even": ("@slices=2", "slices=2 must be an odd number"),
    "range": ("@slices=1,window=5:1", "window=5:1 must be two values"),
    "no windows": ("@overlap=8", "overlap is of windows: give tile"),
    "no step": ("@tile=16,overlap=16", "leaves no step"),
    "two resolutions": ("@tile=16,level=1,microns=1", "give one"),
    "two kinds": ("@slices=1,fps=1", "give one"),
    "every": ("@tile=16,every=2", "every is of slices"),
    "no slices": ("@tile=16", "has 7 slices: add slices=1"),
    "no such level": ("@slices=1,tile=16,level=4", "has 1 resolutions"),
    "unknown size": ("@slices=1,tile=16,microns=1", "does not say how large a pixel is"),
    "too large": ("@slices=1,tile=64", "as large as a window"),
    "no film": ("@fps=1", "holds no images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", STACK, imagej=True, metadata={"axes": "ZYX"})
    words, match = REFUSED[case]
    refused(f"{tmp_path}{words}", match)


def test_finer_pixels_than_the_file_has_are_refused(tmp_path):
    pyramid(tmp_path / "a.tif")
    refused(f"{tmp_path}@tile=16,microns=0.2", "has pixels of 0.5 microns, larger than 0.2")


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_a_slide_that_was_cut_short_is_named(tmp_path, kept):
    path = pyramid(tmp_path / "slide.tif", photometric="rgb")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    refused(f"{tmp_path}@tile=50", r"slide\.tif.*(cut short|cannot be read)")


def test_a_damaged_tile_costs_its_windows_only(tmp_path):
    path = pyramid(tmp_path / "slide.tif")
    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        at = page.dataoffsets[0]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 40)
    train = open_data(f"{path}@tile=64,blank=0").train
    with pytest.raises(Unreadable, match=r"slide\.tif#y=0,x=0 cannot be read"):
        train.read(0)
    assert train.read(len(train) - 1).shape == (3, 64, 64)


def test_one_piece_of_compressed_pixels_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("patchloom.data.containers.tiff._LARGEST_PART", 300 * 400)
    tifffile.imwrite(tmp_path / "a.tif", PICTURE, photometric="rgb", compression="deflate", rowsperstrip=300)
    refused(f"{tmp_path}@tile=50", "compressed in parts of 300 x 420.*save it in tiles")


def test_a_missing_extra_is_named_with_what_installs_it(tmp_path, monkeypatch):
    (tmp_path / "a.nd2").write_bytes(b"0")
    monkeypatch.setattr("patchloom.data.containers.open.find_spec", lambda name: None)
    refused(f"{tmp_path}@slices=1", r"\.nd2 files are read by nd2: pip install")


@pytest.mark.slow  # it starts a process
def test_a_training_is_the_same_where_another_process_reads_the_windows(tmp_path, capsys):
    for turns, name in enumerate("ab"):
        pyramid(tmp_path / "s" / f"{name}.tif", np.roll(PICTURE, turns, axis=1))
    same = {"model": "vit_tiny_patch16_224", "img_size": 32, "patch_size": 16, "batch_size": 8, "epochs": 2}
    same |= {"device": "cpu", "threads": 1, "cache": "none"}
    for workers in (0, 1):
        pretrain(f"{tmp_path}/s@tile=64", "mae", out=tmp_path / str(workers), workers=workers, **same)
    one, two = (load_file(tmp_path / str(workers) / "encoder.safetensors") for workers in (0, 1))
    assert all(torch.equal(one[name], two[name]) for name in {*one, *two})
    assert (tmp_path / "0" / "pictures" / "windows.png").is_file()
    assert "a smaller tile" in failed(capsys, "pretrain", f"{tmp_path}/s@tile=4000", "--task", "mae")
