"""Tests of the pictures on a page: captions, and the budget of bytes."""

import base64
import io
import shutil

import numpy as np
import pytest
from PIL import Image

from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.report import pictures
from patchloom.report.load_run import load_run
from patchloom.report.pictures import collect_pictures, find_caption, webp


def opened(picture):
    kind, _, content = picture.uri.partition(",")
    assert kind == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def noise(path, width=600, height=500):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test_sheets_are_shown_with_captions(run):
    noise(run / "pictures" / "<script>.png")
    noise(run / "pictures" / "deep" / "depth.png")
    noise(run / "pictures-birds" / "recovered.png")
    ((*found,),), said = collect_pictures([load_run(run)])
    assert not said
    titles = [one.title for one in found]
    assert "<script>" in titles and "curves" not in " ".join(titles)
    assert titles[-1] == "Withheld patches and their reconstruction, of birds"
    assert {"Patches whose position was found", "Images reassembled from patches"} <= set(titles)
    for one in found:
        assert opened(one).size == (one.width, one.height) and one.alt
        assert one.caption or one.title == "<script>"


def test_many_pictures_become_smaller_and_then_fewer(run, monkeypatch):
    monkeypatch.setattr(pictures, "_STEPS", ((200, 85), (100, 60)))
    shutil.rmtree(run / "pictures")
    for i in range(6):
        noise(run / "pictures" / f"views-{i}.png", 200, 150)
    (many,), said = collect_pictures([load_run(run)], budget=60_000)
    assert sum(len(one.uri) for one in many) <= 60_000 and max(one.width for one in many) < 200 and not said
    (few,), said = collect_pictures([load_run(run)], budget=15_000)
    assert 0 < len(few) < len(many) and sum(len(one.uri) for one in few) <= 15_000
    assert said == [f"{len(many) - len(few)} of {len(many)} pictures are left out to keep the page small."]


def test_a_large_sheet_is_made_small_when_it_is_opened(run, monkeypatch):
    """All sheets are in memory at once while their quality is chosen."""
    seen = []
    monkeypatch.setattr(pictures, "_STEPS", ((200, 85), (100, 60)))
    monkeypatch.setattr(pictures, "webp", lambda image, *how: (seen.append(image.size), webp(image, *how))[1])
    noise(run / "pictures" / "views.png", 900, 300)
    collect_pictures([load_run(run)], budget=1000)
    assert (200, 67) in seen and max(width for width, _ in seen) == 200


def test_what_is_no_picture_is_named(run):
    (run / "pictures" / "broken.png").write_bytes(b"\x89PNG\r\n")
    _, said = collect_pictures([load_run(run)])
    assert len(said) == 1 and said[0].startswith("broken.png could not be shown (")


def test_a_run_without_pictures(run):
    for path in (run / "pictures").iterdir():
        path.unlink()
    (run / "pictures").rmdir()
    assert collect_pictures([load_run(run)]) == ([[]], [])


@pytest.mark.parametrize(("size", "shown"), [((400, 100), (200, 50)), ((100, 1600), (25, 400)), ((30, 20), (30, 20))])
def test_pictures_keep_their_shape(size, shown):
    assert webp(Image.new("RGB", size), 200, 80)[1:] == shown


def test_captions_are_of_the_kind_of_picture():
    assert find_caption("attention-3").title == "Attention of single patches (3)"
    assert find_caption("position_map-birds").title.startswith("Accuracy of predicted positions")
    assert find_caption("positions").title != find_caption("position_map").title
    assert find_caption("whatever") == ("whatever", "")
    heard = find_caption("nearest", modality_of(Sound()))
    assert "recording" in heard.text and "image" not in heard.text
