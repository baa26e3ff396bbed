from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from patchloom.data.augment import (
    DRAW,
    CentreCrop,
    RandomCrop,
    TwoViews,
    draw_colors,
    native_scale,
    plan_colors,
    recolor,
    recolor_view,
    resize_part,
)
from patchloom.data.decode import to_channels
from patchloom.data.loader import training_batches
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError

sides = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(sides, sides, st.sampled_from([1, 2, 3, 5]), st.booleans(), st.integers(0, 99))
def test_any_image_becomes_the_requested_size(height, width, channels, deep, seed):
    image = torch.randint(0, 256, (channels, height, width), dtype=torch.uint8)
    image = image / 255 if deep else image
    for crop in (RandomCrop((6, 9)), CentreCrop((6, 9))):
        (view,) = crop(image, np.random.default_rng(seed))
        assert view.shape == (channels, 6, 9) and view.dtype == image.dtype
        assert not deep or (view.min() >= 0 and view.max() <= 1)
        assert torch.equal(view, crop(image, np.random.default_rng(seed))[0])


@pytest.mark.parametrize(("height", "width"), [(64, 64), (200, 80), (640, 480)])
def test_native_parts_have_about_as_many_pixels_as_the_view_in_images_of_any_size(height, width):
    crop, rng = RandomCrop((16, 24), native=True), np.random.default_rng(0)
    parts = np.array([crop._part(height, width, rng) for _ in range(1000)])
    area = parts[:, 2] * parts[:, 3] / (16 * 24)
    assert 0.45 < area.min() < 0.55 and 1.9 < area.max() < 2.1
    assert (parts[:, :2] + parts[:, 2:]).max(0).tolist() == [height, width]


def test_native_parts_of_small_images_are_the_usual_ones():
    assert native_scale((16, 16), (16, 16)) == (0.2, 1.0) and native_scale((8, 8), (16, 16)) == (0.2, 1.0)
    assert native_scale((32, 32), (16, 16)) == (0.125, 0.5)


def test_a_native_centre_is_not_reduced():
    image = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8)
    (view,) = CentreCrop((16, 24), native=True)(image)
    assert torch.equal(view, image[:, 12:28, 13:37])
    small = image[:, :10]
    assert torch.equal(CentreCrop((16, 24), native=True)(small)[0], CentreCrop((16, 24))(small)[0])
    views = TwoViews((16, 24), crop="none", native=True)(image, np.random.default_rng(0))
    assert any(torch.equal(views[0], one) for one in (view, view.flip(-1)))


def test_parts_keep_to_scale_and_ratio_and_reach_everywhere():
    crop, rng = RandomCrop((8, 8), scale=(0.2, 0.5)), np.random.default_rng(0)
    parts = np.array([crop._part(100, 100, rng) for _ in range(2000)])
    top, left, h, w = parts.T
    assert 0.19 < (h * w / 1e4).min() < 0.21 and 0.49 < (h * w / 1e4).max() < 0.51
    assert 0.73 < (w / h).min() < 0.77 and 1.3 < (w / h).max() < 1.37
    assert top.min() == left.min() == 0 and (top + h).max() == (left + w).max() == 100
    assert abs((h * w / 1e4).mean() - 0.35) < 0.01  # uniform in area


@pytest.mark.parametrize("shape, part", [((2, 100), (0, 48, 2, 3)), ((100, 2), (48, 0, 3, 2))])
def test_an_extreme_image_falls_back_to_its_centre(shape, part):
    assert RandomCrop((8, 8), scale=(0.9, 1))._part(*shape, np.random.default_rng(0)) == part


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("part", [(0, 0, 50, 40), (3, 5, 31, 23), (7, 9, 1, 20), (7, 9, 20, 1)])
@pytest.mark.parametrize("size", [(16, 16), (50, 40), (60, 12), (12, 2), (1, 9)])
def test_a_part_is_resized_as_torchvision_does(channels, deep, last, part, size):
    image = some_image(channels, deep, (50, 40))
    image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1) if last else image
    expected = F.resized_crop(image, *part, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(resize_part(image, *part, size), expected.clamp(0, 1) if deep else expected)


def test_colours_of_a_thin_view_stay_in_place():
    """Resizing with torch 2.15: channels-last images of one pixel in width or height come out wrong, or fail."""
    image = torch.tensor([10, 120, 250], dtype=torch.uint8).view(3, 1, 1).expand(3, 30, 30)
    image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for size in ((1, 8), (8, 1), (1, 1)):
        assert (resize_part(image, 2, 2, 20, 20, size) == image[:, :1, :1]).all()


def test_a_part_is_resized_as_pil_does():
    y, x = np.mgrid[:90, :120]
    waves = [127 + 120 * np.sin(x / a + y / b) for a, b in ((5, 9), (3, 40), (11, 4))]
    image = np.stack(waves, -1).astype(np.uint8)
    ours = resize_part(torch.from_numpy(image).permute(2, 0, 1), 10, 20, 70, 80, (32, 32)).permute(1, 2, 0).numpy()
    theirs = np.asarray(Image.fromarray(image).crop((20, 10, 100, 80)).resize((32, 32), Image.Resampling.BICUBIC))
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 1 and difference.mean() < 0.1


def test_half_are_mirrored():
    image = torch.arange(12, dtype=torch.uint8).expand(3, 12, 12).contiguous()
    rng = np.random.default_rng(0)
    crop = RandomCrop((12, 12), scale=(1, 1), ratio=(1, 1))
    views = [crop(image, rng)[0] for _ in range(400)]
    mirrored = sum(torch.equal(view, image.flip(-1)) for view in views)
    assert mirrored + sum(torch.equal(view, image) for view in views) == 400 and 160 < mirrored < 240
    crop = RandomCrop((12, 12), scale=(1, 1), ratio=(1, 1), flip=False)
    assert all(torch.equal(crop(image, rng)[0], image) for _ in range(20))


def test_memory_layout_changes_nothing():
    image = torch.randint(0, 256, (3, 50, 40), dtype=torch.uint8)
    last = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for crop in (RandomCrop((16, 16)), CentreCrop((16, 16))):
        a, b = (crop(x, np.random.default_rng(3))[0] for x in (image, last))
        assert (a.int() - b.int()).abs().max() <= 1


def test_centre_crop_is_resize_then_crop():
    y, x = torch.meshgrid(torch.linspace(0, 1, 64), torch.linspace(0, 1, 96), indexing="ij")
    image = torch.stack([x, y, x * y])
    resized = F.resize(image, [32, 48], interpolation=InterpolationMode.BICUBIC, antialias=True)
    (view,) = CentreCrop((32, 32))(image)
    assert (view - F.center_crop(resized, [32, 32])).abs().max() < 0.02
    (wide,) = CentreCrop((16, 48))(image)
    assert (wide - F.center_crop(resized, [16, 48])).abs().max() < 0.02


def test_wide_targets_show_wide_parts_instead_of_stretched_ones() -> None:
    crop, rng = RandomCrop((64, 128), scale=(0.2, 0.5)), np.random.default_rng(0)
    stretches = []
    for _ in range(300):
        _, _, h, w = crop._part(64, 128, rng)
        stretches.append((128 / w) / (64 / h))
    assert 0.95 < np.median(stretches) < 1.05 and 3 / 4 - 0.05 < min(stretches) and max(stretches) < 4 / 3 + 0.05


def some_image(channels=3, deep=False, size=(30, 40), seed=0):
    image = torch.randint(0, 256, (channels, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return image / 255 if deep else image


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("color", ["none", "shared", "own", "second"])
@pytest.mark.parametrize("crop", ["none", "shared", "own"])
def test_two_views_of_any_image(crop, color, channels, deep):
    image, make = some_image(channels, deep), TwoViews((12, 9), crop=crop, color=color)
    kept = image.clone()
    for seed in range(6):
        views, again = (make(image, np.random.default_rng(seed)) for _ in range(2))
        for view, same in zip(views, again, strict=True):
            assert view.shape == (channels, 12, 9) and view.dtype == image.dtype and torch.equal(view, same)
            assert not deep or (view.min() >= 0 and view.max() <= 1)
    assert torch.equal(image, kept)
    rng = np.random.default_rng(0)
    pairs = [make(image, rng) for _ in range(30)]
    alike = sum(torch.equal(one, two) for one, two in pairs)
    assert alike == 30 if crop != "own" and color in ("none", "shared") else alike < 10
    distinct = len({tuple(one.flatten().tolist()) for one, _ in pairs})
    assert distinct == 1 if crop == "none" and color in ("none", "second") else distinct > 15


def test_the_crop_is_that_of_the_plain_crops():
    image = some_image()
    (centre,) = CentreCrop((12, 12))(image)
    assert all(torch.equal(view, centre) for view in TwoViews((12, 12), crop="none")(image, np.random.default_rng(0)))
    rng, same = np.random.default_rng(5), np.random.default_rng(5)
    one, two = TwoViews((12, 12), crop="own")(image, rng)
    assert torch.equal(one, RandomCrop((12, 12))(image, same)[0]) and torch.equal(
        two, RandomCrop((12, 12))(image, same)[0]
    )
    one, two = TwoViews((12, 12), crop="shared")(image, np.random.default_rng(5))
    assert torch.equal(one, two) and torch.equal(one, RandomCrop((12, 12))(image, np.random.default_rng(5))[0])


@pytest.mark.parametrize("color", ["shared", "own"])
def test_colours_change_and_places_do_not(color):
    """An image with a colour in each half still has two halves of one colour each."""
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    image[0, :, :8], image[1, :, 8:] = 200, 120
    make, rng, changed = TwoViews((16, 16), crop="none", color=color), np.random.default_rng(0), 0
    for _ in range(20):
        for view in make(image, rng):
            halves = view[:, :, :8], view[:, :, 8:]
            assert all((half == half[:, :1, :1]).all() for half in halves)
            changed += not torch.equal(view, image)
    assert 20 < changed < 40


@pytest.mark.parametrize(("crop", "expected"), [("shared", 0.5), ("own", 0.5), ("none", 0.0)])
def test_views_are_mirrored_by_their_own_coin_or_the_shared_one(crop, expected):
    image = torch.arange(12, dtype=torch.uint8).expand(3, 12, 12).contiguous()
    rng = np.random.default_rng(0)
    make = TwoViews((12, 12), crop=crop, scale=(1, 1), ratio=(1, 1))
    mirrored = np.array([[torch.equal(view, image.flip(-1)) for view in make(image, rng)] for _ in range(300)])
    assert np.abs(mirrored.mean(0) - expected).max() < 0.1
    assert (mirrored[:, 0] == mirrored[:, 1]).mean() == pytest.approx(0.5 if crop == "own" else 1.0, abs=0.1)
    plain = TwoViews((12, 12), crop=crop, scale=(1, 1), ratio=(1, 1), flip=False)
    assert all(torch.equal(view, image) for _ in range(20) for view in plain(image, rng))


def test_probabilities_of_jitter_and_grey():
    image, rng = some_image(), np.random.default_rng(0)
    views = [recolor_view(image, draw_colors(rng)) for _ in range(600)]
    grey = np.mean([torch.equal(view[0], view[1]) and torch.equal(view[1], view[2]) for view in views])
    same = np.mean([torch.equal(view, image) for view in views])
    assert abs(grey - 0.2) < 0.05 and abs(same - 0.2 * 0.8) < 0.05


class Drawn:
    """Generator with given draws: whether to jitter, whether to grey, each factor's place in its range, the order."""

    def __init__(self, jitter, grey, **places):
        self.chances = iter([0.0 if jitter else 0.9, 0.0 if grey else 0.9])
        self.places = iter([places.get(name, 0.0) for name in ("brightness", "contrast", "saturation", "hue")])

    def random(self):
        return next(self.chances)

    def uniform(self, low, high):
        return (low + high) / 2 + next(self.places) * (high - low) / 2

    def permutation(self, count):
        return np.arange(count)


@pytest.mark.parametrize("end", [-1.0, 1.0])
def test_strength_of_colour_jitter(end):
    """Brightness and contrast by 0.4, saturation by 0.2, hue by 0.1 of the circle (ExtreMA, as MoCo v3)."""
    image = some_image(deep=True) * 0.5 + 0.2
    most = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
    for name, reach in most.items():
        expected = getattr(F, f"adjust_{name}")(image, end * reach + (name != "hue"))
        assert not torch.allclose(expected, image, atol=1e-3)
        torch.testing.assert_close(
            recolor_view(image, draw_colors(Drawn(True, False, **{name: end}))), expected, rtol=0, atol=1e-5
        )
    untouched = recolor_view(image, draw_colors(Drawn(False, False, **dict.fromkeys(most, end))))
    assert torch.equal(untouched, image)
    grey = recolor_view(image, draw_colors(Drawn(False, True)))
    weights = torch.tensor([0.2989, 0.587, 0.114]).view(3, 1, 1)
    torch.testing.assert_close(grey, (image * weights).sum(0, keepdim=True).expand(3, -1, -1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_other_channels_have_brightness_and_contrast_per_channel(channels):
    image = some_image(channels, deep=True) * 0.5 + 0.2
    bright = recolor_view(image, draw_colors(Drawn(True, True, brightness=0.5, saturation=1.0, hue=1.0)))
    torch.testing.assert_close(bright, image * 1.2, rtol=0, atol=1e-5)
    contrast = recolor_view(image, draw_colors(Drawn(True, True, contrast=-1.0)))
    means = image.mean((1, 2), keepdim=True)
    torch.testing.assert_close(contrast, means + 0.6 * (image - means), rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("deep", [False, True])
def test_batched_colours_equal_torchvisions_per_image(channels, deep):
    rng = np.random.default_rng(0)
    images = torch.stack([some_image(channels, deep) for _ in range(40)])
    draws = torch.stack([draw_colors(rng) for _ in range(40)])
    found = recolor(images, plan_colors(draws, channels))
    for image, draw, changed in zip(images, draws, found, strict=True):
        jitter, grey, _, _, *rest = draw.tolist()
        expected = image.float() / (1 if deep else 255)
        expected = expected if channels == 3 else expected[:, None]
        names = ["brightness", "contrast", "saturation", "hue"]
        for number in rest[4:] if jitter else []:
            if channels == 3 or number < 2:
                expected = getattr(F, f"adjust_{names[int(number)]}")(expected, rest[int(number)])
        if channels == 3 and grey:
            expected = F.rgb_to_grayscale(expected, num_output_channels=3)
        torch.testing.assert_close(changed, expected.view_as(changed), rtol=0, atol=2e-5)


@pytest.mark.parametrize("color", ["none", "shared", "own", "second"])
def test_a_finished_batch_is_what_the_augmentation_makes_of_each_image(color):
    make = TwoViews((12, 9), crop="own", color=color)
    source = open_data("digits").train.subset(range(8))
    batch = next(training_batches(source, make, 8, 3, 0, 1))
    rngs = [np.random.default_rng((3, 0, index)) for index in batch.indices.tolist()]
    views = [make(to_channels(source.read(i), 3), rng) for i, rng in zip(batch.indices.tolist(), rngs, strict=True)]
    for finished, expected in zip(batch.on("cpu").views, zip(*views, strict=True), strict=True):
        unit = 1 if finished.is_floating_point() else 255
        assert (finished / unit - torch.stack(expected) / 255).abs().max() < 0.51 / 255
    assert (batch.colors is None) == (color == "none")


@pytest.mark.parametrize(
    ("option", "words"), [("crop", "none, shared or own"), ("color", "none, shared, own or second")]
)
def test_unknown_words_are_refused(option, words):
    with pytest.raises(PatchloomError, match=f"--task.{option} cannot be both: it takes {words}"):
        TwoViews((8, 8), **{option: "both"})


# Crops of the padded image, as in DeiT's and LUT's programs.


class Offsets:
    """Generator that shifts by given offsets from the corner of the padded image."""

    def __init__(self, *offsets):
        self.offsets = iter(offsets)

    def integers(self, high):
        offset = next(self.offsets)
        assert 0 <= offset < high
        return offset

    def random(self):
        return 0.9  # no mirroring


@pytest.mark.parametrize(("border", "mode"), [("padded", "constant"), ("reflected", "reflect")])
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("deep", [False, True])
def test_padded_crops_equal_torchvisions_at_every_offset(border, mode, channels, deep):
    image = torch.randint(0, 256, (channels, 12, 9), dtype=torch.uint8)
    image = image / 255 if deep else image
    padded = F.pad(image, [4, 4, 4, 4], padding_mode=mode)
    crop = RandomCrop((12, 9), border=border)
    for top in range(9):
        for left in range(9):
            (view,) = crop(image, Offsets(top, left))
            assert view.dtype == image.dtype
            assert torch.equal(view, F.crop(padded, top, left, 12, 9))


@pytest.mark.parametrize(("size", "side"), [((30, 40), 16), ((40, 31), 16), ((16, 25), 16), ((10, 12), 16)])
def test_images_are_resized_to_the_shorter_side_before_they_are_padded(size, side):
    """Within two levels of torchvision's Resize and RandomCrop of PIL images, whose rounding differs."""
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    resized = transforms.Resize(side, InterpolationMode.BICUBIC)(picture)
    theirs = F.pad(resized, [4, 4, 4, 4], padding_mode="reflect")
    crop = RandomCrop((side, side), border="reflected")
    most = resized.height + 8 - side, resized.width + 8 - side
    for top, left in ((0, 0), most, (most[0] // 2, 1)):
        expected = torch.from_numpy(np.array(F.crop(theirs, top, left, side, side))).permute(2, 0, 1)
        (view,) = crop(image, Offsets(top, left))
        assert (view.int() - expected.int()).abs().max() <= 2


def test_shifts_are_uniform_as_torchvisions_and_half_are_mirrored():
    image = torch.arange(144, dtype=torch.uint8).reshape(1, 12, 12)
    padded = F.pad(image, [4, 4, 4, 4])
    places = {F.crop(padded, i, j, 12, 12).numpy().tobytes(): (i, j) for i in range(9) for j in range(9)}
    crop, rng, counts, mirrored = RandomCrop((12, 12), border="padded"), np.random.default_rng(0), np.zeros((9, 9)), 0
    for _ in range(8100):
        (view,) = crop(image, rng)
        place = places.get(view.contiguous().numpy().tobytes())
        mirrored += place is None
        counts[place or places[view.flip(-1).contiguous().numpy().tobytes()]] += 1
    assert abs(mirrored / 8100 - 0.5) < 0.03
    assert ((counts - 100) ** 2 / 100).sum() < 130  # chi-squared with 80 degrees of freedom: 0.1 % lie above 125


@pytest.mark.parametrize("shape", [(1, 3000), (3000, 1), (2, 7), (200, 3)])
def test_long_images_are_cut_before_they_are_resized(shape, monkeypatch):
    made = []
    monkeypatch.setattr(
        "patchloom.data.augment.resize_part", lambda *given: made.append(given[-1]) or resize_part(*given)
    )
    image = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    (view,) = RandomCrop((16, 16), border="reflected")(image, np.random.default_rng(0))
    assert view.shape == (3, 16, 16) and max(made[0]) <= 8 * 16 and min(made[0]) == 16


def test_blurred_and_solarised_as_by_pillow():
    """Within three levels for the blur: Pillow rounds to 8 bits in each of its passes."""
    image = some_image()
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())

    def changed(place, value):
        draw = torch.zeros(DRAW)
        draw[place] = value
        return (recolor(image[None], plan_colors(draw[None], 3))[0] * 255).permute(1, 2, 0)

    assert np.array_equal(changed(2, 1).round().numpy(), np.array(ImageOps.solarize(picture)))
    for radius in (0.1, 0.5, 1.0, 1.3, 2.0):
        expected = np.array(picture.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float32)
        assert np.abs(changed(3, radius).numpy() - expected).max() < 3
        assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() > 5 or radius == 0.1
    assert np.array_equal(changed(1, 1)[..., 0].round(), changed(1, 1)[..., 2].round()), "grey"


def test_colours_of_the_second_view_are_those_of_luts_program():
    """The first view stays. The second has jitter with 0.8, and one of grey, solarised and blurred, each a third."""
    rng, image, make = np.random.default_rng(0), some_image(), TwoViews((30, 40), color="second", border="reflected")
    draws = torch.stack([make.split(image, rng)[1] for _ in range(1500)])
    assert not draws[:, 0].any()
    jitter, grey, solarized, radius = draws[:, 1, :4].T
    assert abs(jitter.mean() - 0.8) < 0.04
    for one in (grey, solarized, (radius > 0).float()):
        assert abs(one.mean() - 1 / 3) < 0.04
    assert (grey + solarized + (radius > 0).float() == 1).all()
    blurred = radius[radius > 0]
    assert 0.1 <= blurred.min() < 0.15 and 1.95 < blurred.max() <= 2 and abs(blurred.mean() - 1.05) < 0.1
    plain = TwoViews((30, 40), border="reflected")
    for seed in range(5):
        (first, second), (kept, _) = (one(image, np.random.default_rng(seed)) for one in (make, plain))
        assert torch.equal(first, kept) and not torch.equal(first, second)


@pytest.mark.parametrize("size", [224, 96])
@pytest.mark.parametrize("h, w", [(375, 500), (500, 375), (333, 499), (64, 64), (224, 900)])
def test_the_test_crop_is_that_of_the_papers_programs(h: int, w: int, size: int) -> None:
    """Resize and CenterCrop of torchvision on the same image, as PIL resizes it."""
    values = np.random.default_rng(h).integers(0, 256, (h, w, 3), dtype=np.uint8)
    crop = transforms.Compose(
        [transforms.Resize(int(size / 0.875), InterpolationMode.BICUBIC), transforms.CenterCrop(size)]
    )
    theirs = np.asarray(crop(Image.fromarray(values))).astype(int)
    (ours,) = CentreCrop((size, size), test_crop=0.875)(torch.from_numpy(values).permute(2, 0, 1))
    assert ours.dtype == torch.uint8 and ours.shape == (3, size, size)
    difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.02  # PIL and torch round a few values differently


def test_the_test_crop_leaves_out_the_border() -> None:
    """Of 375 rows those from 24 to 350 count: 224 of 256."""
    rows = torch.zeros(3, 375, 500, dtype=torch.uint8)
    rows[:, :20] = rows[:, -20:] = 255
    assert CentreCrop((224, 224), test_crop=0.875)(rows)[0].max() == 0
    assert CentreCrop((224, 224))(rows)[0].max() == 255


def test_the_test_crop_of_oblongs_and_strips() -> None:
    """The image covers the larger rectangle in both directions, and a strip is not enlarged as a whole."""
    image = torch.rand(3, 60, 80)
    assert CentreCrop((32, 64), test_crop=0.8)(image)[0].shape == (3, 32, 64)
    assert CentreCrop((64, 32), test_crop=0.8)(image)[0].shape == (3, 64, 32)
    strip = torch.zeros(3, 2, 200_000, dtype=torch.uint8)
    strip[:, :, 99_990:100_010] = 255
    (view,) = CentreCrop((224, 224), test_crop=0.875)(strip)
    assert view.shape == (3, 224, 224) and view.min() == 255
