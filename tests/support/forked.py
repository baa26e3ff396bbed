"""Commands in processes of their own, forked from a server that has imported patchloom: ready at once, and not in 6 s.

What only a fresh interpreter shows is tested where one is started (`subprocess`, ``python -m patchloom``).
"""

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import IO


def server() -> BaseContext:
    """How processes begin that are forked from the server. There is one for all tests of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["patchloom.cli", "patchloom.options", "patchloom.train.loop"])
    return context


class Command:
    """A command line of patchloom in a session of its own, to be used as `subprocess.Popen`.

    Args:
        words: of the command.
        stdout: where it prints; by default into a pipe, which the attribute ``stdout`` reads.
    """

    def __init__(self, words: list[str], stdout: int | None = None) -> None:
        self._err = tempfile.TemporaryFile("w+")
        self.stdout: IO[str] | None = None
        if stdout is None:
            reader, writer = os.pipe()
            self.stdout = open(reader)
        else:
            writer = os.dup(stdout)
        out, err = (Connection(one, readable=False) for one in (writer, os.dup(self._err.fileno())))
        self._process = server().Process(target=_work, args=(words, dict(os.environ), out, err))
        self._process.start()
        out.close()  # else the end of what it prints would never come
        err.close()
        self.pid = self._process.pid

    def communicate(self) -> tuple[str | None, str]:
        """All that is still to be read, when everything that can print has ended."""
        printed = self.stdout and self.stdout.read()
        self._process.join()
        self._err.seek(0)
        return printed, self._err.read()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _work(words: list[str], environment: dict[str, str], out: Connection, err: Connection) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # what starts from here starts as it does for users
    for number, stream in ((1, out), (2, err)):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
    import torch

    from patchloom.cli import main

    torch.set_num_threads(1)
    sys.exit(main(words))
