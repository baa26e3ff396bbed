"""MAE beside a plain program of the same method: all patches embedded, some kept, mask tokens in order, all decoded."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from small import pixel_targets, plain_tokens, same_loss_and_gradients, seeded, small
from torch.nn import functional as F

from patchloom.tasks.mae import MAE

make = partial(small, MAE)


def plain_mae(vit, decoder, images, visible, normalized):
    """Compute the loss as in the authors' program: mask tokens put in order, all patches decoded."""
    b, n, prefix = len(images), vit.patch_embed.num_patches, vit.num_prefix_tokens
    rows = torch.arange(b)[:, None]
    x = decoder.embed(vit.norm(plain_tokens(vit, vit.patch_embed(images), visible)))
    whole = decoder.mask_token.expand(b, n, -1).clone()
    whole[rows, visible] = x[:, prefix:]
    x = torch.cat([x[:, :prefix], whole + decoder.positions], dim=1)
    answers = decoder.answer(decoder.norm(decoder.blocks(x)))[:, prefix:]
    target = pixel_targets(images, vit.patch_embed.patch_size[0], normalized)
    mask = torch.ones(b, n).scatter(1, visible, 0)
    return ((answers - target).square().mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"encoder": {"class_token": False}, "normalized_pixels": False},
        {"size": (16, 40), "channels": 1, "mask_ratio": 0.3},
        {"decoder_width": 24, "decoder_depth": 1, "decoder_heads": 3, "mask_ratio": 0.5},
        {"positions": "none", "encoder": {"class_token": False}},
        {"mask_unit": 8, "encoder": {"reg_tokens": 7}, "positions": "learned", "decoder_depth": 4},  # Pixio
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_program(how):
    task = make(**how)
    other = deepcopy(task)
    images = torch.randn(3, task.geometry.channels, *task.augment.size)
    given = task.given(images, seeded())
    decoder = other.questions["pixels"].decoder
    theirs = plain_mae(other.encoder, decoder, images, given.visible, how.get("normalized_pixels", True))
    same_loss_and_gradients(task, task(images, given=given).loss, other, theirs)


def visible_by_pixio(b, grid, side, ratio, seed):
    """Return the visible patches by Pixio's rule: units of a grid sorted by noise, int(units * (1 - ratio)) stay."""
    numbers = torch.arange(grid[0] * grid[1]).view(1, 1, *grid).float()
    units = F.unfold(numbers, side, stride=side)[0].T.long()  # [units side*side]
    noise = torch.rand(b, len(units), generator=seeded(seed))
    return units[noise.argsort(dim=1)[:, : int(len(units) * (1 - ratio))]].flatten(1)


@settings(max_examples=25)
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
