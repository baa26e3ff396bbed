"""The one sentence by which bad input is rejected, in Python and on the command line."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError


def rejection(call: Callable[..., Any], *given: Any, **options: Any) -> PatchloomError:
    """Return the error of a single line that a call raises, with its traceback."""
    with pytest.raises(PatchloomError) as caught:
        call(*given, **options)
    assert str(caught.value) and "\n" not in str(caught.value), caught.value
    return caught.value


def refusal(call: Callable[..., Any], *given: Any, **options: Any) -> str:
    return str(rejection(call, *given, **options))


def refused(data: Any, match: str, **options: Any) -> PatchloomError:
    """Return the error for data that is refused in one sentence, which matches a pattern."""
    error = rejection(open_data, data, **options)
    assert re.search(match, str(error)), error
    return error


def failed(capsys: pytest.CaptureFixture, *words: object) -> str:
    """Return the line that a command prints when it fails with exit code 2; nothing else is printed."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("patchloom: ") and err.count("\n") == 1 and "Traceback" not in err, out + err
    return err
