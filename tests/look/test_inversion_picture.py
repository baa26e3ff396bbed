"""Tests of the sheets of inversions: their columns and captions for each encoder, and limits on a CPU."""

import csv

import pytest
import torch
from attending import random_vit
from PIL import Image
from swins import swin

from patchloom.audio.config import Sound
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.look import image_grid, inversion
from patchloom.look.context import LookRequest, NamedEncoder
from patchloom.look.inversion import FEW_STEPS, Inversion, InversionFit, draw_inversion, fits_of
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.heads import InstanceHead


def asked(tmp_path, vit=None, head=None, count=5, **more) -> LookRequest:
    folder = tmp_path / "images"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    for i in range(count):
        coarse = torch.randint(256, (5, 7, 3), dtype=torch.uint8).numpy()
        Image.fromarray(coarse).resize((70, 50)).save(folder / f"{i}.png")
    card = EncoderCard(None, (0.5,) * 3, (0.25,) * 3, "mae", "mine")
    one = NamedEncoder("mine", vit or random_vit(), card, head)
    return LookRequest(one, open_data(folder).train, tmp_path / "out", **more)


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def drawn(monkeypatch):
    """Record the drawn sheets."""
    sheets = []
    was = image_grid.draw_sheet
    monkeypatch.setattr(inversion, "draw_sheet", lambda sheet, *rest: sheets.append(sheet) or was(sheet, *rest))
    return sheets


def test_the_sheet_has_a_pair_of_columns_for_each_ratio(tmp_path, drawn):
    files = draw_inversion(asked(tmp_path, images=2, steps=2))
    assert [file.name for file in files] == ["inversion.png", "inversion.csv"]
    (sheet,) = drawn
    assert list(sheet.columns) == [
        "image", "inverted, γ 0", "given, γ 0.5", "inverted, γ 0.5", "given, γ 0.8", "inverted, γ 0.8",
        "given, γ 0.9", "inverted, γ 0.9", "inverted, class token",
    ]  # fmt: skip
    given = [round(12 * sheet.columns[f"given, γ {ratio}"][0, 0].isfinite().double().mean().item())
             for ratio in (0.5, 0.8, 0.9)]  # fmt: skip
    assert given == [6, 2, 1]
    assert "after the last norm" in sheet.caption and "in 2 steps; the paper has 3,000" in sheet.caption
    rows = table(files[1])
    assert [(row["of"], row["ratio"], row["image"]) for row in rows][:3] == [
        ("patches", "0.0", "1"), ("patches", "0.0", "2"), ("patches", "0.5", "1"),
    ]  # fmt: skip
    assert len(rows) == 10 and all(float(row["distance_after"]) < float(row["distance_before"]) for row in rows)
    before = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in draw_inversion(asked(tmp_path, images=2, steps=2))] == before
    assert [file.read_bytes() for file in draw_inversion(asked(tmp_path, images=2, steps=2, seed=1))] != before


def test_a_sheet_a_block(tmp_path, drawn):
    files = draw_inversion(asked(tmp_path, images=1, steps=1, blocks=(1, 3)))
    assert [file.name for file in files] == ["inversion-block-1.png", "inversion-block-3.png", "inversion.csv"]
    assert "after block 1." in drawn[0].caption and "after block 3." in drawn[1].caption
    assert [row["block"] for row in table(files[2])] == ["1"] * 5 + ["3"] * 5


def test_what_is_inverted_is_what_the_encoder_has(tmp_path):
    ratios = [InversionFit(ratio, "patches") for ratio in (0.0, 0.5, 0.8, 0.9)]
    assert fits_of(asked(tmp_path)) == [*ratios, InversionFit(0.0, "class")]
    assert fits_of(asked(tmp_path, random_vit(class_token=False))) == ratios
    head = InstanceHead(32, 2)
    assert fits_of(asked(tmp_path, random_vit(class_token=False), head)) == [*ratios, InversionFit(0.0, "instance")]
    assert fits_of(asked(tmp_path, random_vit(class_token=False), head, blocks=(1,))) == ratios
    assert fits_of(asked(tmp_path, swin())) == [InversionFit(0.0, "patches"), InversionFit(0.75, "patches")]
    assert fits_of(asked(tmp_path, swin((20, 20)))) == [InversionFit(0.0, "patches")]


def test_a_cpu_has_fewer_steps_and_images_unless_steps_are_given(tmp_path, monkeypatch, drawn):
    asks = []

    def quick(one, images, *, steps, ratio, **rest):
        asks.append((len(images), steps))
        left = 0.2 if ratio == 0.5 and steps == FEW_STEPS else 0.02
        return Inversion(images, images, torch.tensor([[1.0], [left]]).expand(2, len(images)))

    monkeypatch.setattr(inversion, "invert", quick)
    draw_inversion(asked(tmp_path))
    draw_inversion(asked(tmp_path, steps=3000))
    draw_inversion(asked(tmp_path, random_vit((192, 256))))
    assert asks == [(4, FEW_STEPS)] * 5 + [(4, 3000)] * 5 + [(1, FEW_STEPS)] * 5
    assert f"in {FEW_STEPS} steps; the paper has 3,000" in drawn[0].caption and "in 3,000 steps." in drawn[1].caption
    assert "fell to 2 % (γ 0), 20 % (γ 0.5), 2 % (γ 0.8)" in drawn[0].caption
    assert ["the fit is not finished: give more --steps" in sheet.caption for sheet in drawn] == [True, False, True]


def test_an_encoder_without_positions_and_a_swin(tmp_path, drawn):
    draw_inversion(asked(tmp_path, random_vit(positions="none"), images=1, steps=1))
    assert "knows no positions" in drawn[0].caption
    draw_inversion(asked(tmp_path, swin(), images=1, steps=1))
    assert "given, γ 0.75" in drawn[1].columns
    with pytest.raises(PatchloomError, match="a Swin's blocks"):
        draw_inversion(asked(tmp_path, swin(), images=1, steps=1, blocks=(1,)))


def test_of_recordings_there_are_spectrograms(tmp_path, monkeypatch, drawn):
    card = EncoderCard(None, (0.5,), (0.25,), "mp3", "speech", sound=Sound())
    vit = random_vit((40, 98), (40, 1), 1)
    ask = LookRequest(NamedEncoder("speech", vit, card), [], tmp_path, steps=1)
    monkeypatch.setattr(LookRequest, "pictures", lambda self, most=None: torch.zeros(1, 1, 40, 98))
    draw_inversion(ask)
    (sheet,) = drawn
    assert "recording" in sheet.columns and sheet.columns["inverted, γ 0.5"].shape[1] == 3
    assert sheet.caption.startswith("Recordings generated by a deep image prior")
    assert "Left to right: 1 s" in sheet.caption
