"""Degradations as options of a task: strengths, canvases, what is refused, and what each image draws for itself."""

from typing import get_args

import pytest
import torch
from restoring import DEGRADATIONS, MANY, degraded, make, pictures, plain
from small import seeded

from patchloom.errors import PatchloomError
from patchloom.withhold.canvas import centre_crop
from patchloom.withhold.degradation import Kind


@pytest.mark.parametrize(("degradation", "options"), [("zoom_in", {"canvas": 48}), ("zoom_in", {"scale": 0.5})])
def test_what_zooming_in_shows_is_put_at_its_place(degradation, options):
    task = make(degradation=degradation, mask_ratio=0.0, **options)
    images = pictures(task)
    given = degraded(task, images)
    assert given.side_share.tolist() == pytest.approx([2 / 3 if "canvas" in options else 0.5] * 3)
    placed = task.degradation.in_frame(given.images, given.side_share)
    frame = task.degradation.frame(images)
    side = round(32 * given.side_share[0].item()) - 4  # less the edge, which is blended with what is drawn out
    apart = (centre_crop(placed, (side, side)) - centre_crop(frame, (side, side))).abs()
    assert apart.mean() < 0.08 * frame.std()
    assert (placed - frame).abs()[:, :, :2].mean() > 5 * apart.mean()  # around it, the edge is drawn out


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
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_every_degradation_was_tried():
    assert set(DEGRADATIONS) == set(get_args(Kind)) == {"masked", "none", *MANY}
