import os

import pytest
from refusing import refused

from patchloom.data.sources.open import absolute_name, open_data
from patchloom.runs.folder import data_slug


@pytest.fixture
def folder(draw, tmp_path, monkeypatch):
    for name in ("p/1.png", "p/a/2.png", "q/frames_1.png", "q/frames_2.png", "q/other.png"):
        draw(name)
    draw("p/a/b/3.png").rename(tmp_path / "p/a/b/3.jpeg")
    (tmp_path / "p/notes.md").write_text("x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paths_of(data):
    train = open_data(data).train
    return sorted(os.path.relpath(train.describe(i)) for i in range(len(train)))


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("p/**/*.png", ["p/1.png", "p/a/2.png"]),
        ("p/**", ["p/1.png", "p/a/2.png", "p/a/b/3.jpeg"]),
        ("q/frames_*.png", ["q/frames_1.png", "q/frames_2.png"]),
        ("q/frames_[2-9].png", ["q/frames_2.png"]),
        ("q/frames_?.png", ["q/frames_1.png", "q/frames_2.png"]),
        ("{p,q}/*.png", ["p/1.png", "q/frames_1.png", "q/frames_2.png", "q/other.png"]),
        ("q/frames_{1,2}.png", ["q/frames_1.png", "q/frames_2.png"]),
        ("?", ["p/1.png", "p/a/2.png", "p/a/b/3.jpeg", "q/frames_1.png", "q/frames_2.png", "q/other.png"]),
    ],
)
def test_a_pattern_is_like_a_list_of_its_files(folder, pattern, files):
    data = open_data(pattern)
    assert paths_of(pattern) == files and data.train.labels is None and data.test is None
    assert paths_of(str(folder / pattern)) == files and data.train.name == pattern


def test_folders_that_links_reach_again_are_read_once(folder):
    (folder / "p" / "a" / "up").symlink_to(folder / "p")
    (folder / "again").symlink_to(folder / "q")
    assert paths_of("p/**/*.png") == ["p/1.png", "p/a/2.png"]
    assert len(paths_of("{q,again}/frames_*.png")) == 2


def test_notes_on_files_that_are_left_out(folder):
    data = open_data("p/*")
    assert paths_of("p/*") == ["p/1.png"]
    files, folders = data.notes
    assert "1 files" in files and "1 folders" in folders and "use **" in folders
    assert open_data("p/*.png").notes == ()
    for pattern, match in (("p/*.tif", "no file matches p/\\*.tif"), ("p/*.md", "1 paths and no image")):
        refused(pattern, match)


def test_a_pattern_expanded_by_a_shell(folder):
    words = ["q/frames_1.png", "q/frames_2.png"]
    assert paths_of(words) == words and open_data(words).train.name == "2 image files"
    assert paths_of(["q/frames_1.png", "p/1.png"]) == ["p/1.png", "q/frames_1.png"]
    assert paths_of(["q/frames_*.png", "p/a"]) == ["p/a/2.png", "p/a/b/3.jpeg", "q/frames_1.png", "q/frames_2.png"]
    assert paths_of(["q/frames_1.png", "p"]) == ["p/1.png", "p/a/2.png", "p/a/b/3.jpeg", "q/frames_1.png"]
    refused(["q/other.png", "gone.png", "away.png"], r"gone.png \(and 1 more of 3\) does not exist")
    refused("q/other.png", "single image")


def test_absolute_patterns(folder, draw, monkeypatch):
    draw("odd [dir]/1.png")
    kept = [absolute_name("q/frames_*.png"), absolute_name("p/**/*.png")]
    monkeypatch.chdir(folder / "odd [dir]")
    kept.append(absolute_name("*.png"))
    monkeypatch.chdir("/")
    assert [len(open_data(one).train) for one in kept] == [2, 2, 1]
    assert absolute_name(kept[2]) == kept[2] and absolute_name("~/x*.png").startswith(os.path.expanduser("~"))
    monkeypatch.chdir(folder)
    draw("r[1]/1.png")  # its name looks like a pattern
    assert paths_of("r[1]") == ["r[1]/1.png"] and absolute_name("r[1]") == str(folder / "r[1]")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("/x/photos/**/*.png", "photos"),
        ("/x/frames_*.jpg", "frames_"),
        ("/x/{a,b}/*.jpg", "x"),
        (["/x/a", "/x/b/"], "a-b"),
        ("/x/a,/x/b", "a-b"),
        (["/x/a", "shapes", "/x/c", "/x/d", "/x/e"], "a-shapes-c-and-2-more"),
        (["/x/y/1.png", "/x/y/2.png"], "y"),
        ("/x/m.csv@path=left", "m.csv"),
    ],
)
def test_names_of_run_folders(data, name):
    assert data_slug(data) == name
