"""Random partitions: properties over random shapes and ratios."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.patches.partition import (
    complement,
    random_block,
    random_dropped,
    random_partition,
    random_unit_partition,
)
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


def test_parts_follow_the_generator_and_differ_between_images():
    one, two = (random_partition(8, 49, (12, 37), torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(*(part[0][None] for part in (one[0][:1], one[0][1:2])))
    other = random_partition(8, 49, (12, 37), torch.Generator().manual_seed(4))
    assert not torch.equal(one[0], other[0])


def test_patches_are_equally_likely():
    visible, _ = random_partition(20_000, 10, (3, 7), torch.Generator().manual_seed(0))
    shares = torch.bincount(visible.flatten(), minlength=10) / 20_000
    assert (shares - 0.3).abs().max() < 0.015


def test_too_large_parts_are_rejected():
    with pytest.raises(ValueError, match=r"9 patches cannot be divided into 5 \+ 5"):
        random_partition(1, 9, (5, 5))


@pytest.mark.parametrize(
    ("n", "share", "expected"), [(196, 0.25, 49), (20, 1 - 0.9, 2), (9, 0.25, 2), (10, 0, 0), (10, 1, 10)]
)
def test_share_of(n, share, expected):
    assert share_of(n, share) == expected


@quick
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31), st.data())
def test_units_are_whole_squares_in_one_part_each(rows, columns, side, seed, data):
    units, grid = rows * columns, (rows * side, columns * side)
    first = data.draw(st.integers(0, units))
    sizes = (first, data.draw(st.integers(0, units - first)))
    parts = random_unit_partition(3, grid, side, sizes, torch.Generator().manual_seed(seed))
    assert [part.shape for part in parts] == [(3, size * side**2) for size in sizes]
    together = torch.cat(parts, dim=1)
    for row in together.tolist():
        assert len(set(row)) == len(row) and all(0 <= index < grid[0] * grid[1] for index in row)
    for part, size in zip(parts, sizes, strict=True):
        unit = part // grid[1] // side * columns + part % grid[1] // side
        unit = unit.unflatten(1, (size, side**2))  # unit after unit
        assert (unit == unit[..., :1]).all()


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


@quick
@given(partitions())
def test_the_complement_is_the_rest_in_the_order_of_the_grid(drawn):
    b, n, sizes, seed = drawn
    (visible,) = random_partition(b, n, sizes[:1], torch.Generator().manual_seed(seed))
    for seen, rest in zip(visible.tolist(), complement(visible, n).tolist(), strict=True):
        assert rest == [place for place in range(n) if place not in seen]
