"""Modules that are saved beside an encoder, each in a file of its own: its card says what each is good for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import get_type_hints

from torch import nn

from patchloom.errors import PatchloomError
from patchloom.hints import check_range, conforms
from patchloom.memory import Affordable
from patchloom.nets.heads import EXTRA_MODULES, Use
from patchloom.nets.weights import (
    FORMAT,
    as_patchloom_wrote,
    is_ours,
    read_about,
    read_card,
    read_weights,
    save_net,
    weights_file,
)

MODULE_FORMAT = "patchloom-module-1"


def save_extra_module(module: nn.Module, path: Path) -> None:
    """Write the ``state_dict`` of a module of `EXTRA_MODULES`, its class, and the ``sizes`` that build it again.

    The file appears whole or not at all.

    Raises:
        ValueError: a module of another class, which nothing could build again.
    """
    if type(module).__name__ not in EXTRA_MODULES:
        raise ValueError(f"{type(module).__name__} is not in EXTRA_MODULES: add what builds it again there")
    save_net(module, MODULE_FORMAT, {"kind": type(module).__name__, "sizes": module.sizes}, path)


def extra_module_file(source: str | Path, use: Use) -> Path | None:
    """The file of the module beside an encoder that is good for ``use``; None if the encoder's card names none.

    Args:
        source: as `load_encoder` takes it. A file that is not called encoder.safetensors has no modules beside it,
            since those in its folder may be another encoder's.
        use: for which a module is wanted.

    Raises:
        PatchloomError: no encoder there, or a damaged one, or one that an older version wrote with a head beside it.
    """
    if str(source).startswith("timm:") or (path := weights_file(source)).name != "encoder.safetensors":
        return None
    with as_patchloom_wrote(path):
        named = [path.with_name(f"{name}.safetensors") for name, good_for in _extra_modules(path) if good_for == use]
    return next((file for file in named if file.exists()), None)  # an encoder may have been copied alone


def _extra_modules(path: Path) -> Iterable[tuple[str, Use]]:
    if not is_ours(path):
        return ()
    head, about = path.with_name("instance_head.safetensors"), read_about(path, FORMAT, "encoder weights")
    if head.exists() and "extra_modules" not in about:  # else another pooling would be quoted without a word
        raise PatchloomError(
            f"an older patchloom wrote {head} for {path}, and this one cannot read it: evaluate with that version, "
            "train again, or move the head away"
        )
    return read_card(path).extra_modules.items()


def load_extra_module(source: str | Path, use: Use) -> nn.Module | None:
    """The module beside an encoder that is good for ``use``, in eval mode; None if there is none.

    Args:
        source, use: as `extra_module_file` takes them.

    Raises:
        PatchloomError: no encoder there, or the module's file is damaged, or not one that patchloom wrote.
    """
    path = extra_module_file(source, use)
    if path is None:
        return None
    about, weights = read_about(path, MODULE_FORMAT, "a module beside an encoder"), read_weights(path)
    with as_patchloom_wrote(path):
        builds = EXTRA_MODULES[about["kind"]]
        hints = get_type_hints(builds.__init__ if isinstance(builds, type) else builds)
        for name, value in about["sizes"].items():
            if name not in hints or not conforms(value, hints[name]):
                raise ValueError(f"it has the size {str(name)[:40]!r} of {str(value)[:40]!r}")
            check_range(name, value, 1, 2**16)
        with Affordable(1):
            module = builds(**about["sizes"])
        module.load_state_dict(weights, strict=True)
    return module.eval()
