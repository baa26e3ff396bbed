from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def draw(tmp_path: Path) -> Callable[..., Path]:
    """Write a small random PNG under tmp_path and return its path; numbered files differ."""

    def write(name: str, height: int = 8, width: int = 10, grey: bool = False) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(list(name.encode()))
        Image.fromarray(rng.integers(0, 256, (height, width) if grey else (height, width, 3), dtype=np.uint8)).save(
            path
        )
        return path

    return write


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hugging Face's data sets keep what they read in a folder of this module's own, and draw no bars."""
    datasets = pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., str]:
    """A function that writes a recording of its own under a path, and returns the path as text."""
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(0)

    def write(path: str, rate: int = 16_000, seconds: float = 0.1, loud: float = 0.9, **how: Any) -> str:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(place, loud * rng.uniform(-1, 1, round(rate * seconds)), rate, **how)
        return str(place)

    return write
