"""Attention in windows: what they hold, and that one of the whole grid is no window."""

import pytest
import torch
from dense_nets import encoder, without_gradient

from patchloom.dense.backbone import FeatureMaps, Windows, even_blocks, tokens_after, window_for, window_of
from patchloom.errors import PatchloomError
from patchloom.nets.finetune import at_size

GENERATOR = torch.Generator().manual_seed(0)


def test_sides() -> None:
    assert window_for((64, 64), (14, 14)) == 16  # ViTDet's own image and pre-training
    assert window_for((32, 32), (14, 14)) == 16
    assert window_for((48, 64), (14, 14)) == 16
    assert window_for((21, 21), (14, 14)) is None and window_for((14, 14), (14, 14)) is None
    assert window_for((37, 37), (16, 16)) == 16  # which nothing divides
    assert window_for((36, 24), (8, 18)) == 12


def test_the_last_block_of_each_quarter() -> None:
    assert (
        even_blocks(12) == (3, 6, 9, 12) and even_blocks(24) == (6, 12, 18, 24) and even_blocks(32) == (8, 16, 24, 32)
    )
    assert even_blocks(6) == (2, 3, 5, 6) and even_blocks(2) == (1, 1, 2, 2) and even_blocks(1) == (1, 1, 1, 1)


@pytest.mark.parametrize("kind", ["p16 registers", "p16 no class token"])
def test_one_window_of_the_whole_grid_is_full_attention(kind: str) -> None:
    vit, _ = encoder(kind, grid=(4, 6), depth=6)
    tokens = torch.randn(2, 24 + vit.num_prefix_tokens, 16, generator=GENERATOR)
    windows = Windows((4, 6), 6, vit.num_prefix_tokens)
    assert windows.sizes == [(1, 24)]
    full, windowed = (tokens_after(vit, tokens, (1, 4, 6), one) for one in (None, windows))
    for number in (1, 4, 6):
        assert torch.allclose(full[number], windowed[number], atol=1e-6)


@pytest.mark.parametrize(("grid", "side", "sizes"), [((4, 6), 2, [(6, 4)]), ((5, 7), 3, None), ((5, 4), 2, None)])
def test_patches_attend_to_those_of_their_window_alone(grid: tuple, side: int, sizes: list | None) -> None:
    vit, _ = encoder("p16 registers", grid=grid)
    prefix = vit.num_prefix_tokens
    windows = Windows(grid, side, prefix)
    assert sizes is None or windows.sizes == sizes
    tokens = torch.randn(2, prefix + grid[0] * grid[1], 16, generator=GENERATOR)
    made = windows(vit.blocks[0], tokens)
    # written out: rows and columns are cut in parts whose lengths differ by one at most
    place = torch.arange(grid[0] * grid[1]).view(grid)
    cuts = [
        [part.tolist() for part in torch.arange(length).tensor_split(max(1, round(length / side)))] for length in grid
    ]
    fronts = []
    for rows in cuts[0]:
        for columns in cuts[1]:
            members = place[rows][:, columns].flatten()
            out = vit.blocks[0](torch.cat([tokens[:, :prefix], tokens[:, prefix + members]], dim=1))
            assert torch.allclose(out[:, prefix:], made[:, prefix + members], atol=1e-6)
            fronts.append(out[:, :prefix])
    assert torch.allclose(torch.stack(fronts).mean(0), made[:, :prefix], atol=1e-6)


def test_only_blocks_that_are_not_the_last_of_a_quarter_are_windowed() -> None:
    vit, _ = encoder("p16 no class token", grid=(4, 4), depth=8)
    calls = []
    for number, block in enumerate(vit.blocks, 1):
        block.register_forward_pre_hook(lambda _, given, number=number: calls.append((number, given[0].shape[:2])))
    maps = FeatureMaps(vit, window=2)
    maps(torch.randn(3, 3, 64, 64))
    assert calls == [(n, (3, 16)) if n % 2 == 0 else (n, (12, 4)) for n in range(1, 9)]


def test_everything_is_trained_in_windows_too() -> None:
    for checkpointing in (False, True):
        vit, _ = encoder("p16 registers", grid=(5, 4), depth=6)
        vit.set_grad_checkpointing(checkpointing)
        maps = FeatureMaps(vit, window=2).train()
        (maps(torch.randn(2, 3, 80, 64))[0] * torch.randn(16, 5, 4)).sum().backward()
        assert not without_gradient(maps)


def test_encoders_that_can_have_none() -> None:
    vit, card = encoder("p16 no class token")
    large = at_size(vit, card, (128, 128))
    assert window_of(large, (4, 4)) == 4 and window_of(vit, (4, 4)) is None
    assert window_of(at_size(vit, card, (128, 128), "relative"), (4, 4)) is None
    assert window_of(encoder("swin", grid=(8, 8))[0], (2, 2)) is None
    with pytest.raises(PatchloomError, match="relative positions .* use --positions keep"):
        FeatureMaps(at_size(vit, card, (128, 128), "relative"), window=4)
    with pytest.raises(PatchloomError, match="fixed attention windows"):
        FeatureMaps(encoder("swin")[0], window=4)
