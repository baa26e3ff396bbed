"""Degradations: the authors' own examples, what must stay as it was, and what is done to every pixel."""

import colorsys
from pathlib import Path

import pytest
import torch
from degrading import SIZES, assert_close, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torchvision.transforms.v2 import functional as V

from patchloom.withhold.canvas import centre_crop, mirror_canvas, zoom_out
from patchloom.withhold.degrade import blur, decolorize, fisheye, zoom_in
from patchloom.withhold.draws import draw_uniform, random_places

quick = settings(max_examples=40, deadline=None)
ORACLE = load_file(Path(__file__).parents[1] / "oracles" / "degradations.safetensors")
anything = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 24), st.integers(1, 24))


# the authors' examples


def test_fisheye_is_the_authors():
    centre, twist = ORACLE["fisheye_centre_xy"].expand(2, 2), ORACLE["fisheye_twist"].expand(2)
    assert_close(fisheye(ORACLE["images"], centre, twist), ORACLE["fisheye"])


def test_mirrored_canvas_is_the_authors():
    left, top = ORACLE["zoom_out_left_top"][:, None]
    canvas = mirror_canvas(ORACLE["zoom_out_small"], (224, 224), top, left)
    assert torch.equal(canvas, ORACLE["zoom_out_canvas"])


# what does nothing


@quick
@given(anything)
def test_degradations_that_do_nothing(shape):
    b, c, h, w = shape
    images = torch.rand(b, c, h, w)
    zero, delta = torch.zeros(b, dtype=torch.int64), torch.zeros(b, 5, 5)
    delta[:, 2, 2] = 1
    assert_close(zoom_in(images, 1), images)
    assert torch.equal(zoom_out(images, [(h, w)], zero, zero, zero), images)
    assert torch.equal(mirror_canvas(images, (h, w), zero, zero), images)
    assert torch.equal(blur(images, delta), images)
    assert_close(fisheye(images, draw_uniform(-1, 1, (b, 2)), torch.zeros(b)), images)
    if c == 3:
        assert torch.equal(decolorize(images, torch.ones(b)), images)


# zooming in


@quick
@given(anything.filter(lambda shape: shape[3] > 1), st.floats(0.01, 1))  # torch resizes a single column wrongly
def test_zoom_in_is_torchvisions_crop_and_resize(shape, scale):
    images = torch.rand(shape)
    h, w = shape[2:]
    part = [max(1, int(torch.tensor(scale * side).round())) for side in (h, w)]
    expected = V.resize(V.center_crop(images, part), [h, w], antialias=True)
    assert_close(zoom_in(images, scale), expected)
    assert_close(zoom_in(images, torch.full(shape[:1], scale)), expected)


def test_zoom_in_at_the_papers_size():
    images = torch.rand(1, 3, 224, 224)
    assert_close(zoom_in(images, 160 / 224), V.resize(images[..., 32:192, 32:192], [224, 224], antialias=True))


def test_each_image_has_its_own_scale():
    images = torch.rand(1, 2, 21, 30).expand(3, -1, -1, -1)
    scales = torch.tensor([0.3, 0.5, 1.0])
    for one, scale in zip(zoom_in(images, scales), scales, strict=True):
        assert_close(one[None], zoom_in(images[:1], scale.item()))


def test_at_least_one_pixel_is_seen_and_at_most_all():
    images = torch.rand(2, 3, 4, 5)
    seen = zoom_in(images, torch.tensor([0.01, 1.5]))
    assert_close(seen[0], images[0, :, 2:3, 2:3].expand(3, 4, 5))
    assert_close(seen[1], images[1])


def test_the_middle_is_cut_out():
    images = torch.arange(6 * 10.0).view(1, 1, 6, 10)
    assert torch.equal(centre_crop(images, (2, 4)), images[:, :, 2:4, 3:7])
    assert torch.equal(centre_crop(images, (6, 10)), images)


# zooming out


@quick
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
def test_mirrored_canvas_is_continuous_and_holds_the_image(data, b, c, s, t):
    h, w = data.draw(st.integers(s, 40)), data.draw(st.integers(t, 40))
    top = torch.tensor([data.draw(st.integers(0, h - s)) for _ in range(b)])
    left = torch.tensor([data.draw(st.integers(0, w - t)) for _ in range(b)])
    small = torch.rand(b, c, s, t)
    canvas = mirror_canvas(small, (h, w), top, left)
    assert canvas.shape == (b, c, h, w)
    for image, whole, y, x in zip(small, canvas, top.tolist(), left.tolist(), strict=True):
        assert torch.equal(whole[:, y : y + s, x : x + t], image)
        # every seam, those of repeated mirrors too: the pixels on both of its sides are the same
        for seam in range(y % s or s, h, s):
            assert torch.equal(whole[:, seam], whole[:, seam - 1])
        for seam in range(x % t or t, w, t):
            assert torch.equal(whole[:, :, seam], whole[:, :, seam - 1])
        # and away from a seam steps go on, as in the image: the first mirrored row is the second's neighbour there too
        if y >= 2 and s >= 2:
            assert torch.equal(whole[:, y - 2, x : x + t], image[:, 1])
        if x + t + 1 < w and t >= 2:
            assert torch.equal(whole[:, y : y + s, x + t + 1], image[:, :, t - 2])


def test_zoom_out_shrinks_with_antialiasing_to_the_drawn_size_at_the_drawn_place():
    images = torch.rand(6, 4, 31, 27)
    which = torch.tensor([0, 1, 2, 2, 1, 0])
    top, left = random_places(SIZES, which, (31, 27), seeded())
    canvas = zoom_out(images, SIZES, which, top, left)
    for i in range(6):
        small = V.resize(images[i : i + 1], list(SIZES[which[i]]), antialias=True)
        assert_close(canvas[i : i + 1], mirror_canvas(small, (31, 27), top[i : i + 1], left[i : i + 1]))


@quick
@given(anything, st.floats(0.01, 1), st.data())
def test_rows_and_columns_are_treated_alike(shape, scale, data):
    images, which = torch.rand(shape), torch.zeros(shape[:1], dtype=torch.int64)
    assert_close(zoom_in(images.mT, scale), zoom_in(images, scale).mT)
    s, t = (data.draw(st.integers(1, side)) for side in shape[2:])
    top, left = random_places([(s, t)], which, shape[2:])
    canvas = zoom_out(images, [(s, t)], which, top, left)
    assert_close(zoom_out(images.mT, [(t, s)], which, left, top), canvas.mT)


# bending


def test_fisheye_keeps_the_centre_enlarges_around_it_and_shows_nothing_from_outside():
    x, y = torch.meshgrid(torch.linspace(-1, 1, 65), torch.linspace(-1, 1, 49), indexing="xy")
    images = torch.stack([x, y])[None].expand(2, -1, -1, -1)  # each pixel tells where it comes from
    centre = torch.tensor([[0.5, -0.25], [-1.0, 1.0]])
    bent = fisheye(images, centre, torch.tensor([0.25, 0.2]))
    before, after = ((picture - centre[:, :, None, None]).norm(dim=1) for picture in (images, bent))
    assert (after - (before - torch.tensor([0.25, 0.2])[:, None, None] * before**2)).abs().max() < 1e-5
    assert torch.allclose(bent[0, :, 18, 48], centre[0], atol=1e-6)  # x 48/32 - 1, y 18/24 - 1
    assert bent[1, :, -1, 0].tolist() == pytest.approx([-1, 1])


def test_fisheye_fills_with_zero_what_lies_outside():
    images = torch.ones(1, 2, 33, 33)
    bent = fisheye(images, torch.zeros(1, 2), torch.tensor([-0.5]))
    assert (bent[:, :, 0, 0] == 0).all() and torch.allclose(bent[:, :, 16, 16], torch.ones(1, 2))
    assert torch.allclose(fisheye(images, torch.zeros(1, 2), torch.tensor([0.25])), images)


# blurring


@quick
@given(anything, st.sampled_from([1, 3, 5]), st.integers(0, 2**31))
def test_each_channel_is_convolved_with_the_images_own_kernel(shape, k, seed):
    images, kernels = (
        torch.randn(shape, generator=seeded(seed)),
        torch.randn(shape[0], k, k, generator=seeded(seed + 1)),
    )
    b, c, h, w = shape
    expected = torch.zeros(shape)
    padded = torch.nn.functional.pad(images, (k // 2,) * 4)
    for i in range(b):
        for row in range(k):
            for column in range(k):
                expected[i] += kernels[i, row, column] * padded[i, :, row : row + h, column : column + w]
    assert_close(blur(images, kernels), expected)


# colours


@quick
@given(st.integers(0, 2**31), st.floats(0, 1))
def test_hue_and_value_stay_while_saturation_falls(seed, share):
    images = torch.rand(2, 3, 4, 5, generator=seeded(seed))
    shares = torch.tensor([share, share / 2])
    faded = decolorize(images, shares)
    for before, after, factor in zip(images, faded, shares.tolist(), strict=True):
        for pixel, got in zip(before.flatten(1).T.tolist(), after.flatten(1).T.tolist(), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            assert got == pytest.approx(colorsys.hsv_to_rgb(hue, saturation * factor, value), abs=1e-5)


def test_without_saturation_the_largest_channel_is_left():
    images = torch.rand(2, 3, 4, 5)
    assert torch.equal(decolorize(images, torch.zeros(2)), images.amax(1, keepdim=True).expand_as(images))


IMAGES, ONE, NONE = torch.rand(2, 3, 8, 10), torch.ones(2), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zoom_in(IMAGES, 0), r"\(0, 1\], not 0"),
        (lambda: zoom_in(IMAGES, 1.2), r"\(0, 1\], not 1.2"),
        (lambda: zoom_in(IMAGES, torch.ones(3)), r"scale must be \[2\], one for each image, but is \[3\]"),
        (lambda: zoom_in(IMAGES[0], 1), r"\[b c h w\], not \[3, 8, 10\] of float32"),
        (lambda: zoom_in(IMAGES.byte(), 1), "of uint8"),
        (lambda: zoom_out(IMAGES, [(8, 11)], NONE, NONE, NONE), "8x11 pixels cannot be placed on a canvas of 8x10"),
        (lambda: zoom_out(IMAGES, [(0, 5)], NONE, NONE, NONE), "0x5 pixels cannot be placed"),
        (lambda: zoom_out(IMAGES, [], NONE, NONE, NONE), "at least one size"),
        (lambda: zoom_out(IMAGES, [(4, 4)], NONE[:1], NONE, NONE), r"which must be \[2\]"),
        (lambda: zoom_out(IMAGES, [(4, 4)], NONE, NONE[:1], NONE), r"top must be \[2\]"),
        (lambda: mirror_canvas(IMAGES, (8, 9), NONE, NONE), "8x10 pixels cannot be placed on a canvas of 8x9"),
        (lambda: mirror_canvas(IMAGES, (8, 10), NONE, NONE[:1]), r"left must be \[2\]"),
        (lambda: fisheye(IMAGES, torch.zeros(2), ONE), r"centre must be \[2, 2\]"),
        (lambda: fisheye(IMAGES, torch.zeros(2, 2), ONE[:1]), r"twist must be \[2\]"),
        (lambda: blur(IMAGES, torch.ones(2, 4, 4)), "odd side, so that it has a centre, not 4"),
        (lambda: blur(IMAGES, torch.ones(3, 3)), r"kernels must be \[2, 3, 3\]"),
        (lambda: blur(IMAGES, torch.ones(1, 3, 3)), r"kernels must be \[2, 3, 3\]"),
        (lambda: decolorize(IMAGES[:, :1], ONE), "channels: 1, not 3"),
        (lambda: decolorize(IMAGES, ONE[:1]), r"saturation must be \[2\]"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
