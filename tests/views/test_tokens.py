"""Dealing, picking and cutting: properties over random shapes and ratios."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.views.tokens import deal, normalize_patches, patchify, put, share_of, take, unpatchify

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
    dealt = deal(b, n, sizes, torch.Generator().manual_seed(seed))
    assert [hand.shape for hand in dealt] == [(b, size) for size in sizes]
    together = torch.cat(dealt, dim=1)
    for row in together.tolist():
        assert len(set(row)) == len(row)
        assert all(0 <= index < n for index in row)


def test_hands_follow_the_generator_and_differ_between_images():
    one, two = (deal(8, 49, (12, 37), torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(*(hand[0][None] for hand in (one[0][:1], one[0][1:2])))
    other = deal(8, 49, (12, 37), torch.Generator().manual_seed(4))
    assert not torch.equal(one[0], other[0])


def test_every_patch_is_dealt_alike():
    visible, _ = deal(20_000, 10, (3, 7), torch.Generator().manual_seed(0))
    shares = torch.bincount(visible.flatten(), minlength=10) / 20_000
    assert (shares - 0.3).abs().max() < 0.015


def test_too_large_hands_are_refused():
    with pytest.raises(ValueError, match="cannot be dealt from 9"):
        deal(1, 9, (5, 5))


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
    (indices,) = deal(b, n, (data.draw(st.integers(0, n)),), generator)
    assert torch.equal(put(take(tokens, indices), indices, tokens), tokens)
    other = put(take(tokens, indices), indices, torch.zeros_like(tokens))
    assert torch.equal(take(other, indices), take(tokens, indices))
    assert torch.equal(take(tokens[..., 0], indices), take(tokens, indices)[..., 0])


@quick
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_unpatchify_undoes_patchify(b, c, rows, columns, p):
    images = torch.randn(b, c, rows * p, columns * p)
    patches = patchify(images, p)
    assert patches.shape == (b, rows * columns, c * p * p)
    assert torch.equal(unpatchify(patches, p, (rows, columns)), images)
    (some,) = deal(b, rows * columns, (rows * columns // 2,))
    assert torch.equal(patchify(images, p, some), take(patches, some))


def test_patch_order_is_row_by_row_and_a_convolutions():
    images = torch.arange(2 * 4 * 6.0).view(1, 2, 4, 6)
    assert torch.equal(patchify(images, 2)[0, 1], images[0, :, 0:2, 2:4].flatten())
    assert torch.equal(patchify(images, 2)[0, 3], images[0, :, 2:4, 0:2].flatten())


def test_a_patch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="30x32 pixels cannot be cut into patches of 8x8"):
        patchify(torch.zeros(1, 3, 30, 32), 8)


def test_normalized_patches():
    patches = normalize_patches(torch.randn(2, 5, 48) * 7 + 3)
    assert patches.mean(-1).abs().max() < 1e-5
    assert (patches.var(-1) - 1).abs().max() < 1e-5
