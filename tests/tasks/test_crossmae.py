"""CrossMAE beside a plain program of its equations, and its independence of what else is predicted."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from golden import close
from small import same_loss_and_gradients, seeded, small
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.encode import encode
from patchloom.nets.performance import checkpoint_gradients, fuse_attention
from patchloom.tasks.crossmae import CrossMAE

make = partial(small, CrossMAE)


def norm(layer, x):
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + layer.eps).sqrt()
    return x * layer.weight + layer.bias


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


def read(block, x, context):
    """Compute a decoder block of one image, head by head: [m d] patches read [t D] tokens."""
    q = linear(block.q, norm(block.norm1, x)).split(x.shape[1] // block.heads, dim=1)
    k, v = (part.split(x.shape[1] // block.heads, dim=1) for part in linear(block.kv, context).chunk(2, dim=1))
    found = [F.softmax(a @ b.T / a.shape[1] ** 0.5, dim=1) @ c for a, b, c in zip(q, k, v, strict=True)]
    x = x + linear(block.proj, torch.cat(found, dim=1))
    hidden = linear(block.mlp.fc1, norm(block.norm2, x))
    return x + linear(block.mlp.fc2, hidden * (1 + torch.erf(hidden / 2**0.5)) / 2)


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
        maps[-1] = norm(vit.norm, maps[-1])
        y = decoder.mask_token + decoder.positions[asked]
        for i, block in enumerate(decoder.blocks):
            context = maps[-1]
            if stages:
                mixed = sum(decoder.mix.weight[i, j] * maps[stage] for j, stage in enumerate(stages))
                context = norm(decoder.mixed_norms[i], mixed)
            y = read(block, y, context)
        answers = linear(decoder.answer, norm(decoder.norm, y))
        target = F.unfold(image[None], 4, stride=4)[0].T[asked]
        if normalized:
            target = (target - target.mean(1, keepdim=True)) / (target.var(1, keepdim=True) + 1e-6).sqrt()
        errors.append((answers - target).square())
    return torch.stack(errors).mean()


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
def test_loss_and_gradients_are_those_of_a_plain_program(options, stages):
    task = make(**options)
    other, images = deepcopy(task), torch.randn(3, 3, 32, 32)
    given = task.given(images, seeded())
    predicted = given.masked[:, : round(64 * options.get("prediction_ratio", 0.25))]
    normalized = options.get("normalized_pixels", True)
    theirs = plain_crossmae(other, images, given.visible, predicted, normalized, stages)
    same_loss_and_gradients(task, task(images, given=given).loss, other, theirs)


def test_a_prediction_does_not_depend_on_which_others_are_made():
    task, images = make().eval(), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())
    encoded = task.encode(images, given)
    decoder = task.questions["pixels"].decoder
    together = decoder(encoded.tokens, given.visible, given.masked)
    apart = [decoder(encoded.tokens, given.visible, part) for part in given.masked.split(7, dim=1)]
    close(together, torch.cat(apart, dim=1))


def test_a_step_decodes_some_patches_and_the_measure_all_of_them():
    task, images, seen = make(), torch.randn(2, 3, 32, 32), []
    task.questions["pixels"].decoder.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    task(images, generator=seeded())
    task.measure(images, seeded())
    assert seen == [16, 48]


@pytest.mark.parametrize("maps", [1, 3])
def test_checkpointing_and_explicit_attention_give_the_same_gradients(maps):
    def gradients(checkpointing, fused):
        task = make(encoder_maps=maps)
        checkpoint_gradients(task, checkpointing)
        fuse_attention(task, fused)
        task(torch.ones(2, 3, 32, 32).cumsum(3) / 32, generator=seeded()).loss.backward()
        return torch.cat([weight.grad.flatten() for weight in task.parameters() if weight.requires_grad])

    usual = gradients(False, True)
    close(gradients(True, True), usual)
    close(gradients(False, False), usual)


def test_a_single_map_is_the_encoders_output():
    task, images = make(encoder_maps=1), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())
    close(task.encode(images, given).tokens, encode(task.encoder, given))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prediction_ratio": 0.8}, "prediction_ratio must be above 0 and at most the mask ratio of 0.75, not 0.8"),
        ({"prediction_ratio": 0.0}, "prediction_ratio must be above 0"),
        ({"encoder_maps": 4}, "has 3 feature maps, the embedding and 2 blocks: give --task.encoder_maps 1 to 3, not 4"),
        ({"encoder_maps": 0}, "give --task.encoder_maps 1 to 3, not 0"),
        ({"decoder_depth": 0}, "give --task.decoder_depth 1 or more"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)
