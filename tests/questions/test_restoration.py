"""Beyond Masking's targets and its two losses beside plain loops, and the answers of those who learn nothing."""

import math

import pytest
import torch
from patchloom.objectives.restoration import answer_of, canvas_errors, centre_of, restoration_targets

from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import patchify


def area(image, size):
    """[h w] resized by averaging: each new pixel is the mean of all old ones that it touches."""
    new = torch.zeros(size, dtype=image.dtype)
    steps = [old / side for old, side in zip(image.shape, size, strict=True)]
    for i in range(size[0]):
        for j in range(size[1]):
            rows = slice(math.floor(i * steps[0]), math.ceil((i + 1) * steps[0]))
            columns = slice(math.floor(j * steps[1]), math.ceil((j + 1) * steps[1]))
            new[i, j] = image[rows, columns].mean()
    return new


def normalized_by_patch(image, p):
    """[h w] with each patch of its own mean and deviation."""
    new = torch.zeros_like(image)
    for i in range(0, image.shape[0], p):
        for j in range(0, image.shape[1], p):
            patch = image[i : i + p, j : j + p]
            new[i : i + p, j : j + p] = (patch - patch.mean()) / (patch.std() + 1e-6)
    return new


def plain_errors(predicted, canvas, p, masked, normalized):
    """Both losses of one image [c h w], [c H W], written out."""
    (h, w), (whole_h, whole_w) = predicted.shape[1:], canvas.shape[1:]
    top, left = (whole_h - h) // 2, (whole_w - w) // 2
    grown = torch.stack([area(channel, (whole_h, whole_w)) for channel in predicted])
    hole, strips = [], [[], [], [], []]
    for c in range(len(canvas)):
        truth = canvas[c, top : top + h, left : left + w]
        truth = normalized_by_patch(truth, p) if normalized else truth
        small = area(canvas[c], (h, w))
        target = area(normalized_by_patch(small, p) if normalized else small, (whole_h, whole_w))
        for i in range(whole_h):
            for j in range(whole_w):
                y, x = i - top, j - left
                if 0 <= y < h and 0 <= x < w:
                    if y // p * (w // p) + x // p in masked:
                        hole.append((grown[c, i, j] - truth[y, x]) ** 2)
                    continue
                strip = 0 if y < 0 else 1 if y >= h else 2 if x < 0 else 3
                strips[strip].append((grown[c, i, j] - target[i, j]) ** 2)
    return torch.stack(hole).mean().item(), sum(torch.stack(strip).mean() for strip in strips).item()


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("size", "whole"), [((8, 12), (12, 18)), ((8, 8), (10, 10))])
def test_both_errors_against_a_loop(size, whole, normalized):
    p, (rows, columns) = 4, (size[0] // 4, size[1] // 4)
    predicted, canvas = torch.randn(2, 2, *size), torch.rand(2, 2, *whole)
    _, masked = random_partition(2, rows * columns, (1, rows * columns - 1))
    inside, band = canvas_errors(predicted, canvas, p, masked, normalized)
    for i in range(2):
        expected = plain_errors(predicted[i], canvas[i], p, set(masked[i].tolist()), normalized)
        assert (inside[i].item(), band[i].item()) == pytest.approx(expected, rel=1e-5)


def test_visible_patches_count_in_neither_error():
    canvas, predicted = torch.rand(1, 1, 12, 12), torch.zeros(1, 1, 8, 8)
    masked = torch.tensor([[0, 1, 2]])
    before = canvas_errors(predicted, canvas, 4, masked, False)
    changed = canvas.clone()
    changed[:, :, 7:9, 7:9] += 0.5  # inside patch 3, which was seen, and far from the band
    inside, band = canvas_errors(predicted, changed, 4, masked, False)
    assert inside.item() == before[0].item() and band.item() == pytest.approx(before[1].item(), rel=1e-6)
    changed[:, :, 2:4, 2:4] += 0.5  # inside patch 0
    assert canvas_errors(predicted, changed, 4, masked, False)[0] > inside


def test_the_band_is_four_strips_of_equal_weight():
    """An error in one corner column of the sides counts by the side's own area, not by the band's."""
    canvas = torch.zeros(1, 1, 16, 16)
    predicted = torch.zeros(1, 1, 8, 8)
    predicted[..., 0, 4] = 1.0  # grown twice: the rows 0 and 1 of the upper strip of 4 x 16
    _, band = canvas_errors(predicted, canvas, 4, torch.tensor([[0]]), False)
    assert band.item() == pytest.approx(4 / (4 * 16))
    predicted = torch.zeros(1, 1, 8, 8)
    predicted[..., 4, 0] = 1.0  # the left strip of 8 x 4
    _, band = canvas_errors(predicted, canvas, 4, torch.tensor([[0]]), False)
    assert band.item() == pytest.approx(4 / (8 * 4))


def test_targets_are_normalised_in_each_channel_of_each_patch():
    images = torch.rand(2, 3, 8, 12) * torch.tensor([1.0, 0.1, 0.5]).view(3, 1, 1)
    targets = restoration_targets(images, 4, None, True).unflatten(-1, (3, 16))
    assert targets.shape == (2, 6, 3, 16)
    assert targets.mean(-1).abs().max() < 1e-5 and (targets.std(-1) - 1).abs().max() < 1e-3
    asked = torch.tensor([[4, 0], [1, 1]])
    some = restoration_targets(images, 4, asked, True).unflatten(-1, (3, 16))
    assert torch.equal(some[1, 0], targets[1, 1]) and torch.equal(some[0, 0], targets[0, 4])
    plain = restoration_targets(images, 4, asked, False)
    assert torch.equal(plain, patchify(images, 4, asked))
    flat = restoration_targets(torch.full((1, 3, 4, 4), 0.7), 4, None, True)
    assert flat.isfinite().all() and flat.abs().max() < 0.1


def test_the_centre():
    images = torch.arange(6 * 10.0).view(1, 1, 6, 10)
    assert torch.equal(centre_of(images, (2, 4)), images[:, :, 2:4, 3:7])
    assert torch.equal(centre_of(images, (6, 10)), images)


def test_the_truth_is_a_perfect_guess():
    images = torch.rand(2, 3, 8, 8)
    for normalized in (True, False):
        target = restoration_targets(images, 4, None, normalized)
        assert torch.equal(answer_of(images, images, 4, normalized), target)


def test_a_smooth_guess_is_not_blown_up_and_a_wild_one_is_held_down():
    truth = torch.rand(1, 1, 4, 4)
    deviation = truth.std()
    smooth, wild = truth.mean() + 0.1 * (truth - truth.mean()), truth.mean() + 10 * (truth - truth.mean())
    assert answer_of(smooth, truth, 4, True).std().item() == pytest.approx(0.1, rel=1e-3)
    assert answer_of(wild, truth, 4, True).std().item() == pytest.approx(1, rel=1e-3)
    assert answer_of(torch.full_like(truth, 0.3), truth, 4, True).abs().max() < 1e-5
    shifted = answer_of(truth + 5 * deviation, truth, 4, True)  # the mean is never asked with normalised pixels
    torch.testing.assert_close(shifted, answer_of(truth, truth, 4, True), rtol=1e-3, atol=1e-4)
