"""Random partitions: properties over random shapes and ratios."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.patches.partition import random_block, random_dropped, random_partition
from patchloom.sizes import share_of

quick = settings(max_examples=50)


@st.composite
def partitions(draw):
    n = draw(st.integers(1, 60))
    sizes = []
    while sum(sizes) < n and len(sizes) < 5:
        sizes.append(draw(st.integers(0, n - sum(sizes))))
    return draw(st.integers(1, 4)), n, sizes, draw(st.integers(0, 2**31))


@quick
@given(partitions())
def test_parts_are_disjoint_and_in_range(drawn):
    b, n, sizes, seed = drawn
    parts = random_partition(b, n, sizes, torch.Generator().manual_seed(seed))
    assert [part.shape for part in parts] == [(b, size) for size in sizes]
    together = torch.cat(parts, dim=1)
    for row in together.tolist():
        assert len(set(row)) == len(row)
        assert all(0 <= index < n for index in row)


def test_patches_are_equally_likely():
    visible, _ = random_partition(20_000, 10, (3, 7), torch.Generator().manual_seed(0))
    shares = torch.bincount(visible.flatten(), minlength=10) / 20_000
    assert (shares - 0.3).abs().max() < 0.015


@pytest.mark.parametrize(
    ("n", "share", "expected"), [(196, 0.25, 49), (20, 1 - 0.9, 2), (9, 0.25, 2), (10, 0, 0), (10, 1, 10)]
)
def test_share_of(n, share, expected):
    assert share_of(n, share) == expected


def test_too_large_parts_are_rejected():
    with pytest.raises(ValueError, match=r"9 patches cannot be divided into 5 \+ 5"):
        random_partition(1, 9, (5, 5))


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


def test_block_places_are_uniform():
    inside, _ = random_block(6_000, (4, 5), (2, 3), torch.Generator().manual_seed(0))
    corners = torch.bincount(inside[:, 0], minlength=20).view(4, 5)
    assert (corners[:3, :3] / 6_000 - 1 / 9).abs().max() < 0.02 and corners[3].sum() == corners[:, 3:].sum() == 0


@pytest.mark.parametrize(("ratio", "dropped"), [(0.75, 12), (0.95, 16), (1.0, 16), (0.01, 1), (0.0, 1)])
def test_a_share_of_the_positions_is_dropped_and_at_least_one(ratio, dropped):
    drawn = random_dropped(3, 16, ratio, torch.Generator().manual_seed(0), "cpu")
    assert drawn.shape == (3, dropped) and all(len(set(row)) == dropped for row in drawn.tolist())
