"""Tests of inversion: independent generators in the range of images, and matching features."""

import pytest
import torch
from attending import GRIDS, PREFIXES, random_vit
from swins import swin

from patchloom.errors import PatchloomError
from patchloom.look import inversion
from patchloom.look.context import NamedEncoder
from patchloom.look.inversion import FittingProgress, Generators, invert
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import attend_each, embed, layer_names, patch_count
from patchloom.nets.heads import InstanceHead, represent
from patchloom.withhold.encoder_input import all_patches


def named(vit, head=None, channels=3) -> NamedEncoder:
    return NamedEncoder("mine", vit, EncoderCard(None, (0.5,) * channels, (0.25,) * channels, "mae", "mine"), head)


def photos(b=2, c=3, h=24, w=32) -> torch.Tensor:
    """Return smooth normalised images."""
    y, x = torch.linspace(0, 1, h)[:, None], torch.linspace(0, 1, w)
    planes = [torch.sin(3 * (i + 1) * x + 2 * y + i) for i in range(b * c)]
    return torch.stack(planes).view(b, c, h, w)


@pytest.mark.parametrize("size", [(32, 32), (24, 50), (40, 98), (12, 6), (7, 9), (64, 8)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_pictures_of_generators_are_within_the_range_of_pixels(size, channels):
    drawn = Generators(2, channels, size)()
    assert drawn.shape == (2, channels, *size)
    assert drawn.min() >= 0 and drawn.max() <= 1
    assert drawn.std() > 0.01


def test_generators_leave_torchs_random_numbers_alone():
    before = torch.get_rng_state()
    Generators(1, 3, (24, 32))
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_are_apart_and_begin_alike():
    both, one, other = (
        Generators(2, 3, (24, 32), seed=3),
        Generators(1, 3, (24, 32), seed=3),
        Generators(1, 3, (24, 32)),
    )
    drawn = both()
    torch.testing.assert_close(drawn[0], drawn[1])
    torch.testing.assert_close(drawn[:1], one())
    assert not torch.allclose(one(), other(), atol=1e-3)
    (slope,) = torch.autograd.grad(drawn[0].sum(), both.last.bias)
    assert slope[:3].abs().min() > 0 and not slope[3:].any()


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_the_distance_of_the_features_falls_to_a_tenth(ratio):
    vit, images = random_vit(positions="learned"), photos()
    found = invert(named(vit), images, ratio=ratio, steps=50)
    assert found.curve.shape == (51, 2) and torch.equal(found.before, found.curve[0])
    assert (found.after < found.before / 10).all()
    pixels = found.images * 0.25 + 0.5
    assert found.images.shape == images.shape and pixels.min() >= -1e-6 and pixels.max() <= 1 + 1e-6


def test_the_picture_is_like_the_image():
    images = photos(1)
    found = invert(named(random_vit(positions="learned", depth=1)), images, ratio=0.0, steps=120)
    alike = torch.corrcoef(torch.stack([found.images.flatten(), (images * 0.25 + 0.5).clamp(0, 1).flatten()]))[0, 1]
    assert alike > 0.8


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
    torch.testing.assert_close(found.after, wanted)


def _through(vit, tokens):
    for block in vit.blocks:
        tokens = block(tokens)
    return tokens


def test_it_is_the_same_again_and_for_each_image_alone():
    vit, images = random_vit(), photos()
    one, again = (invert(named(vit), images, steps=5, seed=4) for _ in range(2))
    assert torch.equal(one.images, again.images) and torch.equal(one.curve, again.curve)
    alone = invert(named(vit), images[1:], steps=5, seed=4)
    torch.testing.assert_close(alone.curve[:, 0], one.curve[:, 1], rtol=1e-3, atol=1e-5)
    assert not torch.equal(invert(named(vit), images, steps=5).images, one.images)


def test_the_encoder_stays_as_it_is():
    vit = random_vit()
    before = {name: (weight.detach().clone(), weight.requires_grad) for name, weight in vit.named_parameters()}
    with torch.no_grad():
        invert(named(vit), photos(), steps=2)
    for name, weight in vit.named_parameters():
        value, learnt = before[name]
        assert torch.equal(weight, value) and weight.grad is None and weight.requires_grad == learnt


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_an_encoder_in_half_precision(half):
    vit, head, images = random_vit().to(half), InstanceHead(32, 2).eval().to(half), photos().to(half)
    for of in ("patches", "instance"):
        found = invert(named(vit, head), images, of=of, steps=2)
        assert found.images.dtype == found.curve.dtype == torch.float32 and found.curve.isfinite().all()


def test_a_block_the_class_token_and_the_instance_head():
    vit, images, head = random_vit(), photos(), InstanceHead(32, 2)
    layers = dict(zip(layer_names(vit), attend_each(vit, embed(vit, all_patches(images, 12)), None), strict=True))
    wanted = {
        ("patches", 2): layers["block 2"][:, 1:],
        ("class", None): layers["norm"][:, :1],
        ("instance", None): represent(vit, head, layers["block 3"])[:, None],
    }
    for (of, block), features in wanted.items():
        found = invert(named(vit, head), images, ratio=0.0, of=of, block=block, steps=1)
        drawn = dict(
            zip(layer_names(vit), attend_each(vit, embed(vit, all_patches(found.images, 12)), None), strict=True)
        )
        mine = {
            "patches": drawn["block 2"][:, 1:],
            "class": drawn["norm"][:, :1],
            "instance": represent(vit, head, drawn["block 3"])[:, None],
        }[of]
        distance = (mine - features).square().sum((1, 2)) / features.square().sum((1, 2))
        torch.testing.assert_close(found.after, distance)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("positions", ["sincos", "none"])
def test_encoders_of_every_kind(grid, prefix, positions):
    size, p, channels = GRIDS[grid]
    vit = random_vit(size, p, channels, positions, **PREFIXES[prefix])
    images = photos(1, channels, *size)
    found = invert(named(vit, channels=channels), images, ratio=0.5, steps=2)
    assert found.images.isfinite().all() and found.curve.isfinite().all()


def test_a_swin_at_the_ratios_of_its_windows():
    net, images = swin(), photos(1, 3, 32, 32)
    for ratio in (0.0, 0.75):
        found = invert(named(net), images, ratio=ratio, steps=3)
        assert found.after < found.before
    with pytest.raises(PatchloomError, match="invert with a ratio of 0 or 0.75"):
        invert(named(net), images, ratio=0.5)
    with pytest.raises(PatchloomError, match="blocks have patches of several sizes"):
        invert(named(net), images, ratio=0.0, block=1)


def test_the_features_of_a_whole_swin_are_those_of_its_images(monkeypatch):
    """Units out of the grid's order would give a jumbled image's features."""
    net, images, seen = swin(), photos(1, 3, 32, 32), []
    once = inversion.encode
    monkeypatch.setattr(inversion, "encode", lambda *given: seen.append(once(*given)) or seen[-1])
    invert(named(net), images, ratio=0.0, steps=1)
    assert torch.equal(seen[0], once(net, all_patches(images, patch_count(net))))


def test_what_is_not_there_is_refused():
    vit, bare, images = random_vit(), random_vit(class_token=False), photos()
    for options, said in (
        ({"of": "instance"}, "no instance representation to invert"),
        ({"block": 4}, "no block 4: choose from 1 to 3"),
        ({"block": 0}, "no block 0: choose from 1 to 3"),
        ({"ratio": 1.0}, "below 1, not 1"),
        ({"steps": 0}, "1 step or more, not 0"),
    ):
        with pytest.raises(PatchloomError, match=said):
            invert(named(vit), images, **options)
    with pytest.raises(PatchloomError, match="of the last block's tokens: leave the block out"):
        invert(named(vit, InstanceHead(32, 2)), images, of="instance", block=1)
    with pytest.raises(PatchloomError, match="no class representation"):
        invert(named(bare), images, of="class")


def test_a_line_tells_the_time_left_and_the_distance():
    fitting = FittingProgress(4, "inverting")
    assert fitting.line() == "inverting ..."
    invert(named(random_vit()), photos(), steps=3, fitting=fitting)
    assert "left · inverting: step 3 of 4, distance" in fitting.line() and "% of the start" in fitting.line()


def test_features_that_are_not_finite_are_refused():
    broken = random_vit()
    torch.nn.init.constant_(broken.norm.weight, torch.nan)
    with pytest.raises(PatchloomError, match="mine gives features that are not finite"):
        invert(named(broken), photos(), steps=1)
