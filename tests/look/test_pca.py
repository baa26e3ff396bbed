"""Tests of principal components: shared PCA, foreground, positions and captions."""

import pytest
import torch
from attending import random_vit
from seeing import asked_of, asked_of_sound, named
from sklearn.decomposition import PCA
from swins import swin

from patchloom.errors import PatchloomError
from patchloom.look.context import chosen_layers, full_caption, to_pictures
from patchloom.look.look import parse_blocks
from patchloom.look.pca import components, draw_features
from patchloom.look.sheet import channels_shown


def test_one_analysis_of_all_images_is_scikit_learns():
    features = torch.randn(3, 4, 5, 9) * torch.linspace(1, 3, 9)
    found = components(features)
    theirs = PCA(3, svd_solver="full").fit(features.flatten(0, 2).double().numpy())
    first = torch.from_numpy(theirs.transform(features.flatten(0, 2).double().numpy())[:, 0]).view(3, 4, 5)
    sign = 1 if (found.first * first).sum() > 0 else -1
    torch.testing.assert_close(sign * found.first, first.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance.double(), torch.from_numpy(theirs.explained_variance_ratio_))
    assert torch.equal(found.foreground, found.first > 0)
    inside = features[found.foreground]
    own = PCA(1, svd_solver="full").fit(inside.double().numpy())
    shown, truth = found.within[found.foreground][:, 0], torch.from_numpy(own.transform(inside.double().numpy())[:, 0])
    middle = (shown > 0) & (shown < 1)
    assert torch.corrcoef(torch.stack([shown[middle], truth.float()[middle]]))[0, 1] > 0.99999
    assert found.within[~found.foreground].isnan().all() and found.colours.isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_foreground_lies_inside_whatever_the_sign(sign):
    inside = torch.zeros(2, 6, 6, dtype=torch.bool)
    inside[0, 2:4, 2:4] = inside[1, 1:3, 2:5] = True
    features = 0.01 * torch.randn(2, 6, 6, 8)
    features[inside] += sign * torch.ones(8)
    assert torch.equal(components(features).foreground, inside)


def test_few_features_have_as_many_colours_as_there_are():
    found = components(torch.randn(1, 1, 2, 5))
    assert found.colours.shape == (1, 1, 2, 3) and found.variance.shape == (2,)
    alone = components(torch.randn(1, 1, 1, 5))
    assert alone.colours.isfinite().all() and not alone.foreground.any()


def test_default_layers_include_the_last(tmp_path):
    deep = named(random_vit(depth=9))
    assert chosen_layers(asked_of(deep, tmp_path), 3) == [3, 6, 9] and chosen_layers(asked_of(deep, tmp_path), 1) == [9]
    assert chosen_layers(asked_of(deep, tmp_path, blocks=(1, 5)), 3) == [1, 5]
    for vit, wrong, said in ((random_vit(), 4, "from 1 to 3"), (swin(), 3, "from 1 to 2")):
        with pytest.raises(PatchloomError, match=said):
            parse_blocks((1, wrong), vit)


def test_a_caption_names_channels_brightness_and_axes(tmp_path):
    day = torch.ones(1, 3, 24, 32)
    assert full_caption(named(random_vit()), "Images.", day) == "Images."
    assert full_caption(named(random_vit(channels=2)), "Images.", day[:, :2]) == f"Images. {channels_shown(2)}"
    night = torch.full((1, 3, 24, 32), (0.05 - 0.5) / 0.2)
    assert "20 times brighter" in full_caption(named(random_vit()), "Images.", night)
    assert to_pictures(named(random_vit()), night).min() == 255
    assert "Left to right: 0.11 s" in full_caption(asked_of_sound(tmp_path).encoder, "Recordings.", day[:, :1])


def test_columns_depend_on_the_number_of_images_and_on_blocks(tmp_path, pages):
    """Of two images the position mean is not subtracted: the differences from it are always opposite."""
    for images, blocks in ((2, None), (3, (1, 3))):
        draw_features(asked_of(named(random_vit()), tmp_path, images=images, blocks=blocks))
    common = ["image", "first component", "first three, all patches", "first three, foreground"]
    drawn = [page.headings for page in pages]
    assert drawn[0] == [*common, "after block 1", "after block 2"]
    assert drawn[1] == [*common, "all, minus position mean", "after block 1", "after block 3"]
