"""patchloom pre-trains vision transformers on your own unlabelled images and shows honestly what they learnt::

    import patchloom
    run = patchloom.pretrain("photos/", task="droppos")
    encoder, card = patchloom.load_encoder(run.folder)

Names are loaded when they are first used, so that ``import patchloom`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from patchloom.errors import PatchloomError
from patchloom.tasks import TASKS
from patchloom.version import __version__

if TYPE_CHECKING:
    from patchloom.runs.encoder import load_encoder, load_extra_module
    from patchloom.train.pretrain import pretrain

__all__ = ["TASKS", "PatchloomError", "__version__", "load_encoder", "load_extra_module", "pretrain"]

_HOMES = {
    "pretrain": "patchloom.train.pretrain",
    "load_encoder": "patchloom.runs.encoder",
    "load_extra_module": "patchloom.runs.encoder",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'patchloom' has no attribute '{name}'")
