"""Near copies, outliers and choices by vectors."""

import numpy as np
import torch

from patchloom.data.near_duplicates import thumbnails
from patchloom.embed import curation
from patchloom.embed.curation import choose_images, find_copies, find_neighbours, herding, near_pairs, unit_vectors


def vectors(n: int, d: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_neighbours_are_those_of_all_distances(monkeypatch):
    monkeypatch.setattr(curation, "_ROWS", 7)  # several blocks, the last one smaller
    some = vectors(40)
    apart = torch.cdist(some.double(), some.double())
    apart.fill_diagonal_(torch.inf)
    near = find_neighbours(some)
    assert torch.equal(near.rows, apart.argsort(1)[:, :20])
    assert torch.allclose(near.distances.double(), apart.sort(1).values[:, :20], atol=1e-5)
    assert find_neighbours(some[:3]).rows.shape == (3, 2)


def test_an_image_far_from_all_is_the_most_isolated():
    some = vectors(60)
    some[17] *= 9
    found = find_neighbours(some).isolation()
    assert found.argmax() == 17 and np.median(found) == 1


def test_copies_need_like_pixels_and_a_film_does_not_shrink_to_one_frame():
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    images[5] = 0.5 * images[2] + 0.1  # darker and flatter
    small = thumbnails(images)
    near = find_neighbours(vectors(8))  # of 8 images, each is a neighbour of all others
    assert {frozenset(pair) for pair in near_pairs(near, small, 0.95)} == {frozenset((2, 5))}
    assert find_copies(near, small, 0.95) == {5: 2}
    # three frames, each near to the next only: the third is no copy of the first, and stays
    turns = torch.tensor([0.0, 0.25, 0.5, 2.0, 3.0, 4.0, 5.0, 1.5])
    film = torch.stack([turns.cos(), turns.sin()], 1)
    assert find_copies(near, film, 0.95)[1] == 0 and 2 not in find_copies(near, film, 0.95)


def test_thumbnails_have_no_mean_and_unit_length():
    noise = torch.rand(2, 1, 20, 30, generator=torch.Generator().manual_seed(0))
    small = thumbnails(torch.cat([noise, torch.full((1, 1, 20, 30), 0.3)]))
    assert small[:2].mean(1).abs().max() < 1e-6 and torch.allclose(small[:2].norm(dim=1), torch.ones(2))
    assert small[2].norm() < 0.1  # rounding, so that images of one colour are no copies


def test_herding_takes_the_densest_group_first_and_then_another():
    around = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    groups = torch.cat([around[i].repeat(n, 1) for i, n in enumerate((3, 9, 5))])
    chosen = herding(groups + 0.01 * vectors(17, 3), 3)
    assert [0 if i < 3 else 1 if i < 12 else 2 for i in chosen] == [1, 2, 0]


def test_a_larger_choice_begins_with_a_smaller_one():
    units, candidates = unit_vectors(vectors(50)), np.arange(10, 50)
    for how in ("random", "herding"):
        many = choose_images(how, units, candidates, 12, seed=3)
        assert choose_images(how, units, candidates, 5, seed=3) == many[:5]
        assert len({*many}) == 12 and {*many} <= {*candidates.tolist()}
    assert choose_images("random", units, candidates, 5, seed=4) != choose_images("random", units, candidates, 5, 3)
