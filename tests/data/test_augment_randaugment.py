"""RandAugment of views in pre-training: after the crop, once for views that share it, for any channels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from resolved import resolved_settings

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
    state, changed = torch.get_rng_state(), 0
    for seed in range(40):
        (view,) = crop(image, np.random.default_rng(seed))
        rng = np.random.default_rng(seed)
        (before,) = plain(image, rng)
        assert torch.equal(view, change(before, rng)), "the same draws, in the same order"
        assert view.shape == (channels, 12, 12) and view.dtype == image.dtype
        assert not deep or (view.min() >= 0 and view.max() <= 1)
        changed += not torch.equal(view, before)
    assert torch.equal(state, torch.get_rng_state())
    assert (
        18 < changed < 36
    )  # two operations with probability 0.5 leave a quarter unchanged, and some operations change nothing


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
