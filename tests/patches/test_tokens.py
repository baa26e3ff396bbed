"""Dealing, picking and cutting: properties over random shapes and ratios."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.patches.partition import random_block, random_partition, random_unit_partition, share_of
from patchloom.patches.tokens import (
    gather_tokens,
    normalize_patches,
    patch_channel_statistics,
    patchify,
    scatter_tokens,
    unpatchify,
)

quick = settings(max_examples=50, deadline=None)


@st.composite
def hands(draw):
    n = draw(st.integers(1, 60))
    sizes = []
    while sum(sizes) < n and len(sizes) < 5:
        sizes.append(draw(st.integers(0, n - sum(sizes))))
    return draw(st.integers(1, 4)), n, sizes, draw(st.integers(0, 2**31))


@quick
@given(hands())
def test_hands_are_disjoint_and_in_range(drawn):
    b, n, sizes, seed = drawn
    dealt = random_partition(b, n, sizes, torch.Generator().manual_seed(seed))
    assert [hand.shape for hand in dealt] == [(b, size) for size in sizes]
    together = torch.cat(dealt, dim=1)
    for row in together.tolist():
        assert len(set(row)) == len(row)
        assert all(0 <= index < n for index in row)


def test_hands_follow_the_generator_and_differ_between_images():
    one, two = (random_partition(8, 49, (12, 37), torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(*(hand[0][None] for hand in (one[0][:1], one[0][1:2])))
    other = random_partition(8, 49, (12, 37), torch.Generator().manual_seed(4))
    assert not torch.equal(one[0], other[0])


def test_every_patch_is_dealt_alike():
    visible, _ = random_partition(20_000, 10, (3, 7), torch.Generator().manual_seed(0))
    shares = torch.bincount(visible.flatten(), minlength=10) / 20_000
    assert (shares - 0.3).abs().max() < 0.015


def test_too_large_hands_are_refused():
    with pytest.raises(ValueError, match="cannot be dealt from 9"):
        random_partition(1, 9, (5, 5))


@pytest.mark.parametrize(
    ("n", "share", "expected"), [(196, 0.25, 49), (20, 1 - 0.9, 2), (9, 0.25, 2), (10, 0, 0), (10, 1, 10)]
)
def test_share_of(n, share, expected):
    assert share_of(n, share) == expected


@quick
@given(st.integers(1, 4), st.integers(1, 30), st.integers(0, 2**31), st.data())
def test_put_undoes_take(b, n, seed, data):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(b, n, 3, generator=generator)
    (indices,) = random_partition(b, n, (data.draw(st.integers(0, n)),), generator)
    assert torch.equal(scatter_tokens(gather_tokens(tokens, indices), indices, tokens), tokens)
    other = scatter_tokens(gather_tokens(tokens, indices), indices, torch.zeros_like(tokens))
    assert torch.equal(gather_tokens(other, indices), gather_tokens(tokens, indices))
    assert torch.equal(gather_tokens(tokens[..., 0], indices), gather_tokens(tokens, indices)[..., 0])


@quick
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_unpatchify_undoes_patchify(b, c, rows, columns, p):
    images = torch.randn(b, c, rows * p, columns * p)
    patches = patchify(images, p)
    assert patches.shape == (b, rows * columns, c * p * p)
    assert torch.equal(unpatchify(patches, p, (rows, columns)), images)
    (some,) = random_partition(b, rows * columns, (rows * columns // 2,))
    assert torch.equal(patchify(images, p, some), gather_tokens(patches, some))


def test_patch_order_is_row_by_row_and_a_convolutions():
    images = torch.arange(2 * 4 * 6.0).view(1, 2, 4, 6)
    assert torch.equal(patchify(images, 2)[0, 1], images[0, :, 0:2, 2:4].flatten())
    assert torch.equal(patchify(images, 2)[0, 3], images[0, :, 2:4, 0:2].flatten())


def test_a_patch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="30x32 pixels cannot be cut into patches of 8x8"):
        patchify(torch.zeros(1, 3, 30, 32), 8)


def test_patches_of_several_views_of_every_image_are_cut_without_copies_of_the_images():
    images, some = torch.randn(2, 3, 8, 8), torch.tensor([[0, 3], [1, 2], [2, 2], [3, 0], [1, 1], [0, 2]])
    assert torch.equal(patchify(images, 4, some), patchify(images.repeat(3, 1, 1, 1), 4, some))
    with pytest.raises(ValueError, match="5 rows of indices do not belong to 2 images alike"):
        patchify(images, 4, some[:5])


def test_normalized_patches():
    patches = normalize_patches(torch.randn(2, 5, 48) * 7 + 3)
    assert patches.mean(-1).abs().max() < 1e-5
    assert (patches.var(-1) - 1).abs().max() < 1e-5


@quick
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31), st.data())
def test_units_are_whole_squares_in_one_hand_each(rows, columns, side, seed, data):
    units, grid = rows * columns, (rows * side, columns * side)
    first = data.draw(st.integers(0, units))
    sizes = (first, data.draw(st.integers(0, units - first)))
    dealt = random_unit_partition(3, grid, side, sizes, torch.Generator().manual_seed(seed))
    assert [hand.shape for hand in dealt] == [(3, size * side**2) for size in sizes]
    together = torch.cat(dealt, dim=1)
    for row in together.tolist():
        assert len(set(row)) == len(row) and all(0 <= index < grid[0] * grid[1] for index in row)
    for hand, size in zip(dealt, sizes, strict=True):
        unit = hand // grid[1] // side * columns + hand % grid[1] // side
        unit = unit.unflatten(1, (size, side**2))  # unit after unit
        assert (unit == unit[..., :1]).all()


def test_units_of_one_patch_are_dealt_as_patches():
    one = random_unit_partition(4, (3, 5), 1, (4, 6), torch.Generator().manual_seed(0))
    two = random_partition(4, 15, (4, 6), torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_every_unit_is_dealt_alike():
    visible, _ = random_unit_partition(4_000, (4, 6), 2, (2, 4), torch.Generator().manual_seed(0))
    shares = torch.bincount(visible.flatten(), minlength=24) / 4_000
    assert (shares - 1 / 3).abs().max() < 0.04


@quick
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31), st.data())
def test_a_block_is_one_rectangle_and_the_rest_is_the_rest(rows, columns, seed, data):
    block = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    inside, outside = random_block(5, (rows, columns), block, torch.Generator().manual_seed(seed))
    assert inside.shape == (5, block[0] * block[1])
    for seen, rest in zip(inside.tolist(), outside.tolist(), strict=True):
        assert sorted(seen + rest) == list(range(rows * columns))
        assert seen == sorted(seen) and rest == sorted(rest)
        top, left = divmod(seen[0], columns)
        assert seen == [(top + i) * columns + left + j for i in range(block[0]) for j in range(block[1])]


def test_blocks_lie_everywhere_alike():
    inside, _ = random_block(6_000, (4, 5), (2, 3), torch.Generator().manual_seed(0))
    corners = torch.bincount(inside[:, 0], minlength=20).view(4, 5)
    assert (corners[:3, :3] / 6_000 - 1 / 9).abs().max() < 0.02 and corners[3].sum() == corners[:, 3:].sum() == 0


def test_each_channel_of_each_patch_has_its_own_statistics():
    images = torch.rand(2, 3, 8, 8) * torch.tensor([1.0, 0.1, 5.0]).view(3, 1, 1)
    mean, deviation = patch_channel_statistics(patchify(images, 4), 3)
    assert mean.shape == deviation.shape == (2, 4, 48)
    block = images[1, 2, 4:8, 0:4]  # patch 2, channel 2: the last 16 numbers
    torch.testing.assert_close(mean[1, 2, 32:], block.mean().expand(16))
    spread = ((block - block.mean()).square().sum() / 15).sqrt()
    torch.testing.assert_close(deviation[1, 2, 32:], spread.expand(16) + 1e-6)
    _, flat = patch_channel_statistics(torch.full((1, 1, 32), 0.5), 2)
    assert flat.tolist() == [[pytest.approx([1e-6] * 32)]]
