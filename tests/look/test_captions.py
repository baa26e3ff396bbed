"""Tests of the captions beside pictures, which strangers may have written."""

import json

import pytest

from patchloom.look.captions import Caption, read_caption, write_picture


def test_a_caption_comes_back_and_is_replaced_with_its_picture(tmp_path):
    picture = tmp_path / "new" / "position_map-birds.v2.png"
    for caption in (Caption("First", "Look here.", 3), Caption("Second é", "", 0)):
        assert write_picture(picture, b"png", caption) == picture
        assert read_caption(picture) == caption
    assert sorted(file.suffix for file in picture.parent.iterdir()) == [".json", ".png"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[" * 10_000, "3", "null", '["a", "b", 3]', '{"title": "a", "text": "b"}', "\x00", " " * 40_000),
        *(
            json.dumps({"title": "a", "text": "b", "order": 3} | wrong)
            for wrong in (
                *({"title": 3}, {"title": ""}, {"title": "a" * 201}, {"title": "a\nb"}, {"title": "\ud800"}),
                *({"text": None}, {"text": "b" * 2001}, {"text": "\u202eb"}, {"order": True}, {"order": 0.5}),
                *({"order": "3"}, {"more": 1}),
            )
        ),
    ],
)
def test_without_a_valid_caption_the_title_is_the_files_name(text, tmp_path):
    (tmp_path / "a.b.caption.json").write_text(text)
    found = read_caption(tmp_path / "a.b.png")
    assert found[:2] == ("a.b", "") and found.order > 300  # after all others


def test_links_and_missing_captions_are_no_captions(tmp_path):
    write_picture(tmp_path / "a.png", b"", Caption("secret", "", 0))
    (tmp_path / "b.caption.json").symlink_to(tmp_path / "a.caption.json")
    assert [read_caption(tmp_path / f"{name}.png").title for name in "bc"] == ["b", "c"]
