"""Prediction of pixels: trivial baselines, correct predictions, and Beyond Masking's two losses."""

import math
from dataclasses import replace

import pytest
import torch
from answering import Answers, encoded_of, geometry_of, masking

from patchloom.errors import PatchloomError
from patchloom.patches.partition import complement, random_partition
from patchloom.patches.pictures import fill_holes
from patchloom.patches.tokens import patch_statistics, patchify
from patchloom.questions.pixels import Pixels, Restoration
from patchloom.withhold.degradation import Degradation
from patchloom.withhold.encoder_input import all_patches, blank_patches


def asking(images, normalized, answers=None):
    return Pixels(geometry_of(images, 4), Answers(answers), normalized)


def test_trivial_baselines_are_as_named():
    images = torch.randn(3, 3, 16, 24)
    visible, masked = random_partition(3, 24, (6, 18))

    def baselines(images, normalized):
        b = len(images)
        encoded = encoded_of(images, masking(images, 4, visible[:b], masked[:b]))
        answers = torch.zeros(b, 18, 16 * images.shape[1])
        return asking(images, normalized, answers).measure(encoded).baselines

    plain = baselines(images, normalized=False)
    truth = patchify(images, (4, 4), masked).unflatten(-1, (3, 16))
    torch.testing.assert_close(plain["mean colour"], truth.var(-1, correction=0).mean((1, 2)))
    flat = torch.ones(2, 3, 16, 24) * torch.tensor([1.0, -2.0, 0.5]).view(3, 1, 1)
    for error in baselines(flat, normalized=False).values():
        assert error.max() < 1e-8
    normalized = baselines(images, normalized=True)
    # a patch of noise has deviation 1 after its channels' means; predicting zero has the unbiased variance as error
    assert 0.85 < normalized["mean colour"].mean() < normalized["flat patches"].mean() < 1.0
    torch.testing.assert_close(normalized["flat patches"], torch.full((3,), 47 / 48), atol=1e-4, rtol=0)
    assert set(baselines(images[:, :1], normalized=True)) == {"blurred copy", "flat patches"}  # equal for grey images
    assert set(baselines(images[:, :2], normalized=True)) == {"patch mean", "blurred copy", "flat patches"}


def test_zero_is_the_baseline_of_normalised_targets():
    images = torch.randn(2, 1, 16, 16)
    visible, masked = random_partition(2, 16, (4, 12))
    encoded = encoded_of(images, masking(images, 4, visible, masked))
    measured = asking(images, True, torch.zeros(2, 12, 16)).measure(encoded)
    torch.testing.assert_close(measured.values, measured.baselines["flat patches"])
    assert measured.has_to_be_beaten("flat patches") and measured.has_to_be_beaten("blurred copy")
    plain = asking(images, False, torch.zeros(2, 12, 16)).measure(encoded)
    assert plain.baseline_to_beat() == "blurred copy" and not plain.has_to_be_beaten("mean colour")


def test_the_blur_never_looks_at_masked_patches():
    images = torch.randn(2, 1, 16, 16)
    visible, masked = random_partition(2, 16, (4, 12))
    asked, one = asking(images, normalized=True), encoded_of(images, masking(images, 4, visible, masked))
    other = asked.picture(one, masked, torch.randn(2, 12, 16))
    assert not torch.equal(other, images)
    torch.testing.assert_close(fill_holes(images, (4, 4), visible), fill_holes(other, (4, 4), visible))
    two = encoded_of(other, masking(other, 4, visible, masked))
    for mine, its in zip(*(asked.guessed_statistics(x, masked) for x in (one, two)), strict=True):
        torch.testing.assert_close(mine, its)


def test_right_predictions_recover_the_image():
    images = torch.randn(2, 3, 16, 16)
    visible, masked = random_partition(2, 16, (4, 12))
    encoded, truth = encoded_of(images, masking(images, 4, visible, masked)), patchify(images, (4, 4), masked)
    (sheet,) = asking(images, False, truth).sheets(encoded)
    torch.testing.assert_close(sheet.columns["recovered"], images)
    mean, deviation = patch_statistics(truth)
    (sheet,) = asking(images, True, (truth - mean) / deviation).sheets(encoded)
    torch.testing.assert_close(sheet.columns["recovered, own statistics"], images, rtol=1e-4, atol=1e-4)


# blank patches: their number in the input and in the question


def blank_input(images, blank):
    """Return input with all patches, those of ``blank`` [b k] without content."""
    return encoded_of(images, blank_patches(all_patches(images, geometry_of(images, 4).n), blank))


def blank_question(images, blank, visible_asked):
    answers = torch.zeros(len(images), visible_asked, 48)
    return Pixels(geometry_of(images, 4), Answers(answers, visible_asked), False, blank=blank)


def test_the_right_number_of_blank_patches_is_measured():
    images = torch.randn(2, 3, 16, 16)
    encoded = blank_input(images, torch.tensor([[0, 1, 2], [5, 6, 7]]))
    question = blank_question(images, 3, 3)
    assert question(encoded, 0.0).loss.isfinite() and question.measure(encoded).values.isfinite().all()


def test_a_caption_tells_masked_patches_from_blank_ones():
    images = torch.randn(2, 3, 16, 16)
    visible, masked = random_partition(2, 16, (4, 12))
    removed = asking(images, False, torch.zeros(2, 12, 48)).sheets(
        encoded_of(images, masking(images, 4, visible, masked))
    )
    blank = blank_question(images, 4, 4).sheets(blank_input(images, masked[:, :4]))
    assert removed[0].caption.startswith("75% of the patches are masked;") and "mask token" not in removed[0].caption
    assert blank[0].caption.startswith("25% of the patches are replaced by a mask token;")
    both = encoded_of(images, blank_patches(masking(images, 4, visible, masked), torch.tensor([[0, 1], [1, 3]])))
    assert "75% of the patches are masked and 12%" in blank_question(images, 2, 2).withheld(both.given)


@pytest.mark.parametrize("blank", [0, 2, 4])
@pytest.mark.parametrize("call", ["measure", "sheets"])
def test_another_number_of_blank_patches_is_an_error(blank, call):
    images = torch.randn(2, 3, 16, 16)
    encoded = blank_input(images, torch.tensor([[0, 1, 2], [5, 6, 7]]))
    with pytest.raises(PatchloomError, match=f"blank={blank}.*blank=k.*visible_asked=k"):
        getattr(blank_question(images, blank, blank or 3), call)(encoded)


def test_different_numbers_of_blank_patches_are_an_error():
    images = torch.randn(2, 3, 16, 16)
    encoded = blank_input(images, torch.tensor([[0, 1, 2], [5, 5, 7]]))
    with pytest.raises(PatchloomError, match="2 to 3"):
        blank_question(images, 3, 3).measure(encoded)


@pytest.mark.parametrize("blank", [0, 3])
def test_a_step_notices_blank_patches_of_the_question_or_the_input_alone(blank):
    images = torch.randn(2, 3, 16, 16)
    everything = torch.arange(16).expand(2, -1)
    without = encoded_of(images, masking(images, 4, everything, everything[:, :0]))
    encoded = without if blank else blank_input(images, torch.tensor([[0, 1, 2], [5, 6, 7]]))
    with pytest.raises(PatchloomError, match="blank=k"):
        blank_question(images, blank, 3)(encoded, 0.0)


def test_a_decoder_that_predicts_nothing_is_an_error():
    images = torch.randn(2, 3, 16, 16)
    encoded = blank_input(images, torch.tensor([[0, 1, 2], [5, 6, 7]]))
    with pytest.raises(PatchloomError, match="predicts nothing.*visible_asked=3"):
        blank_question(images, 3, 0)(encoded, 0.0)


# restoration: targets and losses beside plain loops


def restoring(images, normalized, whole=None, band_weight=None):
    """Build the question for patches of 4 pixels of images like ``images``, perhaps the centre of a canvas."""
    size = tuple(images.shape[2:])
    zooming = Degradation("zoom_in", size, whole or size, ())
    return Restoration(geometry_of(images, 4), Answers(), zooming, normalized, band_weight=band_weight)


def canvas_errors(predicted, canvas, masked, normalized, corner=None):
    """Return both errors [b] of a predicted picture [b c h w] whose input began at ``corner`` [b 2] of the canvas."""
    question = restoring(predicted, normalized, tuple(canvas.shape[2:]), band_weight=0.2)
    given = replace(masking(predicted, 4, complement(masked, question.geometry.n), masked), corner=corner)
    return question.canvas_errors(encoded_of(canvas, given), patchify(predicted, (4, 4)))


def targets(images, asked, normalized):
    """Return the targets of the patches ``asked`` [b j] of images; None: all patches."""
    question = restoring(images, normalized)
    everything = torch.arange(question.geometry.n).expand(len(images), -1)
    encoded = encoded_of(images, masking(images, 4, everything, everything[:, :0]))
    return question.targets(encoded, everything if asked is None else asked)


def answer_of(guess, truth, normalized):
    """Convert a guessed picture to predictions for all patches."""
    question = restoring(truth, normalized)
    return question.as_answer(guess, patchify(truth, (4, 4)), torch.arange(question.geometry.n).expand(len(truth), -1))


def area(image, size):
    """Resize [h w] by averaging: each new pixel is the mean of all old ones that it overlaps."""
    new = torch.zeros(size, dtype=image.dtype)
    steps = [old / side for old, side in zip(image.shape, size, strict=True)]
    for i in range(size[0]):
        for j in range(size[1]):
            rows = slice(math.floor(i * steps[0]), math.ceil((i + 1) * steps[0]))
            columns = slice(math.floor(j * steps[1]), math.ceil((j + 1) * steps[1]))
            new[i, j] = image[rows, columns].mean()
    return new


def normalized_by_patch(image, p):
    """Normalise [h w] by each patch's mean and deviation."""
    new = torch.zeros_like(image)
    for i in range(0, image.shape[0], p):
        for j in range(0, image.shape[1], p):
            patch = image[i : i + p, j : j + p]
            new[i : i + p, j : j + p] = (patch - patch.mean()) / (patch.std() + 1e-6)
    return new


def plain_errors(predicted, canvas, p, masked, normalized, corner=None):
    """Compute both losses of one image [c h w], [c H W], written out."""
    (h, w), (whole_h, whole_w) = predicted.shape[1:], canvas.shape[1:]
    top, left = corner or ((whole_h - h) // 2, (whole_w - w) // 2)
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
    return torch.stack(hole).mean().item(), sum(torch.stack(strip).mean() for strip in strips if strip).item()


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("size", "whole"), [((8, 12), (12, 18)), ((8, 8), (10, 10))])
def test_both_errors_against_a_loop(size, whole, normalized):
    p, (rows, columns) = 4, (size[0] // 4, size[1] // 4)
    predicted, canvas = torch.randn(2, 2, *size), torch.rand(2, 2, *whole)
    _, masked = random_partition(2, rows * columns, (1, rows * columns - 1))
    inside, band = canvas_errors(predicted, canvas, masked, normalized)
    for i in range(2):
        expected = plain_errors(predicted[i], canvas[i], p, set(masked[i].tolist()), normalized)
        assert (inside[i].item(), band[i].item()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("normalized", [True, False])
def test_both_errors_at_any_place_of_the_canvas_against_a_loop(normalized):
    predicted, canvas = torch.randn(3, 2, 8, 12), torch.rand(3, 2, 12, 18)
    _, masked = random_partition(3, 6, (1, 5))
    corner = [(0, 0), (4, 3), (1, 6)]  # at an edge there is no strip
    inside, band = canvas_errors(predicted, canvas, masked, normalized, torch.tensor(corner))
    for i in range(3):
        expected = plain_errors(predicted[i], canvas[i], 4, set(masked[i].tolist()), normalized, corner[i])
        assert (inside[i].item(), band[i].item()) == pytest.approx(expected, rel=1e-5)


def test_visible_patches_count_in_neither_error():
    canvas, predicted = torch.rand(1, 1, 12, 12), torch.zeros(1, 1, 8, 8)
    masked = torch.tensor([[0, 1, 2]])
    before = canvas_errors(predicted, canvas, masked, False)
    changed = canvas.clone()
    changed[:, :, 7:9, 7:9] += 0.5  # inside the visible patch 3, and far from the band
    inside, band = canvas_errors(predicted, changed, masked, False)
    assert inside.item() == before[0].item() and band.item() == pytest.approx(before[1].item(), rel=1e-6)
    changed[:, :, 2:4, 2:4] += 0.5  # inside patch 0
    assert canvas_errors(predicted, changed, masked, False)[0] > inside


def test_the_band_is_four_strips_of_equal_weight():
    """An error in one corner column of a side strip is weighted by the area of the strip, not of the band."""
    canvas = torch.zeros(1, 1, 16, 16)
    predicted = torch.zeros(1, 1, 8, 8)
    predicted[..., 0, 4] = 1.0  # enlarged twice: rows 0 and 1 of the upper strip of 4 x 16
    _, band = canvas_errors(predicted, canvas, torch.tensor([[0]]), False)
    assert band.item() == pytest.approx(4 / (4 * 16))
    predicted = torch.zeros(1, 1, 8, 8)
    predicted[..., 4, 0] = 1.0  # the left strip of 8 x 4
    _, band = canvas_errors(predicted, canvas, torch.tensor([[0]]), False)
    assert band.item() == pytest.approx(4 / (8 * 4))


def test_targets_are_normalised_in_each_channel_of_each_patch():
    images = torch.rand(2, 3, 8, 12) * torch.tensor([1.0, 0.1, 0.5]).view(3, 1, 1)
    every = targets(images, None, True).unflatten(-1, (3, 16))
    assert every.shape == (2, 6, 3, 16)
    assert every.mean(-1).abs().max() < 1e-5 and (every.std(-1) - 1).abs().max() < 1e-3
    asked = torch.tensor([[4, 0], [1, 1]])
    some = targets(images, asked, True).unflatten(-1, (3, 16))
    assert torch.equal(some[1, 0], every[1, 1]) and torch.equal(some[0, 0], every[0, 4])
    plain = targets(images, asked, False)
    assert torch.equal(plain, patchify(images, (4, 4), asked))
    flat = targets(torch.full((1, 3, 4, 4), 0.7), None, True)
    assert flat.isfinite().all() and flat.abs().max() < 0.1


def test_the_truth_is_a_perfect_guess():
    images = torch.rand(2, 3, 8, 8)
    for normalized in (True, False):
        target = targets(images, None, normalized)
        assert torch.equal(answer_of(images, images, normalized), target)


def test_the_scale_of_guesses_is_limited():
    truth = torch.rand(1, 1, 4, 4)
    deviation = truth.std()
    smooth, wild = truth.mean() + 0.1 * (truth - truth.mean()), truth.mean() + 10 * (truth - truth.mean())
    assert answer_of(smooth, truth, True).std().item() == pytest.approx(0.1, rel=1e-3)
    assert answer_of(wild, truth, True).std().item() == pytest.approx(1, rel=1e-3)
    assert answer_of(torch.full_like(truth, 0.3), truth, True).abs().max() < 1e-5
    shifted = answer_of(truth + 5 * deviation, truth, True)  # the mean is never predicted with normalised pixels
    torch.testing.assert_close(shifted, answer_of(truth, truth, True), rtol=1e-3, atol=1e-4)
