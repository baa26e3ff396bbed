"""CrossMAE beside a plain program of its equations, and its independence of what else is predicted."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from small import pixel_targets, same_loss_and_gradients, seeded, small
from torch.nn import functional as F

from patchloom.nets.performance import fuse_attention
from patchloom.tasks.crossmae import CrossMAE

make = partial(small, CrossMAE)


def read(block, x, context):
    """Compute a decoder block of one image, head by head: [m d] patches read [t D] tokens."""
    width = x.shape[1] // block.heads
    q, (k, v) = block.q(block.norm1(x)).split(width, dim=1), block.kv(context).chunk(2, dim=1)
    heads = zip(q, k.split(width, dim=1), v.split(width, dim=1), strict=True)
    found = [F.softmax(a @ b.T / width**0.5, dim=1) @ c for a, b, c in heads]
    x = x + block.proj(torch.cat(found, dim=1))
    return x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))


def plain_crossmae(task, images, visible, predicted, normalized, stages):
    """Compute the loss image by image; ``stages`` are the weighted feature maps, the last one after the final norm."""
    vit, decoder = task.encoder, task.questions["pixels"].decoder
    prefix, errors = vit.num_prefix_tokens, []
    for image, kept, asked in zip(images, visible, predicted, strict=True):
        x = vit.patch_embed(image[None])[0]
        if vit.pos_embed is not None:
            x = x + vit.pos_embed[0, prefix:]
        tokens = [token[0] for token in (vit.cls_token, vit.reg_token) if token is not None]
        x = torch.cat([*tokens, x[kept]])[None]
        if prefix:
            x = torch.cat([x[:, :prefix] + vit.pos_embed[:, :prefix], x[:, prefix:]], dim=1)
        maps = [x[0]]
        for block in vit.blocks:
            x = block(x)
            maps.append(x[0])
        maps[-1] = vit.norm(maps[-1])
        y = decoder.mask_token + decoder.positions[asked]
        for i, block in enumerate(decoder.blocks):
            context = maps[-1]
            if stages:
                mixed = sum(decoder.mix.weight[i, j] * maps[stage] for j, stage in enumerate(stages))
                context = decoder.mixed_norms[i](mixed)
            y = read(block, y, context)
        target = pixel_targets(image[None], 4, normalized)[0, asked]
        errors.append((decoder.answer(decoder.norm(y)) - target).square())
    return torch.stack(errors).mean()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"positions": "learned", "encoder": {"depth": 3}}, [0, 1, 2, 3]),
        ({"positions": "learned", "encoder": {"depth": 4, "reg_tokens": 2}, "encoder_maps": 3}, [0, 2, 4]),
        ({"encoder": {"class_token": False}, "encoder_maps": 1, "normalized_pixels": False}, []),
        ({"positions": "learned", "decoder_width": 24, "decoder_depth": 4, "decoder_heads": 3}, [0, 1, 2]),
        ({"encoder": {"class_token": False}, "mask_ratio": 0.5, "prediction_ratio": 0.5}, [0, 1, 2]),
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_program(options, stages, fused):
    task = make(**options)
    other, images = deepcopy(task), torch.randn(3, 3, 32, 32)
    fuse_attention(task, fused)
    given = task.given(images, seeded())
    predicted = given.masked[:, : round(64 * options.get("prediction_ratio", 0.25))]
    normalized = options.get("normalized_pixels", True)
    theirs = plain_crossmae(other, images, given.visible, predicted, normalized, stages)
    same_loss_and_gradients(task, task(images, given=given).loss, other, theirs)


def test_a_step_decodes_some_patches_and_the_measure_all_of_them():
    task, images, seen = make(), torch.randn(2, 3, 32, 32), []
    task.questions["pixels"].decoder.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    task(images, generator=seeded())
    task.measure(images, seeded())
    assert seen == [16, 48]
