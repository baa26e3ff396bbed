"""Lines that fit the terminal: the most important parts stay longest."""

import pytest

from patchloom.display import duration
from patchloom.train.metrics import Line, LinePart, progress_line, round_duration, wrap_columns

MEASURED = ["reconstruction error 0.499 (mean colour 0.615, blurred copy 0.727)"]
MEASURED += ["reconstruction error 0.499 (blurred copy 0.727)", "reconstruction error 0.499"]
PACE = ("1,891 images/s", "1% waiting for data")
NOW = progress_line(10.5, 42, "loss 2.4360", MEASURED, ["2 min 48 s left", "3 min left"], PACE)


def test_the_whole_line_puts_the_time_left_first():
    assert str(NOW) == (
        "2 min 48 s left · epoch 10.5/42 · reconstruction error 0.499 (mean colour 0.615, blurred copy 0.727) · "
        "loss 2.4360 · 1,891 images/s · 1% waiting for data"
    )
    assert str(progress_line(0.0, 42, "", [], ["5 s left", "5 s left"], ("", ""))) == "5 s left · epoch 0.0/42"


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (135, "2 min 48 s left · epoch 10.5/42 · " + MEASURED[0] + " · loss 2.4360 · 1,891 images/s"),
        (115, "2 min 48 s left · epoch 10.5/42 · " + MEASURED[0] + " · loss 2.4360"),
        (96, "2 min 48 s left · epoch 10.5/42 · " + MEASURED[1] + " · loss 2.4360"),
        (79, "3 min left · epoch 10.5/42 · " + MEASURED[1]),
        (60, "3 min left · epoch 10.5/42 · " + MEASURED[2]),
        (50, "3 min left · 10.5/42 · " + MEASURED[2]),
        (30, "3 min left · 10.5/42"),
        (5, "3 min"),
    ],
)
def test_what_matters_least_goes_first(width, text):
    assert NOW.fit(width) == text


def test_it_fits_any_width():
    for width in range(0, 200):
        assert len(NOW.fit(width)) <= width
        if width >= 10:
            assert NOW.fit(width).startswith(("3 min left", "2 min 48 s left"))


def test_parts_give_way_in_their_order():
    one = Line((LinePart(("aaaa", "a", ""), (1, 3)), LinePart(("bbbb", "b"), (2,))))
    assert [one.fit(width) for width in (None, 11, 8, 5, 4, 1)] == [
        "aaaa · bbbb", "aaaa · bbbb", "a · bbbb", "a · b", "b", "b",
    ]  # fmt: skip


def test_prose_is_broken_between_words_and_numbers_stay_whole():
    text = "kNN (k=20, mean): 29.9 % [27.9, 31.9] against 11.0 % untrained and 17.5 % raw pixels on 2,000 test images."
    for width in range(30, 130):
        lines = wrap_columns(text, width).split("\n")
        assert all(len(one) <= width for one in lines)
        assert " ".join(one.strip() for one in lines) == text
        for whole in ("29.9 % [27.9, 31.9]", "11.0 %", "17.5 %"):
            assert any(whole in one for one in lines)
        assert all(one.startswith("  ") and one[2] != " " for one in lines[1:])


def test_a_table_goes_on_under_its_column_and_words_are_never_cut():
    text = "  compile              False        (unknown here: patchloom bench --compile true measures what it brings)"
    assert wrap_columns(text, 80) == (
        "  compile              False        (unknown here: patchloom bench --compile\n"
        "                                    true measures what it brings)"
    )
    assert wrap_columns("  " + "x" * 100 + " end", 80) == "  " + "x" * 100 + "\n    end"
    for short in ("", "  two  columns", "end"):
        assert wrap_columns(short, 80) == short


@pytest.mark.parametrize(
    ("seconds", "long", "short"),
    [
        (42.4, "42 s", "42 s"),
        (168, "2 min 48 s", "3 min"),
        (3599.9, "1 h 0 min", "1 h"),
        (18_600, "5 h 10 min", "5 h"),
        (40 * 86_400, "40 days", "960 h"),
    ],
)
def test_durations(seconds, long, short):
    assert (duration(seconds), round_duration(seconds)) == (long, short)
