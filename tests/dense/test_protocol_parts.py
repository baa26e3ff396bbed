"""Training, validation and test images."""

from dataclasses import replace
from typing import Any

import numpy as np
from refusing import refusal
from scenes import Squares

from patchloom.dense.annotations.base import AnnotatedData
from patchloom.dense.recipes import SEGMENT
from patchloom.dense.study import annotated_parts, best_and_worst
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.runs import held_out
from patchloom.runs.training_set import no_record


def numbers(images: Squares) -> list[int]:
    """Which of the drawn images they are."""
    found = list(range(len(images)))
    while hasattr(images, "whole"):
        found, images = [int(images.indices[i]) for i in found], images.whole
    return found


def parted(train: int | Squares, validation=None, test=None, run=None, **settings: Any) -> Parts:
    images = Squares(train) if isinstance(train, int) else train
    return annotated_parts(AnnotatedData(images, validation, test), EvalSettings(**settings), "Note.", run)


def trained_on(parts: Parts, validation: float, seed: int = 0) -> tuple[Squares, Squares | None]:
    recipe = replace(SEGMENT["small"], validation=validation).settled(len(parts.train), "cpu", 0, 16, 4, 32)
    return parts.trained_on(recipe, EvalSettings(seed=seed))


def test_parts_of_the_data_are_used() -> None:
    parts = parted(20, Squares(5, seed=1), Squares(6, seed=2))
    train, held = trained_on(parts, 0.15)
    assert (len(train), len(held), len(parts.test)) == (20, 5, 6)
    assert trained_on(parts, 0.0) == (parts.train, None)  # the last weights are asked for
    assert parts.story == "Note. The data brings its own validation and test images."


def test_a_missing_test_is_a_fifth_and_no_image_is_in_two_parts() -> None:
    parts = parted(40, seed=3)
    train, held = trained_on(parts, 0.25, 3)
    found = [set(numbers(one)) for one in (train, held, parts.test)]
    assert list(map(len, found)) == [24, 8, 8] and len(set.union(*found)) == 40
    assert "a fifth was split off for the test (seed 3)" in parts.story
    assert set(numbers(parted(40, seed=4).test)) != found[2]


def test_few_labels_are_few_for_validation_too() -> None:
    given = 20, Squares(5, seed=1), Squares(6, seed=2)
    parts = parted(*given, max_train=10)
    train, held = trained_on(parts, 0.2)
    assert (len(train), len(held), len(parts.test)) == (8, 2, 6) and set(numbers(held)).isdisjoint(numbers(train))
    assert "only 10 of 20 training images" in parts.story and "none of the data's own validation images" in parts.story
    assert len(parted(*given, max_train=20).train) == 20
    assert "use --validation 0" in refusal(trained_on, parted(1, None, Squares(2)), 0.15)


def test_groups_stay_whole_and_the_story_says_so() -> None:
    squares, own = Squares(20), Squares(10)
    squares.images.place = lambda i: f"film{i // 5}/{i}.png"
    own.images.place = lambda i: f"film{i // 5 + 7}/{i}.png"
    parts = parted(squares, group=r"film\d")
    films = [{i // 5 for i in numbers(part)} for part in (parts.train, parts.test)]
    assert not films[0] & films[1] and "whole groups" in parts.story and "intervals are over groups" in parts.story
    parts = parted(squares, None, own, group=r"film\d")
    assert parts.test.images.groups.tolist() == [0] * 5 + [1] * 5 and "Intervals are over its groups." in parts.story


def test_copies_of_test_images_are_left_out_or_counted() -> None:
    few = parted(20, None, Squares(6), max_train=10)  # squares of one seed are the same images
    count = len({*numbers(few.train)} & {*range(6)})
    assert 0 < count < 6 and f" {count} of 6 test images are exact copies" in few.story  # of the images that are used
    whole = Squares(40)  # 10 images, four times each
    contents = whole.images.contents
    whole.images.contents = lambda chosen=None: contents(np.arange(40) % 10 if chosen is None else chosen % 10)
    parts = parted(whole)
    left = 40 - len(parts.train) - len(parts.test)
    assert left and f"{left} exact copies of test images were left out of training" in parts.story


def test_test_images_of_the_pre_training_are_counted(monkeypatch) -> None:
    test = Squares(6, seed=1)
    seen = no_record().and_trained_on(test.images.contents(np.arange(4)), "photos")
    monkeypatch.setattr(held_out, "record_of", lambda source: {"run": seen}.get(source))
    assert "4 of 6 test images were in pre-training" in parted(20, None, test, run="run").story
    assert "pre-training" not in parted(20, None, test, run="other").story


def test_the_two_best_and_the_two_worst_images_are_drawn() -> None:
    assert best_and_worst([0.5, float("nan"), 0.9, 0.1, 0.7, 0.3]) == [2, 4, 5, 3]
    assert best_and_worst([0.5, 0.9, float("nan")]) == [1, 0]
