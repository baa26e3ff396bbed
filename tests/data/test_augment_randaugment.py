"""RandAugment of views in pre-training: after the crop, once for views that share it, for any channels."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from resolved import resolved_settings
from timm.data.auto_augment import rand_augment_transform

from patchloom.data.augment import RandAugment, RandomCrop, TwoViews
from patchloom.data.stats import unknown_stats
from patchloom.errors import PatchloomError
from patchloom.runs.task import prepare_task

MODEL = {"name": "nano", "embed_dim": 32, "depth": 1}
ASKED = resolved_settings(model=MODEL, img_size=(32, 32), patch_size=8, attention="explicit")


def some_image(channels: int = 3, deep: bool = False) -> torch.Tensor:
    image = torch.randint(256, (channels, 30, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return image / 255 if deep else image


def changing(channels: int = 3) -> RandAugment:
    return RandAugment(9.0, 0.5, (0.5,) * channels)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
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
    assert (
        18 < changed < 36
    )  # two operations with probability 0.5 leave a quarter unchanged, and some operations change nothing


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


def test_operations_and_strengths_are_those_of_the_programs() -> None:
    """At magnitude 9, with 'inc1': 15 operations, among them invert and solarise-add; no identity."""
    operations = {one.name: one for one in changing().transform((128,) * 3).ops}
    assert operations.keys() == {
        *("AutoContrast", "Equalize", "Invert", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing", "SolarizeAdd"),
        *("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
        *("ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
    }
    strengths = {
        **{"PosterizeIncreasing": 1, "SolarizeIncreasing": 26, "SolarizeAdd": 99, "Rotate": 27, "ShearX": 0.27},
        **{"TranslateXRel": 0.405, "ColorIncreasing": (0.19, 1.81), "SharpnessIncreasing": (0.19, 1.81)},
    }
    for name, wanted in strengths.items():
        (found,) = operations[name].level_fn(9.0, operations[name].hparams)
        either = wanted if isinstance(wanted, tuple) else (wanted, -wanted)
        assert any(found == pytest.approx(one) for one in either)
    assert {one.prob for one in operations.values()} == {0.5}
    assert {one.magnitude_std for one in operations.values()} == {0.5}


@pytest.mark.parametrize("channels", [1, 3])
def test_no_bits_are_black_as_they_were_in_older_pillows(channels: int) -> None:
    view = some_image(channels)
    picture = Image.fromarray(view.permute(1, 2, 0).numpy().squeeze())
    (posterize,) = (one for one in changing().transform((0,) * channels).ops if one.name == "PosterizeIncreasing")
    assert posterize.level_fn(10.0, posterize.hparams) == (0,)
    assert not np.array(posterize.aug_fn(picture, 0)).any()
    assert np.unique(posterize.aug_fn(picture, 1)).tolist() == [0, 128]
    for seed in range(200):  # no draw is refused
        RandAugment(10.0, 0.0, (0.5,) * channels)(view, np.random.default_rng(seed))


def test_deep_pictures_keep_their_range() -> None:
    """A 16-bit image of which only a sixteenth of the range is used has 256 levels, and not 16."""
    dim = some_image(deep=True) / 16
    views = [changing()(dim, np.random.default_rng(seed)) for seed in range(20)]
    assert max(len(view.unique()) for view in views if not torch.equal(view, dim)) > 100
    assert all(view.min() >= dim.min() - 1e-6 and view.max() <= dim.max() + 1e-6 for view in views)


@pytest.mark.parametrize("channels", [2, 5])
def test_further_channels_are_changed_alike(channels: int) -> None:
    image = some_image(1).expand(channels, -1, -1).contiguous()
    rng = np.random.default_rng(0)
    views = [changing(channels)(image, rng) for _ in range(40)]
    assert all(torch.equal(view, view[:1].expand_as(view)) for view in views)
    assert not all(torch.equal(view, image) for view in views)


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


def test_a_run_sets_it_with_the_mean_of_its_data() -> None:
    mean = 0.1, 0.2, 0.3
    stats = unknown_stats(3)._replace(mean=mean)
    assert prepare_task(ASKED, stats).augment.randaugment is None
    for name in ("mae", "restore", "lut"):
        asked = replace(ASKED, task={"name": name}, randaugment=9.0, randaugment_std=0.25)
        change = prepare_task(asked, stats).augment.randaugment
        assert (change.magnitude, change.std, change.fill) == (9.0, 0.25, mean)


def test_an_augmentation_without_it_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unaugmented:
        size = (32, 32)

    from patchloom.tasks import mae

    built = mae.MAE.__init__

    def begin(self, *args, **options):
        built(self, *args, **options)
        self.augment = Unaugmented()

    monkeypatch.setattr(mae.MAE, "__init__", begin)
    monkeypatch.setattr("patchloom.runs.task.build_task", lambda task, vit: mae.MAE(vit))
    assert prepare_task(ASKED, unknown_stats(3)).augment.flip is True
    with pytest.raises(PatchloomError, match="--randaugment has no effect on mae"):
        prepare_task(replace(ASKED, randaugment=9.0), unknown_stats(3))
    for word in ("padded", "reflected"):
        with pytest.raises(PatchloomError, match=f"--crop_scale {word} has no effect on mae, .* attribute border"):
            prepare_task(replace(ASKED, crop_scale=word), unknown_stats(3))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"randaugment": 11.0}, "--randaugment must be 0 to 10, not 11"),
        ({"randaugment": 9.0, "randaugment_std": -1.0}, "--randaugment_std must be 0 or more"),
        ({"randaugment_std": 1.0}, "--randaugment_std has no effect without --randaugment"),
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(PatchloomError, match=said):
        replace(ASKED, **wrong).check()
