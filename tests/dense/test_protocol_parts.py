"""Training, validation and test images."""

import numpy as np
import pytest
from scenes import Squares

from patchloom.dense.annotations.base import AnnotatedData
from patchloom.dense.protocol import dense_parts
from patchloom.errors import PatchloomError
from patchloom.evaluate.settings import EvalSettings
from patchloom.runs import held_out
from patchloom.runs.training_set import no_record


def numbers(images: Squares) -> list[int]:
    """Which of the drawn images they are."""
    found = list(range(len(images)))
    while hasattr(images, "whole"):
        found, images = [int(images.indices[i]) for i in found], images.whole
    return found


def test_what_the_data_brings_is_taken() -> None:
    parts = dense_parts(AnnotatedData(Squares(20), Squares(5, seed=1), Squares(6, seed=2)), EvalSettings())
    train, held = parts.trained_on(0.15, 0)
    assert (len(train), len(held), len(parts.test)) == (20, 5, 6)
    assert parts.trained_on(0.0, 0) == (parts.train, None)  # the last weights are asked for
    assert parts.story == "The data brings its own validation and test images."


def test_without_a_test_a_fifth_is_split_off_and_nothing_is_in_two_parts() -> None:
    parts = dense_parts(AnnotatedData(Squares(40), None, None), EvalSettings(seed=3), "Note.")
    train, held = parts.trained_on(0.25, 3)
    found = [set(numbers(one)) for one in (train, held, parts.test)]
    assert list(map(len, found)) == [24, 8, 8] and len(set.union(*found)) == 40
    assert "a fifth was split off for the test (seed 3)" in parts.story and parts.story.startswith("Note. ")
    others = dense_parts(AnnotatedData(Squares(40), None, None), EvalSettings(seed=4))
    assert set(numbers(others.test)) != found[2]


def test_few_labels_are_few_for_validation_too() -> None:
    opened = AnnotatedData(Squares(20), Squares(5, seed=1), Squares(6, seed=2))
    parts = dense_parts(opened, EvalSettings(max_train=10))
    train, held = parts.trained_on(0.2, 0)
    assert (len(train), len(held), len(parts.test)) == (8, 2, 6) and set(numbers(held)).isdisjoint(numbers(train))
    assert "Only 10 of 20 training images were used and, for as few labels as said, none of its vali" in parts.story
    assert len(dense_parts(opened, EvalSettings(max_train=20)).train) == 20


def test_one_image_cannot_be_split() -> None:
    parts = dense_parts(AnnotatedData(Squares(1), None, Squares(2)), EvalSettings())
    with pytest.raises(PatchloomError, match="a single training image cannot be split: use --validation 0"):
        parts.trained_on(0.15, 0)


def test_groups_stay_whole_and_the_story_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = Squares(20)
    squares.images.place = lambda i: f"film{i // 5}/{i}.png"
    parts = dense_parts(AnnotatedData(squares, None, None), EvalSettings(group=r"film\d"))
    films = [{i // 5 for i in numbers(part)} for part in (parts.train, parts.test)]
    assert not films[0] & films[1] and "a fifth was split off for the test in whole groups" in parts.story
    assert "intervals are over groups" in parts.story
    own = Squares(10)
    own.images.place = lambda i: f"film{i // 5 + 7}/{i}.png"
    parts = dense_parts(AnnotatedData(squares, None, own), EvalSettings(group=r"film\d"))
    assert parts.test.images.groups.tolist() == [0] * 5 + [1] * 5 and "Intervals are over its groups." in parts.story


def test_copies_of_test_images_are_told() -> None:
    """Squares of one seed are the same images."""
    said = "6 of 6 test images are exact copies of training images"
    assert said in dense_parts(AnnotatedData(Squares(20), None, Squares(6)), EvalSettings()).story
    few = dense_parts(AnnotatedData(Squares(20), None, Squares(6)), EvalSettings(max_train=10))
    count = len({*numbers(few.train)} & {*range(6)})
    assert 0 < count < 6 and f" {count} of 6 test images are exact copies" in few.story  # of the images that are used

    whole = Squares(40)  # 10 images, four times each
    contents = whole.images.contents
    whole.images.contents = lambda chosen=None: contents(np.arange(40) % 10 if chosen is None else chosen % 10)
    parts = dense_parts(AnnotatedData(whole, None, None), EvalSettings())
    left = 40 - len(parts.train) - len(parts.test)
    assert left and f"Nothing was trained on {left} exact copies of test images" in parts.story

    unknown = Squares(20)
    unknown.images.contents = lambda chosen=None: None
    assert "were not looked for" in dense_parts(AnnotatedData(unknown, None, Squares(6)), EvalSettings()).story


def test_test_images_that_were_in_pre_training_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    test = Squares(6, seed=1)
    seen = no_record().and_trained_on(test.images.contents(np.arange(4)), "photos")
    monkeypatch.setattr(held_out, "record_of", lambda source: {"run": seen}.get(source))
    data = AnnotatedData(Squares(20), None, test)
    assert "4 of 6 test images were in pre-training" in dense_parts(data, EvalSettings(), run="run").story
    assert "pre-training" not in dense_parts(data, EvalSettings(), run="other").story
