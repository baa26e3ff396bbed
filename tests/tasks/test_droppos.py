"""DropPos' inputs and questions, beyond the sweep and the golden vectors."""

import math
from dataclasses import replace

import pytest
import torch

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import patch_positions
from patchloom.tasks.droppos import DropPos, another_patch
from patchloom.tasks.masking import visible_of
from patchloom.withhold.encoder_input import all_patches, drop_positions

SIZES = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def make(size=(32, 32), p=4, **options):
    torch.manual_seed(0)
    return DropPos(build_encoder(EncoderSpec("nano", size, p, options=SIZES)), **options)


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("mask", "position", "visible", "dropped"), [(0.75, 0.75, 16, 12), (0, 1, 64, 64), (0.5, 0.25, 32, 8)]
)
def test_how_many_are_masked_and_dropped(mask, position, visible, dropped):
    task = make(mask_ratio=mask, position_mask_ratio=position)
    given = task.given(torch.randn(2, 3, 32, 32), generator())
    assert (given.visible.shape[1], given.masked.shape[1]) == (visible, 64 - visible)
    assert given.dropped.sum(1).tolist() == [dropped] * 2
    assert set(given.visible[0].tolist()).isdisjoint(given.masked[0].tolist())


def test_auto_keeps_enough_patches_to_predict_positions():
    assert make().mask_ratio == 0.75 and make().questions["positions"].temperature == 0.1
    few = make(size=(16, 16), p=4)
    assert few.mask_ratio == 0 and math.isinf(few.questions["positions"].temperature)
    assert make(size=(24, 24), p=4).mask_ratio == pytest.approx(1 - 16 / 36)
    assert visible_of(make(size=(56, 56), p=4).geometry, 0.75) == 49


def test_order_of_the_visible_patches_changes_no_loss():
    task = make(sigma=0.5)
    images = torch.randn(3, 3, 32, 32)
    given = task.given(images, generator())
    order = torch.randperm(given.visible.shape[1])
    other = replace(given, visible=given.visible[:, order], dropped=given.dropped[:, order])
    assert not torch.equal(given.visible, other.visible)
    torch.testing.assert_close(task(images, given=given).loss, task(images, given=other).loss)


def test_shuffle_only_changes_the_order():
    images = torch.randn(2, 3, 32, 32)
    plain, shuffled = (make(shuffle=shuffle).given(images, generator()).visible for shuffle in (False, True))
    assert not torch.equal(plain, shuffled)
    assert torch.equal(plain, shuffled.sort(1).values)


@pytest.mark.parametrize("placeholder", ["learned", "zeros", "foreign"])
def test_placeholders_hide_the_true_position(placeholder):
    """Patches without position have equal features if the content is equal everywhere."""
    task = make(placeholder=placeholder, mask_ratio=0.0, position_mask_ratio=1.0).eval()
    images = torch.ones(1, 3, 32, 32)
    given = drop_positions(all_patches(images, 64), torch.arange(64)[None])
    tokens = task.encode(images, given, generator()).tokens[0, 1:]
    if placeholder == "foreign":
        # each has the position of another patch, drawn anew by the generator
        again = task.encode(images, given, torch.Generator().manual_seed(1)).tokens[0, 1:]
        assert not torch.equal(tokens, again)
        assert task.position_token is None
    else:
        torch.testing.assert_close(tokens, tokens[:1].expand_as(tokens), rtol=1e-4, atol=1e-5)
        assert (task.position_token is None) == (placeholder == "zeros")
    assert patch_positions(task.encoder).std() > 0


def test_smoothing_ends_one_hot_and_no_dropped_position_is_free():
    task, images = make(temperature=float("inf")), torch.randn(2, 3, 32, 32)
    given = task.given(images, generator())
    end = task(images, progress=1.0, given=given).loss
    logits = task.questions["positions"].decoder(task.encode(images, given).tokens)
    plain = torch.nn.functional.cross_entropy(logits[given.dropped], given.visible[given.dropped])
    torch.testing.assert_close(end, plain)
    assert task(images, progress=0.0, given=given).loss != end


def test_sigma_falls_to_its_end_or_stays():
    task, images = make(temperature=float("inf"), sigma=2.0, sigma_end=1.0), torch.randn(2, 3, 32, 32)
    given = task.given(images, generator())
    losses = [task(images, progress=progress, given=given).loss for progress in (0.0, 0.5, 1.0)]
    for loss, sigma in zip(losses, (2.0, 1.5, 1.0), strict=True):
        stays = make(temperature=float("inf"), sigma=sigma, sigma_end=sigma)
        for progress in (0.0, 0.3, 1.0):
            torch.testing.assert_close(stays(images, progress=progress, given=given).loss, loss)
    assert len({loss.item() for loss in losses}) == 3


def test_another_patch_is_never_the_same():
    visible = torch.arange(7).expand(1000, 7)
    other = another_patch(visible, 7, generator())
    assert not (other == visible).any() and other.min() == 0 and other.max() == 6
    counts = torch.bincount(other[:, 0], minlength=7)
    assert counts[0] == 0 and (counts[1:] - 1000 / 6).abs().max() < 60


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"position_mask_ratio": 0.0}, "position_mask_ratio must lie in"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"sigma": -1.0}, "sigma must be 0 or more and finite, not -1.0"),
        ({"sigma_end": 2.0}, "sigma_end must be 0 to --task.sigma, which is 1, not 2: give both the same"),
        ({"sigma_end": -0.5}, "sigma_end must be 0 to --task.sigma"),
        ({"mask_ratio": 0.0, "pixels": True}, "no pixels are hidden"),
        ({"smoothing": "program", "size": (32, 32)}, "as one has pixels, 16 here, and the grid has 64: use"),
        ({"smoothing": "program", "size": (16, 32)}, "square images and patches only, not a grid of 4x8 patches"),
        ({"smoothing": "squared"}, "smoothing"),
        ({"mask_ratio": 0.98}, "2 are needed"),
        ({"decoder_width": 30, "decoder_heads": 4}, "decoder cannot be 30 wide and 2 blocks deep with 4 heads"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_an_encoder_without_positions_is_refused():
    encoder = build_encoder(EncoderSpec("nano", (16, 16), 4, positions="none", options=SIZES))
    with pytest.raises(PatchloomError, match="needs an encoder with position embeddings"):
        DropPos(encoder)
