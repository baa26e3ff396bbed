"""The attentive probe: its pooling beside a plain implementation, and its training on cached tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from refusing import refusal
from torch import nn

from patchloom.evaluate.attentive import AttentiveClassifier, CrossPool, EfficientPool
from patchloom.evaluate.protocols import evaluate
from patchloom.nets.build import EncoderSpec, build_encoder


def test_efficient_pooling_is_one_softmax_and_one_slice_of_the_values_a_query() -> None:
    torch.manual_seed(0)
    pool, tokens = EfficientPool(12, queries=4), torch.randn(3, 5, 12)
    values = tokens @ pool.values.weight.T  # as the equations say: all tokens are mapped first
    slices = []
    for j, query in enumerate(pool.queries):
        weights = torch.softmax(tokens @ query / 12**0.5, dim=1)
        slices.append((weights[..., None] * values[..., 3 * j : 3 * j + 3]).sum(1))
    torch.testing.assert_close(pool(tokens), torch.cat(slices, 1))
    torch.testing.assert_close(pool.attention(tokens).sum(-1), torch.ones(3, 4))
    # M·D + D²/r + (D/r + 1)·K, 1,383,400 for ViT-B on ImageNet-1k (the log of the authors' program)
    large = EfficientPool(768)
    assert sum(one.numel() for one in large.parameters()) + 769 * 1000 == 1_383_400
    assert EfficientPool(12, queries=3, reduce=2)(tokens).shape == (3, 6)


def test_cross_pooling_equals_attention_of_torch() -> None:
    torch.manual_seed(0)
    pool, tokens = CrossPool(12, heads=3).eval(), torch.randn(2, 5, 12)
    plain = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    with torch.no_grad():
        plain.in_proj_weight.copy_(torch.cat([torch.eye(12), pool.keys.weight, pool.values.weight]))
        plain.out_proj.weight.copy_(torch.eye(12))
    query = pool.query.flatten()[None, None].expand(2, 1, 12)
    normed = tokens / (1 + 1e-6) ** 0.5  # running statistics of a new batch norm
    expected, weights = plain(query, normed, normed, average_attn_weights=False)
    torch.testing.assert_close(pool(tokens), expected[:, 0])
    torch.testing.assert_close(pool.attention(tokens), weights[:, :, 0])


def test_the_encoder_stays_as_it_is_and_whole_adds_the_class_token() -> None:
    vit = build_encoder(EncoderSpec("nano", (16, 16), 8, options={"depth": 1, "embed_dim": 24, "num_heads": 2}))
    images = torch.randn(2, 3, 16, 16)
    model = AttentiveClassifier(vit, 3, EfficientPool(24, 4)).train()
    assert not model.encoder.training and model.norm.training
    assert model.features(images).shape == (2, 4, 24)
    assert AttentiveClassifier(vit, 3, EfficientPool(24, 4), whole=True).features(images).shape == (2, 5, 24)
    model(images).sum().backward()
    assert all(one.grad is None for one in vit.parameters()) and model.pool.queries.grad is not None
    groups = model.groups(0.1, 1.0)
    assert [len(group["params"]) for group in groups] == [3, 1]  # queries, values and head; its bias


@pytest.mark.parametrize("options", [{}, {"form": "cross"}, {"recipe": "ep", "optimizer": "adamw"}])
def test_digits_are_told_apart_by_the_encoder_alone(run: Path, options: dict[str, Any]) -> None:
    queries = {} if "form" in options else {"queries": 4}
    usual = {"device": "cpu", "max_train": 300, "epochs": 12, "batch_size": 32, "lr": 5e-3, "control": False}
    report = evaluate("attentive", run, "digits", **usual, **queries, **options)
    (ours,) = report.quoted
    assert ours.value > 0.25 and ours.pooling == "attentive"
    assert ours.settings["form"] == options.get("form", "efficient")
    assert list((run / "pictures").glob("attentive-digits-*.png"))


@pytest.mark.parametrize(
    ("options", "word"),
    [({"queries": 7}, "--queries"), ({"form": "cross", "reduce": 2}, "--reduce"), ({"recipe": "none"}, "no recipe")],
)
def test_what_does_not_fit_is_one_sentence(run: Path, options: dict[str, Any], word: str) -> None:
    assert word in refusal(lambda: evaluate("attentive", run, "digits", device="cpu", max_train=100, **options))
