"""Checkpoints: tensors as safetensors, other state as JSON in its metadata, and a checksum of both. No pickle.

The last two are kept. If the last one is damaged, this is reported, and the one before it is used.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from patchloom.errors import PatchloomError, conforms
from patchloom.nets.checkpoints.read import checksum, read_tensors
from patchloom.system.files import (
    BackgroundWork,
    regular,
    remove_leftovers,
    write_error,
    write_whole,
)

_OPTIMIZER = "optimizer."
_BEST = "best/"  # prefix of the best weights; no module has such a name
_LARGE = 2**28  # bytes whose writing takes seconds
_ROUNDED, _MARGIN = 1.05, 2**28  # of the memory of copies on a GPU, and bytes beside them
_UNREADABLE = OSError, SafetensorError, ValueError, RecursionError
_NUMBERS = {"step": int, "steps": int, "seconds": float}  # in ``about``


SAVE_COST = 20  # shortest pause between checkpoints, as a multiple of the time that training waits for one


class SaveTimer:
    """Timer of the checkpoints of a training.

    Args:
        first: seconds to the first checkpoint; each of the next pauses is twice as long.
        every: longest pause in seconds if writing is fast.
        longest: longest pause in seconds if training would wait more than 1/`SAVE_COST` of the time.
    """

    def __init__(self, first: float, every: float, longest: float = math.inf) -> None:
        self._pause, self._every, self._longest = min(first, every), every, longest
        self.restart()

    def restart(self) -> None:
        self._begun = time.perf_counter()

    @property
    def due(self) -> bool:
        return time.perf_counter() - self._begun > self._pause

    def saved(self, seconds: float) -> None:
        """Record that training waited ``seconds`` for a checkpoint, and begin the next pause."""
        self._pause = min(self._longest, max(min(self._every, 2 * self._pause), SAVE_COST * seconds))
        self.restart()


class Checkpoints:
    """Checkpoints of a run.

    Args:
        folder: folder of ``last.safetensors`` and ``before.safetensors``.
        check: called before a file is written or renamed; may raise.
    """

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None):
        self.check = check
        self.last, self.before = folder / "last.safetensors", folder / "before.safetensors"
        self._sound = True  # whether `last` is intact and may replace `before`
        self._writing: BackgroundWork | None = None

    def there(self) -> bool:
        return self.last.exists() or self.before.exists()

    def clean(self) -> None:
        """Remove incomplete files of a killed process; no other process may be writing."""
        remove_leftovers(self.last.parent)

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write a checkpoint; a complete one is on the disc at every instant.

        Tensors on a GPU, the copies of `tensors_of`, are fetched, digested and written while training goes on: `wait`
        raises what fails. Tensors on the CPU may be the weights themselves, and are written before this returns.
        """
        self.wait()
        self.check()
        text, gpu = json.dumps(about), next((one.device for one in tensors.values() if one.is_cuda), None)
        if gpu is None:
            self._write(tensors, text)
            return
        stream = torch.cuda.Stream(gpu)  # on that of training, it would wait for what is fetched
        stream.wait_stream(torch.cuda.current_stream(gpu))
        copies = dict(tensors)

        def fetch_and_write() -> None:
            with torch.cuda.stream(stream):
                fetched = {name: copies.pop(name).cpu().contiguous() for name in [*copies]}
            self._write(fetched, text)

        self._writing = BackgroundWork(fetch_and_write)

    def wait(self, only_if_done: bool = False) -> None:
        """Wait until the last checkpoint is written; raise the error of writing it."""
        work = self._writing
        if work is not None and (work.done or not only_if_done):
            self._writing = None
            work.wait()

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Wait for the last checkpoint at the end of this block, by an error, too; not by Ctrl-C, which stops at once.

        The error of the block is raised, rather than one of writing.
        """
        try:
            yield
        except Exception:
            with suppress(Exception):
                self.wait()
            raise
        self.wait()

    def _write(self, tensors: dict[str, Tensor], text: str) -> None:
        metadata = {"about": text, "sha256": checksum(tensors, text)}

        def write(path: Path) -> None:
            try:
                path.touch()
                mode = path.stat().st_mode
                if sum(one.nbytes for one in tensors.values()) < _LARGE:
                    save_file(tensors, path, metadata)
                else:
                    BackgroundWork(lambda: save_file(tensors, path, metadata)).wait()
                self.check()  # again, since a large one takes a while
                path.chmod(mode)  # safetensors makes files unreadable to others
            except SafetensorError as problem:  # it drops the errno, but keeps the text
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

    def newest(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights and ``about`` of the newest checkpoint that is intact, or too old for a checksum.

        For a finished run with ``--patience``, these are the weights of its best measure.
        """
        if not self.there():
            raise PatchloomError(f"{self.last.parent.parent} has no checkpoint yet: let the run train first")
        tensors, about, _ = self.read(unsealed=True)
        return best_of(tensors) if is_best(about) else weights_of(tensors), about

    def about(self) -> dict[str, Any]:
        """Return the values beside the tensors of the newest readable checkpoint; {} without one.

        For reports only, not for resuming: neither tensors nor checksum are read.
        """
        for path in (self.last, self.before):
            with suppress(*_UNREADABLE, KeyError), safe_open(regular(path), "pt") as file:
                return _parse_about((file.metadata() or {})["about"])
        return {}

    def progress(self) -> tuple[int, float]:
        """Return the number of steps done and their seconds, from `about`; zeros if unknown."""
        found = self.about()
        return found.get("step", 0), float(found.get("seconds", 0))

    def read(self, unsealed: bool = False) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """Return tensors and ``about`` of the newest intact checkpoint, and a message for each damaged one."""
        self.wait()
        problems: list[str] = []
        for path in (self.last, self.before):
            if not path.exists():
                continue
            try:
                with safe_open(regular(path), "pt") as file:
                    found = file.metadata() or {}
                    if "about" not in found or not (unsealed or "sha256" in found):
                        raise ValueError(
                            "it has no checksum, being older than November 2026: --from can load its weights"
                        )
                    tensors = read_tensors(file, file.keys())
                if "sha256" in found and checksum(tensors, found["about"]) != found["sha256"]:
                    raise ValueError("its checksum does not match")
                about = _parse_about(found["about"])
            except _UNREADABLE as problem:
                problems.append(f"the checkpoint {path} is damaged ({' '.join(str(problem).split())})")
                continue
            self._sound = not problems
            return tensors, about, problems
        raise PatchloomError(
            f"{'; '.join(problems)}; {self.last.parent.parent} has no usable checkpoint: restore one from a copy, or "
            "begin again with another --out"
        )


def tensors_of(task: nn.Module, optimizer: torch.optim.Optimizer, wanted: bool = True) -> dict[str, Tensor]:
    """Return all tensors of a task and its optimiser by name, unsharded, for `Checkpoints.save`.

    On a GPU with room for them they are copies there, which takes milliseconds; otherwise they are on the CPU. Every
    process must call this, because the tensors may be sharded; one in which they are not ``wanted`` gets {}.
    """
    found: dict[str, Tensor | DTensor] = dict(task.state_dict())
    names = {id(weight): name for name, weight in task.named_parameters()}
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{_OPTIMIZER}{key}.{names[id(weight)]}"] = torch.as_tensor(value)
    if wanted:
        # copies have to fit besides all that steps have taken; torch rounds sizes up, and a step of another shape may
        # need more
        sizes = [math.inf if isinstance(one, DTensor) else one.nbytes for one in found.values() if one.is_cuda]
        if sizes and _ROUNDED * sum(sizes) + _MARGIN < torch.cuda.mem_get_info()[0]:
            with suppress(torch.OutOfMemoryError):
                return {name: value.detach().clone() for name, value in found.items()}
        return {name: _unsharded(value.detach()) for name, value in found.items()}
    for value in found.values():
        if isinstance(value, DTensor):
            value.full_tensor()  # all processes gather it
    return {}


def weights_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the task, without optimiser state and best weights."""
    return {name: value for name, value in tensors.items() if not name.startswith((_OPTIMIZER, _BEST))}


def best_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the best measure; {} if the run does not keep them."""
    return {name.removeprefix(_BEST): value for name, value in tensors.items() if name.startswith(_BEST)}


def is_best(about: Mapping[str, Any]) -> bool:
    """Return whether the run of a checkpoint has ended with the weights of its best measure."""
    return bool(about.get("best", {}).get("chosen", False))


def as_best(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of a task for a checkpoint, where `best_of` finds them."""
    return {f"{_BEST}{name}": value for name, value in weights.items()}


def whole_weights(task: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a task's weights by name, unsharded and on the CPU. Every process must call this."""
    return {name: _unsharded(value).clone() for name, value in task.state_dict().items()}


def restore(tensors: dict[str, Tensor], task: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load the tensors of `tensors_of` into a task and its optimiser, with any number of processes."""
    weights = weights_of(tensors)
    # a decoder from an authors' file may store positions that others compute
    own = task.state_dict() | {name: one for name, one in task.named_buffers() if name in weights}
    if weights.keys() != own.keys():
        sides = {"has": sorted(weights.keys() - own.keys()), "lacks": sorted(own.keys() - weights.keys())}
        said = " and ".join(f"it {verb} {names[0]}" for verb, names in sides.items() if names)
        raise PatchloomError(
            f"the checkpoint is of another task or model, or of another version ({said}): "
            "begin a new run from its encoder with --from RUN or --init RUN/encoder.safetensors"
        )
    try:
        task.load_state_dict({name: _as(own[name], value) for name, value in weights.items()}, strict=True)
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
            elif fused:  # a fused optimiser keeps its step count on the device of the weight
                value = value.to(weight.device)
            optimizer.state[weight][key] = value.clone()


def _unsharded(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()


def _as(like: Tensor, value: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return value.to(like.device)
    # every process has the full tensor, so nothing is sent
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _parse_about(text: str) -> dict[str, Any]:
    """Parse the values beside the tensors; the file is untrusted."""
    about = json.loads(text)
    if not isinstance(about, dict) or not isinstance(about.get("best", {}), dict):
        raise ValueError("the values beside its tensors are not of a run")
    best = about.get("best", {})
    numbers = [(about, name, hint) for name, hint in _NUMBERS.items()] + [(best, "step", int)]
    for values, name, hint in numbers:
        if not conforms(value := values.get(name, 0), hint) or not 0 <= value < math.inf:
            raise ValueError(f"its {name} is {str(value)[:40]!r}")
    if best.get("chosen", False) not in (True, False) or best.get("chosen") and "step" not in best:
        raise ValueError("its best measure has no step")
    return about


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values in this process's shards of ``tensors`` are finite; waits for a GPU once."""
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
    return bool(torch.stack([one.isfinite().all() for one in local]).all())
