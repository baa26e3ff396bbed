"""Degradations as options of a task: strengths, canvases, errors, and random draws per image."""

from typing import get_args

import pytest
import torch
from restoring import DEGRADATIONS, MANY, degraded, make, pictures, plain
from small import seeded
from torchvision.transforms.v2 import functional as V

from patchloom.errors import PatchloomError
from patchloom.patches.tokens import patchify
from patchloom.tasks import check_step_size
from patchloom.withhold.canvas import centre_crop, shrink
from patchloom.withhold.degradation import DegradationKind
from patchloom.withhold.encoder_input import all_patches


@pytest.mark.parametrize(("degradation", "options"), [("zoom_in", {"canvas": 48}), ("zoom_in", {"scale": 0.5})])
def test_a_zoomed_part_is_put_at_its_place(degradation, options):
    task = make(degradation=degradation, mask_ratio=0.0, **options)
    images = pictures(task)
    given = degraded(task, images)
    assert given.side_share.tolist() == pytest.approx([2 / 3 if "canvas" in options else 0.5] * 3)
    placed = task.degradation.in_frame(given.images, given.side_share)
    frame = task.degradation.frame(images)
    side = round(32 * given.side_share[0].item()) - 4  # except the edge, which is blended with its extension
    apart = (centre_crop(placed, (side, side)) - centre_crop(frame, (side, side))).abs()
    assert apart.mean() < 0.08 * frame.std()
    assert (placed - frame).abs()[:, :, :2].mean() > 5 * apart.mean()  # around it, the edge is extended


@pytest.mark.parametrize("options", [{"canvas": 48}, {"scale": 0.5}])
def test_a_random_part_is_put_at_its_place(options):
    """On images of row and column numbers, in which each pixel has its own coordinates."""
    task = make(size=(32, 32), channels=2, statistics=False, mask_ratio=0.0, zoom_place="random", **options)
    h, w = task.augment.size
    rows, columns = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
    images = torch.stack([rows / h, columns / w]).expand(40, -1, -1, -1)
    given = degraded(task, images, seeded())
    seen = 32 if "canvas" in options else 16
    assert (given.corner >= 0).all() and given.corner.max() <= h - seen and len(given.corner.unique(dim=0)) > 20
    first = given.images[:, :, 0, 0] * torch.tensor([h, w])  # its centre, half a pixel in; at the edge less when larger
    assert (first - given.corner - 0.5).abs().max() < 1e-3
    placed = task.degradation.in_frame(given.images, given.side_share, given.corner)
    frame = task.degradation.frame(images)
    for one, whole, corner in zip(placed, frame, given.corner.tolist(), strict=True):
        top, left = (round(start * 32 / h) + 2 for start in corner)
        inner = round(seen * 32 / h) - 4
        parts = (picture[:, top : top + inner, left : left + inner] for picture in (one, whole))
        torch.testing.assert_close(*parts, atol=0.01, rtol=0)


def test_the_centre_is_shown_by_default():
    task, generator = make(), seeded()
    images = pictures(task)
    given = degraded(task, images, generator)
    assert given.corner is None and torch.equal(given.images, centre_crop(images, (32, 32)))
    assert torch.rand((), generator=generator) == torch.rand((), generator=seeded())


def test_black_is_black_once_it_is_normalised():
    """Black is -2, -1.667, -1.2 with mean 0.4, 0.5, 0.3 and deviation 0.2, 0.3, 0.25."""
    task = make(degradation="zoom_out", fill="black", scale=0.25)
    seen = degraded(task, pictures(task, b=20), seeded()).images
    black = torch.tensor([-2.0, -5 / 3, -1.2]).view(3, 1, 1)
    is_black = (seen - black).abs().amax(1) < 1e-5
    assert is_black.sum((1, 2)).tolist() == [32 * 32 - 8 * 8] * 20
    assert torch.allclose(plain(task, seen)[is_black[:, None].expand_as(seen)], torch.zeros(()), atol=1e-6)


def test_amid_patches_of_other_images_none_is_the_images_own():
    task = make(degradation="zoom_out", fill="images", scale=0.25, statistics=False)
    colours = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 32, 32)
    seen = degraded(task, colours, seeded()).images.round()  # shrinking also rounds
    for i, image in enumerate(seen):
        around = (image != i).all(0)
        assert around.sum() == 32 * 32 - 8 * 8  # only the small copy is the image's own
        assert set(image.unique().tolist()) == set(range(5))
        for patch in patchify(image[None], (4, 4))[0]:
            assert len(set(patch.tolist()) - {float(i)}) <= 1  # one patch of another image, perhaps covered


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
    whole, some = (task.degradation, task)
    given = task.given(pictures(task), seeded())
    covered = whole(all_patches(pictures(task), 64), task.mean, task.std, seeded()).visible
    assert some.sizes == (4, 60) and given.visible.shape == (3, 4)
    for mine, those, rest in zip(given.visible.tolist(), covered.tolist(), given.masked.tolist(), strict=True):
        assert set(mine) <= set(those) and sorted(mine + rest) == list(range(64))


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


def test_kernels_are_drawn_as_asked():
    assert "its program's" in make(degradation="blur", kernel=3).chosen["kernel_init"][1], "the paper has no deviation"
    task = make(degradation="blur", kernel_init="kaiming", kernel=3)
    point = torch.zeros(200, 3, 32, 32)
    point[:, :, 16, 16] = 1
    given = degraded(task, point, seeded()).images
    kernels = given[:, 0, 15:18, 15:18]
    assert kernels.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.05) and kernels.mean().abs() < 0.05


@pytest.mark.parametrize("of", ["channel", "image"])
def test_blur_changes_colours_by_a_kernel_for_each_channel_alone(of):
    """Beyond Masking 4.1 (d): each of the RGB channels is convolved individually, so that colours change."""
    task = make(degradation="blur", kernel=3, **({} if of == "channel" else {"kernel_of": of}))
    assert task.degradation.kernel_of == of
    grey = torch.ones(50, 3, 32, 32)
    blurred = degraded(task, grey, seeded()).images[:, :, 16, 16]
    spread = blurred.std(1)
    assert spread.mean() == pytest.approx(0.02 * 3, rel=0.2) if of == "channel" else spread.max() < 1e-6


def test_captions_describe_the_degradation():
    options = [
        {"zoom_place": "random"},
        {"degradation": "zoom_out", "fill": "black"},
        {"degradation": "zoom_out", "fill": "images"},
        {"degradation": "zoom_out", "fill": "none"},
        {"degradation": "blur", "kernel_init": "xavier"},
        {"degradation": "blur", "kernel_of": "image"},
        {"degradation": "wave", "canvas": 40},
        {"degradation": "fisheye", "canvas": 40, "canvas_fit": "crop"},
        {"degradation": "zoom_out"},
    ]
    assert [make(**one).degradation.title for one in options] == [
        "zoom_in at a random place",
        "zoom_out on black",
        "zoom_out amid patches of other images",
        "zoom_out without padding",
        "blur by xavier kernels",
        "blur, alike for all channels",
        "wave of a larger picture, resized",
        "fisheye of a larger picture, cropped",
        "zoom_out",
    ]
    task = make(degradation="zoom_out", fill="none", scale=0.5)
    (sheet,) = task.draw(pictures(task), seeded())
    assert sheet.caption.startswith(
        "Degradation: zoom_out without padding; 75% of the patches are not given. Mean over 3"
    )
    assert sheet.columns["given"].isnan().float().mean() == 0.75
    task = make(degradation="blur")
    (sheet,) = task.draw(pictures(task), seeded())
    assert sheet.caption.startswith("Degradation: blur; no patches are masked. Mean over 3")


@pytest.mark.parametrize("name", ["restore", "mixture"])
def test_patches_of_other_images_need_two_images(name):
    withheld = {"degradation": "zoom_out"} if name == "restore" else {"withhold": {"zoom_out": 0.5}}
    with pytest.raises(PatchloomError, match="2 or more images in a step, since the small picture is shown amid"):
        check_step_size({"name": name, **withheld, "fill": "images"}, 1, 100)
    check_step_size({"name": name, **withheld, "fill": "images"}, 2, 100)
    check_step_size({"name": name, **withheld}, 1, 100)


@pytest.mark.parametrize("degradation", MANY)
def test_each_image_draws_its_own_strength_from_a_list(degradation):
    task = make(degradation=degradation, **MANY[degradation])
    one = pictures(task, b=1)
    images = one.expand(40, -1, -1, -1)
    seen = degraded(task, images, seeded()).images
    kinds = seen.flatten(1).unique(dim=0)
    assert len(kinds) == 2 if degradation in ("zoom_in", "decolorize") else len(kinds) > 20
    again = degraded(task, images, seeded()).images
    other = degraded(task, images, seeded(1)).images
    assert torch.equal(seen, again) and not torch.equal(seen, other)
    if degradation == "decolorize":
        grey = plain(task, seen).std(1).amax((1, 2)) < 1e-4
        exact = (seen - one).abs().amax((1, 2, 3)) < 1e-5
        assert (grey | exact).all() and 10 < grey.sum() < 30  # saturations 0 and 1
    single = make(degradation=degradation, **{name: values[1] for name, values in MANY[degradation].items()})
    fixed = degraded(single, images, seeded()).images
    assert (len(fixed.flatten(1).unique(dim=0)) == 1) == (degradation in ("zoom_in", "decolorize"))


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


@pytest.mark.parametrize("channels", [1, 5])
def test_images_of_other_channels(channels):
    with pytest.raises(PatchloomError, match=f"decolorize is for images of 3 channels, and these have {channels}"):
        make(channels=channels, statistics=False, degradation="decolorize")
    for degradation in ("zoom_in", "zoom_out", "fisheye", "blur"):
        task = make(channels=channels, statistics=False, degradation=degradation)
        assert task(pictures(task), generator=seeded()).loss.isfinite()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"degradation": "melt"}, "--task.degradation cannot be melt: it takes masked, zoom_in, "),
        ({"scale": 0.0}, r"the scale of zoom_in must be fractions of the side in \(0, 1\], not \[0.0\]"),
        ({"degradation": "zoom_out", "scale": [0.5, 1.5]}, "the scale of zoom_out must be fractions"),
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
        ({"degradation": "wave", "amplitude": 1.5}, "the amplitude of wave must be numbers in"),
        ({"degradation": "fisheye", "amplitude": 0.1}, "--task.amplitude is not for the degradation fisheye"),
        ({"degradation": "blur", "zoom_place": "centre"}, "--task.zoom_place is not for the degradation blur"),
        ({"fill": "black"}, "--task.fill is not for the degradation zoom_in: leave it out"),
        (
            {"degradation": "zoom_out", "kernel_init": "xavier"},
            "--task.kernel_init is not for the degradation zoom_out",
        ),
        ({"degradation": "fisheye", "canvas_fit": "crop"}, "--task.canvas_fit is for a --task.canvas: leave it out"),
        ({"canvas_fit": "crop"}, "--task.canvas_fit is not for the degradation zoom_in"),
        (
            {"degradation": "zoom_out", "fill": "white"},
            "--task.fill cannot be white: it takes mirror, black, images or none",
        ),
        ({"degradation": "zoom_out", "fill": "none", "scale": [0.5, 0.7]}, "fewer than 8x8 patches, not"),
        ({"degradation": "zoom_out", "fill": "none", "scale": 0.99}, r"give --task.scale one number .* not \[0.99\]"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_every_degradation_was_tried():
    assert set(DEGRADATIONS) == set(get_args(DegradationKind)) == {"masked", "none", *MANY}
