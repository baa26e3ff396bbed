"""Small images on a canvas: surroundings, places, and crops."""

from pathlib import Path

import pytest
import torch
from degrading import SIZES, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small import seeded
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as V

from patchloom.patches.tokens import patchify
from patchloom.withhold.canvas import (
    central_corner,
    centre_crop,
    crop_at,
    enlarged_squares,
    mirror_canvas,
    patches_of_others,
    resize_area,
    zoom_out,
)
from patchloom.withhold.degrade import random_others, random_places

quick = settings(max_examples=40)
ORACLE = load_file(Path(__file__).parents[1] / "oracles" / "degradations.safetensors")


def mirrored_whole(small, size, top, left):
    sides = (torch.full((len(small),), side) for side in small.shape[2:])
    return mirror_canvas(small, *sides, size, top, left)


def test_mirrored_canvas_equals_the_authors():
    left, top = ORACLE["zoom_out_left_top"][:, None]
    canvas = mirrored_whole(ORACLE["zoom_out_small"], (224, 224), top, left)
    assert torch.equal(canvas, ORACLE["zoom_out_canvas"])


def test_each_image_is_cropped_at_its_own_corner():
    images = torch.rand(3, 2, 6, 10)
    corners = torch.tensor([[0, 6], [4, 0], [2, 3]])
    cropped = crop_at(images, (2, 4), corners)
    for one, image, (y, x) in zip(cropped, images, corners.tolist(), strict=True):
        assert torch.equal(one, image[:, y : y + 2, x : x + 4])
    assert torch.equal(centre_crop(images, (2, 4)), images[:, :, 2:4, 3:7])
    assert central_corner(images, (2, 4)).tolist() == [[2, 3]] * 3


@quick
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
def test_mirrored_canvas_is_continuous_and_holds_the_image(data, b, c, s, t):
    h, w = data.draw(st.integers(s, 40)), data.draw(st.integers(t, 40))
    top = torch.tensor([data.draw(st.integers(0, h - s)) for _ in range(b)])
    left = torch.tensor([data.draw(st.integers(0, w - t)) for _ in range(b)])
    small = torch.rand(b, c, s, t)
    canvas = mirrored_whole(small, (h, w), top, left)
    assert canvas.shape == (b, c, h, w)
    for image, whole, y, x in zip(small, canvas, top.tolist(), left.tolist(), strict=True):
        assert torch.equal(whole[:, y : y + s, x : x + t], image)
        # at every seam, also of repeated mirrors, the pixels on both sides are equal
        for seam in range(y % s or s, h, s):
            assert torch.equal(whole[:, seam], whole[:, seam - 1])
        for seam in range(x % t or t, w, t):
            assert torch.equal(whole[:, :, seam], whole[:, :, seam - 1])
        # and away from a seam steps continue as in the image: the first mirrored row neighbours the second there, too
        if y >= 2 and s >= 2:
            assert torch.equal(whole[:, y - 2, x : x + t], image[:, 1])
        if x + t + 1 < w and t >= 2:
            assert torch.equal(whole[:, y : y + s, x + t + 1], image[:, :, t - 2])


def test_zoom_out_shrinks_to_the_drawn_size_at_the_drawn_place_amid_what_is_given():
    images = torch.rand(6, 3, 31, 27)
    which = torch.tensor([0, 1, 2, 2, 1, 0])
    top, left = random_places(SIZES, which, (31, 27), seeded())
    mirrored = zoom_out(images, SIZES, which, top, left)
    others, black = torch.rand(6, 3, 31, 27), torch.tensor([-1.0, -2.0, -3.0]).view(3, 1, 1)
    amid, on_black = (zoom_out(images, SIZES, which, top, left, around) for around in (others, black))
    for i in range(6):
        small = V.resize(images[i : i + 1], list(SIZES[which[i]]), antialias=True)
        assert_close(mirrored[i : i + 1], mirrored_whole(small, (31, 27), top[i : i + 1], left[i : i + 1]))
        inside = torch.zeros(31, 27, dtype=torch.bool)
        s, t = SIZES[which[i]]
        inside[top[i] : top[i] + s, left[i] : left[i] + t] = True
        assert torch.equal(amid[i], torch.where(inside, mirrored[i], others[i]))
        assert torch.equal(on_black[i], torch.where(inside, mirrored[i], black.expand(3, 31, 27)))


def test_patches_of_others_are_patches_and_never_the_images_own():
    """Image i has the value i plus the index of the patch, so that each pixel shows its source."""
    b, n = 4, 6
    number = torch.arange(n).view(2, 3).repeat_interleave(4, 0).repeat_interleave(4, 1)
    images = torch.arange(b).view(b, 1, 1, 1) + number / 10
    step, place = random_others(b, n, seeded())
    assert step.shape == place.shape == (b, n) and step.max() == b - 2 and place.max() == n - 1
    made = patchify(patches_of_others(images, (4, 4), step, place), (4, 4))
    assert (made == made[..., :1]).all()  # each patch is one complete patch
    for i in range(b):
        source = (i + 1 + step[i]) % b
        assert (source != i).all()
        torch.testing.assert_close(made[i, :, 0], source + place[i] / 10)
    step, place = random_others(1, n, seeded())  # a single image lies amid its own
    made = patchify(patches_of_others(images[:1], (4, 4), step, place), (4, 4))
    torch.testing.assert_close(made[0, :, 0], place[0] / 10)


def test_all_other_images_and_patches_are_equally_likely():
    step, place = random_others(5000, 8, seeded())
    assert (place.flatten().bincount() / 40_000 - 1 / 8).abs().max() < 0.01
    assert step.min() == 0 and step.max() == 4998
    few, _ = random_others(3, 20_000, seeded())
    assert (few.flatten().bincount() / 60_000 - 1 / 2).abs().max() < 0.01


@pytest.mark.parametrize(
    ("old", "new"), [((7, 14), (10, 20)), ((20, 10), (14, 7)), ((5, 6), (17, 6)), ((9, 4), (4, 9))]
)
def test_resizing_by_area_equals_torch_and_its_gradient(old, new):
    images = torch.randn(2, 3, *old, requires_grad=True)
    ours, theirs = resize_area(images, new), F.interpolate(images, new, mode="area")
    torch.testing.assert_close(ours, theirs)
    slope = torch.randn(2, 3, *new)
    torch.testing.assert_close(*(torch.autograd.grad(made, images, slope)[0] for made in (ours, theirs)))


def test_a_window_of_a_resized_image_is_that_part_of_it():
    images = torch.randn(2, 3, 7, 14, requires_grad=True)
    part, whole = resize_area(images, (10, 20), ((1, 8), (3, 20))), resize_area(images, (10, 20))[:, :, 1:8, 3:20]
    torch.testing.assert_close(part, whole)
    slope = torch.randn_like(part)
    torch.testing.assert_close(*(torch.autograd.grad(made, images, slope)[0] for made in (part, whole)))


def test_squares_of_an_enlarged_image_need_no_enlarging():
    images = torch.randn(2, 3, 7, 8, requires_grad=True)
    weights = [(torch.rand(b, 12), torch.rand(b, 8)) for b in (2, 1)]
    enlarged = F.interpolate(images, (12, 8), mode="area").square()
    expected = sum(
        (enlarged * rows[:, None, :, None] * columns[:, None, None]).sum((1, 2, 3)) for rows, columns in weights
    )
    found = enlarged_squares(images, *weights)
    torch.testing.assert_close(found, expected)
    slope = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(*(torch.autograd.grad(made, images, slope)[0] for made in (found, expected)))
