"""A kept list of a folder is used while the folder is the same, and never longer."""

import os
import time
from pathlib import Path

import pytest
from PIL import Image

from patchloom.data.sources import scandir as folder_file
from patchloom.data.sources.open import open_data
from patchloom.data.sources.scandir import images_in


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(folder_file, "_WORTH_CACHING", 3)


@pytest.fixture
def walks(monkeypatch):
    """How often a folder was really listed."""
    seen, walk = [], folder_file._walk
    monkeypatch.setattr(folder_file, "_walk", lambda *what: seen.append(what) or walk(*what))
    return seen


@pytest.fixture
def folder(tmp_path):
    for name in ("a/1.png", "a/ü.jpg", "b/c/2.png", "b/c/\udcff.png", "b/text.txt", ".hidden/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    age(tmp_path / "photos")
    return tmp_path / "photos"


def age(root):
    """Let every folder look as if it had last changed a minute ago."""
    for path, _, _ in os.walk(root):
        os.utime(path, (time.time() - 60,) * 2)


PATHS = ["a/1.png", "a/ü.jpg", "b/c/2.png", "b/c/\udcff.png"]


def test_listed_once(folder, walks):
    for _ in range(3):
        assert list(images_in(folder, "photos")) == PATHS
    assert len(walks) == 1
    assert images_in(folder, "photos")[3] == PATHS[3]


@pytest.mark.parametrize("change", ["add", "remove", "rename", "add folder", "deep", "replace folder", "new link"])
def test_listed_again_once_anything_changed(change, folder, walks, tmp_path):
    images_in(folder, "photos")
    match change:
        case "add":
            (folder / "a" / "9.png").write_bytes(b"")
        case "remove":
            (folder / "a" / "1.png").unlink()
        case "rename":
            (folder / "a" / "1.png").rename(folder / "a" / "0.png")
        case "add folder":
            (folder / "a" / "new").mkdir()
            (folder / "a" / "new" / "1.png").write_bytes(b"")
        case "deep":
            (folder / "b" / "c" / "9.png").write_bytes(b"")
        case "replace folder":
            other = tmp_path / "other"
            other.mkdir()
            (other / "x.png").write_bytes(b"")
            (folder / "a").rename(tmp_path / "old")
            other.rename(folder / "a")
        case "new link":
            (folder / "b" / "link.png").symlink_to(folder / "a" / "1.png")
    wanted = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix in (".png", ".jpg"))
    wanted = [path for path in wanted if not path.startswith(".")]
    assert list(images_in(folder, "photos")) == wanted and len(walks) == 2


def test_a_folder_that_has_only_just_changed_is_not_kept(folder, walks):
    os.utime(folder / "a")
    for _ in range(2):
        images_in(folder, "photos")
    assert len(walks) == 2


def test_other_file_systems_and_small_folders_are_not_kept(folder, walks, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(folder_file, "_TRUSTED", {"fuse.s3fs"})
        images_in(folder, "photos")
    with monkeypatch.context() as patch:
        patch.setattr(folder_file, "_WORTH_CACHING", 5)
        images_in(folder, "photos")
    assert len(walks) == 2
    assert not list((Path(os.environ["XDG_CACHE_HOME"]) / "patchloom").glob("listings/*"))


@pytest.mark.parametrize("keep", [0, 7, 16, 60, -1])
def test_a_damaged_list_is_made_again(keep, folder, walks):
    images_in(folder, "photos")
    (kept,) = (Path(os.environ["XDG_CACHE_HOME"]) / "patchloom" / "listings").iterdir()
    kept.write_bytes(kept.read_bytes()[:keep])
    assert list(images_in(folder, "photos")) == PATHS and len(walks) == 2


@pytest.mark.parametrize("split", ["", "train/"])
@pytest.mark.parametrize("files", [("requested.yaml", "config.yaml"), ("compare.yaml", "comparison.csv")])
def test_pictures_of_a_run_are_no_data(tmp_path, split, files):
    for path in ("a.png", f"{split}b.png", "test/c.png" if split else "c.png", "runs/own/pictures/1.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / path)
    before = open_data(tmp_path)
    for file in files:
        assert open_data(tmp_path).notes == before.notes  # one of the two files alone is no run
        (tmp_path / "runs" / "own" / file).write_text("")
    after = open_data(tmp_path)
    assert len(after.train) == (1 if split else 3)
    assert any("run" in note and "runs/own" in note and note.startswith("1 file") for note in after.notes)
    assert not any(after.train.describe(i).endswith("1.png") for i in range(len(after.train)))
    assert len(open_data(tmp_path / "runs" / "own").train) == 1  # named itself, it is data
