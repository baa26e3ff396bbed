"""A run whose images are kept on the disc."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.files import cache_root
from patchloom.train.settings import Settings, resolve

SMALL = {"name": "nano", "embed_dim": 32, "depth": 1}
HOW = {"task": "mae", "model": SMALL, "epochs": 2, "img_size": 16, "batch_size": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without labels, so that no time goes into evaluation; one of them is broken."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(30):
        Image.fromarray(rng.integers(0, 256, (24 + i, 30, 3), dtype=np.uint8)).save(folder / f"{i:02}.jpg")
    (folder / "29.jpg").write_bytes(b"broken")
    return folder


def test_whole_images_train_the_same_encoder(photos, tmp_path, capsys):
    weights = []
    for name, more in {"none": {}, "whole": {"cache": "whole"}, "again": {"cache": "whole", "workers": 2}}.items():
        run = patchloom.pretrain(photos, out=tmp_path / name / "run", **HOW, **more)
        weights.append((run.folder / "encoder.safetensors").read_bytes())
        said = capsys.readouterr().out
        assert ("Decoding 30 images, to be kept in" in said) == (name == "whole")
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


@pytest.mark.parametrize("cache", [1, 0, -5, 95])
def test_fewer_pixels_than_are_trained_on_are_refused(cache):
    with pytest.raises(PatchloomError, match=f"--cache {cache} keeps too few pixels: give 96 or more, or whole"):
        Settings("x", img_size=(96, 64), cache=cache).check()


def test_fewer_pixels_than_auto_chooses_are_refused():
    from patchloom.data import Stats

    stats = Stats((0.5,) * 3, (0.2,) * 3, 80, 80, 100, [])
    asked = Settings("x", {"name": "mae"}, {"name": "nano"}, device="cpu", cache=79)
    with pytest.raises(PatchloomError, match="give 80 or more"):
        resolve(asked, 900, 3, stats)
