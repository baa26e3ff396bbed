"""State dicts in files that anybody may have written. A pickle is read as weights alone, and never run."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.weights import read_metadata, read_weights


class _Bystander:
    """Stands for an object of NumPy's or pathlib's that a file keeps beside its weights: none of them is built."""

    def __init__(self, *given: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# papers' files keep their command line or configuration beside the weights, and a learning rate that NumPy computed:
# bare containers and numbers, in whose stead something stands that runs nothing
_HARMLESS = [
    argparse.Namespace,
    (OrderedDict, "yacs.config.CfgNode"),
    *((_Bystander, name) for name in ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")),
    *((_Bystander, name) for name in ("pathlib.PosixPath", "pathlib._local.PosixPath")),
]


_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".tar")  # what torch saves is called


def plain_file(source: str | Path) -> bool:
    """Whether a file holds weights alone: others' files, since all that patchloom writes says what it is."""
    path = Path(source)
    if str(source).startswith("timm:") or not path.is_file():
        return False
    if path.suffix != ".safetensors":
        return path.suffix.lower() in _PICKLES
    return not any(key.startswith("patchloom-") for key in read_metadata(path, "encoder weights"))


def read_states(path: Path) -> list[tuple[str, dict[str, Tensor]]]:
    """Every state dict in a file, whoever wrote it, by the path of its keys there.

    Raises:
        PatchloomError: it is damaged, or a pickle that holds more than tensors and plain values: none is ever run.
    """
    if path.suffix == ".safetensors":
        read_metadata(path, "weights")
        return [("", read_weights(path))]
    found, queue, seen = [], deque([("", _unpickle(path))]), set()
    while queue:
        place, value = queue.popleft()
        if not isinstance(value, dict) or id(value) in seen:  # a pickle may hold itself
            continue
        seen.add(id(value))
        items = list(dict.items(value))  # what value.items is, the pickle of an OrderedDict may have changed
        tensors = {str(key): item for key, item in items if isinstance(item, Tensor)}
        if tensors:
            found.append((place, tensors))
        queue.extend((f"{place}.{key}" if place else str(key), item) for key, item in items)
    return found


def _unpickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this pickle may fail, which is reported if it does
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        foreign = re.search(r"(?:GLOBAL|Trying to call reduce for|instantiate class) (\S+)", str(problem))
        what = f"Python objects ({foreign[1]}) that could run code" if foreign else "something else than weights"
        raise PatchloomError(
            f"{path} holds {what}, and was not loaded: save its state_dict alone, best as .safetensors"
        ) from problem
    except Exception as problem:  # a damaged or hostile file fails in any way that it likes
        reason = f"{type(problem).__name__}: {problem}".partition("\n")[0].partition(". ")[0][:200]
        raise PatchloomError(
            f"{path} cannot be read as weights ({reason}): is it whole, and did torch save it?"
        ) from problem
