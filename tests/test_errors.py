"""Values checked against type hints, and words of messages."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from patchloom.audio.config import Sound
from patchloom.errors import (
    PatchloomError,
    check_range,
    check_type,
    closest_word,
    conforms,
    listing,
    one_line,
    suggestion,
    typed_fields,
)


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [0, -3, 2**63 - 1], [True, 1.0, "1", None, 2**63]),
        (float, [1.5, 2, float("inf")], [True, "1.5", None, float("nan"), 10**400]),
        (bool, [True, False], [0, "true"]),
        (str, ["", "a"], [1, None]),
        (str | None, ["a", None], [1]),
        (float | Literal["auto"], [0.5, "auto"], ["Auto", True]),
        (Literal[1, "a"], [1, "a"], [True, "b"]),
        (Sequence[int], [[], [1, 2], (3,)], ["12", [1.5], 1]),
        (list[str], [["a"]], [["a", 1], "a"]),
        (tuple[float, float], [(0.2, 1)], [(1,), (1, 2, 3), ("a", "b"), [1, 2]]),
        (tuple[int, ...], [(), (1, 2, 3)], [(1, "a"), [1]]),
        (dict[str, float], [{}, {"a": 1.0}], [{"a": "b"}, {1: 1.0}, []]),
        (Any, [None, object()], []),
    ],
)
def test_values_conform_to_type_hints(hint, right, wrong):
    assert all(conforms(value, hint) for value in right)
    for value in wrong:
        assert not conforms(value, hint)
        with pytest.raises(PatchloomError, match="--x (cannot be|needs a value)"):
            check_type("x", value, hint)


def test_fields_from_files_are_typed_and_in_range():
    assert typed_fields(Sound, {"rate": 16_000, "mean": [0.0] * 40})["mean"] == (0.0,) * 40
    for wrong in ({"rate": "1"}, {"rate": True}, {"nothing": 1}, [1], None):
        with pytest.raises(ValueError):
            typed_fields(Sound, wrong)
    with pytest.raises(ValueError, match="rate must be 1 to 9"):
        typed_fields(Sound, {"rate": 10}, {"rate": (1, 9)})
    check_range("a", [1, 9, "x", True], 1, 9)
    for value in (0.99, 9.01, [5, 10], float("nan")):
        with pytest.raises(ValueError):
            check_range("a", value, 1, 9)


def test_words_of_messages():
    assert (listing("a"), listing("ab"), listing("abc", "and"), listing("")) == ("a", "a or b", "a, b and c", "")
    assert closest_word("Mask-Ratoi", ["mask_ratio", "masks"]) == "mask_ratio"
    assert closest_word("zzz", ["mask_ratio"]) is None
    assert suggestion("dropos", ["mae", "droppos"]) == "; did you mean droppos?" and suggestion("zzz", ["mae"]) == "."
    assert one_line(ValueError("a\n  b")) == "a b" and one_line(ValueError()) == "ValueError"
    assert one_line(OSError(2, "gone", "/x/y"), "/x/y") == "[Errno 2] gone: it"
