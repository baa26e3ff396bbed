"""The trackers that can be asked for by name, and whether what they need is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from patchloom.errors import PatchloomError, listing, pip_install, suggestion
from patchloom.loggers import TRACKERS
from patchloom.loggers.base import Tracker

_EXTRAS = {"tensorboard": "track"}  # by which pip installs it, where it has another name


def parse_trackers(log: str | Sequence[str] | None) -> list[str]:
    """The trackers that ``--log`` asks for, each once."""
    words = log.split(",") if isinstance(log, str) else log or ()
    names = list(dict.fromkeys(word.strip() for word in words if word.strip()))
    for name in names:
        if name not in TRACKERS:
            hint = suggestion(name, TRACKERS, f": there are {listing(TRACKERS, 'and')}")
            raise PatchloomError(f"there is no tracker called {name}{hint}")
    return names


def check_installed(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not there."""
    if missing := [name for name in names if not _installed(name)]:
        remedy = pip_install(*(_EXTRAS.get(name, name) for name in missing))
        are = "is" if len(missing) == 1 else "are"
        raise PatchloomError(f"{listing(missing, 'and')} {are} not installed: {remedy}, or give another --log")


def tracker_class(name: str) -> type[Tracker]:
    """The class of a tracker, which imports the package when it is made."""
    found: type[Tracker] = getattr(import_module(f"patchloom.loggers.{name}"), TRACKERS[name])
    return found


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a folder such as wandb/, left by a run, is no package
