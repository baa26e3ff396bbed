"""Options read from signatures; source files and live objects give the same."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from patchloom.arguments import Option, command_line_hint, from_source, read_signature
from patchloom.data.sources import builtin
from patchloom.evaluate.protocols import PROTOCOLS, protocol_of
from patchloom.options.parse import SIGNATURES, protocols

READ = [
    *(path for paths in SIGNATURES.values() for path in paths),
    *protocols().values(),
]


def some(
    data: str | Path | np.ndarray,
    share: float | Literal["auto"] = "auto",
    *,
    sizes: Sequence[int] = (1, 2),
    model: np.ndarray | dict[str, Any] | str = "auto",
    then: Callable[[], None] | None = None,
    plain=5,
    **more: Any,
) -> None:
    """Do something.

    Args:
        data: images.
        share: of them,
            in one.
        sizes: numbers.
        model: its name.
        then: a function.
        more: others.
    """


def test_options_of_a_signature():
    about, options = read_signature(some)
    assert about == "Do something."
    assert options == (
        Option("data", str, None, "images.", positional=True, required=True),
        Option("share", float | Literal["auto"], "auto", "of them, in one.", positional=True),
        Option("sizes", Sequence[int], (1, 2), "numbers."),
        Option("model", str, "auto", "its name."),
        Option("plain", int, 5),
    )
    assert read_signature(some, skip={"data", "plain"}).options == options[1:-1]


def test_hints_that_can_be_typed():
    for hint in (int | Literal["auto"], str | None, tuple[float, float] | None, dict[str, float], Sequence[int]):
        assert command_line_hint(hint) == hint
    for hint in (np.ndarray, Callable[[], None] | None, dict[str, Any], Any, None | np.ndarray):
        assert command_line_hint(hint) is None


@pytest.mark.parametrize("path", READ)
def test_source_files_and_live_objects_agree(path):
    module, _, name = path.rpartition(".")
    live = getattr(importlib.import_module(module), name)
    read = from_source(path)
    assert read is not live and read_signature(read) == read_signature(live)
    assert [type(one.default) for one in read_signature(read).options] == [
        type(one.default) for one in read_signature(live).options
    ], "True is no 1"


def test_constants_are_read_from_source_files():
    assert list(protocols()) == list(PROTOCOLS)
    for name, path in protocols().items():
        function, _ = protocol_of(name)
        assert path == f"{function.__module__}.{function.__name__}"
    for name in ("BUILTIN", "FETCHED"):
        assert from_source(f"patchloom.data.sources.builtin.{name}") == getattr(builtin, name)
