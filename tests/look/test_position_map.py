"""Tests of the picture of positions: counts, examples and unusual grids."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.evaluate.protocols.positions import choose_examples, offsets_of
from patchloom.look.position_map import Example, cell_height, draw_position_map, times_as_often
from patchloom.questions.positions import PositionPrediction

GRID = (2, 3)


def placed(guesses: list[list[int]], sure: float = 5.0) -> PositionPrediction:
    """Return answers for patches 0, 1, ... of each image; -1 is a position that was given."""
    guess = torch.tensor(guesses)
    logits = sure * torch.nn.functional.one_hot(guess.clamp(min=0), 6).float()
    return PositionPrediction(torch.arange(guess.shape[1]).expand_as(guess), guess >= 0, logits)


def test_offsets_are_from_the_patch_to_where_it_was_put():
    off = offsets_of(placed([[0, 0, -1, 3, 2, 5]]), GRID)
    expected = torch.zeros(3, 5)
    expected[1, 2] = 3  # found: patches 0, 3 and 5
    expected[1, 1] = 1  # patch 1 at place 0: one to the left
    expected[0, 3] = 1  # patch 4 (second row, middle) at place 2 (first row, right)
    assert torch.equal(off, expected.double())
    drawn = np.random.default_rng(0).integers(0, 6, (40_000, 6)).tolist()
    often = times_as_often(offsets_of(placed(drawn), GRID).numpy(), GRID)
    assert np.isnan(often[1, 2]) and np.nanmax(np.abs(often - 1)) < 0.05
    few = times_as_often(offsets_of(placed([[1, 1, 1, 1, 1, 1]]), GRID).numpy(), GRID)
    assert np.isnan(few).all()  # of five wrong ones nothing is said


def test_examples_are_of_each_kind_and_of_different_images():
    logits = torch.zeros(3, 2, 6)
    logits[0, 0, 0], logits[0, 1, 5] = 9.0, 7.0  # sure and right; sure and wrong
    logits[1, 0, 2] = logits[1, 0, 3] = 9.0  # between two places
    logits[2, 0, 4] = 20.0  # surest of all, but its position was given
    dropped = torch.ones(3, 2, dtype=torch.bool)
    dropped[2] = False
    pictures = torch.arange(3).view(3, 1, 1, 1).expand(3, 4, 6, 3).byte()
    found = dict(
        choose_examples(PositionPrediction(torch.tensor([[0, 1]] * 3), dropped, logits), pictures, GRID, each=2)
    )
    assert list(found) == ["sure, and right", "between two places", "sure, and wrong"]
    (right, *_), (between, *_), (wrong, *_) = found.values()
    assert (right.place, right.guess, right.picture[0, 0, 0]) == (0, 0, 0)
    assert (between.place, between.guess) == (0, 2) and between.likely[0, 2] == pytest.approx(between.likely[1, 0])
    assert (wrong.place, wrong.guess, wrong.picture[0, 0, 0]) == (1, 5, 0)
    assert all(one.picture[0, 0, 0] != 2 for some in found.values() for one in some)
    assert all(len({int(one.picture[0, 0, 0]) for one in some}) == len(some) <= 2 for some in found.values())


def draw(out: Path, **changes) -> np.ndarray:
    likely = np.full((2, 3), 0.1)
    likely[1, 2] = 0.5
    one = Example(np.full((20, 30, 3), 90, np.uint8), 0, likely)
    content = {"shares": np.full((2, 3), 0.25), "offsets": np.ones((3, 5)), "examples": [("some", [one, one])]}
    content |= {"title": "run: 25 %", "caption": "words " * 60} | changes
    assert draw_position_map(**content, out=out) == out
    return np.asarray(Image.open(out).convert("RGB")).astype(int)


def test_the_patch_and_the_guess_are_framed(tmp_path):
    page = draw(tmp_path / "new" / "map.png")
    for colour in ((0, 160, 224), (213, 94, 0)):
        assert (np.abs(page - colour).max(-1) < 8).sum() > 200, colour


def test_nothing_to_show_is_drawn_too(tmp_path):
    nothing = draw(tmp_path / "map.png", shares=np.full((2, 3), np.nan), offsets=np.zeros((3, 5)), examples=[("a", [])])
    assert (np.abs(nothing - (217, 217, 217)).max(-1) < 3).sum() > 1000  # grey


def test_maps_of_a_row_are_no_stripes_and_others_have_square_places():
    assert [cell_height(grid) for grid in ((4, 6), (8, 8), (4, 16), (16, 4))] == [1] * 4
    assert (cell_height((1, 98)), cell_height((98, 1))) == pytest.approx((98 / 4, 4 / 98))
