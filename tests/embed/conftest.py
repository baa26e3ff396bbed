from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from embedding import ROWS
from evaluating import write_encoder
from PIL import Image
from threads import one_thread

from patchloom.data.sources.open import open_data
from patchloom.embed import parts

BROKEN = "train/b/17.png"


one_thread = pytest.fixture(autouse=True, scope="package")(one_thread)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROWS", ROWS)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("tiny") / "encoder.safetensors", depth=3, embed_dim=16)


@pytest.fixture(scope="package")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of 26 training images of two classes, one of them broken, and 10 test images."""
    folder, digits = tmp_path_factory.mktemp("photos"), open_data("digits").train
    for split, numbers in (("train", range(26)), ("test", range(26, 36))):
        for i in numbers:
            path = folder / split / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digits.read(i)[0].numpy().astype(np.uint8)).save(path)
    (folder / BROKEN).write_bytes(b"no image")
    return folder
