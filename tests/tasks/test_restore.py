"""Beyond Masking's degradations as a task: targets, losses of perfect predictions, and errors."""

import pytest
import torch
from refusing import refusal
from small import SIZES, pixel_targets, seeded
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as V

from patchloom.nets.build import EncoderSpec, build_encoder, outline
from patchloom.options.tasks import block_of
from patchloom.patches.tokens import gather_tokens, patchify, unpatchify
from patchloom.tasks import build_task, check_step_size
from patchloom.tasks.restore import Restore
from patchloom.withhold.canvas import centre_crop, shrink
from patchloom.withhold.encoder_input import all_patches

DEGRADATIONS = ["masked", "zoom_in", "zoom_out", "fisheye", "wave", "blur", "decolorize", "none"]
MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)


def make(size=(32, 32), p=4, channels=3, statistics=True, **options):
    torch.manual_seed(0)
    task = Restore(build_encoder(EncoderSpec("nano", size, p, channels, options=SIZES)), **options)
    if statistics:
        task.normalized_by(MEAN[:channels], STD[:channels])
    return task


def pictures(task, b=3, seed=1):
    """Return smooth normalised images [b c H W] of the task's input size."""
    coarse = torch.rand(b, task.geometry.channels, 6, 6, generator=seeded(seed))
    return (F.interpolate(coarse, task.augment.size, mode="bicubic").clamp(0, 1) - task.mean) / task.std


def plain(task, images):
    return images * task.std + task.mean


def degraded(task, images, generator=None):
    return task.degradation(all_patches(images, task.geometry.n), task.mean, task.std, generator)


def encoded(task, images, given=None):
    return task.encode(images, task.given(images, seeded()) if given is None else given)


def in_each_channel(patches):
    """Normalise patches [b j 3*16] in each channel."""
    colours = patches.unflatten(-1, (3, 16))
    return ((colours - colours.mean(-1, keepdim=True)) / (colours.std(-1, keepdim=True) + 1e-6)).flatten(2)


# nothing is asked of unmasked images; and two errors of a part are in the golden vector
APART = [("masked", 0.0), ("zoom_in", 0.5)]


@pytest.mark.parametrize(
    ("degradation", "ratio"),
    [(kind, ratio) for kind in DEGRADATIONS for ratio in (0.0, 0.5) if (kind, ratio) not in APART],
)
def test_a_perfect_prediction_has_no_error(degradation, ratio):
    """The target is the clean image: the whole canvas for zoom_in, its centre if it is bent, else the image."""
    canvas = {"canvas": 40} if degradation in ("zoom_in", "fisheye", "wave") else {}
    for normalized in (True, False):
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


@pytest.mark.parametrize(("normalized", "norm"), [(False, "auto"), (True, "channel"), (True, "patch")])
def test_the_original_band_is_an_optional_target(normalized, norm):
    """Appendix A.2: the target is the band of the original canvas, normalised by the patches that predict it."""
    task = make(canvas=40, band_weight=1.0, normalized_pixels=normalized, band_target="original", target_norm=norm)
    images = pictures(task)
    canvas, answers = images if norm == "patch" else plain(task, images), torch.randn(3, 64, 48, generator=seeded())
    found = errors_of(task, images, answers)["band_loss"]

    def grown(patches):
        return F.interpolate(unpatchify(patches, (4, 4), (8, 8)), (40, 40), mode="area")

    target = canvas
    if normalized:
        small = patchify(F.interpolate(canvas, (32, 32), mode="area"), (4, 4))
        parts = small[:, :, None] if norm == "patch" else small.unflatten(-1, (3, 16))
        spread = parts.var(-1, keepdim=True)
        spread = (spread + 1e-6).sqrt() if norm == "patch" else spread.sqrt() + 1e-6
        mean, deviation = (grown(one.expand_as(parts).flatten(2)) for one in (parts.mean(-1, keepdim=True), spread))
        target = (canvas - mean) / deviation
    apart = (grown(answers) - target).square()
    strips = apart[:, :, :4], apart[:, :, 36:], apart[:, :, 4:36, :4], apart[:, :, 4:36, 36:]
    torch.testing.assert_close(found, sum(strip.mean((1, 2, 3)) for strip in strips))
    assert make(canvas=40, normalized_pixels=normalized).questions["pixels"].band_target == (
        "grown" if normalized else "original"
    )


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
    if degradation == "none":  # the input is exact, unless it has holes
        masked = make(degradation="none", mask_ratio=0.5).eval().measure(images, seeded())
        assert measure.baselines["what was given"].max() < 1e-10 < 1e-4 < masked.baselines["what was given"].min()


@pytest.mark.parametrize("size", [(32, 32), (16, 40)])
@pytest.mark.parametrize("ratio", [0.75, 0.5])
def test_block_sampling_shows_one_rectangle(size, ratio):
    task = make(size=size, degradation="masked", sampling="block", mask_ratio=ratio)
    given = task.given(torch.randn(30, 3, *size), seeded())
    visible, (rows, columns), asked = given.visible, task.block, (1 - ratio) * task.geometry.n
    assert abs(rows * columns - asked) <= max(rows, columns) and visible.shape[1] == rows * columns
    for i in range(30):
        row, column = visible[i] // task.geometry.grid[1], visible[i] % task.geometry.grid[1]
        assert row.max() - row.min() + 1 == rows and column.max() - column.min() + 1 == columns
    assert len(visible[:, 0].unique()) > 2


@pytest.mark.parametrize(("sampling", "ratio"), [("centre", 0.75), ("surroundings", 0.25)])
def test_a_central_block_or_its_surroundings_enter_without_a_draw(sampling, ratio):
    task, generator = make(degradation="masked", sampling=sampling, mask_ratio=ratio), seeded()
    images = pictures(task)
    given = task.given(images, generator)
    assert torch.rand((), generator=generator) == torch.rand((), generator=seeded())
    square = [row * 8 + column for row in range(2, 6) for column in range(2, 6)]
    rest = [patch for patch in range(64) if patch not in square]
    visible, masked = (square, rest) if sampling == "centre" else (rest, square)
    assert given.visible.tolist() == [visible] * 3 and given.masked.tolist() == [masked] * 3
    asked, answers = task.questions["pixels"].answer(encoded(task, images, given))
    assert asked.tolist() == [masked] * 3 and answers.shape[1] == len(masked)


def test_targets_of_whole_patches_are_maes_and_right_predictions_are_drawn_right():
    task = make(degradation="zoom_out", target_norm="patch", mask_ratio=0.0)
    images, question = pictures(task), task.questions["pixels"]
    made = encoded(task, images)
    asked, _ = question.answer(made)
    perfect = gather_tokens(pixel_targets(images, 4), asked)
    torch.testing.assert_close(question.targets(question.truth(made), asked), perfect)
    assert question.errors(made, asked, perfect)["loss"].max() < 1e-9
    torch.testing.assert_close(question.picture(made, asked, patchify(images, (4, 4), asked)), images)
    flat = question.measure(made).baselines["flat patches"]
    torch.testing.assert_close(flat, perfect.square().mean((1, 2)), rtol=1e-4, atol=1e-5)  # it predicts zero


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
    usual = {
        "zoom_out": (160 / 224,),
        "fisheye": (0.2, 0.25),
        "blur": (9.0,),
        "decolorize": (0.3,),
        "wave": (0.05, 0.1),
    }
    for kind, strengths in usual.items():
        assert make(size=(224, 224), p=16, degradation=kind).degradation.strengths == strengths
    assert make(degradation="blur").sizes == (64, 0) and make(degradation="blur").degradation.strengths == (3.0,)
    for name, sizes in {"small": (384, 4, 6), "large": (512, 4, 8)}.items():
        encoder = outline(EncoderSpec(f"vit_{name}_patch16_224", (224, 224), 16))
        decoder = build_task({"name": "restore"}, encoder).questions["pixels"].decoder
        assert (decoder.embed.out_features, len(decoder.blocks), decoder.blocks[0].attn.num_heads) == sizes


@pytest.mark.parametrize("place", ["auto", "random"])
@pytest.mark.parametrize("options", [{"canvas": 48}, {"scale": 0.5}])
def test_a_zoomed_part_is_put_at_its_place(options, place):
    """On images of row and column numbers, in which each pixel has its own coordinates."""
    task, generator = make(channels=2, statistics=False, mask_ratio=0.0, zoom_place=place, **options), seeded()
    h, w = task.augment.size
    rows, columns = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
    images = torch.stack([rows / h, columns / w]).expand(40, -1, -1, -1)
    given = degraded(task, images, generator)
    seen = 32 if "canvas" in options else 16
    assert given.side_share.tolist() == pytest.approx([seen / h] * 40)
    if place == "random":
        corners = given.corner
        assert (corners >= 0).all() and corners.max() <= h - seen and len(corners.unique(dim=0)) > 20
    else:
        assert given.corner is None
        corners = torch.full((40, 2), (h - seen) // 2)
        if "canvas" in options:
            assert torch.rand((), generator=generator) == torch.rand((), generator=seeded())
    first = given.images[:, :, 0, 0] * torch.tensor([h, w])  # its centre, half a pixel in; at the edge less when larger
    assert (first - corners - 0.5).abs().max() < 1e-3
    placed = task.degradation.in_frame(given.images, given.side_share, given.corner)
    frame = task.degradation.frame(images)
    for one, whole, corner in zip(placed, frame, corners.tolist(), strict=True):
        top, left = (round(start * 32 / h) + 2 for start in corner)
        inner = round(seen * 32 / h) - 4
        parts = (picture[:, top : top + inner, left : left + inner] for picture in (one, whole))
        torch.testing.assert_close(*parts, atol=0.01, rtol=0)


def test_black_is_black_once_it_is_normalised():
    """Black is -2, -1.667, -1.2 with mean 0.4, 0.5, 0.3 and deviation 0.2, 0.3, 0.25."""
    task = make(degradation="zoom_out", fill="black", scale=0.25)
    seen = degraded(task, pictures(task, b=20), seeded()).images
    black = torch.tensor([-2.0, -5 / 3, -1.2]).view(3, 1, 1)
    is_black = (seen - black).abs().amax(1) < 1e-5
    assert is_black.sum((1, 2)).tolist() == [32 * 32 - 8 * 8] * 20
    assert torch.allclose(plain(task, seen)[is_black[:, None].expand_as(seen)], torch.zeros(()), atol=1e-6)


@pytest.mark.parametrize(("size", "grid"), [((32, 32), (4, 4)), ((24, 40), (3, 5))])
def test_without_padding_only_the_small_picture_enters(size, grid):
    task = make(size=size, degradation="zoom_out", fill="none", scale=0.5)
    rows, columns = grid
    images = pictures(task, b=30)
    given = task.given(images, seeded())
    k, n = rows * columns, task.geometry.n
    assert task.sizes == (k, n - k) == (given.visible.shape[1], given.masked.shape[1])
    small = shrink(images, (rows * 4, columns * 4))
    entering = patchify(given.images, (4, 4), given.visible)
    assert torch.equal(entering, patchify(small, (4, 4)))  # all of it, in order
    wide = task.geometry.grid[1]
    corner = given.visible[:, :1]
    rectangle = torch.arange(rows)[:, None] * wide + torch.arange(columns)
    assert torch.equal(given.visible - corner, rectangle.flatten().expand(30, -1))
    assert len(corner.unique()) > 5
    made = task.encode(images, given)
    asked, answers = task.questions["pixels"].answer(made)
    assert made.tokens.shape[1] == task.geometry.prefix + k and answers.shape[1] == n  # the whole original is predicted


def test_without_padding_patches_can_be_masked_too():
    task = make(degradation="zoom_out", fill="none", scale=0.5, mask_ratio=0.75)
    given = task.given(pictures(task), seeded())
    covered = task.degradation(all_patches(pictures(task), 64), task.mean, task.std, seeded()).visible
    assert task.sizes == (4, 60) and given.visible.shape == (3, 4)
    for mine, those, rest in zip(given.visible.tolist(), covered.tolist(), given.masked.tolist(), strict=True):
        assert set(mine) <= set(those) and sorted(mine + rest) == list(range(64))
    (sheet,) = task.draw(pictures(task), seeded())
    assert sheet.columns["given"].isnan().float().mean() == 60 / 64


@pytest.mark.parametrize("degradation", ["fisheye", "wave"])
def test_a_bent_canvas_is_resized_or_cropped_and_its_centre_is_the_target(degradation):
    resized, cropped = (
        make(degradation=degradation, canvas=40, **({"canvas_fit": "crop"} if crop else {})) for crop in (False, True)
    )
    assert resized.degradation.canvas_fit == "resize"
    images = pictures(resized)
    alone = make(size=(40, 40), degradation=degradation)  # bends the same canvas with the same draws
    bent = degraded(alone, images, seeded()).images
    one, two = (degraded(task, images, seeded()) for task in (resized, cropped))
    torch.testing.assert_close(one.images, V.resize(bent, [32, 32], antialias=True), atol=1e-4, rtol=1e-4)
    assert torch.equal(two.images, centre_crop(bent, (32, 32))) and two.side_share is None
    for task in (resized, cropped):
        assert torch.equal(task.degradation.frame(images), centre_crop(images, (32, 32)))
    assert one.side_share.tolist() == [1.25] * 3
    still = make(degradation="wave", canvas=40, amplitude=0.0)
    given = degraded(still, images, seeded())
    placed = still.degradation.in_frame(given.images, given.side_share)
    apart = (placed - centre_crop(images, (32, 32))).abs().mean()
    assert apart < 0.08 * images.std() < (given.images - centre_crop(images, (32, 32))).abs().mean()


TITLES = {
    "zoom_in at a random place": {"zoom_place": "random"},
    "zoom_out": {"degradation": "zoom_out"},
    "zoom_out on black": {"degradation": "zoom_out", "fill": "black"},
    "zoom_out amid patches of other images": {"degradation": "zoom_out", "fill": "images"},
    "zoom_out without padding": {"degradation": "zoom_out", "fill": "none"},
    "blur by xavier kernels": {"degradation": "blur", "kernel_init": "xavier"},
    "blur, alike for all channels": {"degradation": "blur", "kernel_of": "image"},
    "wave of a larger picture, resized": {"degradation": "wave", "canvas": 40},
    "fisheye of a larger picture, cropped": {"degradation": "fisheye", "canvas": 40, "canvas_fit": "crop"},
}


@pytest.mark.parametrize("of", ["channel", "image"])
def test_blur_changes_colours_by_a_kernel_for_each_channel_alone(of):
    """Beyond Masking 4.1 (d): each of the RGB channels is convolved individually, so that colours change."""
    task = make(degradation="blur", kernel=3, **({} if of == "channel" else {"kernel_of": of}))
    assert task.degradation.kernel_of == of
    grey = torch.ones(50, 3, 32, 32)
    blurred = degraded(task, grey, seeded()).images[:, :, 16, 16]
    spread = blurred.std(1)
    assert spread.mean() == pytest.approx(0.02 * 3, rel=0.2) if of == "channel" else spread.max() < 1e-6
    point = F.pad(torch.ones(200, 3, 1, 1), (16, 15, 16, 15))  # shows the kernel
    kernels = degraded(make(degradation="blur", kernel_init="kaiming", kernel=3), point, seeded()).images
    assert kernels[:, 0, 15:18, 15:18].std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.05)


def test_captions_describe_the_degradation():
    assert [make(**one).degradation.title for one in TITLES.values()] == list(TITLES)
    task = make(degradation="blur")
    (sheet,) = task.draw(pictures(task), seeded())
    assert "Degradation: blur; no patches are masked" in sheet.caption


@pytest.mark.parametrize("name", ["restore", "mixture"])
def test_patches_of_other_images_need_two_images(name):
    withheld = {"degradation": "zoom_out"} if name == "restore" else {"withhold": {"zoom_out": 0.5}}
    assert "2 or more images" in refusal(check_step_size, {"name": name, **withheld, "fill": "images"}, 1, 100)
    check_step_size({"name": name, **withheld, "fill": "images"}, 2, 100)
    check_step_size({"name": name, **withheld}, 1, 100)


@pytest.mark.parametrize(("canvas", "size", "expected"), [(40, (32, 32), (40, 40)), (36, (24, 40), (36, 60))])
@pytest.mark.parametrize("degradation", ["zoom_in", "fisheye"])
def test_a_canvas_keeps_the_aspect_and_shows_its_middle(degradation, canvas, size, expected):
    task = make(size=size, degradation=degradation, canvas=canvas, mask_ratio=0.0)
    assert task.augment.size == task.degradation.canvas == expected
    assert all((whole - part) % 2 == 0 for whole, part in zip(expected, size, strict=True))
    images = pictures(task)
    seen = degraded(task, images, seeded()).images
    assert seen.shape[2:] == size
    if degradation == "zoom_in":
        assert torch.equal(seen, centre_crop(images, size))
