"""Gathering and scattering of tokens, and cutting of images into patches: properties over random shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import gather_tokens, grid_of, patchify, scatter_tokens, unpatchify

quick = settings(max_examples=50)
SIDES = st.tuples(st.integers(1, 6), st.integers(1, 6))  # pixels of a patch


@quick
@given(st.integers(1, 4), st.integers(1, 30), st.integers(0, 2**31), st.data())
def test_scatter_undoes_gather(b, n, seed, data):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(b, n, 3, generator=generator)
    (indices,) = random_partition(b, n, (data.draw(st.integers(0, n)),), generator)
    assert torch.equal(scatter_tokens(gather_tokens(tokens, indices), indices, tokens), tokens)
    other = scatter_tokens(gather_tokens(tokens, indices), indices, torch.zeros_like(tokens))
    assert torch.equal(gather_tokens(other, indices), gather_tokens(tokens, indices))
    assert torch.equal(gather_tokens(tokens[..., 0], indices), gather_tokens(tokens, indices)[..., 0])


def test_gradients_of_gathered_tokens_are_added_without_sorting():
    """The backward pass of ``tokens[images, indices]`` sorts all indices on a GPU."""
    tokens, indices = torch.randn(3, 9, 4, requires_grad=True), torch.tensor([[0, 3, 8], [5, 5, 1], [2, 7, 2]])
    made, expected = gather_tokens(tokens, indices), tokens[torch.arange(3)[:, None], indices]
    steps, seen = [made.grad_fn], set()
    while steps:
        step = steps.pop()
        seen.add(step.name())
        steps += [one for one, _ in step.next_functions if one is not None]
    assert "IndexSelectBackward0" in seen and "IndexBackward0" not in seen
    weights = torch.randn_like(made)
    one, two = (torch.autograd.grad((found * weights).sum(), tokens)[0] for found in (made, expected))
    assert torch.equal(one, two)


@quick
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), SIDES)
def test_unpatchify_undoes_patchify(b, c, rows, columns, p):
    images = torch.randn(b, c, rows * p[0], columns * p[1])
    patches = patchify(images, p)
    assert grid_of(images, p) == (rows, columns) and patches.shape == (b, rows * columns, c * p[0] * p[1])
    assert torch.equal(unpatchify(patches, p, (rows, columns)), images)
    (some,) = random_partition(b, rows * columns, (rows * columns // 2,))
    assert torch.equal(patchify(images, p, some), gather_tokens(patches, some))


def test_patches_of_several_views_of_every_image_are_cut_without_copies_of_the_images():
    images, some = torch.randn(2, 3, 8, 8), torch.tensor([[0, 3], [1, 2], [2, 2], [3, 0], [1, 1], [0, 2]])
    assert torch.equal(patchify(images, (4, 4), some), patchify(images.repeat(3, 1, 1, 1), (4, 4), some))
    with pytest.raises(ValueError, match="5 rows of indices"):
        patchify(images, (4, 4), some[:5])
    for p in ((3, 8), (8, 3)):
        with pytest.raises(ValueError, match=f"8x8 pixels cannot be cut into patches of {p[0]}x{p[1]}"):
            patchify(images, p)
