"""Encoders: equal to timm on whole images, and blind to withheld parts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from perturbing import perturbed

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode, encode_asked, layer_names, patch_layers
from patchloom.nets.performance import fuse_attention, use_kernels
from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import gather_tokens, patchify, scatter_tokens, unpatchify
from patchloom.withhold.encoder_input import all_patches, limit_context, mask_patches

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
    return perturbed(vit).eval()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("size", "p", "channels"), [((24, 24), 8, 3), ((16, 40), 8, 5), ((12, 6), (12, 1), 1)])
def test_whole_images_and_full_contexts_give_timms_features(options, size, p, channels, fused):
    vit = tiny(size, p, channels, **options)
    images, n = torch.randn(2, channels, *size), vit.patch_embed.num_patches
    theirs = vit.forward_features(images)
    fuse_attention(vit, fused)
    every = all_patches(images, n)
    for some in (every, limit_context(every, torch.arange(n).expand(2, n))):
        torch.testing.assert_close(encode(vit, some), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", [1, 4, 9])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_features_that_are_asked_equal_those_of_whole_images(options, kept):
    vit, images = tiny(**options), torch.randn(2, 3, 24, 24)
    asked, prefix = torch.randn(2, 9).argsort(dim=1)[:, :kept], vit.num_prefix_tokens
    every = encode(vit, all_patches(images, 9))
    expected = torch.cat([every[:, :prefix], gather_tokens(every[:, prefix:], asked)], dim=1)
    torch.testing.assert_close(encode_asked(vit, images, asked), expected, rtol=1e-5, atol=1e-5)


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


@settings(max_examples=25)
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
