"""NEPA beside a plain program of its equations; no output depends on a later patch."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from golden import close
from perturbing import perturbed
from small import SIZES, same_loss_and_gradients, small
from torch.nn import functional as F

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode
from patchloom.nets.performance import fuse_attention
from patchloom.tasks.nepa import NEPA
from patchloom.withhold.encoder_input import all_patches, limit_context

make = partial(small, NEPA)


def plain_block(block, tokens):
    """Compute a block of one image, token by token: each reads a softmax over itself and the tokens before it."""
    heads, side = block.attn.num_heads, block.attn.head_dim
    q, k, v = block.attn.qkv(block.norm1(tokens)).view(-1, 3, heads, side).unbind(1)
    mixed = []
    for t in range(len(tokens)):
        weights = F.softmax((q[t] * k[: t + 1]).sum(-1) / side**0.5, dim=0)
        mixed.append((weights[..., None] * v[: t + 1]).sum(0).flatten())
    tokens = tokens + block.attn.proj(torch.stack(mixed))
    return tokens + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(tokens))))


def plain_nepa(task, images):
    vit, errors = task.encoder, []
    prefix = vit.num_prefix_tokens
    for image in images:
        z = vit.patch_embed(image[None])[0]
        x = z + vit.pos_embed[0, prefix:]
        if prefix:
            first = torch.cat([token[0] for token in (vit.cls_token, vit.reg_token) if token is not None])
            x = torch.cat([first + vit.pos_embed[0, :prefix], x])
        for block in vit.blocks:
            x = plain_block(block, x)
        h = vit.norm(x)
        for t in range(len(z)):
            if prefix or t:
                before, target = h[prefix + t - 1], z[t].detach()
                errors.append(1 - before @ target / (before.norm() * target.norm()))
    return torch.stack(errors).mean()


@pytest.mark.parametrize("encoder", [{}, {"class_token": False}, {"reg_tokens": 2}])
def test_loss_and_gradients_are_those_of_a_plain_program(encoder):
    task = make(positions="learned", encoder=encoder, size=(16, 16))
    other, images = deepcopy(task), torch.randn(3, 3, 16, 16)
    same_loss_and_gradients(task, task(images).loss, other, plain_nepa(other, images))


def eva():
    torch.manual_seed(0)
    vit = build_encoder(EncoderSpec("vit_small_patch16_rope_224", (32, 32), 8, options=SIZES)).eval()
    return perturbed(vit)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("build", [lambda: make().encoder.eval(), eva], ids=["vit", "eva"])
def test_later_patches_never_change_earlier_outputs(build, fused):
    vit, images = build(), torch.randn(2, 3, 32, 32)
    fuse_attention(vit, fused)
    rows, columns = vit.patch_embed.patch_size
    other = images.clone()
    other[:, :, 2 * rows :] += 1  # from the third row of patches on
    every = all_patches(images, vit.patch_embed.num_patches)
    same = 2 * (32 // columns) + vit.num_prefix_tokens
    for causal in (True, False):
        one, two = (encode(vit, replace(every, images=shown, causal=causal)).detach() for shown in (images, other))
        changed = (one - two).abs().amax((0, 2)) > 1e-5
        assert changed[same:].all()
        assert not changed[:same].any() if causal else changed[:same].all()
    # the last patch does not enter; the outputs of the others are as if it did
    task = NEPA(vit)
    close(encode(vit, task.given(images)), encode(vit, replace(every, causal=True))[:, :-1])
    with pytest.raises(ValueError, match="causal"):
        encode(vit, limit_context(replace(every, causal=True), torch.arange(8).expand(2, -1)))


def test_metrics_show_a_collapse():
    task, images = make(), torch.randn(4, 3, 32, 32)
    healthy = task(images).metrics
    projection = task.encoder.patch_embed.proj
    with torch.no_grad():
        projection.weight.copy_(projection.weight[:1] * torch.randn(32, 1, 1, 1))  # one direction
    line = task(images).metrics
    with torch.no_grad():
        projection.weight.mul_(1e-4)  # equal embeddings
    point = task(images).metrics
    assert healthy["embedding_rank"] > 4 and healthy["embedding_spread"] > 0.5
    assert line["embedding_rank"] < 2
    assert point["embedding_spread"] < 0.01


def test_measure_of_perfect_and_trivial_answers():
    task, images = make(), torch.randn(3, 3, 32, 32)
    encoded = task.encode(images, task.given(images))
    question = task.questions["next"]
    embeddings = question.embeddings(encoded)
    question.answers = lambda _: embeddings
    measure = question.measure(encoded)
    close(measure.values, torch.ones(3))
    previous = F.cosine_similarity(embeddings[:, :-1], embeddings[:, 1:], dim=-1)
    first = F.cosine_similarity(embeddings[0, 0], embeddings[1:, 0].mean(0), dim=-1)
    close(measure.baselines["previous patch"][0], (previous[0].sum() + first) / 64)
    assert set(measure.to_beat) == set(measure.baselines)


def test_a_perfect_prediction_is_painted_as_the_best_possible_patch():
    task, images = make(), torch.randn(3, 3, 32, 32)
    images[2] = images[0]  # whose patches are the nearest of another image
    encoded = task.encode(images, task.given(images))
    question = task.questions["next"]
    question.answers = question.embeddings
    (sheet,) = question.sheets(encoded)
    close(sheet.columns["predicted"], sheet.columns["best possible"])
    close(sheet.columns["predicted"][0], images[0])
    (alone,) = task.draw(images[:1], None)
    assert "there are none" in alone.caption and alone.columns["predicted"].isnan().all()
