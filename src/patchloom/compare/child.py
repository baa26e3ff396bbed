"""One pre-training in a process of its own, which stops with a checkpoint when whoever started it is gone.

``python -m patchloom.compare.child WORD ...`` is ``patchloom WORD ...``, but for that: its standard input is a pipe from
the process that started it, and ends with that process, whatever ended it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def stop_with_parent() -> None:
    """Ask this process to stop, as SIGTERM does, when its standard input ends."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    from patchloom.cli import main

    stop_with_parent()
    sys.exit(main())
