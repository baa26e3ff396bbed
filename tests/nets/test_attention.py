"""Attention weights computed beside the blocks equal those inside, and the blocks run unchanged."""

import pytest
import torch

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
    "registers": {"reg_tokens": 3},
    "no class token": {"class_token": False},
    "pre-norm, layer scale, normed queries": {"pre_norm": True, "init_values": 0.1, "qk_norm": True},
    "no positions": {"positions": "none"},
    "relative positions": {"positions": "relative"},
    "relative positions, no class token": {"positions": "relative", "class_token": False},
}


def moved(net):
    """Change the initial weights, in which zeros would hide errors."""
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return net.eval()


def tiny(size=(16, 24), p=8, channels=3, positions="sincos", **options):
    torch.manual_seed(0)
    built = "none" if positions == "relative" else positions
    options = {"embed_dim": 32, "depth": 3, "num_heads": 4, **options}
    spec = EncoderSpec("vit_tiny_patch16_224", size, p, channels, built, options)
    vit = build_encoder(spec)
    if positions == "relative":
        vit = with_variant(
            vit, EncoderCard(spec, (0.5,) * channels, (0.2,) * channels, "untrained", "tiny"), "relative"
        )
    return moved(vit)


def hooked(net, run):
    """Record the output of each softmax of ``net`` during ``run`` with explicit attention: the input of its dropout."""
    found = []
    drops = [module for name, module in net.named_modules() if name.endswith("attn_drop")]
    hooks = [drop.register_forward_pre_hook(lambda _, given: found.append(given[0])) for drop in drops]
    fuse_attention(net, False)
    run()
    fuse_attention(net, True)
    for hook in hooks:
        hook.remove()
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
    for mine, its in zip(weights, hooked(vit, lambda: encode(vit, given)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.sum(-1), torch.ones(2, 4, t))
        assert mine.std(-1).mean() > 0.01  # not uniform weights, for which any two would agree


@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_the_encoder_gives_the_same_bit_for_bit(fused):
    vit = tiny(reg_tokens=2)
    fuse_attention(vit, fused)
    use_kernels(vit, "native")
    given = all_patches(torch.randn(2, 3, 16, 24), patch_count(vit))
    before, settings = encode(vit, given), [dict(module.__dict__) for module in vit.modules()]
    *_, (_, last) = attention_each(vit, embed(vit, given), None)
    assert torch.equal(final_norm(vit, last), before)
    assert torch.equal(encode(vit, given), before)
    assert [dict(module.__dict__) for module in vit.modules()] == settings


@torch.no_grad()
def test_weights_of_an_encoder_in_half_precision_are_float32():
    vit = tiny().bfloat16()
    given = all_patches(torch.randn(1, 3, 16, 24).bfloat16(), patch_count(vit))
    for weights, tokens in attention_each(vit, embed(vit, given), None):
        assert weights.dtype == torch.float32 and tokens.dtype == torch.bfloat16
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 7))


@torch.no_grad()
def test_class_attention_is_that_of_the_stock_blocks():
    torch.manual_seed(0)
    head = moved(InstanceHead(32, 4, depth=3))
    patches = torch.randn(2, 5, 32)
    before = head(patches)
    weights = list(class_attention_each(head, patches))
    theirs = hooked(head, lambda: head(patches))
    assert torch.equal(head(patches), before) and len(weights) == 3
    for mine, its in zip(weights, theirs, strict=True):
        torch.testing.assert_close(mine, its[:, :, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.sum(-1), torch.ones(2, 4))
        assert mine.std(-1).mean() > 0.01
