from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.sources.synthetic import SHAPES, Shapes
from patchloom.errors import PatchloomError


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 150), st.sampled_from([16, 32, 64]), st.integers(1, 100))
def test_an_image_depends_on_seed_number_and_size_only(seed, number, size, more):
    one = Shapes(1, seed, size, first=number)
    many = Shapes(number + more, seed, size)
    assert torch.equal(one.read(0), many.read(number))
    assert one.labels[0] == many.labels[number]


def test_seeds_numbers_and_sizes_differ():
    images = [Shapes(2, seed).read(i) for seed in (0, 1) for i in (0, 1)]
    assert all(not torch.equal(a, b) for k, a in enumerate(images) for b in images[:k])
    assert images[0].shape == (3, 64, 64) and images[0].dtype == torch.uint8
    assert Shapes(1, size=40).read(0).shape == (3, 40, 40)


def test_images_never_change():
    """Runs that began with an earlier version continue with the same images, which have the same fingerprint."""
    shapes = Shapes(10)
    assert shapes.labels.tolist() == [7, 4, 3, 0, 1, 2, 8, 6, 5, 9]
    assert shapes.read(0).double().mean((1, 2)).tolist() == pytest.approx([26.287, 120.449, 228.965], abs=0.01)


def test_classes_are_balanced_and_in_no_fixed_order():
    shapes = Shapes(200)
    tens = shapes.labels.reshape(20, 10)
    assert (np.sort(tens, 1) == np.arange(10)).all()
    assert len({tuple(ten) for ten in tens}) > 15
    assert shapes.labels.dtype == np.int64 and len(shapes.classes) == 10


@pytest.mark.parametrize("size", [32, 64])
def test_mask_and_box_agree_with_the_picture(size):
    shapes = Shapes(60, seed=3, size=size)
    for i in range(60):
        label, (x0, y0, x1, y1), mask = shapes.annotation(i)
        assert label == shapes.labels[i] and mask.shape == (size, size) and mask.dtype == bool
        assert mask[y0:y1, x0:x1].sum() == mask.sum() > 0
        for edge in (mask[y0, x0:x1], mask[y1 - 1, x0:x1], mask[y0:y1, x0], mask[y0:y1, x1 - 1]):
            assert edge.any()
        assert 0 < x0 and 0 < y0 and x1 < size and y1 < size  # nothing is cut off
        assert 0.2 * size < max(x1 - x0, y1 - y0) < 0.7 * size
        # Inside, one colour and a little noise; and that colour differs from what surrounds it.
        picture = shapes.read(i).permute(1, 2, 0).float().numpy()
        core = mask.copy()
        for axis in (0, 1):
            core &= np.roll(core, 1, axis) & np.roll(core, -1, axis)
        if core.sum() > 10:
            colour = np.median(picture[core], 0)
            assert np.abs(picture[core] - colour).max() < 35
            assert np.linalg.norm(np.median(picture[~mask], 0) - colour) > 60


def test_masks_distinguish_the_classes():
    """Area over squared diameter of the masks orders the classes according to their geometry."""
    shapes = Shapes(500)
    fill = {name: [] for name in SHAPES}
    for i in range(500):
        label, (x0, y0, x1, y1), mask = shapes.annotation(i)
        fill[SHAPES[label]].append(mask.sum() / ((x1 - x0) * (y1 - y0)))
    mean = {name: np.mean(values) for name, values in fill.items()}
    assert mean["disc"] > mean["half disc"] > mean["star"] and mean["disc"] > mean["ring"] > mean["arc"]
    assert mean["triangle"] > mean["outlined triangle"] and mean["hexagon"] > mean["cross"] > mean["star"]
    assert abs(mean["disc"] - np.pi / 4) < 0.03


def test_raw_pixels_hardly_help():
    train, test = Shapes(1000), Shapes(300, first=2**40)

    def pixels(shapes):
        flat = torch.stack([shapes.read(i) for i in range(len(shapes))]).flatten(1).float()
        return torch.nn.functional.normalize(flat, dim=1)

    near = torch.from_numpy(train.labels)[(pixels(test) @ pixels(train).T).topk(20).indices]
    score = (near.mode(1).values.numpy() == test.labels).mean()
    assert score < 0.22


def test_drawn_once():
    shapes = Shapes(3)
    assert shapes.read(1).data_ptr() == shapes.read(1).data_ptr()


def test_refusals():
    with pytest.raises(PatchloomError, match="at least 1"):
        Shapes(0)
    with pytest.raises(PatchloomError, match="at least 16"):
        Shapes(1, size=8)
    with pytest.raises(IndexError):
        Shapes(3).read(3)
