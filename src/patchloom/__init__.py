"""patchloom pre-trains vision transformers on your own unlabelled images and shows honestly what they learnt::

    import patchloom
    run = patchloom.pretrain("photos/", task="droppos")
    patchloom.evaluate("knn", run, "labelled/")
    encoder, card = patchloom.load_encoder(run)

Names are loaded when they are first used, so that ``import patchloom`` costs nothing.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from patchloom.errors import PatchloomError, TemporaryError
from patchloom.tasks import TASKS

if TYPE_CHECKING:
    from patchloom.bench import bench
    from patchloom.check import check
    from patchloom.compare.compare import compare
    from patchloom.curate import curate
    from patchloom.data.sources.open import open_data
    from patchloom.distill import distill
    from patchloom.embed.embed import embed
    from patchloom.evaluate.classifier import load_classifier
    from patchloom.evaluate.protocols import evaluate
    from patchloom.export.export import export
    from patchloom.look.look import look
    from patchloom.predict import predict
    from patchloom.report.report import report
    from patchloom.report.results import results
    from patchloom.runs.encoder import load_encoder, load_extra_module
    from patchloom.train.loop import pretrain
    from patchloom.version import __version__


__all__ = [
    "TASKS",
    "PatchloomError",
    "TemporaryError",
    "__version__",
    "bench",
    "check",
    "compare",
    "curate",
    "distill",
    "embed",
    "evaluate",
    "export",
    "load_classifier",
    "load_encoder",
    "load_extra_module",
    "look",
    "open_data",
    "predict",
    "pretrain",
    "report",
    "results",
]

_HOMES = {
    "__version__": "patchloom.version",
    "bench": "patchloom.bench",
    "check": "patchloom.check",
    "compare": "patchloom.compare.compare",
    "curate": "patchloom.curate",
    "distill": "patchloom.distill",
    "embed": "patchloom.embed.embed",
    "evaluate": "patchloom.evaluate.protocols",
    "export": "patchloom.export.export",
    "load_classifier": "patchloom.evaluate.classifier",
    "load_encoder": "patchloom.runs.encoder",
    "load_extra_module": "patchloom.runs.encoder",
    "look": "patchloom.look.look",
    "open_data": "patchloom.data.sources.open",
    "predict": "patchloom.predict",
    "pretrain": "patchloom.train.loop",
    "report": "patchloom.report.report",
    "results": "patchloom.report.results",
}


class _Verb(ModuleType):
    """Module with the name of a verb, callable as the verb."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the function of the verb, so that the module shows its signature."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_HOMES[name]), name)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """Return the documentation of the verb, for `help`."""
        return self.__wrapped__.__doc__

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.__wrapped__(*given, **options)


class _Patchloom(ModuleType):
    """This package, in which some names, such as ``patchloom.evaluate``, are both a verb and a subpackage.

    Every import from below ``patchloom.evaluate`` makes Python set ``patchloom.evaluate`` to the subpackage. Therefore
    the subpackage itself is made callable when it is set. A function of that name would be overwritten by the next
    import, or would hide `patchloom.evaluate.protocols` from ``import patchloom.evaluate.protocols``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Patchloom


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
        return globals().get(name, found)  # set by the import if there is a module of that name
    raise AttributeError(f"module 'patchloom' has no attribute '{name}'")
