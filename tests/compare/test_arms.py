"""A comparison of two arms from the command line, and fine-tuning of their encoders."""

import json
from dataclasses import replace

import numpy as np
import pytest
from in_process import HERE
from PIL import Image

from patchloom.cli import main
from patchloom.compare import runner
from patchloom.evaluate.recipes import RECIPES
from patchloom.runs.folder import RunFolder

SMALL = ["--img_size=16", "--patch_size=8", "--batch_size=8", "--threads=1", "--workers=0", "--seeds=1", "--few=9"]


@pytest.mark.usefixtures("quick_probe")
def test_arms_differ_in_their_options_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "subprocess", HERE)
    monkeypatch.setattr(runner, "_LOOK", 0.02)
    monkeypatch.setitem(RECIPES, "small", (replace(RECIPES["small"][0], epochs=1), {}))
    rng = np.random.default_rng(0)
    for i in range(60):  # bright and dark noise
        path = tmp_path / "images" / ("bright", "dark")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 130, (16, 16, 3), np.uint8) + 125 * (i % 2)).save(path)
    arms = ["mae", "mae:blr=1e-3"]
    words = ["compare", str(tmp_path / "images"), f"--tasks={','.join(arms)}", "--minutes=0.01", *SMALL]
    assert (
        main([*words, "--finetune", "--log", "tensorboard", "tensorboard", f"--out={tmp_path / 'out'}", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)["result"]
    folders = [RunFolder(tmp_path / "out" / name) for name in ("mae-seed0", "mae-blr=1e-3-seed0")]
    usual, other = (folder.read_config() for folder in folders)
    assert other.blr == 1e-3 != usual.blr
    same = {"epochs": usual.epochs, "warmup_epochs": usual.warmup_epochs, "blr": usual.blr}
    assert replace(other, **same) == usual and all(
        (folder.path / "logs" / "tensorboard").exists() for folder in folders
    )
    assert [one["task"] for one in found["trained"]] == arms
    for one in found["trained"]:
        assert one["updates"] * 8 == one["images"] > 0 and one["seconds"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Training of each run" in page and "mae:blr=1e-3" in page and "fine-tuned, small" in page
