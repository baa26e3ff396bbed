"""Degradations: the authors' examples, invariants, and the effect on every pixel."""

import colorsys
from pathlib import Path

import pytest
import torch
from degrading import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small import seeded
from torchvision.transforms.v2 import functional as V

from patchloom.withhold.canvas import crop_at, zoom_out
from patchloom.withhold.degrade import (
    blur,
    decolorize,
    draw_from,
    fisheye,
    random_kernels,
    random_places,
    seen_pixels,
    wave,
    zoom_in,
)

quick = settings(max_examples=40)
ORACLE = load_file(Path(__file__).parents[1] / "oracles" / "degradations.safetensors")
anything = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 24), st.integers(1, 24))


def test_fisheye_equals_the_authors():
    centre, twist = ORACLE["fisheye_centre_xy"].expand(2, 2), ORACLE["fisheye_twist"].expand(2)
    assert_close(fisheye(ORACLE["images"], centre, twist), ORACLE["fisheye"])


@quick
@given(anything.filter(lambda shape: shape[3] > 1), st.floats(0.01, 1))  # torch resizes a single column incorrectly
def test_zoom_in_is_torchvisions_crop_and_resize(shape, scale):
    images = torch.rand(shape)
    h, w = shape[2:]
    part = [max(1, int(torch.tensor(scale * side).round())) for side in (h, w)]
    expected = V.resize(V.center_crop(images, part), [h, w], antialias=True)
    assert_close(zoom_in(images, scale), expected)
    assert_close(zoom_in(images, torch.full(shape[:1], scale)), expected)


def test_at_least_one_pixel_is_seen_and_at_most_all():
    images = torch.rand(2, 3, 4, 5)
    seen = zoom_in(images, torch.tensor([0.01, 1.5]))
    assert_close(seen[0], images[0, :, 2:3, 2:3].expand(3, 4, 5))
    assert_close(seen[1], images[1])


def test_zoom_in_shows_the_part_at_the_corner_with_as_many_pixels_as_it_says():
    images, scales = torch.rand(3, 2, 21, 30), torch.tensor([0.3, 0.5, 1.0])
    seen = seen_pixels(scales, (21, 30))
    assert seen.tolist() == [[6, 9], [10, 15], [21, 30]]  # 6.3 and 9, 10.5 (rounded to even) and 15
    corners = torch.tensor([[15, 21], [0, 7], [0, 0]])
    parts = [
        V.resize(one[None, :, y : y + h, x : x + w], [21, 30], antialias=True)
        for one, (y, x), (h, w) in zip(images, corners.tolist(), seen.int().tolist(), strict=True)
    ]
    assert_close(zoom_in(images, scales, corners), torch.cat(parts))


def test_fisheye_keeps_the_centre_and_shows_nothing_from_outside():
    x, y = torch.meshgrid(torch.linspace(-1, 1, 65), torch.linspace(-1, 1, 49), indexing="xy")
    images = torch.stack([x, y])[None].expand(2, -1, -1, -1)  # each pixel contains its coordinates
    centre = torch.tensor([[0.5, -0.25], [-1.0, 1.0]])
    bent = fisheye(images, centre, torch.tensor([0.25, 0.2]))
    before, after = ((picture - centre[:, :, None, None]).norm(dim=1) for picture in (images, bent))
    assert (after - (before - torch.tensor([0.25, 0.2])[:, None, None] * before**2)).abs().max() < 1e-5
    assert torch.allclose(bent[0, :, 18, 48], centre[0], atol=1e-6)  # x 48/32 - 1, y 18/24 - 1
    assert bent[1, :, -1, 0].tolist() == pytest.approx([-1, 1])
    outside = fisheye(torch.ones(1, 2, 33, 33), torch.zeros(1, 2), torch.tensor([-0.5]))
    assert (outside[:, :, 0, 0] == 0).all() and torch.allclose(outside[:, :, 16, 16], torch.ones(1, 2))


def test_a_wave_moves_columns_up_and_down_by_a_sine():
    """8 pixels of 16, 4 columns a wave: columns 0, 2, 4 stay, 1 shows the pixels 4 below, 3 those 4 above."""
    image = torch.arange(1.0, 17.0)[:, None].expand(16, 5)[None, None]  # each pixel contains its row, from 1 on
    moved = wave(image, torch.tensor([0.25]), torch.tensor([0.0]), waves=1)[0, 0]
    rows, none = torch.arange(1.0, 17.0), torch.zeros(4)
    torch.testing.assert_close(moved[:, [0, 2, 4]], rows[:, None].expand(16, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(moved[:, 1], torch.cat([rows[4:], none]), atol=1e-4, rtol=0)
    torch.testing.assert_close(moved[:, 3], torch.cat([none, rows[:12]]), atol=1e-4, rtol=0)
    later = wave(image, torch.tensor([0.25]), torch.tensor([0.25]), waves=1)[0, 0]
    torch.testing.assert_close(later[:, 0], moved[:, 1], atol=1e-4, rtol=0)


def test_a_wave_is_one_and_a_half_of_them():
    rows = torch.arange(40.0)[:, None].expand(40, 31)[None, None]
    shift = wave(rows, torch.tensor([0.2]), torch.tensor([0.3]))[0, 0, 20] - 20
    expected = 8 * torch.sin(2 * torch.pi * (1.5 * torch.linspace(0, 1, 31) + 0.3))
    torch.testing.assert_close(shift, expected, atol=1e-3, rtol=0)


@quick
@given(anything, st.sampled_from([1, 3, 5]), st.booleans(), st.integers(0, 2**31))
def test_each_channel_is_convolved_with_its_kernel_or_that_of_its_image(shape, k, shared, seed):
    images, kernels = (
        torch.randn(shape, generator=seeded(seed)),
        torch.randn(shape[0], 1 if shared else shape[1], k, k, generator=seeded(seed + 1)),
    )
    b, c, h, w = shape
    expected = torch.zeros(shape)
    padded = torch.nn.functional.pad(images, (k // 2,) * 4)
    for i in range(b):
        for row in range(k):
            for column in range(k):
                weight = kernels[i, :, row, column][:, None, None]
                expected[i] += weight * padded[i, :, row : row + h, column : column + w]
    assert_close(blur(images, kernels), expected)


@quick
@given(st.integers(0, 2**31), st.floats(0, 1) | st.just(0.0))
def test_hue_and_value_stay_while_saturation_falls(seed, share):
    images = torch.rand(2, 3, 4, 5, generator=seeded(seed))
    shares = torch.tensor([share, share / 2])
    faded = decolorize(images, shares)
    for before, after, factor in zip(images, faded, shares.tolist(), strict=True):
        for pixel, got in zip(before.flatten(1).T.tolist(), after.flatten(1).T.tolist(), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            assert got == pytest.approx(colorsys.hsv_to_rgb(hue, saturation * factor, value), abs=1e-5)


IMAGES, ONE, NONE = torch.rand(2, 3, 8, 10), torch.ones(2), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zoom_in(IMAGES, 0), r"\(0, 1\], not 0"),
        (lambda: zoom_in(IMAGES, 1.2), r"\(0, 1\], not 1.2"),
        (lambda: zoom_in(IMAGES, torch.ones(3)), r"scale must be \[2\].* but is \[3\]"),
        (lambda: zoom_in(IMAGES[0], 1), r"not \[3, 8, 10\] of float32"),
        (lambda: zoom_in(IMAGES.byte(), 1), "of uint8"),
        (lambda: zoom_in(IMAGES, ONE, ONE), r"corner must be \[2, 2\]"),
        (lambda: fisheye(IMAGES, torch.zeros(2), ONE), r"centre must be \[2, 2\]"),
        (lambda: fisheye(IMAGES, torch.zeros(2, 2), ONE[:1]), r"twist must be \[2\]"),
        (lambda: wave(IMAGES, ONE[:1], ONE), r"amplitude must be \[2\]"),
        (lambda: wave(IMAGES, ONE, ONE[:1]), r"phase must be \[2\]"),
        (lambda: blur(IMAGES, torch.ones(2, 1, 4, 4)), "odd, not 4"),
        (lambda: blur(IMAGES, torch.ones(3, 3)), r"kernels must be \[2, 3, 3, 3\]"),
        (lambda: blur(IMAGES, torch.ones(2, 2, 3, 3)), r"kernels must be \[2, 3, 3, 3\]"),
        (lambda: blur(IMAGES, torch.ones(1, 1, 3, 3)), r"kernels must be \[2, 1, 3, 3\]"),
        (lambda: decolorize(IMAGES[:, :1], ONE), "needs 3 channels"),
        (lambda: decolorize(IMAGES, ONE[:1]), r"saturation must be \[2\]"),
        (lambda: zoom_out(IMAGES, [(9, 10)], NONE, NONE, NONE), "9x10 pixels"),
        (lambda: zoom_out(IMAGES, [(0, 5)], NONE, NONE, NONE), "0x5 pixels"),
        (lambda: zoom_out(IMAGES, [(5, 0)], NONE, NONE, NONE), "5x0 pixels"),
        (lambda: zoom_out(IMAGES, [], NONE, NONE, NONE), "at least one size"),
        (lambda: zoom_out(IMAGES, [(4, 4)], NONE[:1], NONE, NONE), r"which must be \[2\]"),
        (lambda: zoom_out(IMAGES, [(4, 4)], NONE, NONE[:1], NONE), r"top must be \[2\]"),
        (lambda: zoom_out(IMAGES, [(8, 11)], NONE, NONE, NONE), "8x11 pixels .* canvas of 8x10"),
        (lambda: zoom_out(IMAGES, [(8, 10)], NONE, NONE, NONE[:1]), r"left must be \[2\]"),
        (lambda: crop_at(IMAGES, (4, 4), NONE), r"corner must be \[2, 2\]"),
        (lambda: random_places([(9, 9)], NONE, (8, 9)), "9x9 pixels"),
        (lambda: random_kernels([5, 8], NONE), "not 8"),
        (lambda: random_kernels([-1], NONE), "not -1"),
        (lambda: random_kernels([], NONE), "at least one kernel side"),
        (lambda: draw_from([], 2), "nothing to draw from"),
    ],
)
def test_wrong_shapes_and_numbers_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
