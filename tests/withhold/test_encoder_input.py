"""Withholding only removes, in the order in which it is written."""

import pytest
import torch

from patchloom.withhold.encoder_input import all_patches, blank_patches, drop_positions, limit_context, mask_patches

IMAGES = torch.randn(2, 3, 8, 8)
KEEP = torch.tensor([[3, 0, 2], [1, 3, 0]])


def test_masking_picks_among_the_visible():
    given = mask_patches(all_patches(IMAGES, 4), KEEP)
    assert torch.equal(given.visible, KEEP)
    again = mask_patches(given, torch.tensor([[0], [2]]))
    assert again.visible.tolist() == [[3], [0]]


def test_masked_patches_are_listed_in_the_order_of_prediction():
    assert all_patches(IMAGES, 4).masked.shape == (2, 0)
    given = mask_patches(all_patches(IMAGES, 4), KEEP)
    assert given.masked.tolist() == [[1], [2]]
    again = mask_patches(given, torch.tensor([[0], [2]]), torch.tensor([[2, 1], [0, 1]]))
    assert again.masked.tolist() == [[1, 2, 0], [2, 1, 3]]


def test_flags_stay_with_their_patches():
    given = drop_positions(all_patches(IMAGES, 4), torch.tensor([[3], [0]]))
    given = blank_patches(given, torch.tensor([[2], [2]]))
    given = mask_patches(given, KEEP)
    assert given.dropped.tolist() == [[True, False, False], [False, False, True]]
    assert given.blank.tolist() == [[False, False, True], [False, False, False]]


def test_dropping_after_masking_counts_places_among_the_visible():
    given = drop_positions(mask_patches(all_patches(IMAGES, 4), KEEP), torch.tensor([[0], [1]]))
    assert given.dropped.tolist() == [[True, False, False], [False, True, False]]


def test_withholding_adds_up():
    given = drop_positions(drop_positions(all_patches(IMAGES, 4), torch.tensor([[0], [1]])), torch.tensor([[2], [1]]))
    assert given.dropped.tolist() == [[True, False, True, False], [False, True, False, False]]


def test_a_limited_context_cannot_be_masked_afterwards():
    with pytest.raises(ValueError, match="limit the context after masking"):
        mask_patches(limit_context(all_patches(IMAGES, 4), KEEP), KEEP)


def test_the_mean_token_is_of_patches_with_content():
    given = all_patches(torch.zeros(2, 3, 8, 8), n=4)
    tokens = torch.tensor([[[9.0], [1.0], [2.0], [3.0], [6.0]]] * 2)  # the first is a class token
    assert given.mean_patch_token(tokens).tolist() == [[3.0], [3.0]]
    blank = blank_patches(given, torch.tensor([[0, 1], [2, 3]]))
    assert blank.mean_patch_token(tokens).tolist() == [[4.5], [1.5]]
    entering = mask_patches(blank, torch.tensor([[2, 1], [0, 3]]))
    assert entering.mean_patch_token(tokens[:, :3]).tolist() == [[1.0], [1.0]]
