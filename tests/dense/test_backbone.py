"""Encoders at other sizes, and the maps of their features."""

import pytest
import timm
import torch
from dense_nets import KINDS, encoder, without_gradient
from packaging.version import Version
from timm.layers import resample_abs_pos_embed
from torch import nn

from patchloom.dense.backbone import FeatureMaps, four_levels
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import encode, grid_size, input_size, patch_count, patch_positions, patch_side, prefix_count
from patchloom.nets.finetune import RelativeAttention, at_size
from patchloom.patches.positions import sincos_2d
from patchloom.withhold.encoder_input import all_patches


def image(net: nn.Module, b: int = 2) -> torch.Tensor:
    return torch.randn(b, 3, *input_size(net), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_at_another_size(kind: str) -> None:
    vit, card = encoder(kind)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    p = patch_side(vit)
    copy = at_size(vit, card, (6 * p, 8 * p), drop_path=0.1)
    assert (grid_size(copy), input_size(copy)) == ((6, 8), (6 * p, 8 * p))
    assert grid_size(vit) == (4, 4)
    assert {one for one in map(id, copy.parameters())}.isdisjoint(map(id, vit.parameters()))
    for name, value in vit.state_dict().items():
        assert torch.equal(value, before[name])
        if name != "pos_embed":
            assert torch.equal(copy.state_dict()[name], value), name
    table = patch_positions(vit)
    if table is not None and kind != "swin":
        resampled = resample_abs_pos_embed(table[None], [6, 8], [4, 4], num_prefix_tokens=0)[0]
        assert torch.allclose(patch_positions(copy), resampled)
        own = copy.get_parameter("pos_embed")
        assert own.requires_grad == vit.get_parameter("pos_embed").requires_grad
        prefix = len(own[0]) - patch_count(copy)
        assert torch.equal(own[0, :prefix], vit.get_parameter("pos_embed")[0, :prefix])
    assert any(getattr(one, "drop_prob", 0) for one in copy.modules())
    assert not any(getattr(one, "drop_prob", 0) for one in at_size(vit, card, (4 * p, 4 * p)).modules())


@pytest.mark.parametrize("kind", ["p8 learned", "p16 registers", "swin"])
def test_the_same_size_is_the_same_encoder(kind: str) -> None:
    vit, card = encoder(kind)
    copy = at_size(vit, card, input_size(vit)).eval()
    given = all_patches(image(vit), patch_count(vit))
    assert torch.equal(encode(copy, given), encode(vit, given))


def test_a_grid_of_as_many_patches_that_is_another_one() -> None:
    vit, card = encoder("p4", grid=(4, 8))
    turned = at_size(vit, card, (32, 16))
    assert torch.allclose(
        patch_positions(turned), resample_abs_pos_embed(patch_positions(vit)[None], [8, 4], [4, 8], 0)[0]
    )


def test_positions_are_those_of_the_new_grid() -> None:
    vit, card = encoder("p8 learned", grid=(4, 4))
    fixed = at_size(vit, card, (64, 48), "fixed")
    assert (
        torch.equal(patch_positions(fixed), sincos_2d(16, (8, 6)))
        and not fixed.get_parameter("pos_embed").requires_grad
    )
    none = at_size(vit, card, (64, 48), "none")
    assert patch_positions(none) is None
    relative = at_size(vit, card, (64, 48), "relative")
    tables = [one.rel_pos for one in relative.modules() if isinstance(one, RelativeAttention)]
    assert len(tables) == 4 and {one.window_size for one in tables} == {(8, 6)}
    bare, its = encoder("p32 no positions")
    learned = patch_positions(at_size(bare, its, (320, 320), "learned"))
    assert 0.015 < learned.std() < 0.025  # drawn for this grid: resampled noise would be flatter


def test_an_encoder_that_timm_names() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2).eval()
    card = EncoderCard(None, (0.5,) * 3, (0.5,) * 3, "timm:vit_tiny_patch16_224", "tiny")
    with pytest.raises(RuntimeError):  # a name says nothing of fewer blocks
        at_size(vit, card, (64, 96))
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0).eval()
    assert grid_size(at_size(vit, card, (64, 96))) == (4, 6)


def test_a_swin_keeps_its_windows() -> None:
    swin, card = encoder("swin", grid=(2, 2))
    copy = at_size(swin, card, (96, 64)).eval()
    windows = [block.window_size for stage in copy.layers for block in stage.blocks]
    assert windows == [block.window_size for stage in swin.layers for block in stage.blocks]
    maps = FeatureMaps(copy)
    whole = encode(copy, all_patches(image(copy), patch_count(copy)))
    assert torch.allclose(maps(image(copy))[0].flatten(2).mT, whole, atol=1e-5)


def test_a_size_that_patches_do_not_divide() -> None:
    vit, card = encoder("p16 registers")
    with pytest.raises(
        PatchloomError, match="patches of 16 pixels do not divide images of 360x480: choose 352x480 or 368x480"
    ):
        at_size(vit, card, (360, 480))
    with pytest.raises(PatchloomError, match="choose 16x32$"):
        at_size(vit, card, (10, 32))
    swin, its = encoder("swin")
    with pytest.raises(PatchloomError, match="units of 16 pixels do not divide images of 40x32"):
        at_size(swin, its, (40, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_map_is_what_the_encoder_gives(kind: str) -> None:
    vit, _ = encoder(kind, grid=(2, 4))
    maps = FeatureMaps(vit)
    (last,) = maps(image(vit))
    tokens = encode(vit, all_patches(image(vit), patch_count(vit)))[:, prefix_count(vit) :]
    assert torch.allclose(last, tokens.mT.unflatten(2, (2, 4)), atol=1e-5)
    assert maps.strides == (float(patch_side(vit)),) and maps.widths == (last.shape[1],) and maps.grids == ((2, 4),)
    assert set(maps.state_dict()) == {f"encoder.{name}" for name in vit.state_dict()}


@pytest.mark.parametrize("kind", KINDS)
def test_four_levels(kind: str) -> None:
    vit, _ = encoder(kind)
    numbers = four_levels(vit)
    maps = FeatureMaps(vit, numbers)
    found = maps(image(vit))
    assert [one.shape[1:] for one in found] == [(d, *grid) for d, grid in zip(maps.widths, maps.grids, strict=True)]
    if kind == "swin":
        assert numbers == (1, 2, 3, 3) and maps.strides == (4, 8, 16, 16) and maps.widths == (8, 16, 32, 32)
        return
    assert numbers == ((1, 1, 2, 2) if "two" in kind else (1, 2, 3, 4))
    if kind == "p32 no positions" and Version(timm.__version__) < Version("1.0.31"):
        pytest.skip("timm's own intermediates lack a token there")
    stock = vit.forward_intermediates(
        image(vit), [number - 1 for number in sorted(set(numbers))], intermediates_only=True
    )
    for number, one in zip(numbers, found, strict=True):
        assert torch.allclose(one, stock[sorted(set(numbers)).index(number)], atol=1e-5)


def test_stages_of_a_swin_of_other_strides() -> None:
    fine = encoder("swin", depths=[1, 1], num_heads=[1, 2])[0]
    assert four_levels(fine) == (1, 2, 2, 2)
    deep = encoder("swin", depths=[1, 1, 1, 1, 1], num_heads=[1, 1, 1, 1, 1], grid=(2, 2))
    # whose fifth stage would be of stride 64
    assert four_levels(deep[0]) == (1, 2, 3, 4)
    maps = FeatureMaps(deep[0], four_levels(deep[0]))
    sum(one.square().sum() for one in maps(image(deep[0]))).backward()
    assert not without_gradient(maps) and any(name.startswith("layers.4.") for name in maps.unused)


@pytest.mark.parametrize("blocks", [None, (1, 3), (2,)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_gets_a_gradient_and_the_rest_is_frozen(kind: str, blocks: tuple | None) -> None:
    if blocks and "two" in kind:
        blocks = (1,)
    vit, _ = encoder(kind, grid=(2, 2))
    fixed = {name for name, one in vit.named_parameters() if not one.requires_grad}
    maps = FeatureMaps(vit, blocks).train()
    sum((one * torch.randn_like(one)).sum() for one in maps(image(vit))).backward()
    assert not without_gradient(maps)
    frozen = {name for name, one in vit.named_parameters() if not one.requires_grad} - fixed
    assert frozen == set(maps.unused)
    assert ("norm.weight" in frozen) == (blocks is not None)


def test_a_norm_after_pooling_is_the_final_one() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0, global_pool="avg").eval()
    maps = FeatureMaps(vit)
    sum((one * torch.randn_like(one)).sum() for one in maps(image(vit))).backward()
    assert not without_gradient(maps) and maps.unused == ()
    assert torch.allclose(maps(image(vit))[0].mean(1), torch.zeros(()), atol=1e-5)  # normed over channels


def test_checkpointing_changes_nothing() -> None:
    for kind in ("p16 registers", "swin"):
        vit, _ = encoder(kind, grid=(2, 2))
        maps = FeatureMaps(vit, four_levels(vit)).train()
        plain = maps(image(vit))
        vit.set_grad_checkpointing()
        again = maps(image(vit))
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
        sum(one.square().sum() for one in again).backward()
        assert not without_gradient(maps)


def test_numbers_that_no_block_has() -> None:
    for blocks in ((0,), (5,), ()):
        with pytest.raises(ValueError, match="blocks are 1 to 4"):
            FeatureMaps(encoder()[0], blocks)
