"""Pictures of patches: wrong ones marked, images put together again, features as colours."""

import pytest
import torch
from sklearn.decomposition import PCA

from patchloom.patches.pictures import fill_holes, mark_wrong, mix_patches, principal, put_together, scatter_places
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


def test_holes_of_an_even_image_are_filled_evenly():
    """A grid and patches that are not square."""
    images = torch.tensor([0.5, -2.0]).view(1, 2, 1, 1).expand(1, 2, 12, 8).clone()
    holes = images.clone()
    holes[:, :, 4:8] = torch.randn(1, 2, 4, 8)  # patches 4 to 7 of 3 by 4, each 4 by 2 pixels
    filled = fill_holes(holes, (4, 2), torch.tensor([[0, 1, 2, 3, 8, 9, 10, 11]]))
    torch.testing.assert_close(filled, images)


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


@pytest.mark.parametrize(("m", "d"), [(200, 12), (7, 40), (12, 12)])
def test_principal_axes_and_variances_are_scikit_learns(m, d):
    """Including signs, for many features and for few."""
    features = torch.randn(m, d, generator=torch.Generator().manual_seed(m)) * torch.linspace(1, 3, d) + 5
    theirs = PCA(3, svd_solver="full").fit(features.double().numpy())
    ours = principal(features)
    torch.testing.assert_close(ours.axes, torch.from_numpy(theirs.components_), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.variance, torch.from_numpy(theirs.explained_variance_ratio_), rtol=1e-8, atol=0)
    projected = torch.from_numpy(theirs.transform(features.double().numpy()))
    torch.testing.assert_close(ours.project(features), projected, rtol=1e-8, atol=1e-8)


def test_colours_run_between_centiles_and_leave_holes():
    line = torch.linspace(0, 1, 101)[:, None] * torch.tensor([[3.0, 4.0]])
    axes = principal(line, 1)
    colours = axes.colours(line)[:, 0]
    assert colours[:3].max() < 1e-6 and colours[98:].min() > 1 - 1e-6
    torch.testing.assert_close(colours[50], torch.tensor(0.5))
    assert axes.colours(torch.full((1, 2), torch.nan)).isnan().all()
    assert axes.variance.tolist() == pytest.approx([1.0])
    equal = principal(torch.ones(9, 4)).colours(torch.ones(9, 4))
    assert equal.isfinite().all() and (equal == equal[0]).all()
