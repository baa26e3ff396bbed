"""Beyond Masking's degradations as a task: targets, losses of perfect predictions, and errors."""

import pytest
import torch
from restoring import DEGRADATIONS, MANY, WITH_RATIOS, degraded, make, pictures, plain
from small import seeded
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, outline
from patchloom.patches.tokens import gather_tokens, in_grid_order, patchify, unpatchify
from patchloom.questions.pixels import Pixels
from patchloom.tasks import build_task
from patchloom.tasks.restore import block_of
from patchloom.withhold.encoder_input import mask_patches


def encoded(task, images, given=None):
    return task.encode(images, task.given(images, seeded()) if given is None else given)


def in_each_channel(patches):
    """Normalise patches [b j 3*16] in each channel."""
    colours = patches.unflatten(-1, (3, 16))
    return ((colours - colours.mean(-1, keepdim=True)) / (colours.std(-1, keepdim=True) + 1e-6)).flatten(2)


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
@pytest.mark.parametrize(("degradation", "ratio"), WITH_RATIOS)
def test_every_degradation_has_a_loss_that_reaches_every_parameter(degradation, ratio, size):
    task = make(size=size, degradation=degradation, mask_ratio=ratio)
    outcome = task(pictures(task), generator=seeded())
    assert outcome.loss.isfinite()
    two = degradation == "zoom_in" and ratio > 0
    assert outcome.metrics.keys() == ({"mask_loss", "band_loss"} if two else set())
    outcome.loss.backward()
    for name, weight in task.named_parameters():
        assert not weight.requires_grad or weight.grad.abs().sum() > 0, name
    assert (task.questions["pixels"].decoder.mask_token is None) == (ratio == 0)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("degradation", "ratio"), [case for case in WITH_RATIOS if case != ("zoom_in", 0.5)])
def test_a_perfect_prediction_has_no_error(degradation, ratio, normalized):
    """The target is the clean image: the whole canvas for zoom_in, its centre if it is bent, else the image."""
    canvas = {"canvas": 40} if degradation in ("zoom_in", "fisheye", "wave") else {}
    task = make(degradation=degradation, mask_ratio=ratio, normalized_pixels=normalized, **canvas)
    images, question = pictures(task), task.questions["pixels"]
    made = encoded(task, images)
    truth = plain(task, images)
    if degradation == "zoom_in":
        truth = F.interpolate(truth, (32, 32), mode="area")
    elif canvas:
        truth = truth[:, :, 4:36, 4:36]
    asked, answers = question.answer(made)
    only_masked = degradation in ("masked", "none") and ratio
    everything = torch.cat([made.given.visible, made.given.masked], dim=1)
    assert torch.equal(asked, made.given.masked if only_masked else everything)
    perfect = patchify(truth, (4, 4), asked)
    perfect = in_each_channel(perfect) if normalized else perfect
    assert perfect.shape == answers.shape
    errors = question.errors(made, asked, perfect)
    assert errors.keys() == {"loss"} and errors["loss"].shape == (3,)
    assert errors["loss"].max() < 1e-9
    assert question.errors(made, asked, perfect + 1)["loss"].tolist() == pytest.approx([1] * 3)


def errors_of(task, images, picture):
    """Return the errors of a picture [b c h w] as prediction for images: in pixels from 0 to 1, or normalised ones."""
    made, question = encoded(task, images), task.questions["pixels"]
    asked, _ = question.answer(made)
    return question.errors(made, asked, gather_tokens(picture, asked))


def test_a_perfect_prediction_has_neither_error():
    """A canvas twice as large, of equal 2 x 2 pixels, has an exact prediction."""
    task = make(canvas=64, normalized_pixels=False)
    small = torch.rand(2, 3, 32, 32)
    images = (small.repeat_interleave(2, 2).repeat_interleave(2, 3) - task.mean) / task.std
    errors = errors_of(task, images, patchify(small, (4, 4)))
    assert errors.keys() == {"loss", "mask_loss", "band_loss"}
    assert all(values.max() < 1e-9 for values in errors.values())


def test_the_band_has_a_perfect_prediction_with_normalised_pixels():
    task = make(canvas=40)
    images = pictures(task)
    target = in_each_channel(patchify(F.interpolate(plain(task, images), (32, 32), mode="area"), (4, 4)))
    errors = errors_of(task, images, target)
    assert errors["band_loss"].max() < 1e-9 < 0.01 < errors["mask_loss"].min()


@pytest.mark.parametrize("normalized", [True, False])
def test_the_original_band_is_an_optional_target(normalized):
    """Appendix A.2: the target is the band of the original canvas, normalised by the patches that predict it."""
    task = make(canvas=40, band_weight=1.0, normalized_pixels=normalized, band_target="original")
    images = pictures(task)
    canvas, answers = plain(task, images), torch.randn(3, 64, 48, generator=seeded())
    found = errors_of(task, images, answers)["band_loss"]

    def grown(patches):
        return F.interpolate(unpatchify(patches, (4, 4), (8, 8)), (40, 40), mode="area")

    target = canvas
    if normalized:
        colours = patchify(F.interpolate(canvas, (32, 32), mode="area"), (4, 4)).unflatten(-1, (3, 16))
        mean, deviation = (
            grown(one.expand_as(colours).flatten(2))
            for one in (colours.mean(-1, keepdim=True), colours.std(-1, keepdim=True) + 1e-6)
        )
        target = (canvas - mean) / deviation
    apart = (grown(answers) - target).square()
    strips = apart[:, :, :4], apart[:, :, 36:], apart[:, :, 4:36, :4], apart[:, :, 4:36, 36:]
    torch.testing.assert_close(found, sum(strip.mean((1, 2, 3)) for strip in strips))
    assert make(canvas=40, normalized_pixels=normalized).questions["pixels"].band_target == (
        "grown" if normalized else "original"
    )


def test_predictions_belong_to_the_predicted_patches():
    task = make().eval()
    images, question = pictures(task), task.questions["pixels"]
    made = encoded(task, images)
    asked, answers = question.answer(made)
    visible, masked = made.given.visible, made.given.masked
    whole = in_grid_order(question.decoder(made.tokens, visible, masked), visible, masked)
    torch.testing.assert_close(in_grid_order(answers, asked), whole)
    torch.testing.assert_close(gather_tokens(whole, asked), answers)
    # in any order of the visible patches
    other = degraded(task, images, None)
    order = torch.randperm(visible.shape[1])
    other = mask_patches(other, visible[:, order], masked)
    found, same = question.answer(encoded(task, images, other))
    torch.testing.assert_close(in_grid_order(same, found), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
def test_the_band_weight_shares_the_loss(weight):
    task = make(canvas=40, band_weight=weight)
    outcome = task(pictures(task), generator=seeded())
    parts = outcome.metrics
    expected = (1 - weight) * parts["mask_loss"] + weight * parts["band_loss"]
    torch.testing.assert_close(outcome.loss.detach(), expected)
    assert parts["mask_loss"] != parts["band_loss"]


@pytest.mark.parametrize("normalized", [True, False])
def test_the_input_is_an_exact_baseline_without_a_degradation(normalized):
    task = make(degradation="none", normalized_pixels=normalized).eval()
    measure = task.measure(pictures(task), seeded())
    assert measure.baselines["what was given"].max() < 1e-10
    assert measure.baselines["flat patches"].min() > 1e-4
    masked = make(degradation="none", mask_ratio=0.5, normalized_pixels=normalized).eval()
    assert masked.measure(pictures(task), seeded()).baselines["what was given"].min() > 1e-4


@pytest.mark.parametrize("degradation", DEGRADATIONS)
def test_baselines_predict_the_same_targets(degradation):
    task = make(degradation=degradation).eval()
    images = pictures(task)
    measure = task.measure(images, seeded())
    assert measure.values.shape == (3,) and measure.baseline_to_beat() == min(measure.means(), key=measure.means().get)
    question = task.questions["pixels"]
    if degradation != "masked" and question.band_weight is None:
        truth = in_each_channel(patchify(task.degradation.frame(plain(task, images)), (4, 4)))
        torch.testing.assert_close(measure.baselines["flat patches"], truth.square().mean((1, 2)))
    assert task.measure(images, seeded()).values.tolist() == measure.values.tolist()


@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
@pytest.mark.parametrize("ratio", [0.75, 0.5])
def test_block_sampling_shows_one_rectangle(size, ratio):
    task = make(size=size, degradation="masked", sampling="block", mask_ratio=ratio)
    given = task.given(torch.randn(30, 3, *size), seeded())
    visible, masked, (rows, columns), n = given.visible, given.masked, task.block, task.geometry.n
    asked = (1 - ratio) * n
    assert abs(rows * columns - asked) <= max(rows, columns) and visible.shape[1] == rows * columns
    for i in range(30):
        row, column = visible[i] // task.geometry.grid[1], visible[i] % task.geometry.grid[1]
        assert row.max() - row.min() + 1 == rows and column.max() - column.min() + 1 == columns
        assert sorted(visible[i].tolist() + masked[i].tolist()) == list(range(n))
    assert len(visible[:, 0].unique()) > 2
    assert task(pictures(task), generator=seeded()).loss.isfinite()


@pytest.mark.parametrize(("sampling", "ratio"), [("centre", 0.75), ("surroundings", 0.25)])
def test_a_central_block_or_its_surroundings_enter(sampling, ratio):
    task = make(degradation="masked", sampling=sampling, mask_ratio=ratio)
    images = pictures(task)
    given = task.given(images)
    square = [row * 8 + column for row in range(2, 6) for column in range(2, 6)]
    rest = [patch for patch in range(64) if patch not in square]
    visible, masked = (square, rest) if sampling == "centre" else (rest, square)
    assert given.visible.tolist() == [visible] * 3 and given.masked.tolist() == [masked] * 3
    asked, answers = task.questions["pixels"].answer(encoded(task, images, given))
    assert asked.tolist() == [masked] * 3 and answers.shape[1] == len(masked)


def test_a_central_block_takes_no_draws():
    task, generator = make(degradation="masked", sampling="centre"), seeded()
    task.given(pictures(task), generator)
    assert torch.rand((), generator=generator) == torch.rand((), generator=seeded())


def test_targets_of_whole_patches_are_maes():
    """Targets of normalised images, by mean and variance of all numbers of a patch; right predictions have no error."""
    task = make(degradation="zoom_out", target_norm="patch")
    images, question = pictures(task), task.questions["pixels"]
    made = encoded(task, images)
    asked, _ = question.answer(made)
    patches = patchify(images, (4, 4), asked)
    perfect = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(question.targets(made, asked), perfect)
    assert question.errors(made, asked, perfect)["loss"].max() < 1e-9
    assert (make(degradation="zoom_out").questions["pixels"].targets(made, asked) - perfect).abs().mean() > 0.1
    pixels = Pixels(task.geometry, question.decoder)
    torch.testing.assert_close(question.targets(made, asked), pixels.targets(made, asked))


def test_right_predictions_of_whole_patches_are_drawn_right():
    task = make(target_norm="patch", mask_ratio=0.0, scale=0.5)
    images, question = pictures(task), task.questions["pixels"]
    made = encoded(task, images)
    asked, _ = question.answer(made)
    patches = patchify(images, (4, 4), asked)
    torch.testing.assert_close(question.picture(made, asked, patches), images)
    flat = question.measure(made).baselines["flat patches"]
    patches = patches - patches.mean(-1, keepdim=True)
    expected = (patches.square() / (patches.var(-1, keepdim=True) + 1e-6)).mean((1, 2))  # it predicts zero
    torch.testing.assert_close(flat, expected, rtol=1e-4, atol=1e-5)
    assert "mean squared error" in question.sheets(made)[0].caption


def test_blocks_are_like_the_grid():
    assert block_of((14, 14), 0.25) == (7, 7)
    assert block_of((14, 14), 0.2) == (6, 6)
    assert block_of((4, 16), 0.25) == (2, 8)
    assert block_of((8, 8), 0.001) == (1, 1)
    assert (block_of((1, 98), 0.5), block_of((98, 1), 0.5)) == ((1, 49), (49, 1))


def test_the_default_is_the_papers_best():
    task = make(size=(224, 224), p=16)
    assert (task.degradation.kind, task.augment.size, task.sizes) == ("zoom_in", (320, 320), (49, 147))
    assert task.questions["pixels"].band_weight == 0.2
    strengths = {
        kind: make(size=(224, 224), p=16, degradation=kind).degradation.strengths for kind in MANY if kind != "zoom_in"
    }
    usual = {"zoom_out": (160 / 224,), "fisheye": (0.2, 0.25), "blur": (9.0,), "decolorize": (0.3,)}
    assert strengths == usual | {"wave": (0.05, 0.1)}
    assert make(degradation="blur").sizes == (64, 0) and make(degradation="blur").degradation.strengths == (3.0,)


@pytest.mark.parametrize(("name", "sizes"), [("base", (384, 4, 6)), ("large", (512, 4, 8))])
def test_the_decoder_is_the_programs_for_its_encoder(name, sizes):
    encoder = outline(EncoderSpec(f"vit_{name}_patch16_224", (224, 224), 16))
    decoder = build_task({"name": "restore"}, encoder).questions["pixels"].decoder
    assert (decoder.embed.out_features, len(decoder.blocks), decoder.blocks[0].attn.num_heads) == sizes


@pytest.mark.parametrize("degradation", ["masked", "zoom_in", "zoom_out", "fisheye", "decolorize", "none"])
def test_normalisation_statistics_change_no_loss(degradation):
    """Provided that the patch projection compensates. (Blur and wave are padded with the mean colour: left out.)"""

    def loss(mean, std):
        task = make(degradation=degradation)
        task.normalized_by(mean, std)
        project = task.encoder.patch_embed.proj
        with torch.no_grad():
            weight = project.weight.clone()
            project.weight.mul_(task.std)
            project.bias.add_((weight * task.mean).sum((1, 2, 3)))
        images = (plain_pictures - task.mean) / task.std
        return task.eval()(images, generator=seeded()), task.measure(images, seeded()).baselines

    task = make(degradation=degradation, statistics=False)
    plain_pictures = pictures(task)
    one, baselines = loss((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    two, same = loss((0.6, 0.1, 0.45), (0.1, 0.5, 0.3))
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.metrics, two.metrics, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(baselines, same, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"degradation": "masked", "mask_ratio": 0.0}, "masks nothing: raise --task.mask_ratio"),
        ({"size": (8, 8), "degradation": "masked", "sampling": "block", "mask_ratio": 0.25}, "masks nothing"),
        ({"sampling": "grid"}, "--task.sampling cannot be grid"),
        (
            {"degradation": "blur", "sampling": "centre"},
            "--task.sampling centre has no effect here, because a mask ratio",
        ),
        ({"size": (8, 8), "degradation": "masked", "sampling": "surroundings"}, "leaves no surroundings: lower"),
        ({"target_norm": "whole"}, "--task.target_norm cannot be whole: it takes channel"),
        ({"target_norm": "patch", "normalized_pixels": False}, "--task.target_norm has no effect here, because pixels"),
        ({"band_weight": 1.5}, "band_weight must lie in .0, 1., not 1.5"),
        ({"mask_ratio": 0.0, "band_target": "grown"}, "--task.band_target has no effect here, because only zooming in"),
        ({"band_target": "whole"}, "--task.band_target cannot be whole"),
        ({"size": (8, 8), "p": 1}, "within patches of one pixel there is nothing to normalise"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)
