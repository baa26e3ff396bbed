"""Rare classes: weights, Dice, crops that hold them, and the rule by which auto takes them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.augment import PixelAugment
from patchloom.dense.metrics import constant_overlaps, foreground_iou, mean_iou, overlaps
from patchloom.dense.rare import class_weights, dice_loss, for_rare_classes, rare_crops
from patchloom.dense.recipes import FOR_RARE, PROBE, SEGMENT
from patchloom.dense.segment import batch_overlaps, pixel_loss


def test_weights_are_enets() -> None:
    """1 / ln(1.02 + p), Paszke et al. 2016: by hand for fractions of 0.98, 0.02 and none."""
    weights = class_weights(np.array([[90, 2, 0], [8, 0, 0]]))
    expected = [1 / math.log(2.0), 1 / math.log(1.04), 1 / math.log(1.02)]
    assert weights.tolist() == pytest.approx(expected) and expected[1] > 25


def test_the_weighted_loss_is_a_weighted_mean() -> None:
    """Two pixels, one of each class, with losses ln 2 and ln 4."""
    logits = torch.log(torch.tensor([[[[0.5, 0.75]], [[0.5, 0.25]]]]))
    truth, weights = torch.tensor([[[0, 1]]]), torch.tensor([1.0, 3.0])
    expected = (math.log(2) + 3 * math.log(4)) / 4
    assert pixel_loss(logits, truth, weights).item() == pytest.approx(expected)
    ignored = torch.tensor([[[0, IGNORED]]])
    assert pixel_loss(logits, ignored, weights).item() == pytest.approx(math.log(2))
    assert pixel_loss(logits, torch.full((1, 1, 2), IGNORED), weights, dice=True) == 0


def test_dice_by_hand() -> None:
    """Three pixels, the last of which does not count: Dice 2 * 0.5 / (1 + 0.75) and 2 * 0.75 / (1 + 1.25)."""
    chances = torch.tensor([[[[0.5, 0.25, 0.9]], [[0.5, 0.75, 0.1]], [[0.0, 0.0, 0.0]]]])
    truth = torch.tensor([[[0, 1, IGNORED]]])
    expected = 1 - (2 * 0.5 / (1 + 0.75) + 2 * 0.75 / (1 + 1.25)) / 2  # the third class is not shown
    assert dice_loss(torch.log(chances), truth).item() == pytest.approx(expected, rel=1e-5)
    right = torch.tensor([[[[40.0, -40.0]], [[-40.0, 40.0]]]])
    assert dice_loss(right, torch.tensor([[[0, 1]]])) < 1e-5 < 0.99 < dice_loss(right, torch.tensor([[[1, 0]]]))


def crops_of(augment: PixelAugment, truths: list[torch.Tensor]) -> list[torch.Tensor]:
    """The label maps of a crop of each."""
    rng, image = np.random.default_rng(0), torch.zeros(1, 64, 64, dtype=torch.uint8)
    return [augment(image, truth, rng)[1] for truth in truths]


def test_every_second_crop_holds_the_rare_class() -> None:
    """A quarter of the images have one rare pixel in a corner, which hardly any crop of a sixteenth would show."""
    truths = torch.zeros(40, 64, 64, dtype=torch.int16)
    truths[::4, 1, 62] = 1
    pixels = np.stack([np.bincount(one.numpy().ravel(), minlength=2) for one in truths])
    crops = rare_crops(pixels, 0.5)
    assert len(crops.images) == 60 and (np.bincount(crops.images) == [3, 1, 1, 1] * 10).all()
    augment = PixelAugment((16, 16), None, (1.0, 1.0), flip=False, rare=crops.classes, aimed=crops.aimed)
    held = [bool((crop == 1).any()) for crop in crops_of(augment, [*truths[crops.images]] * 4)]
    assert 0.4 < np.mean(held) < 0.6
    plain = PixelAugment((16, 16), None, (1.0, 1.0), flip=False)
    assert np.mean([bool((crop == 1).any()) for crop in crops_of(plain, [*truths] * 10)]) < 0.05


def test_each_rare_class_of_an_image_is_aimed_at_alike() -> None:
    truth = torch.zeros(64, 64, dtype=torch.int16)
    truth[:3, :60], truth[63, 63] = 1, 2
    seen = crops_of(PixelAugment((8, 8), None, (1.0, 1.0), flip=False, rare=(1, 2), aimed=1.0), [truth] * 400)
    assert all((one > 0).any() for one in seen) and 0.4 < np.mean([bool((one == 2).any()) for one in seen]) < 0.6


def test_nothing_is_drawn_for_rare_crops_that_are_off() -> None:
    """So that views, and all numbers, are as they were."""
    image, truth = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8), torch.zeros(40, 50, dtype=torch.int16)
    truth[20, 20] = 1
    augments = PixelAugment((16, 16), 32), PixelAugment((16, 16), 32, rare=(1,), aimed=0.0)
    one, other = (augment(image, truth, np.random.default_rng(3)) for augment in augments)
    assert torch.equal(one[0][0], other[0][0]) and torch.equal(one[1], other[1])
    assert rare_crops(np.array([[99, 1]]), 0.0).aimed == 0 and rare_crops(np.array([[50, 50]]), 0.5).aimed == 0


@pytest.mark.parametrize(
    ("pixels", "acts"),
    [
        ([9975, 25], True),
        ([9501, 299, 200], True),  # all the rest under 5 % together
        ([9400, 300, 300], False),  # each under 5 %, but not together: CamVid is of that kind
        ([50, 50], False),
        ([100, 0], False),
    ],
)
def test_auto_acts_where_a_constant_answer_is_nearly_right(pixels: list[int], acts: bool) -> None:
    asked = SEGMENT["small"]
    recipe = asked.settled(20, "cpu", 0, 16, 4, 32)
    assert (recipe.class_weights, recipe.rare_crops, recipe.loss) == (False, 0.0, "cross-entropy")
    found, said = for_rare_classes(asked, recipe, np.array(pixels), ("ground", "scratch", "hole"))
    assert found == (replace(recipe, **FOR_RARE) if acts else recipe) and bool(said) == acts
    assert not acts or "are not ground" in said and "--class_weights true and --rare_crops 0.5" in said
    for other in (replace(asked, class_weights=False, rare_crops=0.0), SEGMENT["mae"], PROBE):
        plain = other.settled(20, "cpu", 0, 16, 4, 32)
        assert for_rare_classes(other, plain, np.array(pixels), ("a", "b", "c")) == (plain, "")


def test_the_constant_answer_and_the_foreground() -> None:
    """Two images of 8 pixels: by hand."""
    truth = torch.tensor([[6, 2, 0], [5, 3, 0]])
    matrices = torch.stack([torch.diag(row) for row in truth])
    best, constant = constant_overlaps(overlaps(matrices))
    assert best == 0 and constant.sum(0).tolist() == [[11, 0, 0], [16, 5, 0], [11, 5, 0]]
    assert mean_iou(constant.sum(0)).item() == pytest.approx(11 / 16 / 2) and foreground_iou(constant.sum(0)) == 0
    second, other = constant_overlaps(overlaps(matrices), 1)
    assert second == 1 and foreground_iou(other.sum(0)).item() == pytest.approx(5 / 16)  # the third class is nowhere
    half = torch.tensor([[[9, 1, 0], [2, 2, 0], [0, 0, 0]]])
    assert foreground_iou(overlaps(half)[0]).item() == pytest.approx(2 / 5)  # of the second class alone


def test_overlaps_of_a_batch_are_those_of_its_confusion() -> None:
    logits, truth = torch.randn(2, 3, 4, 4), torch.randint(-1, 3, (2, 4, 4))
    matrix = torch.zeros(3, 3, dtype=torch.int64)
    for real, answer in zip(truth.flatten().tolist(), logits.argmax(1).flatten().tolist(), strict=True):
        matrix[real, answer] += real >= 0
    assert torch.equal(batch_overlaps(logits, truth), overlaps(matrix).float())
