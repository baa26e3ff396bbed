"""Stopping between two steps, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stop:
    """While entered, Ctrl-C and SIGTERM only set ``asked``; a second one acts at once."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            self._before = {number: signal.signal(number, self._ask) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
