"""Checkpoints: tensors in safetensors, the rest as JSON in its metadata. Nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.files import write_whole

_OPTIMIZER = "optimizer."


def save_checkpoint(path: Path, task: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> None:
    """Write weights, optimiser state and ``about`` (JSON); the file appears whole or not at all."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in task.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"{_OPTIMIZER}{number}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    write_whole(path, save(tensors, metadata={"about": json.dumps(about)}))


def _open(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            return {key: file.get_tensor(key) for key in file.keys()}, about
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise PatchloomError(
            f"the checkpoint {path} is damaged ({problem}): restore it from a copy, or delete it to "
            "train from the start"
        ) from problem


def load_checkpoint(path: Path, task: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Restore weights, and the optimiser's state if one is given.

    Returns:
        What was saved as ``about``.

    Raises:
        PatchloomError: the file is damaged, or belongs to another task or model.
    """
    tensors, about = _open(path)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key in [key for key in tensors if key.startswith(_OPTIMIZER)]:
        number, name = key.removeprefix(_OPTIMIZER).split(".")
        state.setdefault(int(number), {})[name] = tensors.pop(key)
    try:
        task.load_state_dict(tensors, strict=True)
    except RuntimeError as problem:
        raise PatchloomError(f"the checkpoint {path} is of another task or model: {problem}") from problem
    if optimizer is not None:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return about
