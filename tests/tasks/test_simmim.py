"""SimMIM beside a plain program of the same method: all patches embedded, masked ones replaced, L1 on their pixels."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from small import pixel_targets, plain_tokens, same_loss_and_gradients, seeded, small
from torch.nn import functional as F

from patchloom.tasks.simmim import SimMIM

make = partial(small, SimMIM)


def plain_simmim(vit, mask_token, head, images, blank, normalized):
    """Compute the loss as in the authors' program; ``blank`` [b n] is True where a patch is masked."""
    x = vit.patch_embed(images)  # the convolution, over all patches
    w = blank[..., None].float()
    x = plain_tokens(vit, x * (1 - w) + mask_token * w)
    answers = F.linear(vit.norm(x)[:, vit.num_prefix_tokens :], head.weight, head.bias)
    apart = (answers - pixel_targets(images, vit.patch_embed.patch_size[0], normalized)).abs()
    return (apart * w).sum() / w.sum() / apart.shape[-1]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"encoder": {"class_token": False}, "normalized_pixels": True},
        {"encoder": {"reg_tokens": 2}, "positions": "learned"},
        {"size": (16, 40), "channels": 1, "mask_ratio": 0.3},
        {"positions": "none", "mask_unit": 16, "encoder": {"class_token": False}},
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_program(how):
    task = make(**how)
    other = deepcopy(task)
    images = torch.randn(3, task.geometry.channels, *task.augment.size)
    given, head = task.given(images, seeded()), other.questions["pixels"].decoder
    normalized = how.get("normalized_pixels", False)
    theirs = plain_simmim(other.encoder, other.mask_token, head, images, given.blank, normalized)
    same_loss_and_gradients(task, task(images, given=given).loss, other, theirs)


@pytest.mark.parametrize(
    ("size", "unit", "side"), [((32, 32), "auto", 2), ((16, 48), 8, 2), ((32, 48), 16, 4), ((24, 36), 12, 3)]
)
def test_masks_are_whole_square_units(size, unit, side):
    task = make(size=size, mask_unit=unit)
    assert task.unit == side
    given = task.given(torch.randn(20, 3, *size), seeded())
    assert torch.equal(given.visible, torch.arange(task.geometry.n).expand(20, -1)) and given.masked.shape == (20, 0)
    mask = given.blank.unflatten(1, task.geometry.grid)
    coarse = mask.unfold(1, side, side).unfold(2, side, side).flatten(3)
    assert torch.equal(coarse.all(-1), coarse.any(-1))
    assert len(mask.unique(dim=0)) > 1  # drawn for each image


@pytest.mark.parametrize(("ratio", "visible"), [(0.6, 6), (0.5, 8), (0.75, 4), (0.1, 14), (0.9, 1)])
def test_the_number_of_masked_units_is_rounded_up(ratio, visible):
    """Of 16 units, as in the authors' program."""
    given = make(mask_ratio=ratio).given(torch.randn(2, 3, 32, 32), seeded())
    assert given.has_content().sum(1).tolist() == [4 * visible] * 2
    assert given.blank.sum(1).tolist() == [64 - 4 * visible] * 2


@pytest.mark.parametrize("size", [(20, 32), (32, 12), (20, 20)])
def test_units_of_odd_grids_and_oblong_patches_are_one_patch(size):
    assert make().chosen["mask_unit"][0] == 8 and make(mask_unit=4).unit == 1
    task = make(size=size)
    assert task.unit == 1 and task.chosen["mask_unit"][0] == 4 and "odd sides" in task.chosen["mask_unit"][1]
    oblong = small(SimMIM, (8, 12), (8, 1), mask_ratio=0.5)
    assert oblong.unit == 1 and oblong.sizes == (6, 6) and "mask_unit" not in oblong.chosen
