"""Killing a process at a chosen file operation."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection


def die_at(event: int | None, folder: str, events: Collection[str]) -> list[str]:
    """Kill this process (SIGKILL) just before its event number ``event``, from 1; None: never.

    Args:
        event: number of the event.
        folder: prefix of the paths that count; opened files count if they are opened for writing.
        events: names of Python's audit events.

    Returns:
        The events so far, a list that grows.
    """
    seen: list[str] = []

    def watch(name: str, arguments: tuple) -> None:
        if name not in events or not str(arguments[0]).startswith(folder):
            return
        if name == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        seen.append(name)
        if len(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return seen
