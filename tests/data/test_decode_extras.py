"""HEIC and DICOM, which extras decode, compared with the written pixels."""

import numpy as np
import pytest
from encoding import assert_unreadable
from PIL import Image

from patchloom.data.conversions import collect_conversions
from patchloom.data.decode import decode_image, read_image
from patchloom.data.sources.open import open_data

try:
    import pydicom
except ImportError:
    pydicom = None

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 4096, (9, 14)).astype(np.uint16)


def watched_read(path):
    with collect_conversions() as found:
        return read_image(path), found.words


def test_heic(tmp_path):
    pytest.importorskip("pillow_heif").register_heif_opener()
    ramp = np.zeros((32, 48, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(48) * 5, (np.arange(32) * 7)[:, None]
    for name in ("a.heic", "b.HEIF", "c.hif"):
        Image.fromarray(ramp).save(tmp_path / name, format="HEIF", quality=95)
    source = open_data(tmp_path)
    assert len(source.train) == 3 and not source.notes
    for i in range(3):
        image = source.train.read(i)
        assert image.shape == (3, 32, 48)
        assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - ramp).mean() < 3
    content = (tmp_path / "a.heic").read_bytes()
    assert (decode_image(content, "it") == source.train.read(0)).all()
    assert_unreadable(content[: len(content) // 2])


@pytest.mark.skipif(pydicom is None, reason="needs the extra dicom")
class TestDicom:
    def write(self, path, array, bits=12, kind="MONOCHROME2", modality="MR", **more):
        data = pydicom.Dataset()
        data.file_meta = pydicom.dataset.FileMetaDataset()
        data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        data.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
        data.set_pixel_data(array, kind, bits)
        data.Modality = modality
        for name, value in more.items():
            setattr(data, name, value)
        data.save_as(path, enforce_file_format=True)
        return path

    def test_stored_values_are_divided_by_the_largest_of_their_bits(self, tmp_path):
        image, found = watched_read(self.write(tmp_path / "a.dcm", GREY))
        assert image.shape == (1, 9, 14) and image.is_floating_point() and found == {"bits"}
        np.testing.assert_allclose(image[0].numpy(), GREY / 4095, atol=1e-6)
        signed = (GREY.astype(int) - 2048).astype(np.int16)
        image = read_image(self.write(tmp_path / "b.dcm", signed, RescaleSlope=2, RescaleIntercept=5))
        np.testing.assert_allclose(image[0].numpy(), GREY / 4095, atol=1e-6)

    def test_white_may_be_0(self, tmp_path):
        image, found = watched_read(self.write(tmp_path / "a.dcm", GREY, kind="MONOCHROME1", modality="DX"))
        np.testing.assert_allclose(image[0].numpy(), 1 - GREY / 4095, atol=1e-6)
        assert found == {"bits", "inverted"}
        eight = (GREY // 16).astype(np.uint8)
        image, found = watched_read(self.write(tmp_path / "b.dcm", eight, 8, kind="MONOCHROME1"))
        np.testing.assert_array_equal(image[0].numpy(), 255 - eight)
        assert found == {"inverted"}

    def test_ct_agrees_between_scanners(self, tmp_path):
        """The same tissue, stored unsigned with an intercept or signed without, has the same values."""
        units = GREY.astype(int) - 1024
        how = dict(modality="CT", RescaleSlope=1)
        one, found = watched_read(self.write(tmp_path / "a.dcm", GREY, RescaleIntercept=-1024, **how))
        signed = units.astype(np.int16)
        signed[0, 0] = -2000  # outside of the scanner's circle
        two = read_image(self.write(tmp_path / "b.dcm", signed, 16, RescaleIntercept=0, **how))
        np.testing.assert_allclose(one[0].numpy(), (units + 1024) / 4095, atol=1e-6)
        assert two[0, 0, 0] == 0 and (one == two)[0, 1:].all() and found == {"CT"}

    def test_colour_frames_and_bytes(self, tmp_path):
        colour = RNG.integers(0, 256, (3, 9, 14, 3), dtype=np.uint8)
        path = self.write(tmp_path / "a.dicom", colour, 8, kind="RGB", modality="US", NumberOfFrames=3)
        image, found = watched_read(path)
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), colour[0])
        assert found == {"frames"}
        assert (decode_image(path.read_bytes(), "it") == image).all()
        assert len(open_data(tmp_path).train) == 1

    def test_unreadable_files_are_named(self, tmp_path, monkeypatch):
        path = self.write(tmp_path / "a.dcm", GREY)
        whole = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
            assert_unreadable(path, "bomb")
        data = pydicom.dcmread(path)
        del data.Rows, data.Columns, data.PixelData
        data.save_as(path)
        for content in (path.read_bytes(), whole[:200], whole[:-50], b"", b"no image"):
            path.write_bytes(content)
            assert_unreadable(path)

    def test_values_of_more_than_8_bits_count_as_4_bytes(self, tmp_path, monkeypatch):
        path = self.write(tmp_path / "a.dcm", GREY)
        monkeypatch.setattr("patchloom.data.decode._MOST_EXPANSION", 0)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4 * GREY.size // 6)  # the limit has 6 bytes per pixel
        assert read_image(path).shape == (1, 9, 14)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4 * GREY.size // 6 - 1)
        assert_unreadable(path, "would become 504, .*bomb")

    def test_a_deflated_file_is_not_inflated_beyond_the_limit(self, tmp_path, monkeypatch):
        plain = read_image(self.write(tmp_path / "a.dcm", GREY))
        data = pydicom.dcmread(tmp_path / "a.dcm")
        data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
        pydicom.dcmwrite(tmp_path / "b.dcm", data)
        data.add_new(0x00091010, "OB", bytes(10**6))
        pydicom.dcmwrite(tmp_path / "c.dcm", data)
        assert (read_image(tmp_path / "c.dcm") == plain).all()
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
        monkeypatch.setattr("patchloom.data.decode._BLOCK", 5000)
        assert (read_image(tmp_path / "b.dcm") == plain).all()
        for large in (tmp_path / "c.dcm", (tmp_path / "c.dcm").read_bytes()):
            assert_unreadable(large, "decompression bomb")
