"""Attention weights computed beside the blocks equal those inside, and the blocks run unchanged."""

import pytest
import torch
from perturbing import perturbed

from patchloom.nets.attention import attention_each, class_attention_each
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import embed, encode, final_norm, patch_count, prefix_count
from patchloom.nets.finetune import with_variant
from patchloom.nets.heads import InstanceHead
from patchloom.nets.performance import fuse_attention, use_kernels
from patchloom.withhold.encoder_input import all_patches

KINDS = {
    "class token": {},
    "registers, no positions": {"reg_tokens": 3, "positions": "none"},
    "pre-norm, layer scale, normed queries": {"pre_norm": True, "init_values": 0.1, "qk_norm": True},
    "relative positions": {"positions": "relative"},
    "relative positions, no class token": {"positions": "relative", "class_token": False},
}


def moved(net):
    """Change the initial weights, in which zeros would hide errors."""
    return perturbed(net, 0.2).eval()


def tiny(size=(16, 24), p=8, channels=3, positions="sincos", **options):
    torch.manual_seed(0)
    built = "none" if positions == "relative" else positions
    options = {"embed_dim": 32, "depth": 3, "num_heads": 4, **options}
    spec = EncoderSpec("nano", size, p, channels, built, options)
    card = EncoderCard(spec, (0.5,) * channels, (0.2,) * channels, "untrained", "tiny")
    return moved(with_variant(build_encoder(spec), card, "relative" if positions == "relative" else "keep"))


def softmaxes(net, run):
    """Return the output of each softmax of ``net`` during ``run`` with explicit attention: the input of its dropout."""
    found = []
    for name, module in net.named_modules():
        if name.endswith("attn_drop"):
            module.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    fuse_attention(net, False)
    run()
    return found


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("size", "p", "channels"), [((16, 24), 8, 3), ((12, 6), (12, 1), 1)])
@torch.no_grad()
def test_weights_are_those_of_the_stock_blocks(options, size, p, channels):
    vit = tiny(size, p, channels, **options)
    given = all_patches(torch.randn(2, channels, *size), patch_count(vit))
    weights = [one for one, _ in attention_each(vit, embed(vit, given), None)]
    t = prefix_count(vit) + patch_count(vit)
    assert [tuple(one.shape) for one in weights] == [(2, 4, t, t)] * 3
    for mine, its in zip(weights, softmaxes(vit, lambda: encode(vit, given)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
        assert mine.std(-1).mean() > 0.01  # not uniform weights, for which any two would agree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_the_encoder_gives_the_same_bit_for_bit_and_weights_are_float32(fused, dtype):
    vit = tiny(reg_tokens=2).to(dtype)
    fuse_attention(vit, fused)
    use_kernels(vit, "native")
    given = all_patches(torch.randn(2, 3, 16, 24, dtype=dtype), patch_count(vit))
    before, settings = encode(vit, given), [dict(module.__dict__) for module in vit.modules()]
    for weights, tokens in attention_each(vit, embed(vit, given), None):
        assert weights.dtype == torch.float32 and tokens.dtype == dtype
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    assert torch.equal(final_norm(vit, tokens), before) and torch.equal(encode(vit, given), before)
    assert [dict(module.__dict__) for module in vit.modules()] == settings


@torch.no_grad()
def test_class_attention_is_that_of_the_stock_blocks():
    torch.manual_seed(0)
    head, patches = moved(InstanceHead(32, 4, depth=3)), torch.randn(2, 5, 32)
    before, weights = head(patches), list(class_attention_each(head, patches))
    assert torch.equal(head(patches), before)
    for mine, its in zip(weights, softmaxes(head, lambda: head(patches)), strict=True):
        torch.testing.assert_close(mine, its[:, :, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.sum(-1), torch.ones(2, 4))
        assert mine.std(-1).mean() > 0.01
