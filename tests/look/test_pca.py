"""Tests of principal components: shared PCA, foreground, and pictures for every kind of encoder."""

import pytest
import torch
from attending import random_vit
from PIL import Image
from seeing import asked_of, asked_of_sound, named
from sklearn.decomposition import PCA
from swins import swin

from patchloom.errors import PatchloomError
from patchloom.look import pca as module
from patchloom.look.context import full_caption, output_of, to_pictures
from patchloom.look.image_grid import channels_shown
from patchloom.look.pca import components, draw_features, edge_of, subtract_position_mean

KINDS = {
    "class token": {},
    "registers": {"reg_tokens": 2},
    "no class token, no positions": {"class_token": False, "positions": "none"},
    "not square": {"size": (16, 40), "p": (8, 4)},
    "one row": {"size": (12, 30), "p": (12, 3)},
    "one patch": {"size": (16, 16), "p": 16},
}


def test_one_analysis_of_all_images_is_scikit_learns():
    features = torch.randn(3, 4, 5, 9) * torch.linspace(1, 3, 9)
    found = components(features)
    theirs = PCA(3, svd_solver="full").fit(features.flatten(0, 2).double().numpy())
    first = torch.from_numpy(theirs.transform(features.flatten(0, 2).double().numpy())[:, 0]).view(3, 4, 5)
    sign = 1 if (found.first * first).sum() > 0 else -1
    torch.testing.assert_close(sign * found.first, first.float(), rtol=1e-5, atol=1e-5)
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


def test_the_edge_of_a_strip_is_its_ends():
    assert edge_of((1, 5)).tolist() == [[True, False, False, False, True]]
    assert edge_of((3, 3)).sum() == 8 and not edge_of((2, 2)).any()


def test_what_places_have_in_common_is_taken_away():
    places, things = torch.randn(1, 3, 4, 6), torch.randn(5, 1, 1, 6)
    left = subtract_position_mean(places + things)
    torch.testing.assert_close(left, (things - things.mean(0)).expand_as(left), rtol=1e-5, atol=1e-5)


def test_few_features_have_as_many_colours_as_there_are():
    found = components(torch.randn(1, 1, 2, 5))
    assert found.colours.shape == (1, 1, 2, 3) and found.variance.shape == (2,)
    alone = components(torch.randn(1, 1, 1, 5))
    assert alone.colours.isfinite().all() and not alone.foreground.any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_encoder_is_drawn(kind, tmp_path):
    vit = random_vit(**KINDS[kind])
    one = named(vit)
    (path,) = draw_features(asked_of(one, tmp_path, images=2, beside=(named(random_vit(), "another"),)))
    assert path == tmp_path / "components.png" and min(Image.open(path).size) > 300


def test_swin_sound_and_a_single_image(tmp_path):
    for folder, asked in {
        "swin": asked_of(named(swin()), tmp_path / "swin", blocks=(1, 2)),
        "sound": asked_of_sound(tmp_path / "sound"),
        "single": asked_of(named(random_vit()), tmp_path / "single", images=1),
    }.items():
        (path,) = draw_features(asked)
        assert path.parent.name == folder and path.stat().st_size > 5000


def test_blocks_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(PatchloomError, match="mine has no block 4: its blocks are numbered 1 to 3"):
        draw_features(asked_of(named(random_vit()), tmp_path, blocks=(1, 4)))
    with pytest.raises(PatchloomError, match="mine has no stage 3: its stages are numbered 1 to 2"):
        draw_features(asked_of(named(swin()), tmp_path, blocks=(3,)))


def test_features_that_are_not_finite_are_refused():
    vit = random_vit()
    torch.nn.init.constant_(vit.norm.weight, torch.nan)
    with pytest.raises(PatchloomError, match="mine gives features that are not finite"):
        output_of(named(vit), torch.randn(1, 3, 24, 32))


def test_a_caption_says_what_is_shown_of_the_channels_and_speaks_of_recordings(tmp_path):
    day = torch.ones(1, 3, 24, 32)
    assert full_caption(named(random_vit()), "Images.", day) == "Images."
    assert full_caption(named(random_vit(channels=2)), "Images.", day[:, :2]) == f"Images. {channels_shown(2)}"
    night = torch.full((1, 3, 24, 32), (0.05 - 0.5) / 0.2)
    assert full_caption(named(random_vit()), "Images.", night).endswith("are drawn 20 times brighter.")
    assert to_pictures(named(random_vit()), night).min() == 255
    heard = full_caption(asked_of_sound(tmp_path).encoder, "Recordings.", day[:, :1])
    assert heard.startswith("Recordings. Left to right: 0.11 s")


def test_the_same_twice(tmp_path):
    asked = [asked_of(named(random_vit()), tmp_path / name, images=2) for name in "ab"]
    first, second = (draw_features(one)[0].read_bytes() for one in asked)
    assert first == second


def test_places_are_only_taken_away_of_several_images(tmp_path, monkeypatch):
    """The differences of two images from their mean are always opposite."""
    drawn = []
    monkeypatch.setattr(module, "draw_tiles", lambda rows, headings, size, title, caption, *_: drawn.append(headings))
    for images in (2, 3):
        draw_features(asked_of(named(random_vit()), tmp_path, images=images))
    assert ["all, minus position mean" in headings for headings in drawn] == [False, True]
