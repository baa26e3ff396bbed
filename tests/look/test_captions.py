"""Tests of the captions beside pictures, which strangers may have written."""

import json

import pytest

from patchloom.look.captions import Caption, read_caption, write_picture


def test_a_caption_comes_back_and_is_replaced_with_its_picture(tmp_path):
    picture = tmp_path / "new" / "position_map-birds.v2.png"
    for caption in (Caption("First", "Look here.", 3), Caption("Second é", "", 0, ("a", "b"))):
        assert write_picture(picture, b"png", caption) == picture
        assert read_caption(picture) == caption
    assert sorted(file.suffix for file in picture.parent.iterdir()) == [".json", ".png"]


@pytest.mark.parametrize("text", [None, "", "{", "[" * 10_000, "null", '["a", "b", 3]', '{"title": "a"}', " " * 40_000])
def test_without_a_valid_caption_the_title_is_the_files_name(text, tmp_path):
    if text is not None:
        (tmp_path / "a.b.caption.json").write_text(text)
    assert read_caption(tmp_path / "a.b.png").title == "a.b"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("title", ""), ("title", 3), ("title", "\ud800"), ("text", None), ("text", "b" * 2001), ("order", True)),
        *(("order", 0.5), ("pairs", 3), ("pairs", ["\ud800"]), ("more", 1)),
    ],
)
def test_values_of_a_strangers_caption_are_checked(name, value, tmp_path):
    caption = Caption("theirs", "Look.", 3)._asdict()
    for given, title in ((caption, "theirs"), (caption | {name: value}, "a")):
        (tmp_path / "a.caption.json").write_text(json.dumps(given))
        assert read_caption(tmp_path / "a.png").title == title
