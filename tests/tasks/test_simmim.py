"""SimMIM beside a plain program of the same method: all patches embedded, masked ones replaced, L1 on their pixels."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from small import indices_of, same_loss_and_gradients, seeded, small
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.patches.tokens import patchify, scatter_tokens, unpatchify
from patchloom.tasks.simmim import SimMIM

make = partial(small, SimMIM)


def plain_simmim(vit, mask_token, head, images, mask):
    """Compute the loss as in the authors' program; ``mask`` [b rows columns] is 1 where a patch is masked."""
    p, prefix = vit.patch_embed.patch_size[0], vit.num_prefix_tokens
    x = vit.patch_embed(images)  # the convolution, over all patches
    w = mask.flatten(1)[..., None].float()
    x = x * (1 - w) + mask_token * w
    tokens = [token.expand(len(x), -1, -1) for token in (vit.cls_token, vit.reg_token) if token is not None]
    x = torch.cat([*tokens, x], dim=1)
    if vit.pos_embed is not None:
        x = x + vit.pos_embed
    x = vit.norm(vit.blocks(x))[:, prefix:]
    picture = F.pixel_shuffle(F.linear(x, head.weight, head.bias).transpose(1, 2).unflatten(2, mask.shape[1:]), p)
    wide = mask.repeat_interleave(p, 1).repeat_interleave(p, 2)[:, None].float()
    return ((images - picture).abs() * wide).sum() / wide.sum() / images.shape[1]


def as_mask(given, grid):
    """Return a mask [b rows columns]: 1 where a patch is masked."""
    return given.blank.float().unflatten(1, grid)


def answer(task, images, given):
    return task.questions["pixels"].answer(task.encode(images, given))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"encoder": {"class_token": False}},
        {"encoder": {"reg_tokens": 2}, "positions": "learned"},
        {"size": (16, 40), "channels": 1, "mask_ratio": 0.3},
        {"positions": "none", "mask_unit": 16, "encoder": {"class_token": False}},
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_program(how):
    task = make(**how)
    other = deepcopy(task)
    images = torch.randn(3, task.geometry.channels, *task.augment.size)
    given = task.given(images, seeded())
    ours = task(images, given=given).loss
    head = other.questions["pixels"].decoder
    theirs = plain_simmim(other.encoder, other.mask_token, head, images, as_mask(given, task.geometry.grid))
    same_loss_and_gradients(task, ours, other, theirs)


def repainted(images, which):
    """Replace the patches ``which`` [b m] of images by noise."""
    noise = torch.randn(2, which.shape[1], 48)
    return unpatchify(scatter_tokens(noise, which, patchify(images, (4, 4))), (4, 4), (8, 8))


def test_masked_pixels_are_predicted_and_never_seen():
    task, images = make().eval(), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())
    other = repainted(images, indices_of(given.blank))
    (asked, mine), (_, same) = (answer(task, x, replace(given, images=x)) for x in (images, other))
    assert torch.equal(asked, indices_of(given.blank)) and torch.equal(mine, same)
    assert task(images, given=given).loss != task(other, given=replace(given, images=other)).loss
    seen = repainted(images, indices_of(~given.blank))
    assert not torch.equal(mine, answer(task, seen, replace(given, images=seen))[1])


def test_normalized_pixels_are_maes():
    task, images = make(normalized_pixels=True), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())
    asked, found = answer(task, images, given)
    target = patchify(images, (4, 4), asked)
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(task(images, given=given).loss, (found - target).abs().mean())


@pytest.mark.parametrize(
    ("size", "unit", "side"), [((32, 32), "auto", 2), ((16, 48), 8, 2), ((32, 48), 16, 4), ((24, 36), 12, 3)]
)
def test_masks_are_whole_square_units(size, unit, side):
    task = make(size=size, mask_unit=unit)
    assert task.unit == side
    given = task.given(torch.randn(20, 3, *size), seeded())
    assert torch.equal(given.visible, torch.arange(task.geometry.n).expand(20, -1)) and given.masked.shape == (20, 0)
    mask = as_mask(given, task.geometry.grid)
    coarse = mask.unfold(1, side, side).unfold(2, side, side).flatten(3)
    assert ((coarse == 1).all(-1) | (coarse == 0).all(-1)).all()
    assert len(mask.unique(dim=0)) > 1  # drawn for each image


@pytest.mark.parametrize(
    ("ratio", "visible"), [(0.6, 6), (0.5, 8), (0.75, 4), (0.1, 14), (0.9, 1)]
)  # of 16 units; the number of masked ones is rounded up, as in the authors' program
def test_how_many_are_masked(ratio, visible):
    task = make(mask_ratio=ratio)
    given = task.given(torch.randn(2, 3, 32, 32), seeded())
    assert given.has_content().sum(1).tolist() == [4 * visible] * 2
    assert given.blank.sum(1).tolist() == [64 - 4 * visible] * 2


@pytest.mark.parametrize("size", [(20, 32), (32, 12), (20, 20)])
def test_odd_grids_have_units_of_one_patch(size):
    task = make(size=size)
    assert task.unit == 1 and task.chosen["mask_unit"] == (4, "one patch, because the grid has odd sides")
    assert task(torch.randn(2, 3, *size), generator=seeded()).loss.isfinite()


def test_units_of_one_patch_follow_the_paper_otherwise():
    assert make().chosen["mask_unit"] == (8, "two patches, like 32 pixels for patches of 16")
    assert make(mask_unit=4).unit == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"mask_unit": 6},
            "mask units of 6 pixels do not fit 8x8 patches of 4 pixels: give --task.mask_unit a multiple",
        ),
        ({"mask_unit": 12}, "do not fit 8x8 patches of 4 pixels"),
        ({"mask_unit": 0}, "mask units of 0 pixels do not fit"),
        ({"mask_unit": 64}, "mask units of 64 pixels do not fit"),
        ({"size": (20, 32), "mask_unit": 8}, "do not fit 5x8 patches"),
        ({"size": (32, 20), "mask_unit": 8}, "do not fit 8x5 patches"),
        ({"mask_ratio": 0.0}, "masks nothing: raise --task.mask_ratio"),
        ({"mask_ratio": 1.0}, "mask ratio of 1.0 leaves 0 of 64 patches visible"),
        ({"mask_unit": 32}, "leaves none of 1 mask units visible: lower --task.mask_ratio or --task.mask_unit"),
        ({"mask_ratio": 0.95}, "leaves none of 16 mask units visible"),
        ({"p": 1, "size": (8, 8), "channels": 1, "normalized_pixels": True}, "patches of one pixel"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_mask_units_are_for_square_patches():
    task = small(SimMIM, (8, 12), (8, 1), mask_ratio=0.5)
    assert task.unit == 1 and task.sizes == (6, 6)
    with pytest.raises(PatchloomError, match="patches of 8x1 pixels are not: leave out --task.mask_unit"):
        small(SimMIM, (8, 12), (8, 1), mask_unit=8)
