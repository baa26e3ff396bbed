"""Runs of a comparison in the process of the test."""

import contextlib
import io
import subprocess
from types import SimpleNamespace
from typing import IO

from patchloom.cli import main


class Here:
    """Replacement for `subprocess.Popen` that trains in this process, which saves the start of another."""

    def __init__(self, words: list[str], *, stdout: IO[bytes], **how) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            self.code = main(words[3:])
        stdout.write(said.getvalue().encode())
        self.stdin = io.BytesIO()

    def poll(self) -> int:
        return self.code


HERE = SimpleNamespace(Popen=Here, PIPE=subprocess.PIPE)
