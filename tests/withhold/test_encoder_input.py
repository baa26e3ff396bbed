"""Withholding only removes, in the order in which it is written."""

import pytest
import torch

from patchloom.withhold.encoder_input import all_patches, blank_patches, drop_positions, limit_context, mask_patches

EVERY = all_patches(torch.randn(2, 3, 8, 8), 4)
KEEP = torch.tensor([[3, 0, 2], [1, 3, 0]])


def test_masking_picks_among_the_visible_and_lists_the_masked_in_the_order_of_prediction():
    assert EVERY.visible.tolist() == [[0, 1, 2, 3]] * 2 and EVERY.masked.shape == (2, 0)
    given = mask_patches(EVERY, KEEP)
    assert torch.equal(given.visible, KEEP) and given.masked.tolist() == [[1], [2]]
    again = mask_patches(given, torch.tensor([[0], [2]]), torch.tensor([[2, 1], [0, 1]]))
    assert again.visible.tolist() == [[3], [0]] and again.masked.tolist() == [[1, 2, 0], [2, 1, 3]]


def test_flags_add_up_and_stay_with_their_patches():
    given = drop_positions(drop_positions(EVERY, torch.tensor([[3], [0]])), torch.tensor([[1], [0]]))
    assert given.dropped.tolist() == [[False, True, False, True], [True, False, False, False]]
    given = mask_patches(blank_patches(given, torch.tensor([[2], [2]])), KEEP)
    assert given.dropped.tolist() == [[True, False, False], [False, False, True]]
    assert given.blank.tolist() == [[False, False, True], [False, False, False]]
    given = drop_positions(mask_patches(EVERY, KEEP), torch.tensor([[0], [1]]))  # places among the visible
    assert given.dropped.tolist() == [[True, False, False], [False, True, False]]


def test_a_limited_context_cannot_be_masked_afterwards():
    with pytest.raises(ValueError, match="limit the context after masking"):
        mask_patches(limit_context(EVERY, KEEP), KEEP)


def test_the_mean_token_is_of_patches_with_content():
    tokens = torch.tensor([[[9.0], [1.0], [2.0], [3.0], [6.0]]] * 2)  # the first is a class token
    assert EVERY.mean_patch_token(tokens).tolist() == [[3.0], [3.0]]
    blank = blank_patches(EVERY, torch.tensor([[0, 1], [2, 3]]))
    assert blank.mean_patch_token(tokens).tolist() == [[4.5], [1.5]]
    entering = mask_patches(blank, torch.tensor([[2, 1], [0, 3]]))
    assert entering.mean_patch_token(tokens[:, :3]).tolist() == [[1.0], [1.0]]
