"""Quick comparisons, whose runs are in the process of the test."""

import contextlib
import io
import subprocess
from types import SimpleNamespace
from typing import IO

import pytest

from patchloom.cli import main
from patchloom.compare import runner
from patchloom.train import estimate


class Here:
    """Replacement for `subprocess.Popen` that trains in this process, which saves the start of another."""

    def __init__(self, words: list[str], *, stdout: IO[bytes], **how) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            self.code = main(words[3:])
        stdout.write(said.getvalue().encode())

    def poll(self) -> int:
        return self.code

    def communicate(self) -> None:
        """Wait for the end, which has come."""


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Let comparisons time only a few steps, and train in this process."""
    for name in ("_PERIODS", "_READING"):
        patch.setattr(estimate, name, 0.0)
    patch.setattr(runner, "subprocess", SimpleNamespace(Popen=Here, PIPE=subprocess.PIPE))
    patch.setattr(runner, "_LOOK", 0.02)
