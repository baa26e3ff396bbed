"""Pace of the last minute, by a clock that only advances when seconds are added."""

import pytest

from patchloom.pace import Pace


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def walk(pace, clock, seconds):
    for each in seconds:
        clock.now += each
        pace.advance()


def test_slow_first_updates_do_not_count(clock):
    pace = Pace(1000, clock=clock)
    assert pace.left() is None and pace.each() == 0
    walk(pace, clock, [3.0])
    assert pace.left() == pytest.approx(3.0 * 999), "better than nothing"
    walk(pace, clock, [2.0, 1.5, 1.0] + [0.5] * 16)
    assert pace.left() == pytest.approx(0.5 * 980), "the mean since the start would say 825 s"


def test_an_earlier_pace_is_believed_until_there_is_another(clock):
    pace = Pace(1000, 400, before=0.5, clock=clock)
    assert pace.left() == pytest.approx(300.0)
    walk(pace, clock, [3.0, 1.0, 1.0])
    assert pace.left() == pytest.approx(0.5 * 597)
    walk(pace, clock, [0.25] * 17)
    assert pace.left() == pytest.approx(0.25 * 580)
    pace = Pace(1000, before=0.1, clock=clock)  # on a quiet machine
    walk(pace, clock, [6.0] * 3)
    assert pace.left() == pytest.approx(6.0 * 997), "not for long"


def test_the_pace_is_that_of_the_last_minute(clock):
    pace = Pace(100_000, clock=clock)
    walk(pace, clock, [0.1] * 3000 + [0.4] * 200)
    assert pace.each() == pytest.approx(0.4, rel=0.01)
    walk(pace, clock, [0.1] * 300)
    assert pace.each() == pytest.approx(60 / (300 + 30 / 0.4), rel=0.02), "half a minute of each"
    slow, quick = Pace(100, clock=clock), Pace(10**6, clock=clock)
    walk(slow, clock, [80.0] * 6 + [200.0])
    assert slow.each() == pytest.approx((3 * 80 + 200) / 4), "never that of one update"
    walk(quick, clock, [0.001] * 20_000)
    assert quick.each() == pytest.approx(0.001, rel=0.01) and len(quick._marks) < 300, "not all are kept"


def test_what_comes_between_is_left_out_and_waiting_is_of_late(clock):
    pace = Pace(1000, clock=clock)
    walk(pace, clock, [1.0] * 20)
    clock.now += 100  # a validation
    pace.resume()
    for _ in range(120):
        with pace.waits():
            clock.now += 0.5
        walk(pace, clock, [0.5])
    assert pace.each() == pytest.approx(1.0) and pace.waiting() == pytest.approx(0.5)


def test_a_program_that_was_suspended_goes_on_at_its_pace_and_slow_steps_are_no_gap(clock):
    pace = Pace(1000, clock=clock)
    walk(pace, clock, [1.0] * 30 + [8 * 3600.0] + [1.0] * 5)
    assert pace.each() == pytest.approx(1.0) and pace.left() == pytest.approx(964)
    pace = Pace(1000, clock=clock)
    walk(pace, clock, [0.5] * 100 + [20.0] * 4)
    assert pace.each() > 10
    walk(pace, clock, [20.0] * 4)
    assert pace.each() == pytest.approx(20.0)


def test_units_of_an_update_may_be_many(clock):
    pace = Pace(1000, 100, clock=clock)
    for done in (200, 300, 500):
        clock.now += (done - pace.done) / 100
        pace.update(done)
    assert pace.left() == pytest.approx(5.0)
    pace.total = 600  # shorter than planned
    assert pace.left() == pytest.approx(1.0)
