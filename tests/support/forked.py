"""Commands in processes forked from a server that has already imported patchloom, which saves 6 s each.

Behaviour that needs a fresh interpreter is tested with `subprocess` and ``python -m patchloom``.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.forkserver import ensure_running
from types import SimpleNamespace
from typing import IO


def server() -> BaseContext:
    """Return the multiprocessing context of the fork server, which all tests of this process share."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["patchloom.cli", "patchloom.options", "patchloom.train.loop"])
    ensure_running()
    return context


class Command:
    """Command of patchloom in a new session, with the interface of `subprocess.Popen`.

    Args:
        words: arguments of the command.
        stdout: file descriptor of its output; default: a pipe, readable as the attribute ``stdout``.
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
        out.close()  # otherwise the reader would never see the end of the output
        err.close()
        self.pid = self._process.pid

    def communicate(self) -> tuple[str | None, str]:
        """Return the remaining output after all processes have ended."""
        printed = self.stdout and self.stdout.read()
        self._process.join()
        self._err.seek(0)
        return printed, self._err.read()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


class Popen:
    """Replacement for `subprocess.Popen` of ``python -m patchloom WORDS`` with a pipe as input, in a new session."""

    def __init__(
        self,
        words: list[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert words[:3] == [sys.executable, "-m", "patchloom"] and stdin == subprocess.PIPE and start_new_session
        reader, writer = os.pipe()
        self.stdin = open(writer, "wb")
        streams = [Connection(os.dup(one.fileno()), readable=False) for one in (stdout, stderr)]
        streams.append(Connection(reader, writable=False))
        self._process = server().Process(target=_work, args=(words[3:], dict(env), *streams))
        self._process.start()
        for one in streams:
            one.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("patchloom", timeout or 0.0)
        return self._process.exitcode

    def communicate(self) -> None:
        self.stdin.close()
        self._process.join()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


# replaces the module `subprocess` in `runner`
SUBPROCESS = SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)


def _work(
    words: list[str], environment: dict[str, str], out: Connection, err: Connection, given: Connection | None = None
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # restores the default start method of users
    for number, stream in ((0, given), (1, out), (2, err)):
        if stream is None:
            continue
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
    os.fsync = lambda handle: None  # a small run waits a second for the disc
    import torch

    from patchloom.cli import main

    torch.set_num_threads(1)
    sys.exit(main(words))
