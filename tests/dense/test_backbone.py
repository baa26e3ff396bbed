"""Encoders at other sizes, the maps of their features, attention in windows, and pyramids."""

import pytest
import timm
import torch
from dense_nets import KINDS, encoder, without_gradient
from packaging.version import Version
from refusing import refusal
from timm.layers import LayerNorm2d, resample_abs_pos_embed
from torch import nn

from patchloom.dense.backbone import (
    FeatureMaps,
    MultiLevel,
    SimpleFeaturePyramid,
    Windows,
    even_blocks,
    four_levels,
    tokens_after,
    window_for,
    window_of,
)
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
    same, given = at_size(vit, card, input_size(vit)).eval(), all_patches(image(vit), patch_count(vit))
    assert torch.equal(encode(same, given), encode(vit, given))
    drops = [any(getattr(one, "drop_prob", 0) for one in net.modules()) for net in (copy, same)]
    assert drops == [True, False]


def test_positions_are_those_of_the_new_grid() -> None:
    vit, card = encoder("p4", grid=(4, 8))
    turned = resample_abs_pos_embed(patch_positions(vit)[None], [8, 4], [4, 8], 0)[0]  # as many patches
    assert torch.allclose(patch_positions(at_size(vit, card, (32, 16))), turned)
    vit, card = encoder("p8 learned", grid=(4, 4))
    fixed = at_size(vit, card, (64, 48), "fixed")
    assert torch.equal(patch_positions(fixed), sincos_2d(16, (8, 6)))
    assert not fixed.get_parameter("pos_embed").requires_grad
    assert patch_positions(at_size(vit, card, (64, 48), "none")) is None
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


def test_sizes_that_patches_do_not_divide_are_rejected() -> None:
    vit, card = encoder("p16 registers")
    assert "360x480: choose 352x480 or 368x480" in refusal(at_size, vit, card, (360, 480))
    assert refusal(at_size, vit, card, (10, 32)).endswith("choose 16x32")
    assert "units of 16 pixels do not divide images of 40x32" in refusal(at_size, *encoder("swin"), (40, 32))


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
    blocks = [number - 1 for number in sorted(set(numbers))]
    stock = dict(zip(blocks, vit.forward_intermediates(image(vit), blocks, intermediates_only=True), strict=True))
    assert all(torch.allclose(one, stock[number - 1], atol=1e-5) for number, one in zip(numbers, found, strict=True))


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
def test_trained_weights_get_a_gradient_and_others_are_frozen(kind: str, blocks: tuple | None) -> None:
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
    with pytest.raises(ValueError, match="one map or of 4"):
        MultiLevel(FeatureMaps(encoder()[0], (1, 2)))


def test_sides_of_windows_and_the_last_block_of_each_quarter() -> None:
    assert window_for((64, 64), (14, 14)) == 16  # ViTDet's own image and pre-training
    assert window_for((32, 32), (14, 14)) == 16
    assert window_for((48, 64), (14, 14)) == 16
    assert window_for((21, 21), (14, 14)) is None and window_for((14, 14), (14, 14)) is None
    assert window_for((37, 37), (16, 16)) == 16  # which nothing divides
    assert window_for((36, 24), (8, 18)) == 12
    known = {12: (3, 6, 9, 12), 24: (6, 12, 18, 24), 6: (2, 3, 5, 6), 2: (1, 1, 2, 2), 1: (1, 1, 1, 1)}
    assert {depth: even_blocks(depth) for depth in known} == known


@pytest.mark.parametrize("kind", ["p16 registers", "p16 no class token"])
def test_one_window_of_the_whole_grid_is_full_attention(kind: str) -> None:
    vit, _ = encoder(kind, grid=(4, 6), depth=6)
    tokens = torch.randn(2, 24 + vit.num_prefix_tokens, 16)
    windows = Windows((4, 6), 6, vit.num_prefix_tokens)
    assert windows.sizes == [(1, 24)]
    full, windowed = (tokens_after(vit, tokens, (1, 4, 6), one) for one in (None, windows))
    for number in (1, 4, 6):
        assert torch.allclose(full[number], windowed[number], atol=1e-6)


@pytest.mark.parametrize(("grid", "side", "sizes"), [((4, 6), 2, [(6, 4)]), ((5, 7), 3, None), ((5, 4), 2, None)])
def test_patches_attend_to_those_of_their_window_alone(grid: tuple, side: int, sizes: list | None) -> None:
    vit, _ = encoder("p16 registers", grid=grid)
    prefix = vit.num_prefix_tokens
    windows = Windows(grid, side, prefix)
    assert sizes is None or windows.sizes == sizes
    tokens = torch.randn(2, prefix + grid[0] * grid[1], 16)
    made = windows(vit.blocks[0], tokens)
    # written out: rows and columns are cut in parts whose lengths differ by one at most
    place, fronts = torch.arange(grid[0] * grid[1]).view(grid), []
    for rows in place.tensor_split(round(grid[0] / side)):
        for members in rows.tensor_split(round(grid[1] / side), dim=1):
            chosen = prefix + members.flatten()
            out = vit.blocks[0](torch.cat([tokens[:, :prefix], tokens[:, chosen]], dim=1))
            assert torch.allclose(out[:, prefix:], made[:, chosen], atol=1e-6)
            fronts.append(out[:, :prefix])
    assert torch.allclose(torch.stack(fronts).mean(0), made[:, :prefix], atol=1e-6)


def test_only_blocks_that_are_not_the_last_of_a_quarter_are_windowed() -> None:
    vit, _ = encoder("p16 no class token", grid=(4, 4), depth=8)
    calls = []
    for number, block in enumerate(vit.blocks, 1):
        block.register_forward_pre_hook(lambda _, given, number=number: calls.append((number, given[0].shape[:2])))
    maps = FeatureMaps(vit, window=2)
    maps(torch.randn(3, 3, 64, 64))
    assert calls == [(n, (3, 16)) if n % 2 == 0 else (n, (12, 4)) for n in range(1, 9)]


def test_encoders_that_can_have_none() -> None:
    vit, card = encoder("p16 no class token")
    large = at_size(vit, card, (128, 128))
    assert window_of(large, (4, 4)) == 4 and window_of(vit, (4, 4)) is None
    assert window_of(encoder("swin", grid=(8, 8))[0], (2, 2)) is None
    relative = at_size(vit, card, (128, 128), "relative")
    assert window_of(relative, (4, 4)) is None
    assert "--positions keep" in refusal(FeatureMaps, relative, window=4)
    assert "fixed attention windows" in refusal(FeatureMaps, encoder("swin")[0], window=4)


# of patches of p pixels: strides, and rows of levels for 5 rows of patches
LEVELS = {
    4: ((4, 8, 16, 32), (5, 3, 2, 1)),
    8: ((4, 8, 16, 32), (10, 5, 3, 2)),
    14: ((3.5, 7, 14, 28), (20, 10, 5, 3)),
    16: ((4, 8, 16, 32), (20, 10, 5, 3)),
    32: ((4, 8, 16, 32), (40, 20, 10, 5)),
}


def pyramid_of(kind: str, simple: bool, grid=(5, 4)):
    vit, _ = encoder(kind, grid=grid)
    maps = FeatureMaps(vit, None if simple and kind != "swin" else four_levels(vit)).train()
    pyramid = SimpleFeaturePyramid(maps, 24) if simple else MultiLevel(maps)
    return maps, pyramid, pyramid(maps(torch.randn(2, 3, *input_size(vit))))


@pytest.mark.parametrize("simple", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_strides_and_shapes(kind: str, simple: bool) -> None:
    maps, pyramid, levels = pyramid_of(kind, simple)
    if kind == "swin":  # whose stages serve as they are
        assert pyramid.strides == (4, 8, 16, 32) and pyramid.grids == ((20, 16), (10, 8), (5, 4), (3, 2))
        layers = [type(one) for level in pyramid.levels for one in level]
        assert [one for one in layers if one not in (nn.Conv2d, LayerNorm2d)] == [nn.MaxPool2d]
    else:
        strides, rows = LEVELS[KINDS[kind][0]]
        assert pyramid.strides == strides and pyramid.widths == ((24,) if simple else (16,)) * 4
        assert tuple(one.shape[2] for one in levels) == rows
    assert [one.shape[1:] for one in levels] == [
        (d, *grid) for d, grid in zip(pyramid.widths, pyramid.grids, strict=True)
    ]
    sum((one * torch.randn_like(one)).sum() for one in levels).backward()
    assert not without_gradient(maps) and not without_gradient(pyramid)


def test_the_layers_of_the_papers() -> None:
    def layers(simple: bool) -> list[list[str]]:
        levels = pyramid_of("p16 no class token", simple)[1].levels
        return [[type(one).__name__ for one in level] for level in levels]

    tail = ["Conv2d", "LayerNorm2d", "Conv2d", "LayerNorm2d"]
    doubling = ["ConvTranspose2d", "LayerNorm2d", "GELU", "ConvTranspose2d"]
    assert layers(True) == [doubling + tail, ["ConvTranspose2d", *tail], tail, ["MaxPool2d", *tail]]
    doubling[1] = "BatchNorm2d"
    assert layers(False) == [doubling, ["ConvTranspose2d"], [], ["MaxPool2d"]]


def test_a_level_lies_where_its_map_lies() -> None:
    maps, pyramid, _ = pyramid_of("p8 learned", True, (4, 4))
    given = torch.zeros(1, 16, 4, 4)
    there = given.clone()
    there[:, :, 3, 0] = torch.randn(16)
    with torch.no_grad():
        for stride, one, other in zip(pyramid.strides, pyramid([given]), pyramid([there]), strict=True):
            rows, columns = (one != other).any(1)[0].nonzero().unbind(1)
            cell = 24 / stride, 0  # where the patch begins, in cells; a 3x3 convolution reaches one cell further
            assert rows.min() >= cell[0] // 1 - 1 and columns.max() <= 8 / stride + 1
