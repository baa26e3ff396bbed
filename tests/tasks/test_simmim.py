"""SimMIM beside a plain program of the same method: every patch embedded, masked ones replaced, L1 on their pixels."""

from copy import deepcopy

import pytest
import torch
from golden import close
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.patches.tokens import patchify, scatter_tokens, unpatchify
from patchloom.tasks.simmim import SimMIM

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def make(size=(32, 32), p=4, channels=3, positions="sincos", encoder=None, **options):
    torch.manual_seed(0)
    spec = EncoderSpec("nano", size, p, channels, positions=positions, options=SIZES | (encoder or {}))
    task = SimMIM(build_encoder(spec), **options)
    with torch.no_grad():  # zero biases would hide mistakes
        for weight in task.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    return task


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def plain_simmim(vit, mask_token, head, images, mask):
    """The loss as the authors' program has it; ``mask`` [b rows columns] is 1 where a patch is masked."""
    p, prefix = vit.patch_embed.patch_size[0], vit.num_prefix_tokens
    x = vit.patch_embed(images)  # the convolution, over all patches
    w = mask.flatten(1)[..., None].float()
    x = x * (1 - w) + mask_token * w
    tokens = [token.expand(len(x), -1, -1) for token in (vit.cls_token, vit.reg_token) if token is not None]
    x = torch.cat([*tokens, x], dim=1)
    if vit.pos_embed is not None:
        x = x + vit.pos_embed
    x = vit.norm(vit.blocks(x))[:, prefix:]
    picture = F.pixel_shuffle(head(x).transpose(1, 2).unflatten(2, mask.shape[1:]), p)
    wide = mask.repeat_interleave(p, 1).repeat_interleave(p, 2)[:, None].float()
    return ((images - picture).abs() * wide).sum() / wide.sum() / images.shape[1]


def as_mask(masked, grid):
    return torch.zeros(len(masked), grid[0] * grid[1]).scatter(1, masked, 1).unflatten(1, grid)


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
    images = torch.randn(3, task.channels, *task.augment.size)
    hands = task.deal(3, generator(), "cpu")
    ours = task(images, hands=hands).loss
    theirs = plain_simmim(other.encoder, other.mask_token, other.head, images, as_mask(hands[1], task.grid))
    close(ours, theirs.detach())
    ours.backward()
    theirs.backward()
    for (name, mine), its in zip(task.named_parameters(), other.parameters(), strict=True):
        if mine.requires_grad:
            assert its.grad.abs().max() > 0, name
            close(mine.grad, its.grad)


def test_masked_pixels_are_asked_and_never_seen():
    task, images = make().eval(), torch.randn(2, 3, 32, 32)
    hands = task.deal(2, generator(), "cpu")
    noise = torch.randn(2, hands[1].shape[1], 48)
    other = unpatchify(scatter_tokens(noise, hands[1], patchify(images, 4)), 4, task.grid)
    assert torch.equal(task.recover(images, hands[1]), task.recover(other, hands[1]))
    assert task(images, hands=hands).loss != task(other, hands=hands).loss
    seen = unpatchify(
        scatter_tokens(torch.randn(2, hands[0].shape[1], 48), hands[0], patchify(images, 4)), 4, task.grid
    )
    assert not torch.equal(task.recover(images, hands[1]), task.recover(seen, hands[1]))


def test_normalized_pixels_are_maes():
    task, images = make(normalized_pixels=True), torch.randn(2, 3, 32, 32)
    hands = task.deal(2, generator(), "cpu")
    target = patchify(images, 4, hands[1])
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(task(images, hands=hands).loss, (task.recover(images, hands[1]) - target).abs().mean())


@pytest.mark.parametrize(
    ("size", "unit", "side"), [((32, 32), "auto", 2), ((16, 48), 8, 2), ((32, 48), 16, 4), ((24, 36), 12, 3)]
)
def test_masks_are_whole_square_units(size, unit, side):
    task = make(size=size, mask_unit=unit)
    assert task.unit == side
    visible, masked = task.deal(20, generator(), "cpu")
    together = torch.cat([visible, masked], dim=1).sort(dim=1).values
    assert torch.equal(together, torch.arange(task.patches).expand(20, -1))
    mask = as_mask(masked, task.grid)
    coarse = mask.unfold(1, side, side).unfold(2, side, side).flatten(3)
    assert ((coarse == 1).all(-1) | (coarse == 0).all(-1)).all()
    assert len(mask.unique(dim=0)) > 1  # drawn for each image


@pytest.mark.parametrize(
    ("ratio", "visible"), [(0.6, 6), (0.5, 8), (0.75, 4), (0.1, 14), (0.9, 1)]
)  # of 16 units; the masked ones are rounded up, as in the authors' program
def test_how_many_are_masked(ratio, visible):
    task = make(mask_ratio=ratio)
    seen, masked = task.deal(2, generator(), "cpu")
    assert (seen.shape[1], masked.shape[1]) == (4 * visible, 64 - 4 * visible)


@pytest.mark.parametrize("size", [(20, 32), (32, 12), (20, 20)])
def test_odd_grids_have_units_of_one_patch(size):
    task = make(size=size)
    assert task.unit == 1 and task.chosen["mask_unit"] == (4, "one patch, since the grid has odd sides")
    assert task(torch.randn(2, 3, *size), generator=generator()).loss.isfinite()


def test_units_of_one_patch_follow_the_paper_otherwise():
    assert make().chosen["mask_unit"] == (8, "two patches, as 32 pixels for patches of 16")
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
