"""The plan of a training by the clock, from its pace."""

import pytest

from patchloom.schedules import cosine_rate
from patchloom.train.clock import Piece, is_due, plan_anew, points_passed


def test_a_plan_that_stays_is_the_usual_schedule():
    piece = Piece(0, 0.0, 40)
    for step in range(40):
        assert piece.at(step) == step / 40 and piece.rate(step, 4, 1e-3) == cosine_rate(step, 40, 4, 1e-3)


def test_the_progress_is_that_of_the_time():
    """Three steps were planned and take 1 s instead of 83: after the first, 239 of 240 s are left."""
    piece = plan_anew(Piece(0, 0.0, 3), 1, 1 / 240, 239.0, 1.0, 1)
    assert piece == Piece(1, 1 / 240, 240) and piece.at(1) == 1 / 240 and piece.at(240) == 1
    rates = [piece.rate(step, 24, 1e-3) for step in range(1, 240)]
    assert max(rates) == pytest.approx(1e-3, rel=0.01) and rates[0] < 1e-4 and rates[-1] < 1e-6
    slower = plan_anew(piece, 120, 0.75, 60.0, 2.0, 1)
    assert slower == Piece(120, 0.75, 150) and slower.at(135) == 0.875


def test_small_changes_and_an_unknown_pace_keep_the_plan():
    piece = Piece(0, 0.0, 1000)
    assert plan_anew(piece, 100, 0.1, 90.0, 0.0, 1) == piece
    assert plan_anew(piece, 100, 0.1, 90.0, 0.098, 1) == piece
    assert plan_anew(piece, 100, 0.1, 90.0, 0.05, 1).steps == 1900
    assert plan_anew(piece, 1000, 1.3, -30.0, 0.1, 1) == plan_anew(piece, 1000, 0.9, -1.0, 0.1, 1) == piece  # it ended
    assert plan_anew(piece, 900, 1.2, -20.0, 0.1, 4).steps == 904  # over time: one more update, with its measure


def test_it_is_due_at_fixed_points_of_time_or_progress():
    assert not is_due(0, 0.01, 0.02) and is_due(0, 0.01, 0.04) and is_due(0, 0.04, 0.01)
    passed = points_passed(0.26, 0.1)
    assert passed == 4 and not is_due(passed, 0.3, 0.4) and is_due(passed, 0.3, 0.5)
    assert is_due(9, 1.0, 0.98) and is_due(9, 0.8, 1.0) and not is_due(9, 0.99, 1.0) and not is_due(9, 1.01, 1.0)
