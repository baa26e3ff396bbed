"""What is read of signatures, and that the package's list of it gives the same again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from patchloom.arguments import Option, command_line_hint, format_hint, packaged_spec, read_signature
from patchloom.bench import bench
from patchloom.check import check
from patchloom.evaluate.protocols import PROTOCOLS, protocol_of
from patchloom.options import task_spec
from patchloom.tasks import TASKS, Entry, task_class
from patchloom.tasks.mae import MAE

GIVEN = {"run", "data", "settings", "count"}


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


def test_what_words_can_say_of_a_signature():
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
    ("hint", "text"),
    [
        (int | Literal["auto"], "int | Literal['auto']"),
        (str | None, "str | None"),
        (tuple[float, float] | None, "tuple[float, float] | None"),
        (dict[str, float], "dict[str, float]"),
        (Sequence[int], "Sequence[int]"),
        (Literal["a", "b"] | Path, "Literal['a', 'b'] | Path"),
    ],
)
def test_a_hint_is_written_as_in_python(hint, text):
    assert command_line_hint(hint) == hint and format_hint(hint) == text


@pytest.mark.parametrize("hint", [np.ndarray, Callable[[], None] | None, dict[str, Any], Any, None | np.ndarray])
def test_what_no_word_can_be_is_no_option(hint):
    assert command_line_hint(hint) is None


def test_the_list_gives_back_what_the_signatures_say():
    def plain(found):
        return [option._replace(default=repr(option.default).strip("()[]")) for option in found.options]

    for function in (check, bench):
        assert plain(packaged_spec("verbs", function.__name__)) == plain(read_signature(function))
    for name in PROTOCOLS:
        assert plain(packaged_spec("protocols", name)) == plain(read_signature(protocol_of(name)[0], skip=GIVEN))
    for name, entry in TASKS.items():
        assert plain(packaged_spec("tasks", entry.path)) == plain(read_signature(task_class(name), skip={"encoder"}))


class Mine(MAE):
    """My own.

    Args:
        encoder: the ViT to train.
        share: of the patches.
    """

    def __init__(self, encoder, share: float = 0.5):
        super().__init__(encoder, share)


def test_a_task_of_ones_own_is_read_from_its_signature(monkeypatch):
    monkeypatch.setitem(TASKS, "mine", Entry(f"{__name__}.Mine"))
    monkeypatch.setitem(TASKS, "mae", Entry(f"{__name__}.Mine"))  # in the place of ours
    monkeypatch.setattr("patchloom.tasks.importlib.import_module", lambda _: type("module", (), {"Mine": Mine}))
    for name in ("mine", "mae"):
        assert task_spec(name) == ("My own.", (Option("share", float, 0.5, "of the patches."),))
