"""DropPos' inputs and questions, beyond the sweep and the golden vectors."""

import math
from functools import partial

import pytest
import torch
from small import seeded, small
from torch.nn import functional as F

from patchloom.nets.encode import patch_positions
from patchloom.tasks.droppos import DropPos, another_patch
from patchloom.withhold.encoder_input import all_patches, drop_positions

make = partial(small, DropPos, encoder={"depth": 1})


def test_auto_keeps_enough_patches_to_predict_positions():
    assert make().mask_ratio == 0.75 and make().questions["positions"].temperature == 0.1
    few = make(size=(16, 16), p=4)
    assert few.mask_ratio == 0 and math.isinf(few.questions["positions"].temperature)
    assert make(size=(24, 24), p=4).mask_ratio == pytest.approx(1 - 16 / 36)
    given = make(size=(56, 56), p=4).given(torch.randn(1, 3, 56, 56), seeded())
    assert given.visible.shape[1] == 49


@pytest.mark.parametrize("placeholder", ["learned", "zeros", "foreign"])
def test_placeholders_hide_the_true_position(placeholder):
    """Patches without position have equal features if the content is equal everywhere."""
    task = make(placeholder=placeholder, mask_ratio=0.0, position_mask_ratio=1.0).eval()
    images = torch.ones(1, 3, 32, 32)
    given = drop_positions(all_patches(images, 64), torch.arange(64)[None])
    tokens = task.encode(images, given, seeded()).tokens[0, 1:]
    if placeholder == "foreign":
        # each has the position of another patch, drawn anew by the generator
        again = task.encode(images, given, seeded(1)).tokens[0, 1:]
        assert not torch.equal(tokens, again)
        assert task.position_token is None
    else:
        torch.testing.assert_close(tokens, tokens[:1].expand_as(tokens), rtol=1e-4, atol=1e-5)
        assert (task.position_token is None) == (placeholder == "zeros")
    assert patch_positions(task.encoder).std() > 0


def test_sigma_falls_to_its_end_or_stays():
    task, images = make(temperature=float("inf"), sigma=2.0, sigma_end=1.0), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())
    losses = [task(images, progress=progress, given=given).loss for progress in (0.0, 0.5, 1.0)]
    for loss, sigma in zip(losses, (2.0, 1.5, 1.0), strict=True):
        stays = make(temperature=float("inf"), sigma=sigma, sigma_end=sigma)
        for progress in (0.0, 0.3, 1.0):
            torch.testing.assert_close(stays(images, progress=progress, given=given).loss, loss)
    assert len({loss.item() for loss in losses}) == 3
    # at σ = 0 labels are one-hot, and known positions do not count
    logits = task.questions["positions"].decoder(task.encode(images, given).tokens)
    plain = F.cross_entropy(logits[given.dropped], given.visible[given.dropped])
    ends = make(temperature=float("inf"))
    torch.testing.assert_close(ends(images, progress=1.0, given=given).loss, plain)


def test_another_patch_is_never_the_same():
    visible = torch.arange(7).expand(1000, 7)
    other = another_patch(visible, 7, seeded())
    assert not (other == visible).any() and other.min() == 0 and other.max() == 6
    counts = torch.bincount(other[:, 0], minlength=7)
    assert counts[0] == 0 and (counts[1:] - 1000 / 6).abs().max() < 60
