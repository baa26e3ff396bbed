"""Swin: equal to timm on whole images and on uniformly masked ones, and blind to withheld places."""

import re

import pytest
import timm
import torch
from refusing import refusal
from swins import DEEP, spec_of, swin

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.fit import load_published
from patchloom.nets.checkpoints.resize import fit_biases
from patchloom.nets.encode import encode, grid_size, layer_names, patch_count, patch_layers, patch_positions
from patchloom.nets.performance import checkpoint_gradients, fuse_attention
from patchloom.nets.swin import _of_units, window_block
from patchloom.patches.partition import uniform_partition
from patchloom.patches.positions import sincos_2d
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.withhold.encoder_input import all_patches, blank_patches, drop_positions, limit_context, mask_patches

# sides and windows: whole windows, padding, one window for all, oblong
KINDS = [
    ((32, 32), {}),
    ((32, 32), {"window_size": 7}),
    ((32, 32), DEEP),
    ((16, 48), {**DEEP, "window_size": 3}),
    ((24, 40), {"window_size": [3, 5]}),
    ((16, 16), {"window_size": 16}),
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("size", "options"), KINDS)
def test_whole_images_give_timms_features(size, options, fused):
    net = swin(size, **options)
    fuse_attention(net, fused)
    images = torch.randn(2, 3, *size)
    ours, theirs = encode(net, all_patches(images, patch_count(net))), net.forward_features(images)
    torch.testing.assert_close(ours, theirs.flatten(1, 2), rtol=1e-5, atol=1e-5)


def test_swin_t_is_timms():
    torch.manual_seed(0)
    net = build_encoder(EncoderSpec("swin_tiny_patch4_window7_224", (64, 64), 4, positions="none")).eval()
    assert grid_size(net) == (2, 2)  # from units of 32 pixels
    images = torch.randn(1, 3, 64, 64)
    theirs = net.forward_features(images).flatten(1, 2)
    torch.testing.assert_close(encode(net, all_patches(images, 4)), theirs, rtol=1e-5, atol=1e-5)
    stock = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, img_size=64)
    stock.load_state_dict(net.state_dict(), strict=True)
    assert not any(getattr(part, "drop_prob", 0) for part in net.modules())  # timm's default is 0.1


def test_maps_of_stages_end_in_the_output():
    net, images = swin((32, 48), **DEEP), torch.randn(2, 3, 32, 48)
    maps = list(patch_layers(net, images))
    assert layer_names(net) == ("embedding", "stage 1", "stage 2", "stage 3", "norm")
    assert [tuple(one.shape[1:]) for one in maps] == [(16, 24, 8), (16, 24, 8), (8, 12, 16), (4, 6, 32), (4, 6, 32)]
    torch.testing.assert_close(maps[-1], net.forward_features(images))


def closed_up(images, p, visible, grid):
    """Return the images that the visible units form."""
    return unpatchify(patchify(images, (p, p), visible), (p, p), grid)


@pytest.mark.parametrize("options", [{}, {**DEEP, "window_size": 2}, {"window_size": 3}])
def test_uniformly_masked_units_close_up_to_an_image_of_half_the_side(options):
    net, small = swin((32, 64), **options), swin((16, 32), **options)
    small.load_state_dict(net.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 64)
    rows, columns = grid_size(net)
    visible, masked = uniform_partition(2, (rows, columns), torch.Generator().manual_seed(0))
    features = encode(net, mask_patches(all_patches(images, rows * columns), visible, masked))
    closed = closed_up(images, 32 // rows, visible, (rows // 2, columns // 2))
    torch.testing.assert_close(features, small.forward_features(closed).flatten(1, 2), rtol=1e-5, atol=1e-5)


def test_a_window_is_no_larger_than_the_closed_up_grid():
    """timm would resize the table; here its centre is used, so that an offset keeps its bias."""
    net, small = swin((16, 16), window_size=8), swin((8, 8), window_size=8)
    visible, masked = uniform_partition(1, grid_size(net), torch.Generator().manual_seed(0))
    images = torch.randn(1, 3, 16, 16)
    features = encode(net, mask_patches(all_patches(images, 16), visible, masked))
    state = net.state_dict()
    for name, own in small.state_dict().items():
        if name.endswith("bias_table"):
            side, inner = (round(len(one) ** 0.5) for one in (state[name], own))
            centre = slice((side - inner) // 2, (side + inner) // 2)
            state[name] = state[name].view(side, side, -1)[centre, centre].flatten(0, 1)
    small.load_state_dict(state, strict=True)
    closed = closed_up(images, 4, visible, (2, 2))
    torch.testing.assert_close(features, small.forward_features(closed).flatten(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize(("size", "options"), [KINDS[0], KINDS[1], KINDS[2], KINDS[4]])
def test_without_positions_features_follow_the_contents_of_units_wherever_and_in_any_order(size, options, share):
    """Windows, shifts and biases do not reveal places."""
    net = swin(size, **options)
    n, grid = patch_count(net), grid_size(net)
    k, p = max(2, round(n * share)), size[0] // grid[0]
    images, order = torch.randn(2, 3, *size), torch.randperm(n)
    moved = unpatchify(patchify(images, (p, p))[:, order], (p, p), grid)

    def features(images, visible, known=False):
        given = mask_patches(all_patches(images, n), visible)
        given = given if known else drop_positions(given, torch.arange(k).expand(2, k))
        return encode(net, given, position_token=torch.zeros(()))

    visible = torch.stack([torch.randperm(n)[:k] for _ in range(2)])
    plain, shuffled = features(images, visible), torch.randperm(k)
    there = order.argsort()[visible]  # the places of the same contents
    torch.testing.assert_close(features(moved, there[:, shuffled]), plain[:, shuffled], rtol=1e-4, atol=1e-5)
    assert (plain - plain.roll(1, 1)).abs().max() > 1e-2  # otherwise the test would show nothing
    if share == 1:
        every = torch.arange(n).expand(2, n)
        known, other = (features(one, every, known=True) for one in (images, moved))
        assert (other - known[:, order]).abs().max() > 1e-2


def test_without_positions_biases_are_those_within_a_unit():
    net = swin(**DEEP | {"window_size": 5}).requires_grad_(False)  # windows are larger than units of 4 x 4 patches
    block, tokens = net.layers[0].blocks[0], torch.randn(1, 32, 8)
    windows = _of_units(2, 4, block.window_size, tokens)
    q, k, v = block.attn.qkv(block.norm1(tokens)).view(32, 3, 8).unbind(1)
    scores, (h, w) = q @ k.T * 8**-0.5, block.window_size
    for i in range(32):
        for j in range(32):
            if i // 16 == j // 16:
                down, along = i % 16 // 4 - j % 16 // 4, i % 4 - j % 4
                row = (down + h - 1) * (2 * w - 1) + along + w - 1
                scores[i, j] += block.attn.relative_position_bias_table[row, 0]
    attended = tokens + block.attn.proj(scores.softmax(-1) @ v)
    expected = attended + block.mlp(block.norm2(attended))
    torch.testing.assert_close(window_block(block, tokens, windows), expected, rtol=1e-4, atol=1e-5)


def test_a_known_position_changes_only_its_unit():
    given = drop_positions(all_patches(torch.ones(1, 3, 32, 32), 64), torch.arange(1, 64)[None])
    features = encode(net := swin(), given, position_token=torch.zeros(()))[0]
    torch.testing.assert_close(features[1:], features[1:2].expand(63, -1), rtol=1e-4, atol=1e-5)
    assert (features[0] - features[1]).abs().max() > 1e-2
    torch.testing.assert_close(patch_positions(net), sincos_2d(8, (8, 8)))


def test_blank_content_is_unknown():
    net, token = swin(), torch.randn(8)
    images = torch.randn(1, 3, 32, 32)
    other = images.clone()
    other[:, :, 4:8, 8:12] += 1  # unit 1, 2 of 8 x 8
    blank = torch.tensor([[10]])
    one, two = (encode(net, blank_patches(all_patches(x, 64), blank), mask_token=token) for x in (images, other))
    assert torch.equal(one, two)
    assert not torch.equal(encode(net, all_patches(images, 64)), encode(net, all_patches(other, 64)))


@pytest.mark.parametrize("dropped", [False, True])
def test_gradient_checkpointing_changes_nothing(dropped):
    net = swin().train()
    given = all_patches(torch.randn(2, 3, 32, 32), 64)
    if dropped:
        given = drop_positions(given, torch.arange(48).expand(2, 48))

    def gradient():
        loss = encode(net, given, position_token=torch.zeros(())).square().sum()
        return torch.autograd.grad(loss, net.patch_embed.proj.weight)[0]

    plain = gradient()
    checkpoint_gradients(net, True)
    torch.testing.assert_close(gradient(), plain)


def test_impossible_inputs_are_rejected():
    net = swin()
    given = all_patches(torch.randn(1, 3, 32, 32), 64)
    with pytest.raises(ValueError, match="windows need all 64 units, or one of each 2x2, not 20"):
        encode(net, mask_patches(given, torch.arange(20)[None]))
    with pytest.raises(ValueError, match="leave out the context"):
        encode(net, limit_context(given, torch.arange(5)[None]))


def test_one_of_each_cell():
    visible, masked = uniform_partition(50, (4, 6), torch.Generator().manual_seed(0))
    assert visible.shape == (50, 6) and masked.shape == (50, 18)
    assert torch.equal(torch.cat([visible, masked], 1).sort(1).values, torch.arange(24).expand(50, 24))
    cell = visible // 6 // 2 * 3 + visible % 6 // 2
    assert torch.equal(cell, torch.arange(6).expand(50, 6))
    assert len(visible.flatten().unique()) == 24  # each is drawn now and then
    with pytest.raises(ValueError, match="cells of 2x2"):
        uniform_partition(1, (3, 4))


def test_weights_of_other_windows_are_adapted(tmp_path):
    source, net = swin(window_size=3), swin()
    torch.save(source.state_dict(), tmp_path / "swin.pth")
    done = load_published(net, tmp_path / "swin.pth")
    assert not done.missing and not done.unexpected
    assert len(done.resampled) == 4 and "from windows of 3x3 to 4x4" in done.resampled[0]
    torch.testing.assert_close(net.layers[0].blocks[0].attn.qkv.weight, source.layers[0].blocks[0].attn.qkv.weight)
    same = {"x.relative_position_bias_table": torch.randn(25, 2)}
    assert not fit_biases(net, dict(same), same)


@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_the_authors_names_of_a_swin_become_timms(tmp_path, prefix):
    """Microsoft's program merges patches at the end of a stage, and saves windows."""
    source, net = swin(**DEEP), build_encoder(spec_of(**DEEP))
    named = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16, dtype=torch.long)}
    named |= {"layers.0.blocks.1.attn_mask": torch.zeros(4, 16, 16)}
    for name, value in source.state_dict().items():
        stage = int(name.split(".")[1]) if ".downsample." in name else 0
        named[name.replace(f"layers.{stage}.downsample", f"layers.{stage - 1}.downsample")] = value
    torch.save({"model": {prefix + name: value for name, value in named.items()}}, tmp_path / "swin.pth")
    done = load_published(net, tmp_path / "swin.pth")
    assert not done.missing and not done.unexpected and not done.resampled
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in source.state_dict().items())


@pytest.mark.parametrize("depths", [[2, 2], [1, 1, 1]])
def test_a_swin_of_other_stages_is_rejected_with_advice(tmp_path, depths):
    source, net = swin(depths=depths, num_heads=DEEP["num_heads"][: len(depths)]), swin(**DEEP | {"depths": [2, 2, 6]})
    torch.save(source.state_dict(), tmp_path / "swin.pth")
    with pytest.raises(PatchloomError, match=re.escape(f"stages of {depths} blocks and this encoder [2, 2, 6]: give")):
        load_published(net, tmp_path / "swin.pth")


def test_a_stage_of_a_swin_is_no_vit(tmp_path):
    torch.save(swin(**DEEP).state_dict(), tmp_path / "swin.pth")
    vit = build_encoder(EncoderSpec("nano", (32, 32), 4, options={"depth": 2, "embed_dim": 32, "num_heads": 2}))
    assert "holds a Swin, and this encoder is a plain ViT" in refusal(load_published, vit, tmp_path / "swin.pth")
