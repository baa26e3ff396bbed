"""Options read from signatures; source files and live objects give the same."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from patchloom.arguments import Option, command_line_hint, from_source, read_signature
from patchloom.data.sources import builtin
from patchloom.evaluate.protocols import PROTOCOLS
from patchloom.options import SIGNATURES, protocols, task_spec
from patchloom.tasks import TASKS, Entry
from patchloom.tasks.mae import MAE

READ = [
    *(path for paths in SIGNATURES.values() for path in paths),
    *PROTOCOLS.values(),
    *(entry.path for entry in TASKS.values()),
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
    assert [option.name for option in read_signature(some, skip={"data", "plain"}).options] == [
        "share",
        "sizes",
        "model",
    ]


@pytest.mark.parametrize(
    "hint",
    [
        int | Literal["auto"],
        str | None,
        tuple[float, float] | None,
        dict[str, float],
        Sequence[int],
        Literal["a", "b"] | Path,
    ],
)
def test_hints_that_can_be_typed(hint):
    assert command_line_hint(hint) == hint


@pytest.mark.parametrize("hint", [np.ndarray, Callable[[], None] | None, dict[str, Any], Any, None | np.ndarray])
def test_hints_that_cannot_be_typed(hint):
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
    assert list(protocols().items()) == list(PROTOCOLS.items())
    for name in ("BUILTIN", "FETCHED"):
        assert from_source(f"patchloom.data.sources.builtin.{name}") == getattr(builtin, name)


class Mine(MAE):
    """My own.

    Args:
        encoder: the ViT to train.
        share: of the patches.
    """

    def __init__(self, encoder, share: float = 0.5):
        super().__init__(encoder, share)


def test_a_custom_task_is_read_from_its_signature(monkeypatch):
    monkeypatch.setitem(TASKS, "mine", Entry(f"{__name__}.Mine"))
    monkeypatch.setitem(TASKS, "mae", Entry(f"{__name__}.Mine"))  # in the place of ours
    monkeypatch.setattr("patchloom.tasks.importlib.import_module", lambda _: type("module", (), {"Mine": Mine}))
    for name in ("mine", "mae"):
        assert task_spec(name) == ("My own.", (Option("share", float, 0.5, "of the patches."),))
