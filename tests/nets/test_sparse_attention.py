"""Blocks with fewer queries, and recomputed activations."""

import pytest
import torch
from sweep import build, views_of
from timm.models.vision_transformer import Block

from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.performance import checkpoint_gradients
from patchloom.nets.sparse_attention import run_blocks
from patchloom.tasks import TASKS


def gradients(net, loss):
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in net.named_parameters() if weight.grad is not None}
    net.zero_grad()
    return found


def test_causal_blocks_see_earlier_tokens_only():
    torch.manual_seed(0)
    blocks, tokens = [Block(32, 4), Block(32, 4)], torch.randn(2, 9, 32)
    whole = run_blocks(blocks, tokens, causal=True)
    torch.testing.assert_close(run_blocks(blocks, tokens[:, :5], causal=True), whole[:, :5], rtol=1e-5, atol=1e-6)
    assert (run_blocks(blocks, tokens) - whole)[:, :8].abs().amax((0, 2)).min() > 1e-3
    with pytest.raises(ValueError, match="leave out keys_values"):
        run_blocks(blocks, tokens, causal=True, keys_values=torch.zeros(2, 1, dtype=torch.long))


@pytest.mark.parametrize("depth", [2, 0])
def test_a_decoders_last_block_skips_visible_patches(depth):
    torch.manual_seed(0)
    decoder, seen = MAEDecoder(16, 3, torch.randn(12, 16), depth, heads=2), []
    for block in decoder.blocks:
        block.mlp.register_forward_hook(lambda module, given, made: seen.append(made.shape[1]))
    visible, masked = torch.arange(4).expand(2, 4), torch.arange(4, 12).expand(2, 8)
    assert decoder(torch.randn(2, 5, 16), visible, masked).shape == (2, 8, 3)
    assert seen == [13, 8][:depth]
    assert Decoder(16, 3, 16, depth, 2)(torch.randn(2, 5, 16)).shape == (2, 4, 3)


@pytest.mark.parametrize("name", TASKS)
def test_recomputed_activations_change_no_gradient(name):
    task = build(name).train()
    views = views_of(task)
    found, calls = [], []
    for block in task.encoder.blocks:
        block.norm2.register_forward_hook(lambda *_: calls.append(1))
    for again in (False, True):
        calls.clear()
        checkpoint_gradients(task, again)
        loss = task(*views, progress=0.5, generator=torch.Generator().manual_seed(3)).loss
        found.append((loss.item(), gradients(task, loss), len(calls)))
    (loss, plain, once), (same, checkpointed, twice) = found
    assert loss == same and twice > once and plain.keys() == checkpointed.keys()
    for weight in plain:
        torch.testing.assert_close(checkpointed[weight], plain[weight], rtol=1e-5, atol=1e-7)
