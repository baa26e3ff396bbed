"""Declared options, and those of the signature of somebody's own task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from math import inf
from typing import Any, Literal, get_type_hints

import numpy as np
import pytest
from refusing import refusal

from patchloom.evaluate.protocols import protocol_of
from patchloom.options.declare import (
    Bounds,
    Option,
    command_line_hint,
    declared,
    filled,
    option,
    place,
    read_signature,
    verb,
)
from patchloom.options.protocols import PROTOCOLS
from patchloom.options.values import parse_value


@dataclass(frozen=True)
class Draw:
    """Draw something."""

    run: str = place("folder of a run")
    share: float | Literal["auto"] = option("auto", "of them", above=0, most=1, group="data")
    sizes: tuple[int, int] = option((1, 2), "numbers", least=1)
    plain: bool = option(True, "simple", rare=True)
    then: Callable[[], None] | None = option(None, "a function")


@verb(Draw)
def draw(options: Draw) -> Draw:
    """Draw a picture."""
    return options


def test_what_is_declared_is_the_signature_the_help_and_the_check() -> None:
    about, options = declared(Draw)
    assert about == "Draw something."
    assert [one.name for one in options] == ["run", "share", "sizes", "plain"], "a function cannot be typed"
    assert options[0].positional and options[0].required and options[3].rare and options[1].group == "data"
    assert str(signature(draw)).startswith("(run: str, *, share: ")
    assert "share: of them." in (draw.__doc__ or "")
    assert draw("r", share=np.float32(0.5)).share == 0.5 and draw(run="r").sizes == (1, 2)
    for call, said in (
        (lambda: draw(), "draw needs run, as in patchloom.draw(run)"),
        (lambda: draw("r", 0.5), "draw takes run without a name"),
        (lambda: draw("r", run="s"), "run twice"),
        (lambda: draw("r", shar=0.5), "did you mean --share?"),
        (lambda: draw("r", share="all"), "--share cannot be all: it takes float or auto"),
        (lambda: draw("r", share=0), "--share must be above 0 and at most 1, not 0"),
        (lambda: draw("r", sizes=(3, 0)), "--sizes must be 1 or more, not 0"),
    ):
        assert said in refusal(call)
    assert "--task.plain cannot be 2" in refusal(filled, Draw, {"run": "r", "plain": 2}, "", "task.")


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "said"),
    [
        (Bounds(least=1), 1, 0, "1 or more"),
        (Bounds(least=1), 2**31 - 1, 2**31, "1 or more and at most 2,147,483,647"),
        (Bounds(above=0), 1e-9, 0, "above 0"),
        (Bounds(above=0), 1e300, inf, "above 0 and finite"),
        (Bounds(least=0, below=1), 0.999, 1.0, "0 or more and below 1"),
        (Bounds(least=0, most=10), 10, 10.5, "0 to 10"),
        (Bounds(most=inf), inf, None, ""),
    ],
)
def test_bounds(bounds: Bounds, inside: float, outside: float | None, said: str) -> None:
    bounds.check("x", inside)
    bounds.check("x", [inside, "auto", None, True])
    shown = outside if isinstance(outside, int) else f"{outside or 0:g}"
    if outside is not None:
        for value in (outside, [inside, outside]):
            assert refusal(bounds.check, "x", value) == f"--x must be {said}, not {shown}"
    assert "--x is empty: give one number" in refusal(bounds.check, "x", [])
    Bounds().check("x", ())


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "12", 12),
        (str, "12", "12"),
        (str | int, "12", 12),
        (str | None, "null", None),
        (float | Literal["auto"], "auto", "auto"),
        (float | Literal["auto"], "1e-3", 1e-3),
        (float, "5", 5),
        (float, "-inf", -inf),
        (float, "-.inf", -inf),
        (float, "nan", None),
        (int, "1.5", None),
        (bool, "Yes", True),
        (bool, "2", None),
        (tuple[float, float], "[0.9, 0.95]", (0.9, 0.95)),
        (tuple[float, float], "0.9", None),
        (tuple[int, int] | Literal["auto"], "64x128", (64, 128)),
        (tuple[int, int] | Literal["auto"], "96", (96, 96)),
        (int | tuple[int, int], "96", 96),
        (list[int], "5,20", [5, 20]),
        (float | list[float], "0.1,1", [0.1, 1]),
        (dict[str, float], "{mask: 0.5,blank:1}", {"mask": 0.5, "blank": 1}),
        (dict[str, float], "mask", None),
        (str | list[str], "[a, b]", "[a, b]"),
        (int, "9" * 400, None),
    ],
)
def test_a_typed_word_becomes_a_value(hint: Any, text: str, value: Any) -> None:
    if value is None and text != "null":
        assert "--x cannot be " in refusal(parse_value, Option("x", hint), text)
    else:
        found = parse_value(Option("x", hint), text)
        assert found == value and type(found) is type(value)


class Own:
    """Do something.

    Args:
        encoder: the encoder.
        share: of them,
            in one.
        sizes: numbers.
        then: a function.
    """

    def __init__(
        self,
        encoder: np.ndarray,
        share: float | Literal["auto"] = "auto",
        *,
        sizes: Sequence[int] = (1, 2),
        then: Callable[[], None] | None = None,
        plain=5,
        **more: Any,
    ) -> None: ...


def test_options_of_a_signature() -> None:
    about, options = read_signature(Own)
    assert about == "Do something."
    assert options == (
        Option("share", float | Literal["auto"], "auto", "of them, in one."),
        Option("sizes", Sequence[int], (1, 2), "numbers."),
        Option("plain", int, 5),
    )


def test_hints_that_can_be_typed() -> None:
    for hint in (int | Literal["auto"], str | None, tuple[float, float] | None, dict[str, float], Sequence[int]):
        assert command_line_hint(hint) == hint
    for hint in (np.ndarray, Callable[[], None] | None, dict[str, Any], Any, None | np.ndarray):
        assert command_line_hint(hint) is None


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_takes_its_options(name):
    function, _ = protocol_of(name)
    assert [*signature(function).parameters] == ["run", "data", "settings", "options"]
    assert get_type_hints(function)["options"] is PROTOCOLS[name].options
