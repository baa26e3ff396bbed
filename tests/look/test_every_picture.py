"""Sweep: every picture of an encoder for every kind of encoder, repeatable, and never of diverged features."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attending import random_vit
from running import csv_rows
from seeing import asked_of, asked_of_sound, named
from swins import swin

from patchloom.data.sources.synthetic import Shapes
from patchloom.errors import PatchloomError
from patchloom.look import charts
from patchloom.look.look import PICTURES, draw_pictures
from patchloom.look.sheet import read_caption
from patchloom.nets.heads import InstanceHead
from patchloom.results.claims import UNTRAINED

VITS = {
    "registers": {"reg_tokens": 2},
    "no class token, no positions": {"class_token": False, "positions": "none"},
    "not square": {"size": (16, 40), "p": (8, 4)},
    "one row": {"size": (12, 30), "p": (12, 3)},
    "one patch": {"size": (16, 16), "p": 16, "positions": "none"},
}
LEFT_OUT = {"swin": {"attention", "relative"}, "sound": {"retrieval"}, "single": {"neighbours", "retrieval"}}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr(charts, "DPI", 50)


def request(kind, folder):
    more = {"images": 2, "steps": 1}
    if kind == "sound":
        return asked_of_sound(folder, **more)
    head = InstanceHead(32, 2).eval() if kind == "instance head" else None
    one = named(swin() if kind == "swin" else random_vit(**VITS.get(kind, {})), head=head)
    asked = asked_of(one, folder, beside=(named(random_vit((32, 32), 4, depth=1), UNTRAINED),), **more)
    return replace(asked, source=Shapes(1)) if kind == "single" else asked


@pytest.mark.parametrize("kind", [*VITS, "instance head", "swin", "sound", "single"])
def test_every_picture_of_every_kind_of_encoder(kind, pages, tmp_path, capsys):
    files = draw_pictures(list(PICTURES), request(kind, tmp_path / kind), lenient=True)
    assert {line.split()[0] for line in capsys.readouterr().err.splitlines()} == LEFT_OUT.get(kind, set())
    assert len(pages) == {"swin": 5, "sound": 7, "single": 5}.get(kind, 8)
    for page in pages:
        assert page.caption and sum(count for _, count in page.groups) in (0, len(page.headings))
        for row in page.rows:
            assert len(row) == len(page.headings) and all(tile.picture.dtype == np.uint8 for tile in row if tile)
    for path in files:
        if path.suffix == ".png":
            title, text, order, _ = read_caption(path)
            assert text and 100 <= order < 200 and not (kind == "sound" and "image" in f"{title} {text}".lower())
        if path.suffix == ".csv":
            names = {row["encoder"] for row in csv_rows(path)}
            assert ("ear" if kind == "sound" else "mine") in names and names <= {"ear", "mine", UNTRAINED}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_the_same_bytes_again(name, tmp_path):
    asked = asked_of(named(random_vit()), tmp_path / "a", images=2, steps=1)
    first, second = (draw_pictures([name], one, False) for one in (asked, replace(asked, folder=tmp_path / "b")))
    assert first and [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize("name", PICTURES)
def test_features_that_are_not_finite_are_refused(name, tmp_path):
    vit = random_vit()
    with torch.no_grad():
        vit.blocks[1].mlp.fc2.bias[0] = torch.nan
    with pytest.raises(PatchloomError, match="mine gives features that are not finite"):
        draw_pictures([name], asked_of(named(vit), tmp_path, images=2, steps=1), lenient=False)
