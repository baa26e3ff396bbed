"""Tests of inversion: independent generators in the range of images, matching features, and sheets."""

from dataclasses import replace

import pytest
import torch
from attending import random_vit
from refusing import refusal
from running import csv_rows
from seeing import asked_of, named
from swins import swin

from patchloom.data.sources.synthetic import Shapes
from patchloom.errors import PatchloomError
from patchloom.look import inversion
from patchloom.look.inversion import FEW_STEPS, Inversion, InversionFit, draw_inversion, fits_of, invert
from patchloom.nets.encode import attend_each, embed, layer_names, patch_count
from patchloom.nets.heads import InstanceHead, represent
from patchloom.withhold.encoder_input import all_patches


def photos(b=2, c=3, h=24, w=32) -> torch.Tensor:
    y, x = torch.linspace(0, 1, h)[:, None], torch.linspace(0, 1, w)
    planes = [torch.sin(3 * (i + 1) * x + 2 * y + i) for i in range(b * c)]
    return torch.stack(planes).view(b, c, h, w)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_the_distance_of_the_features_falls_to_a_tenth(ratio):
    vit, images = random_vit(positions="learned"), photos()
    found = invert(named(vit), images, ratio=ratio, steps=50)
    assert found.curve.shape == (51, 2)
    assert (found.curve[-1] < found.curve[0] / 10).all()
    pixels = found.images * 0.2 + 0.5
    assert found.images.shape == images.shape and pixels.min() >= -1e-6 and pixels.max() <= 1 + 1e-6


def test_the_distance_is_of_the_visible_patches_of_a_whole_picture():
    vit, images = random_vit(), photos()
    found = invert(named(vit), images, ratio=0.5, steps=1)
    seen = ~found.given.isnan()
    assert torch.equal(found.given[seen], images[seen])
    keep = seen[:, 0, ::8, ::8].flatten(1)
    assert keep.sum(1).tolist() == [6, 6]
    given = all_patches(images, 12)
    places = keep.nonzero()[:, 1].view(2, 6)
    from_part = vit.norm(_through(vit, embed(vit, type(given)(images, places))))[:, 1:]
    from_whole = vit.norm(_through(vit, embed(vit, all_patches(found.images, 12))))[:, 1:]
    whole = from_whole[torch.arange(2)[:, None], places]
    wanted = (whole - from_part).square().sum((1, 2)) / from_part.square().sum((1, 2))
    torch.testing.assert_close(found.curve[-1], wanted)


def _through(vit, tokens):
    for block in vit.blocks:
        tokens = block(tokens)
    return tokens


@pytest.fixture
def in_double_precision():
    """Compute by float64: in float32, Adam's first steps turn the rounding of small gradients into whole steps."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_it_is_the_same_again_and_for_each_image_alone(in_double_precision):
    vit, images = random_vit(), photos()
    before = torch.get_rng_state()
    one, again = (invert(named(vit), images, steps=5, seed=4) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.images, again.images) and torch.equal(one.curve, again.curve)
    alone = invert(named(vit), images[1:], steps=5, seed=4)
    torch.testing.assert_close(alone.curve[:, 0], one.curve[:, 1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(invert(named(vit), images, steps=5).images, one.images)


def test_the_encoder_stays_as_it_is_and_may_be_in_half_precision():
    vit = random_vit()
    before = {name: (weight.detach().clone(), weight.requires_grad) for name, weight in vit.named_parameters()}
    with torch.no_grad():
        invert(named(vit), photos(), steps=2)
    for name, weight in vit.named_parameters():
        value, learnt = before[name]
        assert torch.equal(weight, value) and weight.grad is None and weight.requires_grad == learnt
    vit, head, images = random_vit().bfloat16(), InstanceHead(32, 2).eval().bfloat16(), photos().bfloat16()
    for of in ("patches", "instance"):
        found = invert(named(vit, head=head), images, of=of, steps=2)
        assert found.images.dtype == found.curve.dtype == torch.float32 and found.curve.isfinite().all()


def test_a_block_the_class_token_and_the_instance_head():
    vit, images, head = random_vit(), photos(), InstanceHead(32, 2)

    def features(of, pictures):
        each = attend_each(vit, embed(vit, all_patches(pictures, 12)), None)
        layers = dict(zip(layer_names(vit), each, strict=True))
        if of == "instance":
            return represent(vit, head, layers["block 3"])[:, None]
        return layers["norm"][:, :1] if of == "class" else layers["block 2"][:, 1:]

    for of, block in (("patches", 2), ("class", None), ("instance", None)):
        found = invert(named(vit, head=head), images, ratio=0.0, of=of, block=block, steps=1)
        mine, wanted = features(of, found.images), features(of, images)
        torch.testing.assert_close(found.curve[-1], (mine - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2)))


def test_a_swin_at_the_ratios_of_its_windows():
    net, images = swin(), photos(1, 3, 32, 32)
    for ratio in (0.0, 0.75):
        found = invert(named(net), images, ratio=ratio, steps=3)
        assert found.curve[-1] < found.curve[0]
    assert "0 or 0.75" in refusal(invert, named(net), images, ratio=0.5)
    assert "a Swin's blocks" in refusal(invert, named(net), images, ratio=0.0, block=1)


def test_the_features_of_a_whole_swin_are_those_of_its_images(monkeypatch):
    """Units out of the grid's order would give a jumbled image's features."""
    net, images, seen = swin(), photos(1, 3, 32, 32), []
    once = inversion.encode
    monkeypatch.setattr(inversion, "encode", lambda *given: seen.append(once(*given)) or seen[-1])
    invert(named(net), images, ratio=0.0, steps=1)
    assert torch.equal(seen[0], once(net, all_patches(images, patch_count(net))))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"of": "instance"}, "no instance representation"),
        ({"of": "class"}, "no class representation"),
        ({"block": 4}, "no block 4: choose from 1 to 3"),
        ({"block": 0}, "no block 0"),
        ({"ratio": 1.0}, "below 1, not 1"),
        ({"steps": 0}, "1 step or more, not 0"),
    ],
)
def test_what_is_not_there_is_refused(options, said):
    assert said in refusal(invert, named(random_vit(class_token=False)), photos(), **options)
    with pytest.raises(PatchloomError, match="leave the block out"):
        invert(named(random_vit(), head=InstanceHead(32, 2)), photos(), of="instance", block=1)


@pytest.fixture
def drawn(monkeypatch):
    sheets = []
    monkeypatch.setattr(inversion, "draw_sheet", lambda sheet, *at, **_: sheets.append(sheet) or at[2] / sheet.name)
    return sheets


def asked(folder, vit=None, head=None, **more):
    return replace(asked_of(named(vit or random_vit(), head=head), folder, **more), source=Shapes(5))


def test_the_sheet_has_a_pair_of_columns_for_each_ratio(tmp_path, drawn):
    files = draw_inversion(asked(tmp_path, images=2, steps=2))
    assert [file.name for file in files] == ["inversion", "inversion.csv"]
    (sheet,) = drawn
    assert list(sheet.columns) == [
        "image", "inverted, γ 0", "given, γ 0.5", "inverted, γ 0.5", "given, γ 0.8", "inverted, γ 0.8",
        "given, γ 0.9", "inverted, γ 0.9", "inverted, class token",
    ]  # fmt: skip
    given = [round(12 * sheet.columns[f"given, γ {ratio}"][0, 0].isfinite().double().mean().item())
             for ratio in (0.5, 0.8, 0.9)]  # fmt: skip
    assert given == [6, 2, 1]
    assert "after the last norm" in sheet.caption and "in 2 steps" in sheet.caption
    rows = csv_rows(files[1])
    assert [(row["of"], row["ratio"], row["image"]) for row in rows][:3] == [
        ("patches", "0.0", "1"), ("patches", "0.0", "2"), ("patches", "0.5", "1"),
    ]  # fmt: skip
    assert len(rows) == 10 and all(float(row["distance_after"]) < float(row["distance_before"]) for row in rows)
    again, other = (csv_rows(draw_inversion(asked(tmp_path, images=2, steps=2, seed=seed))[1]) for seed in (0, 1))
    assert again == rows != other


def test_a_sheet_a_block(tmp_path, drawn):
    files = draw_inversion(asked(tmp_path, images=1, steps=1, blocks=(1, 3)))
    assert [file.name for file in files] == ["inversion-block-1", "inversion-block-3", "inversion.csv"]
    assert "after block 1." in drawn[0].caption and "after block 3." in drawn[1].caption
    assert [row["block"] for row in csv_rows(files[2])] == ["1"] * 5 + ["3"] * 5


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
    assert f"in {FEW_STEPS} steps" in drawn[0].caption and "in 3,000 steps." in drawn[1].caption
    assert "fell to 2 % (γ 0), 20 % (γ 0.5), 2 % (γ 0.8)" in drawn[0].caption
    assert ["give more --steps" in sheet.caption for sheet in drawn] == [True, False, True]
