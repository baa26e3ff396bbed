"""Jigsaw: the loss against a plain computation, what enters the encoder, its measure and pictures."""

from copy import deepcopy

import pytest
import torch
from small import plain_tokens, same_loss_and_gradients, seeded, small

from patchloom.patches.tokens import patchify
from patchloom.tasks.jigsaw import Jigsaw, JigsawHead

N = 64


def make(class_token=False, **options):
    return small(Jigsaw, positions="none", encoder={"class_token": class_token}, **options).eval()


def plain_logits(task, images, visible):
    """Compute logits [b k n] of patches ``visible`` [b k] by timm's modules, tokens chosen after the embedding."""
    vit, (first, _, second, _, third) = task.encoder, task.questions["positions"].decoder
    x = vit.norm(plain_tokens(vit, vit.patch_embed(images), visible))[:, vit.num_prefix_tokens :]
    for layer in (first, second):
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    return x @ third.weight.T + third.bias


def test_the_head_begins_without_biases():
    head = JigsawHead(16, 4, 0)
    assert not any(layer.bias.any() for layer in head if hasattr(layer, "bias"))


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.75])
def test_loss_and_gradients_are_those_of_a_plain_computation(ratio, class_token):
    task, images = make(class_token, mask_ratio=ratio), torch.randn(3, 3, 32, 32)
    other = deepcopy(task)
    given = task.given(images, seeded())
    assert given.visible.shape == (3, round(N * (1 - ratio))) and given.dropped.all() and given.context is None
    logits = plain_logits(other, images, given.visible)
    own = logits.gather(2, given.visible[..., None])[..., 0]
    by_hand = (logits.exp().sum(-1).log() - own).mean()
    same_loss_and_gradients(task, task(images, given=given).loss, other, by_hand)

    right = (logits.argmax(-1) == given.visible).float().mean(1)
    found = task.measure(images, seeded())
    torch.testing.assert_close(found.values, right)
    assert found.baselines["chance"].tolist() == pytest.approx([1 / N] * 3) and found.to_beat == "chance"


def test_pictures_are_those_of_figure_3_and_every_place_is_withheld(monkeypatch):
    task, images = make(), torch.randn(2, 3, 32, 32)
    trained, marked, ratios = task.draw(images, seeded())
    assert "32 of 32" in trained.caption and "32 of 64 patches are removed" in trained.caption
    assert "64 of 64" in marked.caption and Jigsaw.encoder_defaults({})["positions"][0] == "none"
    assert list(ratios.columns) == ["original", "given", "γ = 0.0", "γ = 0.25", "γ = 0.5", "γ = 0.75"]
    first = torch.zeros(N).index_fill(0, torch.tensor([0]), 1.0)
    monkeypatch.setattr(
        task.questions["positions"].decoder, "forward", lambda tokens: first.expand(2, tokens.shape[1], N)
    )
    _, marked, ratios = task.draw(images, seeded())
    assert "1.6% at γ = 0.0, " in marked.caption  # the first of 64 patches
    everything = patchify(ratios.columns["γ = 0.0"], (4, 4))
    # all patches want one place, and each gets one of its own
    assert torch.equal(everything.flatten(1).sort(1).values, patchify(images, (4, 4)).flatten(1).sort(1).values)
