"""Pictures of predicted patches: wrong ones marked, and images put together again."""

import torch

from patchloom.patches.pictures import mark_wrong, mix_patches, put_together, scatter_places
from patchloom.patches.tokens import patchify


def test_pictures_mark_wrong_patches_and_show_predicted_places():
    images = torch.arange(1 * 1 * 4 * 4.0).view(1, 1, 4, 4)
    visible, placed = torch.tensor([[0, 1, 3]]), torch.tensor([[0, 3, 3]])
    marked = mark_wrong(images, (2, 2), visible, placed)
    assert torch.equal(marked[..., :2, :2], images[..., :2, :2])  # right
    assert (marked[..., :2, 2:] == float("inf")).all()  # wrong, marked at its true place
    assert marked[..., 2:, :2].isnan().all()  # masked
    assert torch.equal(marked[..., 2:, 2:], images[..., 2:, 2:])
    rebuilt = put_together(images, (2, 2), visible, placed)
    assert torch.equal(rebuilt[..., 2:, 2:], (images[..., :2, 2:] + images[..., 2:, 2:]) / 2)
    assert rebuilt[..., :2, 2:].isnan().all() and rebuilt[..., 2:, :2].isnan().all()


def test_shuffled_input_keeps_known_places():
    visible = torch.arange(12).expand(5, 12)
    dropped = torch.ones(5, 12, dtype=torch.bool)
    dropped[:, [2, 7]] = False
    places = scatter_places(visible, dropped, torch.Generator().manual_seed(0))
    assert (places[:, [2, 7]] == torch.tensor([2, 7])).all()
    assert torch.equal(places.sort(1).values, visible) and not torch.equal(places[0], visible[0])


def test_patches_of_two_images_are_shuffled_into_two_sets_without_a_loss():
    images, others = torch.arange(2 * 24.0).view(2, 1, 4, 6), -1 - torch.arange(2 * 24.0).view(2, 1, 4, 6)
    first, second = mix_patches(images, others, (2, 2), torch.Generator().manual_seed(0))
    assert first.shape == second.shape == images.shape
    for i in range(2):
        dealt, pool = (
            torch.cat([patchify(one[i : i + 1], (2, 2))[0] for one in two])
            for two in ((first, second), (images, others))
        )
        assert sorted(dealt.tolist()) == sorted(pool.tolist())
        for one in (first, second):  # each set has some of both, in another order
            own = (patchify(one[i : i + 1], (2, 2))[0] >= 0).all(1)
            assert 0 < own.sum() < 6
    assert not torch.equal(first[0] >= 0, first[1] >= 0)  # drawn for each pair
