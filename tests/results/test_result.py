"""A result is written in its unit, and read back from files that anybody may have written."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchloom.results.claims import Difference
from patchloom.results.result import Baseline, Result, number_of, text_of

SHARE = Result("share of the way", 0.4, 0.3, 0.5, 50, digits=0)
CHANCE = Baseline("chance", 0.1, SHARE, True, True)
AGAINST = (Difference("untrained", 0.2, 0.1, 0.3, 50, 3, True, constant="cat"),)
SETTINGS = {"k": 20, "pooling": "mean", "blr": 1e-3, "ratio": [0.1, None]}
WHOLE = Result("accuracy", 0.46, 0.4, 0.5, 50, "mine", "knn", SETTINGS, data="digits", fingerprint="f" * 16, seed=3)
WHOLE = replace(WHOLE, baselines=(CHANCE,), against=AGAINST, also={"rank": 3.5}, date="2026-11-27T10:00:00+00:00")

words, numbers = st.text(st.characters(categories=("L", "N", "P", "Zs")), max_size=20), st.floats(-1e9, 1e9)
plain = st.recursive(st.none() | st.booleans() | st.integers(-(10**9), 10**9) | numbers | words, st.lists, max_leaves=3)


@st.composite
def results(draw: st.DrawFn) -> Result:
    value, reach = draw(numbers), draw(st.floats(0, 1e9) | st.just(math.inf))
    return Result(
        draw(words), value, value - reach, value + reach, draw(st.integers(0, 10**9)), draw(words), draw(words),
        draw(st.dictionaries(words, plain, max_size=3)), draw(st.sampled_from(["%", "", "patches"])),
        draw(st.none() | st.integers(0, 6)), draw(st.sampled_from(["images", "recordings"])),
        seed=draw(st.integers(0, 9)), quoted=draw(st.booleans()), higher_is_better=draw(st.booleans()),
        also=draw(st.dictionaries(words, numbers)),
        baselines=draw(st.sampled_from([(), (CHANCE,)])), against=draw(st.sampled_from([(), AGAINST])),
    )  # fmt: skip


@given(results())
def test_a_result_is_read_as_it_was(result: Result) -> None:
    assert Result.of(json.loads(json.dumps(result.plain(), allow_nan=False))) == result


@pytest.mark.parametrize(
    "changes",
    [
        {"value": "0.5"}, {"value": True}, {"value": math.inf}, {"value": 10**400}, {"low": 0.6}, {"n": -1}, {"n": 1.5},
        {"n": 2**70}, {"seed": -1}, {"digits": 7}, {"digits": 1.0}, {"quoted": 1}, {"higher_is_better": None},
        {"measure": None}, {"encoder": "a" * (2**17 + 1)}, {"noun": "movies"}, {"settings": []}, {"settings": None},
        {"also": {"rank": "3"}}, {"also": 3}, {"against": 3}, {"against": [3]}, {"against": [{"control": "b"}]},
        {"against": [AGAINST[0].plain() | {"n": 1.5}]}, {"against": [AGAINST[0].plain() | {"low": math.inf}]},
        {"against": [AGAINST[0].plain() | {"trained": 1}]}, {"baselines": [{}]}, {"baselines": 3},
        {"baselines": [CHANCE._asdict() | {"share": SHARE.plain(), "barred": 1}]},
        {"baselines": [CHANCE._asdict() | {"share": SHARE.plain()}] * 2},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_another_type_or_range_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError):
        Result.of(WHOLE.plain() | changes)


@pytest.mark.parametrize("values", [None, [], "x", {}, {"measure": "accuracy"}])
def test_other_documents_are_refused(values: object) -> None:
    with pytest.raises(ValueError):
        Result.of(values)


def test_numbers_and_texts_of_files() -> None:
    assert (number_of(None, 1.0), number_of(2, 0.0), text_of("é" * 1000), text_of("a\x1b\n")) == (
        1.0, 2.0, "é" * 1000, "a\\x1b\\n",
    )  # fmt: skip


def test_a_result_is_written_in_its_unit() -> None:
    assert (WHOLE.text(), WHOLE.compact(0.1), WHOLE.number(0.7), WHOLE.pooling) == (
        "46.0 % [40.0, 50.0]", "10.0%", "70.0 %", "mean",
    )  # fmt: skip
    error = replace(WHOLE, unit="", digits=3, low=-math.inf, high=math.inf)
    assert (error.text(), error.compact(0.5), error.number(-0.0001)) == ("0.460", "0.500", "0.000")
    assert replace(WHOLE, low=0.46, high=0.46).text() == "46.0 %"
    assert WHOLE.to_beat is CHANCE


def test_the_interval_of_a_mean_over_images_stays_in_the_range_of_its_unit() -> None:
    alike = Result.of_means("distance", "a", "positions", {}, [1.0] * 20 + [9.0] * 20, "patches", [0] * 20 + [1] * 20)
    assert alike.groups == 2 and alike.high > 50 and alike.value == 5
    far = Result.of_means("distance", "a", "positions", {}, [1.0, 9.0], "patches")
    assert (far.low, round(far.high, 2)) == (0.0, 55.82) and far.text() == "5.00 patches [0.00, 55.82]"
    low, high = (Result.of_means("top-1", "a", "positions", {}, values) for values in ([0.2, 0.25], [0.75, 0.8]))
    assert (low.low, high.high) == (0.0, 1.0) and 0.5 < low.high < 0.6 and 0.4 < high.low < 0.5
