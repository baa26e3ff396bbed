"""Blocks with fewer queries, recomputed activations, and kernels written by torch.compile."""

from functools import partial

import pytest
import torch
from sweep import build, views_of
from timm.models.vision_transformer import Block
from torch._dynamo.utils import counters

from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.performance import checkpoint_gradients, compile_blocks, fuse_attention
from patchloom.nets.sparse_attention import query_block
from patchloom.tasks import TASKS


def gradients(net, loss):
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in net.named_parameters() if weight.grad is not None}
    net.zero_grad()
    return found


@pytest.mark.parametrize("fused", [True, False])
def test_few_queries_get_the_outputs_of_the_whole_block(fused):
    torch.manual_seed(0)
    block = Block(32, 4, qkv_bias=True, qk_norm=True, init_values=0.3)
    fuse_attention(block, fused)
    tokens = torch.randn(2, 9, 32)
    whole, some = block(tokens)[:, 5:], query_block(block, tokens, 5)
    torch.testing.assert_close(some, whole, rtol=1e-5, atol=1e-6)
    for one, two in zip(*(gradients(block, x.square().sum()).values() for x in (some, whole)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_a_decoders_last_block_skips_visible_patches():
    torch.manual_seed(0)
    decoder = MAEDecoder(16, 3, torch.randn(12, 16), depth=2, heads=2)
    seen = []
    for block in decoder.blocks:
        block.mlp.register_forward_hook(lambda module, given, made: seen.append(made.shape[1]))
    visible, masked = torch.arange(4).expand(2, 4), torch.arange(4, 12).expand(2, 8)
    answers = decoder(torch.randn(2, 5, 16), visible, masked)
    assert answers.shape == (2, 8, 3)
    assert seen == [13, 8]


def test_a_decoder_without_blocks_predicts():
    decoder = MAEDecoder(16, 3, torch.randn(12, 16), depth=0, heads=2)
    visible, masked = torch.arange(4).expand(2, 4), torch.arange(4, 12).expand(2, 8)
    assert decoder(torch.randn(2, 5, 16), visible, masked).shape == (2, 8, 3)
    assert Decoder(16, 3, 16, 0, 2)(torch.randn(2, 5, 16)).shape == (2, 4, 3)


@pytest.mark.parametrize("name", TASKS)
def test_recomputed_activations_change_no_gradient(name):
    task = build(name).train()
    views = views_of(task)
    found = []
    for again in (False, True):
        counted = []
        hooks = [
            block.norm2.register_forward_hook(lambda *_, counted=counted: counted.append(1))
            for block in task.encoder.blocks
        ]
        checkpoint_gradients(task, again)
        loss = task(*views, progress=0.5, generator=torch.Generator().manual_seed(3)).loss
        found.append((loss.item(), gradients(task, loss), len(counted)))
        for hook in hooks:
            hook.remove()
    (loss, plain, once), (same, checkpointed, twice) = found
    assert loss == same and twice > once
    assert plain.keys() == checkpointed.keys()
    for weight in plain:
        torch.testing.assert_close(checkpointed[weight], plain[weight], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", TASKS)
def test_compiled_blocks_have_no_graph_breaks_and_are_compiled_in_the_first_step_only(name, monkeypatch):
    # torch.compile's graphs are run uncompiled: the same graphs, without a compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    task = build(name).train()
    views = views_of(task)
    plain = task(*views, progress=0.0, generator=torch.Generator().manual_seed(0)).loss.item()
    compile_blocks(task)
    graphs = []
    for step in range(3):
        loss = task(*views, progress=step / 3, generator=torch.Generator().manual_seed(step)).loss
        loss.backward()
        task.after_step(step / 3)
        graphs.append(counters["stats"]["unique_graphs"])
        assert step or loss.item() == pytest.approx(plain, rel=1e-5)
    assert graphs[0] > 0 and graphs[0] == graphs[-1]
    assert not counters["graph_break"]
    compile_blocks(task, enabled=False)
    assert all(block._compiled_call_impl is None for block in task.encoder.blocks)
