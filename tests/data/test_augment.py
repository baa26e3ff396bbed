from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from patchloom.data import CentreCrop, RandomCrop

sides = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(sides, sides, st.sampled_from([1, 2, 3, 5]), st.booleans(), st.integers(0, 99))
def test_any_image_becomes_the_asked_size(height, width, channels, deep, seed):
    image = torch.randint(0, 256, (channels, height, width), dtype=torch.uint8)
    image = image / 255 if deep else image
    for crop in (RandomCrop((6, 9)), CentreCrop((6, 9))):
        (view,) = crop(image, np.random.default_rng(seed))
        assert view.shape == (channels, 6, 9) and view.dtype == image.dtype
        assert not deep or (view.min() >= 0 and view.max() <= 1)
        assert torch.equal(view, crop(image, np.random.default_rng(seed))[0])


def test_parts_keep_to_scale_and_ratio_and_reach_everywhere():
    crop, rng = RandomCrop((8, 8), scale=(0.2, 0.5)), np.random.default_rng(0)
    parts = np.array([crop._part(100, 100, rng) for _ in range(2000)])
    top, left, h, w = parts.T
    assert 0.19 < (h * w / 1e4).min() < 0.21 and 0.49 < (h * w / 1e4).max() < 0.51
    assert 0.73 < (w / h).min() < 0.77 and 1.3 < (w / h).max() < 1.37
    assert top.min() == left.min() == 0 and (top + h).max() == (left + w).max() == 100
    assert abs((h * w / 1e4).mean() - 0.35) < 0.01  # uniform in area


@pytest.mark.parametrize("shape, part", [((2, 100), (0, 48, 2, 3)), ((100, 2), (48, 0, 3, 2))])
def test_an_extreme_image_falls_back_to_its_centre(shape, part):
    assert RandomCrop((8, 8), scale=(0.9, 1))._part(*shape, np.random.default_rng(0)) == part


def test_half_are_mirrored():
    image = torch.arange(12, dtype=torch.uint8).expand(3, 12, 12).contiguous()
    rng = np.random.default_rng(0)
    crop = RandomCrop((12, 12), scale=(1, 1), ratio=(1, 1))
    views = [crop(image, rng)[0] for _ in range(400)]
    mirrored = sum(torch.equal(view, image.flip(-1)) for view in views)
    assert mirrored + sum(torch.equal(view, image) for view in views) == 400 and 160 < mirrored < 240
    crop = RandomCrop((12, 12), scale=(1, 1), ratio=(1, 1), flip=False)
    assert all(torch.equal(crop(image, rng)[0], image) for _ in range(20))


def test_memory_layout_changes_nothing():
    image = torch.randint(0, 256, (3, 50, 40), dtype=torch.uint8)
    last = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for crop in (RandomCrop((16, 16)), CentreCrop((16, 16))):
        a, b = (crop(x, np.random.default_rng(3))[0] for x in (image, last))
        assert (a.int() - b.int()).abs().max() <= 1


def test_centre_crop_is_resize_then_crop():
    y, x = torch.meshgrid(torch.linspace(0, 1, 64), torch.linspace(0, 1, 96), indexing="ij")
    image = torch.stack([x, y, x * y])
    resized = F.resize(image, [32, 48], interpolation=InterpolationMode.BICUBIC, antialias=True)
    (view,) = CentreCrop((32, 32))(image)
    assert (view - F.center_crop(resized, [32, 32])).abs().max() < 0.02
    (wide,) = CentreCrop((16, 48))(image)
    assert (wide - F.center_crop(resized, [16, 48])).abs().max() < 0.02


def test_wide_targets_show_wide_parts_instead_of_stretched_ones() -> None:
    crop, rng = RandomCrop((64, 128), scale=(0.2, 0.5)), np.random.default_rng(0)
    stretches = []
    for _ in range(300):
        _, _, h, w = crop._part(64, 128, rng)
        stretches.append((128 / w) / (64 / h))
    assert 0.95 < np.median(stretches) < 1.05 and 3 / 4 - 0.05 < min(stretches) and max(stretches) < 4 / 3 + 0.05
