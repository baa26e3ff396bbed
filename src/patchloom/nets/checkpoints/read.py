"""Reading of files of weights: safetensors, and torch's pickles. Files are untrusted, and never executed."""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import re
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.system.files import regular

State = dict[str, Tensor]

CHECKSUM = "sha256"  # name in the metadata of patchloom's files
_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
_DTYPES |= {torch.int8, torch.int16, torch.int32, torch.int64}


def damaged(path: str | Path, why: str) -> PatchloomError:
    """Return the error for a file of patchloom's that is not as it was written."""
    return PatchloomError(f"{path} is not what patchloom wrote ({why}): restore it from a copy, or make it again")


@contextmanager
def expect_intact(path: str | Path) -> Iterator[None]:
    """Report errors inside this block as damage of a file that patchloom wrote."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as problem:
        reason = (str(problem).splitlines() or [""])[0][:200]
        raise damaged(path, reason if type(problem) is ValueError and reason else type(problem).__name__) from problem


def printable(text: str, most: int) -> str:
    """Replace control characters, which could control a terminal, in a text of a file."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def is_pickle(path: Path) -> bool:
    """Return whether a file has one of torch's names; all other files of weights are safetensors."""
    return path.suffix.lower() in (".pth", ".pt", ".bin", ".ckpt", ".tar")


@contextmanager
def _opened(path: Path, what: str) -> Iterator[Any]:
    try:
        with safe_open(regular(path, follow=True), "pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError) as problem:
        raise PatchloomError(f"{path} cannot be read as {what} ({problem}): is it whole?") from problem


def read_metadata(path: Path, what: str) -> dict[str, str]:
    """Read the metadata of any safetensors file."""
    with _opened(path, what) as file:
        return file.metadata() or {}


def read_tensors(file: Any, names: Iterable[str]) -> State:
    """Read tensors of an open safetensors file, all of types that can be computed with."""
    found = {name: file.get_tensor(name) for name in names}
    for name, one in found.items():
        if one.dtype not in _DTYPES:  # such as packed ones of 4 bits
            raise ValueError(f"its tensor {name[:80]} is of {one.dtype}: save it as float32")
    return found


def read_weights(path: Path) -> State:
    """Read the tensors of a safetensors file, and verify the checksum that patchloom's files have."""
    with _opened(path, "weights") as file:
        about = file.metadata() or {}
        found = read_tensors(file, file.keys())
    for text in about.values():
        with suppress(ValueError, RecursionError):  # metadata of other programs may be anything
            parsed = json.loads(text)
            if isinstance(parsed, dict) and (given := parsed.pop(CHECKSUM, None)) is not None:
                if checksum(found, json.dumps(parsed)) != given:
                    raise damaged(path, "its checksum differs")
    return found


def checksum(tensors: State, about: str) -> str:
    """Return 64 hex digits of names, types, shapes and values of contiguous CPU tensors, and of a text."""
    total = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        total.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        total.update(value.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def read_states(path: Path) -> list[tuple[str, State]]:
    """Read every state dict in a file of any program, by the path of its keys there."""
    if not is_pickle(path):
        return [("", read_weights(path))]
    found, queue, seen = [], deque([("", _unpickle(path))]), set()
    while queue:
        place, value = queue.popleft()
        if not isinstance(value, dict) or id(value) in seen:  # a pickle may contain itself
            continue
        seen.add(id(value))
        items = list(dict.items(value))  # the pickle of an OrderedDict may have replaced value.items
        tensors = {str(key): item for key, item in items if isinstance(item, Tensor)}
        for name, value in tensors.items():
            plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_nested
            # a few bytes may stand for terabytes
            if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise PatchloomError(
                    f"{path} does not store all numbers of {name[:80]!r}: save its state_dict again, with dense tensors"
                )
        if tensors:
            found.append((place, tensors))
        queue.extend((f"{place}.{key}" if place else str(key), item) for key, item in items)
    return found


class _Bystander:
    """Stand-in for an object of NumPy or pathlib that a file has beside its weights; the object is not built."""

    def __init__(self, *given: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# papers' files have their command line or configuration beside the weights, and a learning rate computed by NumPy:
# plain containers and numbers, replaced by stand-ins that execute nothing
_HARMLESS: list[Any] = [
    argparse.Namespace,
    (OrderedDict, "yacs.config.CfgNode"),
    *((_Bystander, name) for name in ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")),
    *((_Bystander, name) for name in ("pathlib.PosixPath", "pathlib._local.PosixPath")),
]


def _unpickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that this pickle may fail, which is reported if it does
            return torch.load(regular(path, follow=True), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        foreign = re.search(r"(?:GLOBAL|Trying to call reduce for|instantiate class) (\S+)", str(problem))
        what = f"Python objects ({foreign[1]}) that could run code" if foreign else "something other than weights"
        raise PatchloomError(
            f"{path} holds {what}, and was not loaded: save only its state_dict, preferably as .safetensors"
        ) from problem
    except Exception as problem:  # damaged and hostile files fail in many ways
        reason = f"{type(problem).__name__}: {problem}".partition("\n")[0].partition(". ")[0][:200]
        raise PatchloomError(
            f"{path} cannot be read as weights ({reason}): is it whole, and did torch save it?"
        ) from problem
