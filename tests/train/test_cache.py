"""A run whose images are cached on the disc."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.runs.settings import Settings
from patchloom.system.files import cache_root

SMALL = {"name": "nano", "embed_dim": 32, "depth": 1}
HOW = {"task": "mae", "model": SMALL, "epochs": 2, "img_size": 16, "batch_size": 8, "device": "cpu"}
HOW |= {"precision": "float32", "attention": "explicit", "threads": 1}  # else all would be measured for each cache


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unlabelled images, which need no evaluation; one is broken."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(30):
        Image.fromarray(rng.integers(0, 256, (24 + i, 30, 3), dtype=np.uint8)).save(folder / f"{i:02}.jpg")
    (folder / "29.jpg").write_bytes(b"broken")
    return folder


def test_whole_images_train_the_same_encoder(photos, tmp_path, capsys):
    weights = []
    for name, more in {"none": {}, "whole": {"cache": "whole"}, "again": {"cache": "whole", "workers": 2}}.items():
        run = patchloom.pretrain(photos, out=tmp_path / name / "run", randaugment=9.0, **HOW, **more)
        weights.append((run.folder / "encoder.safetensors").read_bytes())
        said = capsys.readouterr().out
        assert ("Decoding 30 images, to be cached in" in said) == (name == "whole")
        assert (run.folder / "unreadable.txt").read_text().split() == [str(photos / "29.jpg")]
    assert weights[0] == weights[1] == weights[2]


def test_reduced_images_change_what_is_seen_but_not_the_measures_at_the_start(photos, tmp_path):
    first, last = [], []
    for cache in ("none", 20):
        run = patchloom.pretrain(photos, out=tmp_path / str(cache) / "run", cache=cache, **HOW)
        rows = (run.folder / "metrics.csv").read_text().splitlines()
        first.append(rows[1]), last.append((run.folder / "encoder.safetensors").read_bytes())
    assert last[0] != last[1]
    without_time = [[value for value in row.split(",") if value][:6] for row in first]
    assert without_time[0] == without_time[1]


def test_native_crops_train_another_encoder_and_are_measured_at_their_scale(photos, tmp_path):
    first, last = [], []
    for scale in (0.2, "native"):
        run = patchloom.pretrain(photos, out=tmp_path / str(scale) / "run", crop_scale=scale, **HOW)
        rows = (run.folder / "metrics.csv").read_text().splitlines()
        first.append(rows[1].split(",")[:6]), last.append((run.folder / "encoder.safetensors").read_bytes())
    assert f"crop_scale: {scale}" in (run.folder / "config.yaml").read_text()
    assert last[0] != last[1] and first[0] != first[1]
    assert patchloom.pretrain(photos, out=run.folder, crop_scale="native", **HOW).folder == run.folder


def test_no_room_ends_before_the_run_begins(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    out = tmp_path / "run"
    words = ["pretrain", str(photos), "--img_size", "16", "--model", "nano", "--cache", "whole", "--out", str(out)]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"patchloom: {cache_root() / 'images'}") and not out.exists()


def test_images_in_memory_are_refused(tmp_path, capsys):
    assert main(["pretrain", "shapes:40", "--cache", "whole", "--out", str(tmp_path / "run")]) == 2
    assert "are in memory already: leave out --cache" in capsys.readouterr().err


ZOOMED = {"name": "restore"}  # its canvas is 10/7 of the image: 22 for 16
BENT = {"name": "restore", "degradation": "fisheye", "canvas": 20, "mask_ratio": 0.5}
ENLARGED = {"name": "restore", "scale": 0.714}  # crops of the usual size


@pytest.mark.parametrize(
    ("task", "size", "needed"),
    [("mae", 16, 16), ("mae", "auto", 24), ("mae", (24, 16), 24), ("extrema", 16, 16)]
    + [(ZOOMED, 16, 22), (ZOOMED, (16, 32), 44), (BENT, 16, 20), (ENLARGED, 16, 16)],
)
def test_fewer_pixels_than_the_tasks_crops_have_are_refused(photos, tmp_path, cache_in, task, size, needed):
    """The size that the message proposes is the smallest that enlarges no crop."""
    cache_in(tmp_path / "cache")
    folder = alike(photos, tmp_path / "photos") if size == "auto" else photos
    how = HOW | {"task": task, "img_size": size, "patch_size": 4, "epochs": 1, "out": tmp_path / "run"}
    for cache in (needed - 1, -5):
        with pytest.raises(PatchloomError, match=rf"--cache {cache} keeps too few pixels.*: give {needed} or more, or"):
            patchloom.pretrain(folder, cache=cache, **how)
    assert not (tmp_path / "run").exists() and not (cache_root() / "images").exists()
    patchloom.pretrain(folder, cache=needed, **how)
    assert (tmp_path / "run" / "encoder.safetensors").exists()


def alike(photos: Path, folder: Path) -> Path:
    """Images of 24 x 30 pixels."""
    folder.mkdir()
    for path in sorted(photos.glob("*.jpg"))[:20]:
        Image.open(path).crop((0, 0, 30, 24)).save(folder / path.name)
    return folder


def test_a_run_of_an_earlier_version_goes_on(photos, tmp_path, monkeypatch):
    """A cache with fewer pixels than the task's crops is not refused for a run that has begun."""
    how = HOW | {"task": ZOOMED, "patch_size": 4, "cache": 17, "out": tmp_path / "run"}
    with monkeypatch.context() as earlier:
        earlier.setattr(Settings, "check_cache", lambda *_: None)
        whole = patchloom.pretrain(photos, **how).folder
    (whole / "summary.txt").unlink()
    assert patchloom.pretrain(photos, **how).summary
