"""Encoders: equal to timm on whole images, blind to withheld parts, rejected by name if unsupported."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder, check_servable
from patchloom.nets.encode import encode, layer_names, patch_layers, patch_positions
from patchloom.nets.performance import fuse_attention, use_kernels
from patchloom.patches.partition import random_partition
from patchloom.patches.positions import sincos_1d, sincos_2d
from patchloom.patches.tokens import patchify, scatter_tokens, unpatchify
from patchloom.withhold.encoder_input import all_patches, blank_patches, drop_positions, limit_context, mask_patches

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 4}
KINDS = {
    "class token": {},
    "registers": {"reg_tokens": 3},
    "registers beside the positions": {"reg_tokens": 2, "no_embed_class": True},
    "no class token": {"class_token": False},
    "no class token, one register": {"class_token": False, "reg_tokens": 1},
    "pre-norm": {"pre_norm": True},
    "layer scale, normed queries": {"init_values": 0.1, "qk_norm": True},
}


def tiny(size=(24, 24), p=8, channels=3, **options):
    torch.manual_seed(0)
    vit = build_encoder(EncoderSpec("vit_tiny_patch16_224", size, p, channels, options={**TINY, **options}))
    with torch.no_grad():  # zero biases and positions would hide errors
        for weight in vit.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return vit.eval()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("size", "p", "channels"), [((24, 24), 8, 3), ((16, 40), 8, 5), ((12, 6), (12, 1), 1)])
def test_whole_images_give_timms_features(options, size, p, channels):
    vit = tiny(size, p, channels, **options)
    images = torch.randn(2, channels, *size)
    ours, theirs = encode(vit, all_patches(images, vit.patch_embed.num_patches)), vit.forward_features(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_patch_layers_are_outputs_of_blocks(options):
    vit = tiny((16, 40), **options)
    images, seen = torch.randn(2, 3, 16, 40), []
    handles = [one.register_forward_hook(lambda _, given, out: seen.append(out)) for one in (*vit.blocks, vit.norm)]
    vit.forward_features(images)
    for handle in handles:
        handle.remove()
    layers = list(patch_layers(vit, images))
    assert len(layers) == len(layer_names(vit)) and layers[0].shape == (2, 2, 5, 32)
    for layer, tokens in zip(layers[1:], seen, strict=True):
        torch.testing.assert_close(layer.flatten(1, 2), tokens[:, -10:], rtol=1e-5, atol=1e-5)


SIDES = st.sampled_from([(4, 4), (6, 2), (5, 1)])  # of a patch


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), SIDES, st.floats(0.1, 0.9), st.integers(0, 2**31))
def test_masked_pixels_change_nothing_and_order_changes_only_order(rows, columns, p, share, seed):
    n = rows * columns
    vit = build_encoder(EncoderSpec("vit_tiny_patch16_224", (rows * p[0], columns * p[1]), p, options=TINY)).eval()
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, rows * p[0], columns * p[1], generator=generator)
    k = max(1, round(n * share))
    visible, masked = random_partition(2, n, (k, n - k), generator)
    features = encode(vit, mask_patches(all_patches(images, n), visible))

    patches = patchify(images, p)
    noise = torch.randn(2, n - k, patches.shape[-1], generator=generator)
    changed = unpatchify(scatter_tokens(noise, masked, patches), p, (rows, columns))
    torch.testing.assert_close(encode(vit, mask_patches(all_patches(changed, n), visible)), features, rtol=0, atol=0)

    order = torch.randperm(k, generator=generator)
    shuffled = encode(vit, mask_patches(all_patches(images, n), visible[:, order]))
    torch.testing.assert_close(shuffled[:, 1:], features[:, 1:][:, order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shuffled[:, 0], features[:, 0], rtol=1e-4, atol=1e-5)


def test_dropped_positions_are_unknown():
    """Two patches that swap places have the same features once their positions are dropped."""
    vit = tiny()
    images = torch.randn(1, 3, 24, 24)
    patches = patchify(images, (8, 8))
    swapped = patches.clone()
    swapped[:, [2, 7]] = patches[:, [7, 2]]
    drop = torch.tensor([[2, 7]])
    token = torch.randn(32)

    def features(pixels, dropped):
        view = all_patches(unpatchify(pixels, (8, 8), (3, 3)), 9)
        return encode(vit, drop_positions(view, drop) if dropped else view, position_token=token)[:, 1:]

    known, other = features(patches, True), features(swapped, True)
    torch.testing.assert_close(known[:, [2, 7]], other[:, [7, 2]], rtol=1e-5, atol=1e-5)
    known, other = features(patches, False), features(swapped, False)
    assert (known[:, [2, 7]] - other[:, [7, 2]]).abs().max() > 1e-3


def test_blank_content_is_unknown():
    vit = tiny()
    images, token = torch.randn(1, 3, 24, 24), torch.randn(32)
    other = images.clone()
    other[:, :, 8:16, 8:16] += 1  # patch 4
    blank = torch.tensor([[4]])
    one, two = (encode(vit, blank_patches(all_patches(x, 9), blank), mask_token=token) for x in (images, other))
    assert torch.equal(one, two)
    assert not torch.equal(encode(vit, all_patches(images, 9)), encode(vit, all_patches(other, 9)))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_full_context_is_plain_attention(options, fused):
    vit = tiny(**options)
    fuse_attention(vit, fused)
    view = all_patches(torch.randn(2, 3, 24, 24), 9)
    everyone = torch.arange(9).expand(2, 9)
    torch.testing.assert_close(encode(vit, limit_context(view, everyone)), encode(vit, view), rtol=1e-5, atol=1e-5)


def test_a_patch_outside_the_context_changes_only_itself():
    vit = tiny()
    images = torch.randn(1, 3, 24, 24)
    other = images.clone()
    other[:, :, 8:16, 8:16] += 1  # patch 4
    context = torch.tensor([[0, 3, 8]])
    one, two = (encode(vit, limit_context(all_patches(x, 9), context)) for x in (images, other))
    changed = (one != two).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [1 + 4]


def test_both_forms_of_attention_agree():
    vit = tiny()
    view = all_patches(torch.randn(2, 3, 24, 24), 9)
    features = encode(vit, view)
    fuse_attention(vit, fused=not vit.blocks[0].attn.fused_attn)
    torch.testing.assert_close(encode(vit, view), features, rtol=1e-5, atol=1e-5)


DROPOUT = {"pos_drop_rate": 0.2, "attn_drop_rate": 0.2, "proj_drop_rate": 0.2}


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_equals_timms_in_training_and_is_off_in_eval(fused):
    vit, images = tiny(**DROPOUT), torch.randn(2, 3, 24, 24)
    fuse_attention(vit, fused)
    plain = encode(tiny(), all_patches(images, 9))
    torch.testing.assert_close(encode(vit, all_patches(images, 9)), plain, rtol=1e-5, atol=1e-5)
    vit.train()
    torch.manual_seed(1)
    ours = encode(vit, all_patches(images, 9))
    torch.manual_seed(1)
    torch.testing.assert_close(ours, vit.forward_features(images), rtol=1e-5, atol=1e-5)
    assert (ours - plain).abs().mean() > 0.1


@pytest.mark.parametrize("one", DROPOUT)
@pytest.mark.parametrize("fused", [False, True])
def test_each_dropout_acts_where_few_patches_are_keys_and_on_what_would_run_native(one, fused):
    vit = tiny(embed_dim=64, **{one: 0.2}).train()
    fuse_attention(vit, fused)
    use_kernels(vit, "native")
    given = limit_context(all_patches(torch.randn(2, 3, 24, 24), 9), torch.tensor([[0, 4, 8], [1, 2, 3]]))
    for half in (False, one != "pos_drop_rate"):  # leaves the blocks to the native kernels, which not every CPU can run
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            first, second = encode(vit, given), encode(vit, given)
        assert (first - second).abs().mean() > 0.01


def test_gradient_checkpointing_changes_nothing():
    vit = tiny().train()
    view = all_patches(torch.randn(2, 3, 24, 24), 9)
    plain = torch.autograd.grad(encode(vit, view).square().sum(), vit.cls_token)[0]
    vit.set_grad_checkpointing()
    torch.testing.assert_close(torch.autograd.grad(encode(vit, view).square().sum(), vit.cls_token)[0], plain)


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2, "no_embed_class": True}])
def test_fixed_positions(options):
    vit = build_encoder(EncoderSpec("nano", (16, 32), 8, options=options))
    torch.testing.assert_close(patch_positions(vit), sincos_2d(128, (2, 4)))
    assert not vit.pos_embed.requires_grad
    assert vit.pos_embed.shape[1] == 8 + (0 if options else 1)
    assert build_encoder(EncoderSpec("nano", (16, 32), 8, positions="learned")).pos_embed.requires_grad
    learned = build_encoder(EncoderSpec("nano", (16, 32), 8, positions="sincos-learned", options=options))
    assert torch.equal(learned.pos_embed, vit.pos_embed) and learned.pos_embed.requires_grad
    frames = build_encoder(EncoderSpec("nano", (40, 98), (40, 1), 1, options=options))
    torch.testing.assert_close(patch_positions(frames), sincos_1d(128, torch.arange(98)))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("vit_tinny_patch16_224", "did you mean vit_tiny_patch16_224"),
        ("resnet50", "ResNet"),
        ("eva02_enormous_patch14_clip_224", "EvaBlockPostNorm"),
        ("deit_tiny_distilled_patch16_224", "VisionTransformerDistilled"),
        ("swinv2_tiny_window8_256", "SwinTransformerV2"),
    ],
)
def test_unsupported_models_are_rejected_by_name(model, said):
    with pytest.raises(PatchloomError, match=said):
        build_encoder(EncoderSpec(model, (224, 224), 16))


def test_stock_models_with_foreign_blocks_are_rejected():
    vit = timm.create_model("vit_tiny_patch16_224", block_fn=timm.models.vision_transformer.ResPostBlock)
    with pytest.raises(PatchloomError, match="ResPostBlock"):
        check_servable(vit, "vit_tiny_patch16_224")


def test_sizes_that_do_not_fit_are_rejected():
    with pytest.raises(PatchloomError, match="patches of 16 pixels do not divide images of 100x96"):
        build_encoder(EncoderSpec("nano", (100, 96), 16))
    with pytest.raises(PatchloomError, match="40x2 pixels do not divide images of 50x97: .* of 40x2, such as 40x96"):
        build_encoder(EncoderSpec("nano", (50, 97), (40, 2)))
    with pytest.raises(PatchloomError, match="timm cannot build"):
        build_encoder(EncoderSpec("nano", (32, 32), 8, options={"num_heads": 7}))


def test_the_speech_model_of_mp3_has_70_000_parameters():
    """Width 32, 8 blocks, feed-forward 64, a class token, dropout 0.1 (section 4.3), and no positions."""
    sizes = {"embed_dim": 32, "depth": 8, "num_heads": 4, "mlp_ratio": 2, "proj_drop_rate": 0.1}
    vit = build_encoder(EncoderSpec("nano", (40, 98), (40, 1), 1, "none", sizes | {"class_token": True}))
    assert sum(weight.numel() for weight in vit.parameters()) == 69_760
    assert encode(vit, all_patches(torch.randn(2, 1, 40, 98), 98)).shape == (2, 99, 32)


def test_the_projection_is_the_convolution():
    vit = tiny(channels=2)
    images = torch.randn(1, 2, 24, 24)
    project = vit.patch_embed.proj
    ours = F.linear(patchify(images, (8, 8)), project.weight.flatten(1), project.bias)
    torch.testing.assert_close(ours, project(images).flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-5)
