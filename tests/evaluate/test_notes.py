"""Notes on data that was left out: once, where an evaluation begins, and in a run's opening lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.cli import main
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.protocols.knn import knn
from patchloom.evaluate.settings import EvalSettings
from patchloom.train.loop import pretrain

VAL = (
    "Of 26 images, train (20) is trained on, test (4) is the test, and val (2) is neither: choose between runs by it, "
    "or move it into train to train on it"
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in {"train": 20, "test": 4, "val": 2}.items():
        for i in range(count):
            path = tmp_path / "photos" / split / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


def test_evaluate_says_it_once(tiny_encoder: Path, photos: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", "knn", str(tiny_encoder), str(photos), "--seeds", "2"]) == 0
    told = capsys.readouterr().out
    before, said, _ = told.partition(f"{VAL}.\n")
    assert said and before in ("", "Seed 0, 1 of 2:\n") and told.count("Of 26 images") == 1
    evaluate("knn", tiny_encoder, photos)
    assert capsys.readouterr().out == f"{VAL}.\n", "another evaluation says it, too"
    knn(tiny_encoder, photos, EvalSettings())
    assert not capsys.readouterr().out


def test_pretrain_says_it(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for path in photos.rglob("*.png"):
        image = Image.open(path).convert("LA")
        image.putalpha(100)
        image.save(path)
    sizes = dict(epochs=1, img_size=8, patch_size=4, batch_size=8, workers=0, held_out=0.1)
    model = {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}
    pretrain(photos, "mae", out=tmp_path / "run", model=model, **sizes)
    told = capsys.readouterr().out
    assert f"\n  {VAL}\n" in told
    assert f"\n  18 of 18 images have an alpha channel, composited over white ({photos}/train/" in told
