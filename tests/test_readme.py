"""README's commands, verbatim and in order, in one folder with small data."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_docs import ROOT, blocks_of, commands_of

from patchloom.cli import main

pytestmark = pytest.mark.usefixtures("quick_probe")


def draw(path: Path, seed: int, brighter: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 200, (8, 8, 3), dtype=np.uint8)
    pixels[..., brighter] += 50
    Image.fromarray(pixels).resize((32, 32)).save(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders that README names, and trainings of a few steps."""
    monkeypatch.chdir(tmp_path)
    for i in range(40):
        draw(Path(f"photos/{i:04}.png"), i)
        draw(Path(f"labelled/{'ab'[i % 2]}/{i}.png"), i, brighter=i % 2)
        draw(Path(f"frames/images/{i}.png"), i)
        maps = np.random.default_rng(i).integers(0, 2, (32, 32), dtype=np.uint8)
        Path("frames/labels").mkdir(exist_ok=True)
        Image.fromarray(maps).save(f"frames/labels/{i}.png")
    monkeypatch.setattr("patchloom.train.resolve._SAMPLES", {"cpu": 64, "gpu": 64})
    monkeypatch.setattr("patchloom.evaluate.recipes._UPDATES", {"cpu": 2, "gpu": 2})
    monkeypatch.setattr("patchloom.evaluate.recipes._EPOCHS", (1, 2))
    monkeypatch.setattr("patchloom.dense.recipes._UPDATES", {"cpu": 2, "gpu": 2})
    return tmp_path


def test_every_command_works_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = []
    for info, text, line in blocks_of(ROOT / "README.md"):
        for words in commands_of(text) if info == ["bash"] else []:
            if any(word.startswith("timm:") for word in words):
                skipped.append(words)  # its weights would be fetched
                continue
            assert main(words) == 0, f"README.md:{line} patchloom {' '.join(words)}: {capsys.readouterr().err}"
        if info == ["python"]:
            exec(compile("\n" * line + text, "README.md", "exec"), {"__name__": "readme"})
    assert len(skipped) == 2
    assert {"report.html", "encoder.safetensors"} <= {one.name for one in Path("runs/photos-mae").iterdir()}
    assert Path("photos.npz").exists()
