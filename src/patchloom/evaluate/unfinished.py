"""Trainings of an evaluation that were stopped or killed, kept on disc until the same command goes on with them.

A folder's name is a digest of all that decides the training: the weights with which it begins, the images and labels,
the recipe, the seed, and the versions of the programs. So a training is only ever gone on with as it was begun. The
folders are in ``$XDG_CACHE_HOME/patchloom/trainings``, or ``~/.cache/patchloom/trainings``. An evaluation that reaches
its end removes its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.files import cache_root
from patchloom.runs.checkpoint import Checkpoints

_SAVE_EVERY = 30.0  # seconds
_SAVE_SHARE = 0.05  # of the time at most goes into saving
_FORGOTTEN = 30 * 86_400  # seconds after which nobody will go on

_OPENED: ContextVar[list[Path] | None] = ContextVar("_OPENED", default=None)


@contextmanager
def until_done() -> Iterator[None]:
    """While entered, trainings are kept; on leaving without an error those that were kept are removed."""
    opened: list[Path] = []
    token = _OPENED.set(opened)
    try:
        yield
    finally:
        _OPENED.reset(token)
    for folder in opened:
        shutil.rmtree(folder, ignore_errors=True)


class Unfinished:
    """The checkpoints of one training.

    Args:
        about: all that decides the training, as JSON has it; None keeps nothing.
    """

    def __init__(self, about: Any):
        opened = _OPENED.get()
        self._checkpoints: Checkpoints | None = None
        if about is None or opened is None:  # nobody would remove what was kept
            return
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:32]
        folder = cache_root() / "trainings" / name
        _forget_old(folder.parent)
        opened.append(folder)
        self._checkpoints = Checkpoints(folder)
        self._due = time.perf_counter() + _SAVE_EVERY
        self._kept = False

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and plain values that were saved last; None if there are none that are sound."""
        if self._checkpoints is None or not self._checkpoints.there():
            return None
        self._checkpoints.clean()
        with contextlib.suppress(PatchloomError):  # it begins again
            tensors, about, _ = self._checkpoints.read()
            self._kept = True
            return tensors, about
        return None

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return self._checkpoints is not None and time.perf_counter() > self._due

    @property
    def worth(self) -> bool:
        """Whether a training that has ended is to be kept for the one that follows: it has taken a while."""
        return self._checkpoints is not None and (self._kept or self.due)

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> bool:
        """Keep the state of the training; whether it could be: a disc without room costs nothing but that.

        Of several processes, the first of each machine writes.
        """
        if self._checkpoints is None:
            return False
        begun = time.perf_counter()
        with contextlib.suppress(PatchloomError):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                self._checkpoints.save(tensors, about)
            self._kept = True
        now = time.perf_counter()
        self._due = now + max(_SAVE_EVERY, (now - begun) / _SAVE_SHARE)
        return self._kept


def _forget_old(home: Path) -> None:
    with contextlib.suppress(OSError):
        for folder in home.iterdir():
            if time.time() - folder.stat().st_mtime > _FORGOTTEN:
                shutil.rmtree(folder, ignore_errors=True)
