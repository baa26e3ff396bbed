"""Neighbours that stay where some patches are seen."""

import pytest
import torch

from patchloom.evaluate.label_free import neighbour_overlap, partial_means
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import embed
from patchloom.nets.heads import pooled_tokens
from patchloom.withhold.encoder_input import all_patches


def test_all_are_kept_where_nothing_changes_and_noise_keeps_them_at_chance() -> None:
    lots = torch.Generator().manual_seed(0)
    whole = torch.randn(400, 16, generator=lots)
    assert (neighbour_overlap(whole, 2 * whole) == 1).all()
    kept = neighbour_overlap(whole, torch.randn(400, 16, generator=lots))
    assert kept.shape == (400,) and kept.mean().item() == pytest.approx(10 / 399, abs=0.01)


def test_the_share_is_of_each_image() -> None:
    turn = torch.linspace(0, 3.0, 7)  # on a half circle: nearest are those beside
    whole = torch.stack([turn.cos(), turn.sin()], 1)
    part = whole.clone()
    part[0] = whole[2]  # its two nearest, itself left out: 2 and 1 or 3; they were 1 and 2
    kept = neighbour_overlap(whole, part, k=2)
    assert kept[1:].tolist() == [1.0] * 6
    part[0] = whole[6]
    assert neighbour_overlap(whole, part, k=2)[0] == 0


def test_an_image_is_never_its_own_neighbour() -> None:
    whole = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    assert (neighbour_overlap(whole, whole, k=10) == 1).all()
    with pytest.raises(ValueError, match="too few for 10 nearest neighbours"):
        neighbour_overlap(whole[:11], whole[:11], k=10)


def test_equal_features_have_no_nearest() -> None:
    """An encoder that gives all images one feature kept all its "neighbours", by their index."""
    whole = torch.full((50, 8), 0.3)
    for part in (whole, 2 * whole, whole + 1e-9 * torch.randn(50, 8)):
        assert neighbour_overlap(whole, part).tolist() == pytest.approx([10 / 49] * 50)


def test_copies_share_the_places_that_are_left() -> None:
    """Of three copies of the nearest one, two are chosen: each is kept if chance chooses it twice."""
    lots = torch.Generator().manual_seed(0)
    whole = torch.randn(40, 16, generator=lots)
    whole[1:4] = whole[0] + 0.01
    kept = neighbour_overlap(whole, whole, k=2)
    assert kept[0].item() == pytest.approx(3 * (2 / 3) ** 2 / 2)
    assert kept[1].item() == pytest.approx(3 * (2 / 3) ** 2 / 2) or kept[1] == 1
    assert neighbour_overlap(whole, whole, k=3)[:4].tolist() == [1.0] * 4


def test_few_patches_are_those_that_come_first_and_all_of_them_the_whole() -> None:
    torch.manual_seed(0)
    options = {"depth": 2, "embed_dim": 32, "num_heads": 2, "class_token": True}
    vit = build_encoder(EncoderSpec("nano", (8, 8), 2, channels=1, options=options)).eval()
    images = torch.randn(3, 1, 8, 8)
    order = torch.stack([torch.randperm(16) for _ in range(3)])
    with torch.inference_mode():
        found = partial_means(vit, images, order, (1.0, 0.25, 0.01))
        assert torch.allclose(found[1.0], pooled_tokens(vit, images)["mean"], atol=1e-5)
        # patches that do not enter may be anything
        tokens = embed(vit, all_patches(images, 16))
        assert tokens.shape[1] == 17
        changed = images.clone()
        for i, hidden in enumerate(order[:, 4:].tolist()):
            for patch in hidden:
                row, column = divmod(patch, 4)
                changed[i, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 9.0
        again = partial_means(vit, changed, order, (1.0, 0.25, 0.01))
    assert torch.equal(found[0.25], again[0.25]) and torch.equal(found[0.01], again[0.01])
    assert not torch.allclose(found[1.0], again[1.0]) and not torch.allclose(found[0.25], found[0.01])
