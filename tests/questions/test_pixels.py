"""Prediction of pixels: trivial baselines, correct predictions, and Beyond Masking's two losses."""

from dataclasses import replace

import pytest
import torch
from answering import Answers, encoded_of, geometry_of, masking
from golden import close
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.patches.partition import complement, random_partition
from patchloom.patches.pictures import fill_holes
from patchloom.patches.tokens import in_grid_order, patch_statistics, patchify
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


@pytest.mark.parametrize("normalized", [True, False])
def test_the_blurred_copy_has_to_be_beaten_and_zero_if_targets_are_normalised(normalized):
    images = torch.randn(2, 1, 16, 16)
    encoded = encoded_of(images, masking(images, 4, *random_partition(2, 16, (4, 12))))
    measured = asking(images, normalized, torch.zeros(2, 12, 16)).measure(encoded)
    assert measured.has_to_be_beaten("blurred copy") and not measured.has_to_be_beaten("mean colour")
    assert measured.has_to_be_beaten("flat patches") == normalized
    if normalized:
        torch.testing.assert_close(measured.values, measured.baselines["flat patches"])


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


def blank_input(images, blank):
    """Return input with all patches, those of ``blank`` [b k] without content."""
    return encoded_of(images, blank_patches(all_patches(images, geometry_of(images, 4).n), blank))


def blank_question(images, blank, visible_asked):
    answers = torch.zeros(len(images), visible_asked, 48)
    return Pixels(geometry_of(images, 4), Answers(answers, visible_asked), False, blank=blank)


BLANK = torch.tensor([[0, 1, 2], [5, 6, 7]])
UNLIKE = torch.tensor([[0, 1, 2], [5, 5, 7]])


def test_the_right_number_of_blank_patches_is_measured_and_told_from_masked_ones():
    images = torch.randn(2, 3, 16, 16)
    encoded, question = blank_input(images, BLANK), blank_question(images, 3, 3)
    assert question(encoded, 0.0).loss.isfinite() and question.measure(encoded).values.isfinite().all()
    visible, masked = random_partition(2, 16, (4, 12))
    given = masking(images, 4, visible, masked)
    removed = asking(images, False, torch.zeros(2, 12, 48)).sheets(encoded_of(images, given))[0].caption
    assert removed.startswith("75% of the patches are masked;") and "mask token" not in removed
    assert "19% of the patches are replaced by a mask token;" in question.sheets(encoded)[0].caption
    both = blank_patches(given, torch.tensor([[0, 1], [1, 3]]))
    assert "75% of the patches are masked and 12%" in blank_question(images, 2, 2).withheld(both)


@pytest.mark.parametrize(
    ("which", "blank", "asked", "call", "words"),
    [
        (BLANK, 0, 3, "measure", "blank=0.*blank=k"),
        (BLANK, 2, 2, "measure", "blank=2.*blank=k"),
        (BLANK, 4, 4, "sheets", "blank=4.*blank=k"),
        (UNLIKE, 3, 3, "measure", "2 to 3"),
        (BLANK, 0, 3, "forward", "blank=0, but some"),
        (None, 3, 3, "forward", "blank=3, but none"),
        (BLANK, 3, 0, "forward", "predicts nothing.*visible_asked=3"),
    ],
)
def test_another_number_of_blank_patches_is_an_error(which, blank, asked, call, words):
    """A step tells some from none, without waiting for a GPU; measures and pictures count them."""
    images, everything = torch.randn(2, 3, 16, 16), torch.arange(16).expand(2, -1)
    without = encoded_of(images, masking(images, 4, everything, everything[:, :0]))
    encoded = without if which is None else blank_input(images, which)
    progress = [0.0] if call == "forward" else []
    with pytest.raises(PatchloomError, match=words):
        getattr(blank_question(images, blank, asked), call)(encoded, *progress)


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


def answer_of(guess, truth, normalized):
    """Convert a guessed picture to predictions for all patches."""
    question = restoring(truth, normalized)
    return question.as_answer(guess, patchify(truth, (4, 4)), torch.arange(question.geometry.n).expand(len(truth), -1))


def area(image, size):
    """Resize [c h w] by averaging: each new pixel is the mean of all old ones that it overlaps."""
    return F.interpolate(image[None], size, mode="area")[0]


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
    grown = area(predicted, (whole_h, whole_w))
    hole, strips = [], [[], [], [], []]
    for c in range(len(canvas)):
        truth = canvas[c, top : top + h, left : left + w]
        truth = normalized_by_patch(truth, p) if normalized else truth
        small = area(canvas[c : c + 1], (h, w))[0]
        target = area((normalized_by_patch(small, p) if normalized else small)[None], (whole_h, whole_w))[0]
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
@pytest.mark.parametrize(
    ("size", "whole", "corners"),
    [
        ((8, 12), (12, 18), [None] * 3),
        ((8, 8), (10, 10), [None] * 3),
        ((8, 12), (12, 18), [(0, 0), (4, 3), (1, 6)]),  # at an edge there is no strip
    ],
)
def test_both_errors_against_a_loop(size, whole, corners, normalized):
    n = size[0] * size[1] // 16
    predicted, canvas = torch.randn(3, 2, *size), torch.rand(3, 2, *whole)
    _, masked = random_partition(3, n, (1, n - 1))
    corner = None if None in corners else torch.tensor(corners)
    inside, band = canvas_errors(predicted, canvas, masked, normalized, corner)
    for i in range(3):
        expected = plain_errors(predicted[i], canvas[i], 4, set(masked[i].tolist()), normalized, corners[i])
        assert (inside[i].item(), band[i].item()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_errors_and_gradients_of_a_canvas_do_not_depend_on_the_images_computed_at_once(at_once, monkeypatch):
    canvas, answers = torch.rand(3, 2, 12, 18), torch.randn(3, 6, 32, requires_grad=True)
    visible, masked = random_partition(3, 6, (2, 4))
    question = restoring(torch.empty(3, 2, 8, 12), True, (12, 18), band_weight=0.3)
    encoded = encoded_of(canvas, masking(torch.empty(3, 2, 8, 12), 4, visible, masked))
    mask, band = question.canvas_errors(encoded, in_grid_order(answers, visible, masked))
    whole = 0.7 * mask + 0.3 * band
    monkeypatch.setattr("patchloom.questions.pixels.rows_at_once", lambda images: at_once)
    found = question.errors(encoded, torch.cat([visible, masked], dim=1), answers)
    close(found["loss"], whole)
    close(found["mask_loss"], mask)
    close(found["band_loss"], band)
    slopes = [torch.autograd.grad(loss @ torch.tensor([1.0, 2.0, 3.0]), answers)[0] for loss in (found["loss"], whole)]
    torch.testing.assert_close(*slopes)


def test_the_scale_of_guesses_is_limited():
    truth = torch.rand(1, 1, 4, 4)
    deviation = truth.std()
    smooth, wild = truth.mean() + 0.1 * (truth - truth.mean()), truth.mean() + 10 * (truth - truth.mean())
    assert answer_of(smooth, truth, True).std().item() == pytest.approx(0.1, rel=1e-3)
    assert answer_of(wild, truth, True).std().item() == pytest.approx(1, rel=1e-3)
    assert answer_of(torch.full_like(truth, 0.3), truth, True).abs().max() < 1e-5
    shifted = answer_of(truth + 5 * deviation, truth, True)  # the mean is never predicted with normalised pixels
    torch.testing.assert_close(shifted, answer_of(truth, truth, True), rtol=1e-3, atol=1e-4)
