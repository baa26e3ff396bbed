"""A run on the built-in recordings: dry run, pictures and export."""

import shlex

import numpy as np
import pytest
from killing import SMALL
from PIL import Image

import patchloom
from patchloom.check import propose
from patchloom.cli import main
from patchloom.data.sources.open import open_data
from patchloom.data.stats import unknown_stats
from patchloom.errors import PatchloomError
from patchloom.look import image_grid, task_pictures
from patchloom.runs.settings import request
from patchloom.train.resolve import resolve

TINY = {name: value for name, value in SMALL.items() if name not in ("img_size", "patch_size")} | {"epochs": 1}


def test_a_dry_run_trains_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "tones:48", "--dry_run", "--model.embed_dim", "32", "--model.depth", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "img_size 40x98" in said
        and "patch_size 40x7" in said
        and "droppos on tones" in said
        and not list(tmp_path.iterdir())
    )


@pytest.mark.usefixtures("quick_probe")
def test_a_tiny_run_its_pictures_and_its_export(tmp_path, monkeypatch):
    titles, draw = [], image_grid.draw_sheet
    monkeypatch.setattr(task_pictures, "draw_sheet", lambda *given: titles.append(given[4]) or draw(*given))
    run = patchloom.pretrain("tones:48", task="mp3", seconds=0.32, out=tmp_path / "run", **TINY).folder
    drawn = Image.open(run / "pictures" / "rebuilt.png")
    assert drawn.width > 3 * 300 and len(np.unique(np.asarray(drawn).reshape(-1, 3), axis=0)) > 100
    assert "on held-out recordings: position accuracy" in titles[0].result
    done = patchloom.export(run)
    assert done.compared_on == "recordings" and done.difference < 1e-4 and done.notes == ()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patch_size": 16}, "patches of 16 rows do not divide the 40 rows of the pictures: give --bins 32"),
        ({"patch_size": 16, "bins": 64, "features": "logmel"}, "the 98 frames of 1 s: give --seconds 0.98 or 1.14"),
        ({"patch_size": (40, 16), "seconds": 0.15}, "the 13 frames of 0.15 s: give --seconds 0.18"),
    ],
)
def test_patches_that_do_not_divide_recordings_say_which_would(settings, said, tmp_path):
    with pytest.raises(PatchloomError, match=said):
        patchloom.pretrain("tones:24", out=tmp_path / "run", **TINY | settings)


def test_the_command_that_check_proposes_is_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proposed = propose(["tones:48"], open_data("tones:48").train, *resolved_for_tones(), estimate=False)
    words = shlex.split(proposed.command)
    assert words[:3] == ["patchloom", "pretrain", "tones:48"] and "--patch_size" in words
    words[words.index("--epochs") + 1] = "1"
    assert main([*words[1:], "--dry_run"]) == 0, capsys.readouterr().err


def resolved_for_tones():
    asked = request("tones:48", "mae", {"model": {"name": "nano", "embed_dim": 32, "depth": 1}})
    return resolve(asked, 48, 1, unknown_stats(1, asked.sound()))
