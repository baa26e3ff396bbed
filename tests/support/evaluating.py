"""Fixtures shared by the tests of evaluations."""

import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from patchloom.evaluate import features
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.results.result import Result


def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty cache of features for one test; return its folder, which does not exist yet."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "patchloom" / "features"


def float32_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in float32 by default, whatever the processor."""
    of_gpus = features.choose_precision
    monkeypatch.setattr(
        features,
        "choose_precision",
        lambda device: ("float32", "as the test says") if device == "cpu" else of_gpus(device),
    )


def folder_of(encoder: Path, folder: Path) -> Path:
    """Make a folder with a copy of an encoder's file, like the folder of a run; return it."""
    folder.mkdir()
    shutil.copy(encoder, folder / "encoder.safetensors")
    return folder


@contextmanager
def ctrl_c_at(training: type, step: int) -> Iterator[list[int]]:
    """Press Ctrl-C as trainings of a class begin their update ``step`` (from 1); yield a list of the updates begun."""
    update, begun = training.update, list[int]()

    def pressed(self: Any, *given: Any) -> Any:
        begun.append(1)
        if len(begun) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "update", pressed)
        yield begun


def numbers(results: Iterable[Result]) -> list[tuple]:
    """Return what was measured, also image by image, without the date and the data."""
    return [
        (one.encoder, one.protocol, one.measure, dict(one.settings), one.value, one.low, one.high)
        + (() if one.outcomes is None else (one.outcomes.values.tobytes(),))
        for one in results
    ]


def write_encoder(path: Path, size: tuple[int, int] = (8, 8), p: int = 2, channels: int = 1, **options: Any) -> Path:
    """Write a small encoder named tiny with patches of ``p`` pixels, random but always the same; return its file."""
    model, positions, seed = options.pop("model", "nano"), options.pop("positions", "sincos"), options.pop("seed", 1)
    own = {"depth": 1, "embed_dim": 32, "num_heads": 2} if model == "nano" else {}
    spec = EncoderSpec(model, size, p, channels, positions=positions, options=own | options)
    torch.manual_seed(seed)
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.3,) * channels, (0.37,) * channels, "mae", "tiny"), path)
    return path
