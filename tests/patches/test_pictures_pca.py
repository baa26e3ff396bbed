"""Principal axes equal scikit-learn's, including signs, for many features and for few."""

import pytest
import torch
from sklearn.decomposition import PCA

from patchloom.patches.pictures import principal


@pytest.mark.parametrize(("m", "d"), [(200, 12), (7, 40), (12, 12)])
def test_axes_and_variances_are_scikit_learns(m, d):
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


def test_equal_features_have_one_colour():
    colours = principal(torch.ones(9, 4)).colours(torch.ones(9, 4))
    assert colours.isfinite().all() and (colours == colours[0]).all()
