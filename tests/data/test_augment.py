import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter, ImageOps
from resolved import resolved_settings
from timm.data.auto_augment import rand_augment_transform
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from patchloom.data.augment import (
    DRAW,
    CentreCrop,
    RandAugment,
    RandomCrop,
    TwoViews,
    draw_colors,
    native_scale,
    plan_colors,
    recolor,
    resize_part,
)
from patchloom.data.decode import to_channels
from patchloom.data.loader import training_batches
from patchloom.data.sources.open import open_data
from patchloom.data.stats import unknown_stats
from patchloom.errors import PatchloomError
from patchloom.runs.task import prepare_task
from patchloom.tasks import mae

sides = st.integers(1, 40)


@settings(max_examples=60)
@given(sides, sides, st.sampled_from([1, 2, 3, 5]), st.booleans(), st.integers(0, 99))
def test_any_image_becomes_the_requested_size(height, width, channels, deep, seed):
    image = torch.randint(0, 256, (channels, height, width), dtype=torch.uint8)
    image = image / 255 if deep else image
    for crop in (RandomCrop((6, 9)), CentreCrop((6, 9))):
        (view,) = crop(image, np.random.default_rng(seed))
        assert view.shape == (channels, 6, 9) and view.dtype == image.dtype
        assert not deep or (view.min() >= 0 and view.max() <= 1)
        assert torch.equal(view, crop(image, np.random.default_rng(seed))[0])


def test_native_crops_of_small_images_are_the_usual_ones_and_of_large_ones_are_not_reduced():
    assert native_scale((16, 16), (16, 16)) == native_scale((8, 8), (16, 16)) == (0.2, 1.0)
    assert native_scale((32, 32), (16, 16)) == (0.125, 0.5)
    crop, rng = RandomCrop((16, 24), native=True), np.random.default_rng(0)
    areas = [np.prod(crop._part(640, 480, rng)[2:]) / (16 * 24) for _ in range(300)]
    assert 0.45 < min(areas) < 0.6 and 1.8 < max(areas) < 2.1, "half to twice the pixels of the view"
    image = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8)
    (view,) = CentreCrop((16, 24), native=True)(image)
    assert torch.equal(view, image[:, 12:28, 13:37])
    small = image[:, :10]
    assert torch.equal(CentreCrop((16, 24), native=True)(small)[0], CentreCrop((16, 24))(small)[0])
    assert torch.equal(TwoViews((16, 24), crop="none", native=True)(image, np.random.default_rng(0))[0], view)


def test_parts_keep_to_scale_and_ratio_and_reach_everywhere():
    """The ratio is relative to that of the view, so that wide targets show wide parts instead of stretched ones."""
    crop, rng = RandomCrop((8, 16), scale=(0.2, 0.5)), np.random.default_rng(0)
    parts = np.array([crop._part(100, 200, rng) for _ in range(2000)])
    top, left, h, w = parts.T
    assert 0.19 < (h * w / 2e4).min() < 0.21 and 0.49 < (h * w / 2e4).max() < 0.51
    assert 0.73 < (w / h / 2).min() < 0.77 and 1.3 < (w / h / 2).max() < 1.37
    assert top.min() == left.min() == 0 and (top + h).max() == 100 and (left + w).max() == 200
    assert abs((h * w / 2e4).mean() - 0.35) < 0.01  # uniform in area


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


def some_image(channels=3, deep=False, size=(30, 40), seed=0):
    image = torch.randint(0, 256, (channels, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return image / 255 if deep else image


@pytest.mark.parametrize(("channels", "deep"), [(1, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize("color", ["none", "shared", "own", "second"])
@pytest.mark.parametrize("crop", ["none", "shared", "own"])
def test_two_views_of_any_image(crop, color, channels, deep):
    image, make = some_image(channels, deep), TwoViews((12, 9), crop=crop, color=color)
    kept, pairs = image.clone(), []
    for seed in range(20):
        views, again = (make(image, np.random.default_rng(seed)) for _ in range(2))
        pairs.append(views)
        assert len(views) == make.n_views
        for view, same in zip(views, again, strict=True):
            assert view.shape == (channels, 12, 9) and view.dtype == image.dtype and torch.equal(view, same)
            assert not deep or (view.min() >= 0 and view.max() <= 1)
    assert torch.equal(image, kept)
    alike = sum(torch.equal(one, two) for one, two in pairs)
    assert alike == 20 if crop != "own" and color in ("none", "shared") else alike < 7
    distinct = len({tuple(one.flatten().tolist()) for one, _ in pairs})
    assert distinct == 1 if crop == "none" and color in ("none", "second") else distinct > 10


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


def test_draws_of_colour_jitter_are_those_of_extrema():
    """Jitter with 0.8, grey with 0.2; brightness and contrast by 0.4, saturation by 0.2, hue by 0.1 of the circle."""
    rng = np.random.default_rng(0)
    draws = torch.stack([draw_colors(rng) for _ in range(2000)])
    torch.testing.assert_close(draws[:, :4].mean(0), torch.tensor([0.8, 0.2, 0, 0]), rtol=0, atol=0.03)
    centre, reach = torch.tensor([1, 1, 1, 0.0]), torch.tensor([0.4, 0.4, 0.2, 0.1])
    torch.testing.assert_close(draws[:, 4:8].amin(0), centre - reach, rtol=0, atol=4e-3)
    torch.testing.assert_close(draws[:, 4:8].amax(0), centre + reach, rtol=0, atol=4e-3)
    places = (draws[:, 8:, None] == torch.arange(4)).float()
    assert (places.sum(1) == 1).all() and (places.mean(0) - 0.25).abs().max() < 0.04, "each order is as likely"


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
    for count in (1, 5, 8):
        first = batch.first(count)
        assert torch.equal(first.indices, batch.indices[:count])
        for one, two in zip(first.on("cpu").views, batch.on("cpu").views, strict=True):
            torch.testing.assert_close(one, two[:count])


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
    values = np.random.default_rng(h).integers(0, 256, (h, w, 3), dtype=np.uint8)
    crop = transforms.Compose(
        [transforms.Resize(int(size / 0.875), InterpolationMode.BICUBIC), transforms.CenterCrop(size)]
    )
    theirs = np.asarray(crop(Image.fromarray(values))).astype(int)
    (ours,) = CentreCrop((size, size), test_crop=0.875)(torch.from_numpy(values).permute(2, 0, 1))
    assert ours.dtype == torch.uint8 and ours.shape == (3, size, size)
    difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.02  # PIL and torch round a few values differently


def test_the_test_crop_of_oblongs_and_strips() -> None:
    """The image covers the larger rectangle in both directions, and a strip is not enlarged as a whole."""
    image = torch.rand(3, 60, 80)
    assert CentreCrop((32, 64), test_crop=0.8)(image)[0].shape == (3, 32, 64)
    assert CentreCrop((64, 32), test_crop=0.8)(image)[0].shape == (3, 64, 32)
    strip = torch.zeros(3, 2, 200_000, dtype=torch.uint8)
    strip[:, :, 99_990:100_010] = 255
    (view,) = CentreCrop((224, 224), test_crop=0.875)(strip)
    assert view.shape == (3, 224, 224) and view.min() == 255


# RandAugment: after the crop, once for views that share it, for any channels.


MODEL = {"name": "nano", "embed_dim": 32, "depth": 1}
ASKED = resolved_settings(model=MODEL, img_size=(32, 32), patch_size=8, attention="explicit")


def changing(channels: int = 3) -> RandAugment:
    return RandAugment(9.0, 0.5, (0.5,) * channels)


@pytest.mark.parametrize(("channels", "deep"), [(1, False), (2, True), (3, False), (3, True)])
def test_a_view_is_cropped_first_and_changed_by_the_generator_alone(channels: int, deep: bool) -> None:
    image, change = some_image(channels, deep), changing(channels)
    plain, crop = RandomCrop((12, 12)), RandomCrop((12, 12), randaugment=change)
    state, changed = (random.getstate(), np.random.get_state()[1].tolist()), 0
    for seed in range(40):
        (view,) = crop(image, np.random.default_rng(seed))
        rng = np.random.default_rng(seed)
        (before,) = plain(image, rng)
        assert torch.equal(view, change(before, rng)), "the same draws, in the same order"
        assert view.shape == (channels, 12, 12) and view.dtype == image.dtype
        assert not deep or (view.min() >= 0 and view.max() <= 1)
        changed += not torch.equal(view, before)
    assert state == (random.getstate(), np.random.get_state()[1].tolist()), "global generators are as before"
    assert 18 < changed < 36  # a quarter of the draws has no operation, and some operations change nothing


@pytest.mark.parametrize(("magnitude", "std"), [(9, 0.5), (3, 0.0), (6, 1.0)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_timms_transform(channels: int, magnitude: int, std: float) -> None:
    """As DeiT's program asks for it: rand-m9-mstd0.5-inc1, bicubic, with the mean in gaps."""
    image, mean = some_image(channels), (0.485, 0.456, 0.406)[:channels]
    fill = tuple(round(255 * value) for value in mean)
    options = {"img_mean": fill if channels == 3 else fill[0], "interpolation": Image.Resampling.BICUBIC}
    theirs = rand_augment_transform(f"rand-m{magnitude}-mstd{std}-inc1", options)
    ours = RandAugment(magnitude, std, mean)
    changed = 0
    for seed in range(60):
        view = ours(image, np.random.default_rng(seed))
        drawn = int(np.random.default_rng(seed).integers(2**32))
        random.seed(drawn)
        np.random.seed(drawn)
        picture = image.permute(1, 2, 0).numpy()
        wanted = np.array(theirs(Image.fromarray(picture if channels == 3 else picture[..., 0])))
        assert np.array_equal(view.permute(1, 2, 0).numpy().reshape(wanted.shape), wanted)
        changed += not torch.equal(view, image)
    assert changed > 30


def test_deep_pictures_keep_their_range_and_further_channels_are_changed_alike() -> None:
    """A 16-bit image of which only a sixteenth of the range is used has 256 levels, and not 16."""
    dim = some_image(1, deep=True).expand(5, -1, -1) / 16
    views = [changing(5)(dim, np.random.default_rng(seed)) for seed in range(30)]
    assert max(len(view[0].unique()) for view in views if not torch.equal(view, dim)) > 100
    assert all(view.min() >= dim.min() - 1e-6 and view.max() <= dim.max() + 1e-6 for view in views)
    assert all(torch.equal(view, view[:1].expand_as(view)) for view in views)


@pytest.mark.parametrize("color", ["none", "own"])
@pytest.mark.parametrize("crop", ["none", "shared", "own"])
def test_views_of_one_crop_are_changed_alike(crop: str, color: str) -> None:
    """Teacher and student see the same content at each place; colour jitter is drawn afterwards."""
    image, make = some_image(), TwoViews((12, 12), crop=crop, color=color, randaugment=changing())
    pairs = [make.split(image, np.random.default_rng(seed))[0] for seed in range(20)]
    assert sum(torch.equal(*pair) for pair in pairs) == (0 if crop == "own" else 20)
    plain = TwoViews((12, 12), crop=crop, color=color)
    changed = [not torch.equal(pair[0], plain(image, np.random.default_rng(i))[0]) for i, pair in enumerate(pairs)]
    assert 5 < sum(changed)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_bits_are_black_as_they_were_in_older_pillows(channels: int) -> None:
    picture = Image.fromarray(some_image(channels).permute(1, 2, 0).numpy().squeeze())
    (posterize,) = (one for one in changing().transform((0,) * channels).ops if one.name == "PosterizeIncreasing")
    assert posterize.level_fn(10.0, posterize.hparams) == (0,)
    assert not np.array(posterize.aug_fn(picture, 0)).any()
    assert np.unique(posterize.aug_fn(picture, 1)).tolist() == [0, 128]


def test_a_run_sets_it_with_the_mean_of_its_data_and_refuses_it_without_effect(monkeypatch) -> None:
    stats = unknown_stats(3)._replace(mean=(0.1, 0.2, 0.3))
    assert prepare_task(ASKED, stats).augment.randaugment is None
    for name in ("mae", "restore", "lut"):
        asked = replace(ASKED, task={"name": name}, randaugment=9.0, randaugment_std=0.25)
        change = prepare_task(asked, stats).augment.randaugment
        assert (change.magnitude, change.std, change.fill) == (9.0, 0.25, stats.mean)

    def unaugmented(task, vit):
        built = mae.MAE(vit)
        built.augment = SimpleNamespace(size=(32, 32))
        return built

    monkeypatch.setattr("patchloom.runs.task.build_task", unaugmented)
    assert prepare_task(ASKED, stats).augment.flip is True
    for wrong in ({"randaugment": 9.0}, {"crop_scale": "padded"}, {"crop_scale": "reflected"}):
        with pytest.raises(PatchloomError, match=f"--{[*wrong][0]} .*has no effect on mae"):
            prepare_task(replace(ASKED, **wrong), stats)
