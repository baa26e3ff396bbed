"""Mixtures with the strongest form of each paper's task have its loss and gradients, from the same generator."""

from copy import deepcopy

import pytest
import torch
from golden import close
from mixing import make
from small import seeded

from patchloom.errors import PatchloomError
from patchloom.tasks.droppos import DropPos
from patchloom.tasks.extrema import ExtreMA
from patchloom.tasks.restore import Restore

SIZES = {"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 2}
EXTREMA = {
    **{"withhold": {"mask": 0.8}, "ask": {"agreement": 1.0}, "teacher": "second", "masks": 5, "crop": "shared"},
    **{"color": "own", "class_token": "cait", "agreement_loss": "infonce"},
}
DROPPOS = {
    **{"withhold": {"mask": 0.75, "drop_positions": 0.75}, "ask": {"positions": 1.0}},
    **{"sigma": 2.0, "sigma_end": 1.0, "position_temperature": 0.1},
}
RESTORE = {"withhold": {"zoom_in": 0.7, "mask": 0.75}, "ask": {"pixels": 1.0}, "canvas": 46, **SIZES}


def images(side=32, n=1):
    return torch.randn(n, 6, 3, side, side, generator=seeded(1)).unbind()


def check(mixture, task, views):
    """Check that loss, metrics and the encoder's gradients are those of a paper's task with the same weights."""
    task.load_state_dict(mixture.state_dict())
    task.normalized_by(mixture.mean.flatten().tolist(), mixture.std.flatten().tolist())
    for progress in (0.0, 0.7):
        mine, theirs = (one(*views, progress=progress, generator=seeded(3)) for one in (mixture, task))
        close(mine.loss, theirs.loss.detach())
        assert mine.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            close(mine.metrics[name], value)
        for one, outcome in ((mixture, mine), (task, theirs)):
            one.zero_grad()
            outcome.loss.backward()
        gradients = dict(task.named_parameters())
        for name, weight in mixture.named_parameters():
            if weight.requires_grad:
                torch.testing.assert_close(weight.grad, gradients[name].grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("loss", ["infonce", "byol"])
def test_extremas(loss):
    mixture = make(**EXTREMA | {"agreement_loss": loss})
    task = ExtreMA(deepcopy(mixture.encoder), mask_ratio=0.8, masks=5, loss=loss)
    check(mixture, task, images(n=2))
    assert (mixture.augment.crop, mixture.augment.color) == (task.augment.crop, task.augment.color)
    assert mixture.extra_modules().keys() == task.extra_modules().keys()


def test_dropposs():
    mixture = make(**DROPPOS)
    task = DropPos(deepcopy(mixture.encoder), 0.75, 0.75, sigma=2.0, sigma_end=1.0, temperature=0.1)
    check(mixture, task, images())
    plain = make(**DROPPOS | {"position_temperature": float("inf")})
    plain.load_state_dict(mixture.state_dict())
    assert (plain(*images(), generator=seeded(3)).loss - mixture(*images(), generator=seeded(3)).loss).abs() > 1e-4


@pytest.mark.parametrize("options", [{}, {"band_weight": 0.4, "band_target": "original"}], ids=str)
def test_beyond_maskings(options):
    mixture = make(**RESTORE, **options)
    task = Restore(deepcopy(mixture.encoder), **SIZES, **options)
    assert mixture.augment.size == task.augment.size == (46, 46)
    check(mixture, task, images(46))
    assert mixture(*images(46), generator=seeded()).metrics.keys() == {"mask_loss", "band_loss"}


def test_several_masks_are_disjoint_and_have_the_loss_of_each():
    asked = {"positions": 1.0, "pixels": 1.0, "agreement": 1.0}
    mixture = make(
        withhold={"mask": 0.75, "blank": 0.25, "drop_positions": 0.5, "limit_context": 0.5}, ask=asked, masks=3
    )
    (photos,) = images()
    given = mixture.given(photos, seeded(), masks=3)
    assert given.visible.shape == (18, 16) and given.masked.shape == (18, 48)
    for i in range(6):
        assert len(given.visible[i::6].unique()) == 48
    whole = mixture(photos, given=given).metrics
    parts = []
    for i in range(3):
        rows = slice(6 * i, 6 * i + 6)
        names = ("visible", "masked", "blank", "dropped", "context")
        one = type(given)(given.images, **{name: getattr(given, name)[rows] for name in names})
        parts.append(mixture(photos, given=one).metrics)
    for name in ("positions_loss", "pixels_loss", "agreement_loss"):
        close(whole[name], sum(part[name] for part in parts) / 3)
    assert mixture.given(photos, seeded()).visible.shape == (6, 16)  # measures and pictures have one mask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EXTREMA | {"masks": 6}, "no 6 disjoint masks of 12 visible patches each in 64: give --task.masks 1 to 5"),
        (EXTREMA | {"masks": 0}, "no 0 disjoint masks"),
        (EXTREMA | {"agreement_loss": "byol", "infonce_temperature": 0.1}, "--task.infonce_temperature has no effect"),
        (EXTREMA | {"infonce_temperature": 0.0}, "--task.infonce_temperature must be above 0"),
        (EXTREMA | {"agreement_loss": "moco"}, "--task.agreement_loss cannot be moco"),
        (EXTREMA | {"agreement_loss": "sigreg", "momentum": 0.9}, "--task.momentum has no effect"),
        (EXTREMA | {"agreement_loss": "sigreg", "gaussian_weight": 1.0}, "--task.gaussian_weight must lie between"),
        (EXTREMA | {"agreement_loss": "visreg", "directions": 0}, "--task.directions must be 1 or more"),
        (EXTREMA | {"teacher": "same"}, "--task.crop has no effect"),
        (EXTREMA | {"class_token": "mean", "attention_blocks": 1}, "--task.attention_blocks has no effect"),
        (DROPPOS | {"sigma_end": 3.0}, "--task.sigma_end must be 0 to --task.sigma"),
        (DROPPOS | {"position_temperature": 0.0}, "--task.position_temperature must be above 0"),
        (RESTORE | {"canvas": "auto", "position_temperature": 0.1}, "--task.position_temperature has no effect"),
        (RESTORE | {"class_token": "cait"}, "--task.class_token has no effect"),
        (RESTORE | {"sigma_end": 0.5}, "--task.sigma_end has no effect"),
        (RESTORE | {"canvas": 64}, "0.500 of --task.canvas 64, not zoom_in 0.7: give zoom_in 0.500"),
        (RESTORE | {"masks": 2}, "the loss on the band of a canvas is for one mask"),
        (RESTORE | {"ask": {"pixels": 1.0, "agreement": 1.0}}, "need images of the encoder's size"),
        (RESTORE | {"withhold": {"zoom_in": 0.7}, "band_weight": 0.1}, "--task.band_weight has no effect"),
        (RESTORE | {"band_weight": 2.0}, "--task.band_weight must lie in"),
    ],
)
def test_impossible_forms_are_refused(options, message):
    with pytest.raises(PatchloomError, match=message):
        make(**options)
