"""Beyond Masking's degradations as a task: what is asked of each, what a perfect answer gets, what is refused."""

from typing import get_args

import pytest
import torch
from patchloom.objectives.restoration import centre_of, restoration_targets
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode
from patchloom.patches.tokens import gather_tokens, patchify
from patchloom.tasks.degradations import Degradation
from patchloom.tasks.restore import Restore, block_of
from patchloom.withhold.encoder_input import all_patches, mask_patches

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
DEGRADATIONS = ["masked", "zoom_in", "zoom_out", "fisheye", "blur", "decolorize", "none"]
WITH_RATIOS = [(kind, ratio) for kind in DEGRADATIONS for ratio in (0.0, 0.5) if (kind, ratio) != ("masked", 0.0)]
MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)


def make(size=(32, 32), p=4, channels=3, statistics=True, **options):
    torch.manual_seed(0)
    task = Restore(build_encoder(EncoderSpec("nano", size, p, channels, options=SIZES)), **options)
    if statistics:
        task.normalized_by(MEAN[:channels], STD[:channels])
    return task


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(task, b=3, seed=1):
    """Smooth images [b c H W] of the size that the task asks for, normalised."""
    coarse = torch.rand(b, task.channels, 6, 6, generator=generator(seed))
    return (F.interpolate(coarse, task.augment.size, mode="bicubic").clamp(0, 1) - task.mean) / task.std


def plain(task, images):
    return images * task.std + task.mean


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
@pytest.mark.parametrize(("degradation", "ratio"), WITH_RATIOS)
def test_every_degradation_has_a_loss_that_reaches_every_parameter(degradation, ratio, size):
    task = make(size=size, degradation=degradation, mask_ratio=ratio)
    outcome = task(pictures(task), generator=generator())
    assert outcome.loss.isfinite()
    two = degradation == "zoom_in" and ratio > 0
    assert outcome.metrics.keys() == ({"mask_loss", "band_loss"} if two else set())
    outcome.loss.backward()
    for name, weight in task.named_parameters():
        assert not weight.requires_grad or weight.grad.abs().sum() > 0, name
    assert (task.decoder.mask_token is None) == (ratio == 0)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("degradation", "ratio"), [case for case in WITH_RATIOS if case != ("zoom_in", 0.5)])
def test_a_perfect_answer_has_no_error(degradation, ratio, normalized):
    """The picture asked is the clean one: the whole canvas for zoom_in, its middle for fisheye, else the image."""
    canvas = {"canvas": 40} if degradation in ("zoom_in", "fisheye") else {}
    task = make(degradation=degradation, mask_ratio=ratio, normalized_pixels=normalized, **canvas)
    images = pictures(task)
    _, masked = task.deal(3, generator(), "cpu")
    truth = plain(task, images)
    if degradation == "zoom_in":
        truth = F.interpolate(truth, (32, 32), mode="area")
    elif canvas:
        truth = truth[:, :, 4:36, 4:36]
    perfect = patchify(truth, 4, masked if degradation in ("masked", "none") and ratio else None)
    if normalized:
        colours = perfect.unflatten(-1, (3, 16))
        perfect = ((colours - colours.mean(-1, keepdim=True)) / (colours.std(-1, keepdim=True) + 1e-6)).flatten(2)
    errors = task.errors(perfect, images, masked)
    assert errors.keys() == {"loss"} and errors["loss"].shape == (3,)
    assert errors["loss"].max() < 1e-9
    assert task.errors(perfect + 1, images, masked)["loss"].tolist() == pytest.approx([1] * 3)


def test_a_perfect_answer_has_none_of_the_two_errors():
    """Where it can exist: a canvas twice as large, of pixels that are 2 x 2 alike."""
    task = make(canvas=64, normalized_pixels=False)
    _, masked = task.deal(2, generator(), "cpu")
    small = torch.rand(2, 3, 32, 32)
    images = (small.repeat_interleave(2, 2).repeat_interleave(2, 3) - task.mean) / task.std
    errors = task.errors(patchify(small, 4), images, masked)
    assert errors.keys() == {"loss", "mask_loss", "band_loss"}
    assert all(values.max() < 1e-9 for values in errors.values())


def test_the_band_has_a_perfect_answer_with_normalised_pixels_too():
    task = make(canvas=40)
    images = pictures(task)
    _, masked = task.deal(3, generator(), "cpu")
    target = restoration_targets(F.interpolate(plain(task, images), (32, 32), mode="area"), 4, None, True)
    errors = task.errors(target, images, masked)
    assert errors["band_loss"].max() < 1e-9 < 0.01 < errors["mask_loss"].min()


def test_answers_are_by_the_grid():
    task = make().eval()
    images = pictures(task)
    seen = task.degrader(images, task.mean, task.std, None).images
    visible, masked = task.deal(3, generator(), "cpu")
    tokens = encode(task.encoder, mask_patches(all_patches(seen, 64), visible))
    by_order = gather_tokens(task.recover(seen, visible, masked), torch.cat([visible, masked], dim=1))
    torch.testing.assert_close(by_order, task.decoder(tokens, visible, masked))


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
def test_the_band_weight_shares_the_loss(weight):
    task = make(canvas=40, band_weight=weight)
    outcome = task(pictures(task), generator=generator())
    parts = outcome.metrics
    expected = (1 - weight) * parts["mask_loss"] + weight * parts["band_loss"]
    torch.testing.assert_close(outcome.loss.detach(), expected)
    assert parts["mask_loss"] != parts["band_loss"]


@pytest.mark.parametrize("normalized", [True, False])
def test_what_was_given_is_exact_where_nothing_was_taken(normalized):
    task = make(degradation="none", normalized_pixels=normalized).eval()
    measure = task.measure(pictures(task), generator())
    assert measure.baselines["what was given"].max() < 1e-10
    assert measure.baselines["flat patches"].min() > 1e-4
    masked = make(degradation="none", mask_ratio=0.5, normalized_pixels=normalized).eval()
    assert masked.measure(pictures(task), generator()).baselines["what was given"].min() > 1e-4


@pytest.mark.parametrize("degradation", DEGRADATIONS)
def test_baselines_are_answers_to_the_same_question(degradation):
    task = make(degradation=degradation).eval()
    images = pictures(task)
    measure = task.measure(images, generator())
    assert measure.values.shape == (3,) and measure.baseline_to_beat() == min(measure.means(), key=measure.means().get)
    if task.asks_all and not task.two_losses:
        truth = restoration_targets(task.degrader.frame(plain(task, images)), 4, None, True)
        torch.testing.assert_close(measure.baselines["flat patches"], truth.square().mean((1, 2)))
    assert task.measure(images, generator()).values.tolist() == measure.values.tolist()


@pytest.mark.parametrize(("degradation", "options"), [("zoom_in", {"canvas": 48}), ("zoom_in", {"scale": 0.5})])
def test_what_zooming_in_shows_is_put_at_its_place(degradation, options):
    task = make(degradation=degradation, mask_ratio=0.0, **options)
    images = pictures(task)
    seen, share = task.degrader(images, task.mean, task.std, None)
    assert share.tolist() == pytest.approx([2 / 3 if "canvas" in options else 0.5] * 3)
    placed = task.degrader.placed(seen, share)
    frame = task.degrader.frame(images)
    side = round(32 * share[0].item()) - 4  # less the edge, which is blended with what is drawn out
    apart = (centre_of(placed, (side, side)) - centre_of(frame, (side, side))).abs()
    assert apart.mean() < 0.08 * frame.std()
    assert (placed - frame).abs()[:, :, :2].mean() > 5 * apart.mean()  # around it, the edge is drawn out


MANY = {
    "zoom_in": {"scale": [0.4, 0.9]},
    "zoom_out": {"scale": [0.4, 0.9]},
    "fisheye": {"twist": [0.0, 1.0]},
    "blur": {"kernel": [3, 9]},
    "decolorize": {"saturation": [0.0, 1.0]},
}


@pytest.mark.parametrize("degradation", MANY)
def test_each_image_draws_its_own_strength_from_a_list(degradation):
    task = make(degradation=degradation, **MANY[degradation])
    one = pictures(task, b=1)
    images = one.expand(40, -1, -1, -1)
    seen = task.degrader(images, task.mean, task.std, generator()).images
    kinds = seen.flatten(1).unique(dim=0)
    assert len(kinds) == 2 if degradation in ("zoom_in", "decolorize") else len(kinds) > 20
    again = task.degrader(images, task.mean, task.std, generator()).images
    other = task.degrader(images, task.mean, task.std, generator(1)).images
    assert torch.equal(seen, again) and not torch.equal(seen, other)
    if degradation == "decolorize":
        grey = plain(task, seen).std(1).amax((1, 2)) < 1e-4
        exact = (seen - one).abs().amax((1, 2, 3)) < 1e-5
        assert (grey | exact).all() and 10 < grey.sum() < 30  # saturations 0 and 1
    single = make(degradation=degradation, **{name: values[1] for name, values in MANY[degradation].items()})
    fixed = single.degrader(images, task.mean, task.std, generator()).images
    assert (len(fixed.flatten(1).unique(dim=0)) == 1) == (degradation in ("zoom_in", "decolorize"))


@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
@pytest.mark.parametrize("ratio", [0.75, 0.5])
def test_block_sampling_shows_one_rectangle(size, ratio):
    task = make(size=size, degradation="masked", sampling="block", mask_ratio=ratio)
    visible, masked = task.deal(30, generator(), "cpu")
    rows, columns = task.block
    asked = (1 - ratio) * task.patches
    assert abs(rows * columns - asked) <= max(rows, columns) and visible.shape[1] == rows * columns
    for i in range(30):
        row, column = visible[i] // task.grid[1], visible[i] % task.grid[1]
        assert row.max() - row.min() + 1 == rows and column.max() - column.min() + 1 == columns
        assert sorted(visible[i].tolist() + masked[i].tolist()) == list(range(task.patches))
    assert len(visible[:, 0].unique()) > 2
    assert task(pictures(task), generator=generator()).loss.isfinite()


def test_blocks_are_like_the_grid():
    assert block_of((14, 14), 0.25) == (7, 7)
    assert block_of((14, 14), 0.2) == (6, 6)
    assert block_of((4, 16), 0.25) == (2, 8)
    assert block_of((8, 8), 0.001) == (1, 1)


def test_the_default_is_the_papers_best():
    task = make(size=(224, 224), p=16)
    assert (task.degrader.kind, task.augment.size, task.hands) == ("zoom_in", (320, 320), (49, 147))
    assert task.two_losses and task.band_weight == 0.2
    strengths = {
        kind: make(size=(224, 224), p=16, degradation=kind).degrader.strengths for kind in MANY if kind != "zoom_in"
    }
    assert strengths == {"zoom_out": (160 / 224,), "fisheye": (0.2, 0.25), "blur": (9.0,), "decolorize": (0.3,)}
    assert make(degradation="blur").hands == (64, 0) and make(degradation="blur").degrader.strengths == (3.0,)


@pytest.mark.parametrize(("canvas", "size", "expected"), [(40, (32, 32), (40, 40)), (36, (24, 40), (36, 60))])
@pytest.mark.parametrize("degradation", ["zoom_in", "fisheye"])
def test_a_canvas_keeps_the_aspect_and_shows_its_middle(degradation, canvas, size, expected):
    task = make(size=size, degradation=degradation, canvas=canvas, mask_ratio=0.0)
    assert task.augment.size == task.degrader.canvas == expected
    assert all((whole - part) % 2 == 0 for whole, part in zip(expected, size, strict=True))
    images = pictures(task)
    seen = task.degrader(images, task.mean, task.std, generator()).images
    assert seen.shape[2:] == size
    if degradation == "zoom_in":
        assert torch.equal(seen, centre_of(images, size))


@pytest.mark.parametrize("degradation", ["masked", "zoom_in", "zoom_out", "fisheye", "decolorize", "none"])
def test_the_statistics_by_which_images_are_normalised_change_no_loss(degradation):
    """If the patch projection makes up for them. (A blur has their mean colour around the image, and is left out.)"""

    def loss(mean, std):
        task = make(degradation=degradation)
        task.normalized_by(mean, std)
        project = task.encoder.patch_embed.proj
        with torch.no_grad():
            weight = project.weight.clone()
            project.weight.mul_(task.std)
            project.bias.add_((weight * task.mean).sum((1, 2, 3)))
        images = (plain_pictures - task.mean) / task.std
        return task.eval()(images, generator=generator()), task.measure(images, generator()).baselines

    task = make(degradation=degradation, statistics=False)
    plain_pictures = pictures(task)
    one, baselines = loss((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    two, same = loss((0.6, 0.1, 0.45), (0.1, 0.5, 0.3))
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.metrics, two.metrics, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(baselines, same, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 5])
def test_images_of_other_channels(channels):
    with pytest.raises(PatchloomError, match=f"decolorize is for images of 3 channels, and these have {channels}"):
        make(channels=channels, statistics=False, degradation="decolorize")
    for degradation in ("zoom_in", "zoom_out", "fisheye", "blur"):
        task = make(channels=channels, statistics=False, degradation=degradation)
        assert task(pictures(task), generator=generator()).loss.isfinite()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"degradation": "masked", "mask_ratio": 0.0}, "masks nothing: raise --task.mask_ratio"),
        ({"size": (8, 8), "degradation": "masked", "sampling": "block", "mask_ratio": 0.25}, "masks nothing"),
        ({"degradation": "melt"}, "--task.degradation cannot be melt: it takes masked or zoom_in or"),
        ({"sampling": "grid"}, "--task.sampling cannot be grid"),
        ({"scale": 0.0}, r"the scale of zoom_in must be shares of the side in \(0, 1\], not \[0.0\]"),
        ({"degradation": "zoom_out", "scale": [0.5, 1.5]}, "the scale of zoom_out must be shares"),
        ({"degradation": "zoom_out", "scale": []}, "the scale of zoom_out must be"),
        ({"degradation": "fisheye", "twist": -0.1}, "the twist of fisheye must be numbers in"),
        ({"degradation": "blur", "kernel": 4}, "the kernel of blur must be odd sides in pixels"),
        ({"degradation": "blur", "kernel": 3.5}, "the kernel of blur must be odd sides in pixels"),
        ({"degradation": "blur", "kernel": 33}, "the kernel of blur must be odd sides in pixels"),
        ({"degradation": "decolorize", "saturation": 1.2}, "the saturation of decolorize must be numbers in"),
        ({"degradation": "blur", "scale": 0.5}, "--task.scale is not for the degradation blur: leave it out"),
        ({"degradation": "masked", "kernel": 3}, "--task.kernel is not for the degradation masked"),
        ({"canvas": 37}, "--task.canvas 37 does not go with zoom_in: give a size above 32 by an even number"),
        ({"canvas": 30}, "--task.canvas 30 does not go with zoom_in"),
        ({"canvas": 40, "scale": 0.5}, "without --task.scale"),
        ({"degradation": "blur", "canvas": 40}, "--task.canvas 40 does not go with blur"),
        ({"band_weight": 1.5}, "band_weight is a share from 0 to 1, not 1.5"),
        ({"size": (8, 8), "p": 1}, "within patches of one pixel there is nothing to normalise"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_every_degradation_was_tried():
    assert set(DEGRADATIONS) == set(get_args(Degradation)) == {"masked", "none", *MANY}
