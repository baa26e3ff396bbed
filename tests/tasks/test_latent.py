"""Latent beside a plain program of I-JEPA's, data2vec 2.0's and Bootleg's equations, and its masks."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from golden import close
from small import plain_tokens, same_loss_and_gradients, seeded, small
from torch.nn import functional as F

from patchloom.patches.partition import inverse_blocks, random_rectangles
from patchloom.tasks.latent import Latent

make = partial(small, Latent)


def normed(x, dim, eps=1e-5):
    return (x - x.mean(dim, keepdim=True)) / (x.var(dim, unbiased=False, keepdim=True) + eps).sqrt()


def layers_of(vit, image):
    """Return tokens [n d] of an image after each block, the last with the final norm, and the outputs of the MLPs."""
    blocks, mlps = [], []
    hooks = [block.register_forward_hook(lambda _, given, out: blocks.append(out)) for block in vit.blocks]
    hooks += [block.mlp.register_forward_hook(lambda _, given, out: mlps.append(out)) for block in vit.blocks]
    blocks[-1] = vit.norm(plain_tokens(vit, vit.patch_embed(image[None])))
    for hook in hooks:
        hook.remove()
    return [[one[0, vit.num_prefix_tokens :] for one in found] for found in (blocks, mlps)]


def transformer(predictor, tokens, visible, asked):
    """Compute I-JEPA's predictor for one block of one image: [m f]."""
    x = predictor.embed(tokens)
    x = torch.cat([x[: len(x) - len(visible)], x[len(x) - len(visible) :] + predictor.positions[visible]])
    x = torch.cat([x, predictor.mask_token + predictor.positions[asked]])
    return predictor.answer(predictor.norm(predictor.blocks(x[None])[0]))[-len(asked) :]


def convolutions(predictor, tokens, visible, asked):
    """Compute data2vec 2.0's decoder for one image: [m f]."""
    whole = predictor.mask_token.repeat(64, 1)
    whole[visible] = tokens[len(tokens) - len(visible) :]
    picture = whole.T.view(-1, 8, 8)
    for conv, norm in zip(predictor.convs, predictor.norms, strict=True):
        found = F.conv2d(picture[None], conv.weight, conv.bias, padding=1, groups=conv.groups)[0]
        found = normed(found, 0) * norm.weight[:, None, None] + norm.bias[:, None, None]
        found = found * (1 + torch.erf(found / 2**0.5)) / 2
        picture = picture + found if picture.shape == found.shape else found
    return predictor.answer(picture.flatten(1).T[asked])


def plain(task, images, given, target, loss, predict):
    """Compute the loss mask by mask; ``target`` makes targets [n f] of an image's layers."""
    question, errors = task.questions["features"], []
    with torch.no_grad():
        targets = [target(*layers_of(question.teacher.encoder, image)) for image in images]
    for row, (visible, sets) in enumerate(zip(given.visible, given.targets["asked"], strict=True)):
        image = row % len(images)
        vit = task.encoder
        tokens = vit.norm(plain_tokens(vit, vit.patch_embed(images[image][None]), visible[None]))[0]
        for asked in sets:
            apart = predict(question.predictor, tokens, visible, asked) - targets[image][asked]
            huber = torch.where(apart.abs() < 1, apart.square() / 2, apart.abs() - 0.5)
            errors.append(huber if loss == "smooth_l1" else apart.square())
    return torch.stack(errors).mean()


def bootleg(blocks, _):
    return torch.cat([normed(block, 1) for block in blocks], dim=1)


def ijepa(blocks, _):
    return normed(blocks[3], 1)


def data2vec(_, mlps):
    return normed(torch.stack([normed(mlp, 0) for mlp in mlps[1:]]).mean(0), 1)


DATA2VEC = {"layers": [2, 3, 4], "combine": "mean", "source": "mlp", "sampling": "inverse", "masks": 3, "loss": "mse"}


@pytest.mark.parametrize(
    ("options", "target", "predict"),
    [
        ({}, bootleg, transformer),
        ({"layers": [4], "encoder": {"class_token": False}, "masks": 2}, ijepa, transformer),
        (DATA2VEC | {"decoder": "conv", "decoder_width": 48, "decoder_depth": 3}, data2vec, convolutions),
    ],
    ids=["Bootleg", "I-JEPA", "data2vec 2.0"],
)
def test_loss_and_gradients_are_those_of_a_plain_program(options, target, predict):
    options = {"positions": "learned", **options}
    options["encoder"] = {"depth": 4, **options.get("encoder", {})}
    task = make(**options)
    other, images = deepcopy(task), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())
    theirs = plain(other, images, given, target, options.get("loss", "smooth_l1"), predict)
    same_loss_and_gradients(task, task(images, given=given).loss, other, theirs)


def test_the_predictor_of_a_vit_s_is_as_wide_and_six_blocks_deep():
    task = make(encoder={"embed_dim": 384, "num_heads": 6})
    assert [task.chosen[f"decoder_{size}"][0] for size in ("width", "depth", "heads")] == [384, 6, 12]


def test_blocks_and_context_are_disjoint():
    task = make(masks=3)
    given = task.given(torch.zeros(20, 3, 32, 32), seeded())
    assert given.visible.shape == (60, 20) and given.targets["asked"].shape == (60, 4, 11)  # 0.175 of 64
    for visible, blocks in zip(given.visible, given.targets["asked"], strict=True):
        assert len(visible.unique()) == 20 and not set(visible.tolist()) & set(blocks.flatten().tolist())
        assert all(len(block.unique()) == 11 for block in blocks)
    apart = given.visible.sort(dim=1).values.unique(dim=0)
    assert len(apart) == 60  # drawn for each image and mask


def test_rectangles_are_compact_and_everywhere():
    blocks = random_rectangles(200, 2, (8, 12), 15, (0.75, 1.5), seeded())
    rows, columns = (part.amax(2) - part.amin(2) + 1 for part in (blocks // 12, blocks % 12))
    assert (rows * columns).max() <= 25 and rows.max() <= 6 and columns.max() <= 6
    assert len(blocks.unique()) == 96
    assert torch.equal(random_rectangles(3, 1, (4, 5), 20, (1, 1)).sort().values[:, 0], torch.arange(20).expand(3, -1))
    strip = random_rectangles(50, 1, (1, 98), 10, (0.75, 1.5), seeded())
    assert ((strip.amax(2) - strip.amin(2)) == 9).all()


def test_inverse_blocks_leave_squares_visible():
    visible, masked = inverse_blocks(50, 2, (14, 14), 3, 39, seeded())
    assert torch.equal(torch.cat([visible, masked], dim=2).sort().values, torch.arange(196).expand(50, 2, -1))
    seen = torch.zeros(100, 1, 14, 14).flatten(2).scatter(2, visible.flatten(0, 1)[:, None], 1.0).view(100, 1, 14, 14)
    whole = F.max_pool2d(-F.max_pool2d(-seen, 3, 1, 1), 3, 1, 1)  # opening: the squares of 3x3 inside
    assert (whole * seen).sum((1, 2, 3)).mean() > 30  # random patches: about 2 of 39
    assert len(visible.unique()) == 196


def test_the_measure_beside_its_baselines_by_hand():
    task, images = make(layers=[1, 2], sampling="random").eval(), torch.randn(5, 3, 32, 32)
    given = task.given(images, seeded())
    encoded = task.encode(images, given)
    measure, question = task.questions["features"].measure(encoded), task.questions["features"]
    targets, answers = question.teacher_features(images), question.answer(encoded)[1]
    for i in range(5):
        asked = given.targets["asked"][i, 0]
        others = torch.stack([targets[j] for j in range(5) if j != i]).mean(0)[asked]
        seen = targets[i][given.visible[i]].mean(0).expand(len(asked), -1)
        close(measure.values[i], F.smooth_l1_loss(answers[i], targets[i][asked]))
        close(measure.baselines["mean feature"][i], F.smooth_l1_loss(others, targets[i][asked]))
        close(measure.baselines["mean of the visible"][i], F.smooth_l1_loss(seen, targets[i][asked]))
    assert measure.baseline_to_beat() == "mean feature" and not measure.has_to_be_beaten("mean of the visible")
    close(measure.outputs, targets.mean(1))


def test_a_collapse_is_visible():
    task, images = make(), torch.randn(20, 3, 32, 32)
    healthy = task(images, generator=seeded()).metrics["target_deviation"]
    teacher = task.questions["features"].teacher.encoder
    with torch.no_grad():
        for block in teacher.blocks:  # every token becomes the same one
            block.mlp.fc2.weight.zero_()
            block.mlp.fc2.bias.add_(torch.randn(32) * 1e4)
    collapsed = task(images, generator=seeded()).metrics
    assert healthy > 0.3 and collapsed["target_deviation"] < 0.01 and collapsed["target_deviation_within"] < 0.01
    measure = task.eval().measure(images, seeded())
    assert measure.collapsed() and measure.diversity["spread"] < 0.01
    task = make(positions="none", encoder={"class_token": False})
    flat = torch.randn(8, 3, 1, 1).expand(-1, -1, 32, 32)  # without positions, the patches of an image are equal
    metrics = task(flat, generator=seeded()).metrics
    assert metrics["target_deviation_within"] < 1e-3 < 0.1 < metrics["target_deviation"]


def test_the_picture_has_the_mean_of_overlapping_blocks():
    task, images = make().eval(), torch.randn(3, 3, 32, 32)
    (sheet,) = task.draw(images, seeded())
    given = task.given(images, seeded())
    predicted = torch.zeros(3, 64).scatter(1, given.targets["asked"].flatten(1), 1.0).view(3, 8, 8) > 0
    assert torch.equal(sheet.columns["answer"][:, 0, ::4, ::4].isfinite(), predicted)


@pytest.mark.parametrize(("size", "blocks", "visible"), [((8, 8), 3, 1), ((8, 4), 1, 1), ((16, 16), 4, 4)])
def test_small_grids(size, blocks, visible):
    task = make(size=size)
    given = task.given(torch.zeros(2, 3, *size), seeded())
    assert given.targets["asked"].shape[1] == blocks and given.visible.shape == (2, visible)
    assert task.chosen["target_blocks"][0] == blocks
