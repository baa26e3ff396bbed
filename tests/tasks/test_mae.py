"""MAE beside a plain program of the same method: all patches embedded, some kept, mask tokens in order, all decoded."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from golden import close
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from small import same_loss_and_gradients, seeded, small
from torch import nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.patches.tokens import patchify, scatter_tokens, unpatchify
from patchloom.tasks.mae import MAE
from patchloom.withhold.encoder_input import all_patches, mask_patches

make = partial(small, MAE)


def plain_mae(vit, decoder, images, visible, normalized):
    """Compute the loss as in the authors' program: mask tokens put in order, all patches decoded."""
    b, n, prefix = len(images), vit.patch_embed.num_patches, vit.num_prefix_tokens
    x = vit.patch_embed(images)  # the convolution, over all patches
    tokens = [token.expand(b, -1, -1) for token in (vit.cls_token, vit.reg_token) if token is not None]
    x = torch.cat([*tokens, x], dim=1)
    if vit.pos_embed is not None:
        x = x + vit.pos_embed
    rows = torch.arange(b)[:, None]
    x = torch.cat([x[:, :prefix], x[:, prefix:][rows, visible]], dim=1)
    x = decoder.embed(vit.norm(vit.blocks(x)))
    whole = decoder.mask_token.expand(b, n, -1).clone()
    whole[rows, visible] = x[:, prefix:]
    x = torch.cat([x[:, :prefix], whole + decoder.positions], dim=1)
    answers = decoder.answer(decoder.norm(decoder.blocks(x)))[:, prefix:]
    p = vit.patch_embed.patch_size[0]
    target = nn.functional.unfold(images, p, stride=p).mT  # (channel, row, column) in a patch
    if normalized:
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    mask = torch.ones(b, n).scatter(1, visible, 0)
    return ((answers - target).square().mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"encoder": {"class_token": False}, "normalized_pixels": False},
        {"encoder": {"reg_tokens": 2}, "positions": "learned"},
        {"size": (16, 40), "channels": 1, "mask_ratio": 0.3},
        {"decoder_width": 24, "decoder_depth": 1, "decoder_heads": 3, "mask_ratio": 0.5},
        {"positions": "none", "encoder": {"class_token": False}},
        {"mask_unit": 8, "encoder": {"reg_tokens": 7}, "positions": "learned", "decoder_depth": 4},
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_program(how):
    task = make(**how)
    other = deepcopy(task)
    images = torch.randn(3, task.geometry.channels, *task.augment.size)
    given = task.given(images, seeded())
    ours = task(images, given=given).loss
    asked = other.questions["pixels"]
    theirs = plain_mae(other.encoder, asked.decoder, images, given.visible, how.get("normalized_pixels", True))
    same_loss_and_gradients(task, ours, other, theirs)


def test_masked_pixels_are_predicted_and_never_seen():
    task, images = make().eval(), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())

    def answer(images):
        return task.questions["pixels"].answer(task.encode(images, again(images)))

    def again(images):
        return mask_patches(all_patches(images, 64), given.visible, given.masked)

    def repainted(which):
        noise = torch.randn(*which.shape, 48)
        return unpatchify(scatter_tokens(noise, which, patchify(images, (4, 4))), (4, 4), (8, 8))

    other = repainted(given.masked)
    (asked, mine), (_, same) = answer(images), answer(other)
    assert torch.equal(asked, given.masked) and torch.equal(mine, same)
    assert task(images, given=again(images)).loss != task(other, given=again(other)).loss
    assert not torch.equal(mine, answer(repainted(given.visible))[1])


@pytest.mark.parametrize(("ratio", "visible"), [(0.75, 16), (0.5, 32), (0.9, 6), (0.1, 57)])
def test_how_many_are_masked(ratio, visible):
    given = make(mask_ratio=ratio).given(torch.randn(20, 3, 32, 32), seeded())
    assert given.visible.shape == (20, visible) and given.masked.shape == (20, 64 - visible)
    together = torch.cat([given.visible, given.masked], dim=1).sort(dim=1).values
    assert torch.equal(together, torch.arange(64).expand(20, -1))
    assert given.blank is given.dropped is given.context is None
    assert len(given.visible.sort(dim=1).values.unique(dim=0)) > 1  # drawn for each image


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_ratio": 0.0}, "masks nothing: raise --task.mask_ratio"),
        ({"mask_ratio": 1.0}, "mask ratio of 1.0 leaves 0 of 64 patches visible"),
        ({"decoder_depth": 0}, "the encoder learns nothing from them: give --task.decoder_depth 1 or more"),
        ({"decoder_width": 30, "decoder_heads": 4}, "decoder cannot be 30 wide and 2 blocks deep with 4 heads"),
        ({"p": 1, "size": (8, 8), "channels": 1}, "patches of one pixel"),
        ({"mask_unit": 6}, "mask units of 6 pixels do not fit 8x8 patches of 4 pixels: give --task.mask_unit"),
        ({"mask_unit": 12}, "do not fit 8x8 patches of 4 pixels"),
        ({"mask_unit": 0}, "mask units of 0 pixels do not fit"),
        ({"mask_unit": 32}, "leaves none of 1 mask units visible: lower --task.mask_ratio or --task.mask_unit"),
        ({"mask_unit": 16, "mask_ratio": 0.8}, "leaves none of 4 mask units visible"),
        ({"mask_unit": 8, "size": (8, 12), "p": (8, 1)}, "patches of 8x1 pixels are not: leave out --task.mask_unit"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def visible_by_pixio(b, grid, side, ratio, seed):
    """Return the visible patches by Pixio's rule: units of a grid sorted by noise, int(units * (1 - ratio)) stay."""
    numbers = torch.arange(grid[0] * grid[1]).view(1, 1, *grid).float()
    units = F.unfold(numbers, side, stride=side)[0].T.long()  # [units side*side]
    noise = torch.rand(b, len(units), generator=seeded(seed))
    return units[noise.argsort(dim=1)[:, : int(len(units) * (1 - ratio))]].flatten(1)


@settings(max_examples=25, deadline=None)
@drawn(st.integers(1, 4), st.integers(2, 4), st.integers(1, 3), st.sampled_from([0.25, 0.5, 0.75]), st.integers(0, 99))
def test_whole_units_are_masked_as_many_as_by_pixio(rows, columns, side, ratio, seed):
    grid = rows * side, columns * side
    if int(rows * columns * (1 - ratio)) == 0:
        return
    task = make(size=(4 * grid[0], 4 * grid[1]), mask_unit=4 * side, mask_ratio=ratio, encoder={"depth": 1})
    given = task.given(torch.zeros(3, 3, *task.augment.size), seeded(seed))
    theirs = visible_by_pixio(3, grid, side, ratio, seed)
    assert torch.equal(given.visible.sort(dim=1).values, theirs.sort(dim=1).values)
    together = torch.cat([given.visible, given.masked], dim=1).sort(dim=1).values
    assert torch.equal(together, torch.arange(task.geometry.n).expand(3, -1))


@pytest.mark.parametrize("options", [{}, {"mask_unit": 4}], ids=str)
def test_units_of_one_patch_are_drawn_as_patches(options):
    task = make(**options)
    order = torch.rand(5, 64, generator=seeded(3)).argsort(dim=1)
    given = task.given(torch.zeros(5, 3, 32, 32), seeded(3))
    assert task.unit == 1 and torch.equal(torch.cat([given.visible, given.masked], dim=1), order)
    assert make().chosen["mask_unit"] == (4, "one patch")


def test_the_loss_of_pixio_with_a_given_mask():
    """Pixio's forward pass written out: eight class tokens with positions, a quarter of the units, errors elsewhere."""
    task = make(mask_unit=8, encoder={"reg_tokens": 7}, positions="learned", decoder_depth=3)
    vit, decoder = task.encoder, task.questions["pixels"].decoder
    images, visible = torch.randn(2, 3, 32, 32), visible_by_pixio(2, (8, 8), 2, 0.75, 5)
    class_tokens = torch.cat([vit.cls_token, vit.reg_token], dim=1)
    assert class_tokens.shape[1] == 8 and vit.pos_embed.shape[1] == 8 + 64 and vit.pos_embed.requires_grad
    x = vit.patch_embed(images) + vit.pos_embed[:, 8:]
    x = torch.stack([one[kept] for one, kept in zip(x, visible, strict=True)])
    x = torch.cat([(class_tokens + vit.pos_embed[:, :8]).expand(2, -1, -1), x], dim=1)
    x = decoder.embed(vit.norm(vit.blocks(x)))
    errors = []
    for one, kept, image in zip(x, visible, images, strict=True):
        whole = decoder.mask_token.repeat(64, 1)
        whole[kept] = one[8:]
        whole = torch.cat([one[:8], whole + decoder.positions])
        answers = decoder.answer(decoder.norm(decoder.blocks(whole[None])))[0, 8:]
        target = F.unfold(image[None], 4, stride=4)[0].T
        target = (target - target.mean(1, keepdim=True)) / (target.var(1, keepdim=True) + 1e-6).sqrt()
        masked = torch.ones(64, dtype=torch.bool)
        masked[kept] = False
        assert masked.sum() == 48
        errors.append((answers - target)[masked].square().mean(1))
    given = task.given(images, seeded(5))
    close(task(images, given=given).loss, torch.cat(errors).mean())
