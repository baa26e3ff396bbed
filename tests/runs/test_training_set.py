"""Records of training images: round trip and damaged files."""

import numpy as np
import pytest
from killing import SMALL, draw_images

from patchloom.data.sources.synthetic import Shapes
from patchloom.errors import PatchloomError
from patchloom.runs.training_set import digest_of_record, no_record, read_record, write_record
from patchloom.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("quick_probe")

QUICK = SMALL | {"epochs": 1, "task": "mae"}


def test_a_record_comes_back_and_grows(tmp_path):
    path, contents = tmp_path / "trained_on.bin", Shapes(20).contents()
    assert read_record(path) is None and digest_of_record(path) == ""
    record = no_record("timm:x").and_trained_on(contents[5:], "one").and_trained_on(contents[:10], "two")
    assert (record.contents == np.unique(contents)).all() and record.unknown == ("timm:x",)
    record = record.and_trained_on(None, "a\nb \udcff").and_trained_on(None, "timm:x")
    write_record(record, path)
    again = read_record(path)
    assert (again.contents == record.contents).all() and again.unknown == ("timm:x", "a\nb \udcff")
    before = digest_of_record(path)
    write_record(again.and_trained_on(contents[:3], "two"), path)
    assert digest_of_record(path) == before, "nothing new"
    write_record(again.and_trained_on(Shapes(1, seed=1).contents(), "two"), path)
    assert digest_of_record(path) != before
    path.unlink()
    path.mkdir()
    with pytest.raises(PatchloomError, match="trained_on.bin"):
        read_record(path)


def test_a_damaged_record_is_reported(tmp_path):
    images = draw_images(tmp_path / "images")
    run = pretrain(images, out=tmp_path / "run", **QUICK).folder
    content = bytearray((run / "trained_on.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (run / "trained_on.bin").write_bytes(content)
    with pytest.raises(
        PatchloomError, match="trained_on.bin is not what patchloom wrote .*: restore it from a copy, or"
    ):
        pretrain(images, from_run=str(run), out=tmp_path / "next", **QUICK)
    assert not (tmp_path / "next").exists()
