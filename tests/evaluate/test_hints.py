"""Hints that are printed before an evaluation: leaks between training and test images, and colours that are dropped."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.cli import main
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder


def encoder(folder: Path, channels: int) -> str:
    spec = EncoderSpec("nano", (16, 16), 4, channels, options={"depth": 1, "embed_dim": 8, "num_heads": 2})
    path = folder / "encoder.safetensors"
    save_encoder(build_encoder(spec), EncoderCard(spec, (0.5,) * channels, (0.2,) * channels, "mae", "tiny"), path)
    return str(path)


def crops(folder: Path, colours: bool = True) -> str:
    rng = np.random.default_rng(0)
    for i in range(40):
        path = folder / "images" / "ab"[i % 2] / f"slide{i % 5}_{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3) if colours else (16, 16), np.uint8)).save(path)
    return str(folder / "images")


def knn(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    main(["evaluate", "knn", *more, "--device", "cpu", "--cache", "false", "--workers", "0"])
    return " ".join(capsys.readouterr().out.split())


def test_crops_of_a_slide_on_both_sides_are_told_with_a_group_that_mends_it(tmp_path, capsys) -> None:
    run, data = encoder(tmp_path, 3), crops(tmp_path)
    said = knn(tmp_path, capsys, run, data)
    assert "groups (slide0, slide1, " in said
    group = re.search(r"--group '(.*?)'", said)[1]
    assert "in training and in test" not in knn(tmp_path, capsys, run, data, "--group", group)


@pytest.mark.parametrize(("channels", "colours", "told"), [(1, True, True), (1, False, False), (3, True, False)])
def test_an_encoder_of_grey_images_says_that_it_drops_colours(tmp_path, capsys, channels, colours, told) -> None:
    run, data = encoder(tmp_path, channels), crops(tmp_path, colours)
    assert ("colours are dropped" in knn(tmp_path, capsys, run, data)) == told
    main(["embed", run, data, "--to", str(tmp_path / "v.npz"), "--device", "cpu"])
    assert ("colours are dropped" in " ".join(capsys.readouterr().out.split())) == told
