"""Crops of images, and whether they are found again."""

import numpy as np
import pytest
import torch

from patchloom.data.augment import RandomCrop
from patchloom.data.decode import Unreadable
from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.evaluate.label_free import AreaCrop, CropsOf, own_crop_found


class Numbered(Source):
    """Images [1 8 12] of which each pixel tells its image and place; how often they are read is counted."""

    name = "numbered"

    def __init__(self, n: int = 5, broken: int | None = None) -> None:
        self.n, self.broken, self.reads = n, broken, [0] * n

    def __len__(self) -> int:
        return self.n

    def read(self, i: int) -> torch.Tensor:
        self.reads[i] += 1
        if i == self.broken:
            raise Unreadable("broken")
        return (torch.arange(96.0).view(1, 8, 12) + 100 * i) / 1000

    def fingerprint(self) -> str:
        return "f" * 16


def test_a_perfect_encoder_finds_every_crop_and_noise_does_at_chance() -> None:
    lots = torch.Generator().manual_seed(0)
    features = torch.randn(1500, 8, generator=lots)
    assert own_crop_found(features, features * 3).all()  # the cosine knows no length
    assert own_crop_found(features, features + 0.01 * torch.randn(1500, 8, generator=lots)).double().mean() > 0.95
    noise = own_crop_found(features, torch.randn(1500, 8, generator=lots))
    assert noise.sum() <= 6  # of 1,500, where 1 is expected
    assert own_crop_found(torch.ones(1500, 8), torch.ones(1500, 8)).sum() == 1  # collapsed: chance


def test_which_is_found_is_told_image_by_image() -> None:
    first = torch.eye(4)
    second = torch.eye(4)[[0, 2, 1, 3]]
    assert own_crop_found(first, second).tolist() == [True, False, False, True]


@pytest.mark.parametrize(("area", "sides"), [(1.0, (8, 8)), (0.25, (4, 4))])
def test_a_crop_has_its_share_of_the_centre_and_lies_at_random(area: float, sides: tuple[int, int]) -> None:
    image, rng = Numbered().read(0), np.random.default_rng(0)
    corners = set()
    for _ in range(60):
        (crop,) = AreaCrop(sides, area)(image, rng)
        assert crop.shape == (1, *sides)  # cut alone, where it need not be resized
        corner = round(crop[0, 0, 0].item() * 1000)
        assert torch.allclose(crop[0], image[0, corner // 12 :][: sides[0], corner % 12 :][:, : sides[1]])
        corners.add(divmod(corner, 12))
    rows, columns = ({corner[i] for corner in corners} for i in (0, 1))
    # the square in the middle of 8x12 pixels begins in column 2
    assert (rows, columns) == (({0}, {2}) if area == 1 else (set(range(5)), set(range(2, 7))))


def test_a_crop_of_a_long_image_has_the_shape_of_the_encoders_input() -> None:
    image = torch.zeros(3, 40, 400, dtype=torch.uint8)
    image[:, :, 200:] = 255
    for area in (0.9, 0.25):
        (crop,) = AreaCrop((16, 32), area)(image, np.random.default_rng(0))
        assert crop.shape == (3, 16, 32) and crop.dtype == torch.uint8
        assert 0 < crop.float().mean() < 255  # of the middle


def test_crops_of_a_source_are_read_once_an_image_and_depend_on_the_seed_alone() -> None:
    ways = [AreaCrop((4, 4), 0.25), AreaCrop((4, 4), 0.25), RandomCrop((4, 4))]
    images = Numbered()
    crops = CropsOf(images, ways, seed=1)
    assert len(crops) == 15
    whole = torch.cat([batch.views[0] for batch in plain_batches(crops, (4, 4), 4, channels=1)])
    assert images.reads == [1] * 5
    assert (whole.flatten(1).mean(1) * 10).long().tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert not torch.equal(whole[0], whole[1])  # two places
    alone = CropsOf(Numbered(), ways, seed=1)
    assert torch.equal(alone.read(13), crops.read(13)) and alone.fingerprint() == crops.fingerprint()
    other = CropsOf(Numbered(), ways, seed=2)
    assert any(not torch.equal(other.read(i), crops.read(i)) for i in range(15))
    assert other.fingerprint() != crops.fingerprint()


def test_an_image_that_cannot_be_read_has_no_crop_at_all() -> None:
    crops = CropsOf(Numbered(broken=2), [AreaCrop((4, 4), 0.5)] * 2, seed=0)
    (batch,) = plain_batches(crops, (4, 4), 100, channels=1)
    assert batch.indices.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert batch.unreadable == ["numbered #2"] * 2
