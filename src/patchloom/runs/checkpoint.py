"""Checkpoints: tensors in safetensors, the rest as JSON in its metadata, and a checksum of both. Nothing is pickled.

The last two are kept. One that is damaged is named, and the one before it is used.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import checksum
from patchloom.system.files import remove_leftovers, run_interruptibly, write_error, write_whole

_OPTIMIZER = "optimizer."
_BEST = "best/"  # weights of the best measure, where a run keeps them; no module has such a name
_LARGE = 2**28  # bytes that take seconds to be written


SAVE_COST = 20  # times what the last checkpoint took to be written passes at least before the next one


class SaveTimer:
    """When a training writes its next checkpoint.

    Args:
        first: seconds to the first one; each of the next comes after twice as many.
        every: seconds between two, at the end.
        longest: seconds between two where writing takes so long that more than 1/`SAVE_COST` of the time went into it.
    """

    def __init__(self, first: float, every: float, longest: float = math.inf) -> None:
        self._pause, self._every, self._longest = min(first, every), every, longest
        self.restart()

    def restart(self) -> None:
        """Begin the present pause anew."""
        self._begun = time.perf_counter()

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.perf_counter() - self._begun > self._pause

    def saved(self, seconds: float) -> None:
        """Note that a checkpoint was written, in so many seconds."""
        self._pause = min(self._longest, max(min(self._every, 2 * self._pause), SAVE_COST * seconds))
        self.restart()


class DamagedCheckpoint(PatchloomError):
    """A checkpoint that is not what was written."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: holds ``last.safetensors`` and ``before.safetensors``.
        check: is called before anything gets its name there, and may raise.
    """

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None):
        self.check = check
        self.last, self.before = folder / "last.safetensors", folder / "before.safetensors"
        self._sound = True  # whether `last` may take the place of `before`

    def there(self) -> bool:
        """Whether there is one."""
        return self.last.exists() or self.before.exists()

    def clean(self) -> None:
        """Remove what a killed process left half-written; no other may be writing."""
        remove_leftovers(self.last.parent)

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write a checkpoint; at every instant, a whole one is on the disc."""
        self.check()
        text = json.dumps(about)
        metadata = {"about": text, "sha256": checksum(tensors, text)}

        def write(path: Path) -> None:
            try:
                path.touch()
                mode = path.stat().st_mode
                if sum(one.nbytes for one in tensors.values()) < _LARGE:
                    save_file(tensors, path, metadata)
                else:
                    run_interruptibly(lambda: save_file(tensors, path, metadata))
                self.check()  # again, since a large one takes a while
                path.chmod(mode)  # safetensors' own is for nobody else to read
            except SafetensorError as problem:  # which hides the system's number, but not its words
                raise OSError(0, str(problem)) from problem

        fresh = self.last.with_name("next.safetensors")
        write_whole(fresh, write)
        try:
            if self._sound and self.last.exists():
                os.replace(self.last, self.before)
            os.replace(fresh, self.last)
        except OSError as problem:
            raise write_error(self.last, problem) from problem
        self._sound = True

    def weights(self) -> dict[str, Tensor]:
        """The task's tensors of the newest checkpoint that is sound, or that is too old to have a checksum.

        Of a run that ended by ``--patience``, or with it, they are those of its best measure.
        """
        return self.newest()[0]

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `weights`, with what is stored beside the tensors."""
        if not self.there():
            raise PatchloomError(f"{self.last.parent.parent} has no checkpoint yet: let the run train first")
        tensors, about, _ = self.read(unsealed=True)
        return best_of(tensors) if is_best(about) else weights_of(tensors), about

    def about(self) -> dict[str, Any]:
        """What the newest checkpoint that can be opened keeps beside its tensors, which are not read; {} of none.

        It is for whoever tells of a run, and not for going on: no checksum is compared.
        """
        for path in (self.last, self.before):
            with suppress(OSError, SafetensorError, ValueError, KeyError), safe_open(path, "pt") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {})["about"])
                return about
        return {}

    def read(self, unsealed: bool = False) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """The tensors and ``about`` of the newest checkpoint that is sound, and a sentence for each that is not."""
        problems: list[str] = []
        for path in (self.last, self.before):
            if not path.exists():
                continue
            try:
                tensors, about = _read(path, unsealed)
            except DamagedCheckpoint as problem:
                problems.append(str(problem))
                continue
            self._sound = not problems
            return tensors, about, problems
        raise DamagedCheckpoint(
            f"{'; '.join(problems)}: no checkpoint of {self.last.parent.parent} can be used, so restore one from a "
            "copy, or begin again with another --out"
        )


def tensors_of(task: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a task and its optimiser are made of, by name, whole and on the CPU.

    Every process must ask, since each may hold a part only.
    """
    tensors = {name: _whole(value) for name, value in task.state_dict().items()}
    names = {id(weight): name for name, weight in task.named_parameters()}
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"{_OPTIMIZER}{key}.{names[id(weight)]}"] = _whole(torch.as_tensor(value))
    return tensors


def weights_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the task, without those of the optimiser and of the best measure."""
    return {name: value for name, value in tensors.items() if not name.startswith((_OPTIMIZER, _BEST))}


def best_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the task at its best measure, where a run keeps them; of others nothing."""
    return {name.removeprefix(_BEST): value for name, value in tensors.items() if name.startswith(_BEST)}


def is_best(about: Mapping[str, Any]) -> bool:
    """Whether the run of a checkpoint ended with the weights of its best measure, by what is stored beside them."""
    return bool(about.get("best", {}).get("chosen", False))


def as_best(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A task's weights by the names under which `best_of` finds them in a checkpoint."""
    return {f"{_BEST}{name}": value for name, value in weights.items()}


def whole_weights(task: nn.Module) -> dict[str, Tensor]:
    """A copy of all that a task is made of, by name, whole and on the CPU. Every process must ask."""
    return {name: _whole(value).clone() for name, value in task.state_dict().items()}


def restore(tensors: dict[str, Tensor], task: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Put back what `tensors_of` gave; into any number of processes."""
    weights = weights_of(tensors)
    # a decoder that began with an authors' file may keep positions, which a fresh one computes
    own = task.state_dict() | {name: one for name, one in task.named_buffers() if name in weights}
    if weights.keys() != own.keys():
        raise PatchloomError(
            "the checkpoint is of another task or model, or an older patchloom wrote it "
            f"({_first_difference(weights, own)}): use the version that wrote it, or begin a new run from its encoder, "
            "by --from and the run's folder or by --init and its encoder.safetensors"
        )
    try:
        placed = {name: _as(own[name], value) if name in own else value for name, value in weights.items()}
        task.load_state_dict(placed, strict=True)
    except (RuntimeError, ValueError) as problem:
        reason = " ".join(str(problem).split())
        raise PatchloomError(f"the checkpoint is of another task or model: {reason}") from problem
    if optimizer is None:
        return
    optimizer.state.clear()
    parameters = dict(task.named_parameters())
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, value in tensors.items():
        if name.startswith(_OPTIMIZER):
            key, _, of = name.removeprefix(_OPTIMIZER).partition(".")
            weight = parameters[of]
            if value.ndim:
                value = _as(weight, value)
            elif fused:  # which counts its steps where the weight is
                value = value.to(weight.device)
            optimizer.state[weight][key] = value.clone()


def _first_difference(found: Iterable[str], own: Iterable[str]) -> str:
    foreign, absent = sorted(set(found) - set(own)), sorted(set(own) - set(found))
    said = [f"it {verb} {names[0]}" for verb, names in (("has", foreign), ("lacks", absent)) if names]
    return " and ".join(said)


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()


def _as(like: Tensor, value: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return value.to(like.device)
    # every process has the whole: nothing needs to be sent
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _read(path: Path, unsealed: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
            if "about" not in found or not (unsealed or "sha256" in found):
                raise ValueError("it has no checksum, as those before November 2026: --from can begin with its weights")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if "sha256" in found and checksum(tensors, found["about"]) != found["sha256"]:
            raise ValueError("its checksum is another one")
        return tensors, json.loads(found["about"])
    except (OSError, SafetensorError, ValueError) as problem:
        reason = " ".join(str(problem).split())
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged ({reason})") from problem


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers in this process's parts of ``tensors`` are numbers."""
    return all(bool(_local(one).isfinite().all()) for one in tensors)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
