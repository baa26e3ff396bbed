"""Tasks in general: the views in pictures are those of training."""

import numpy as np
import pytest
import torch

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.tasks import build_task
from patchloom.tasks.task import augment_views


@pytest.mark.parametrize("task", ["extrema", "lut"])
@pytest.mark.parametrize("brightest", [255, 300 / 65535, 1.0])
def test_views_for_pictures_keep_the_bit_depth(task: str, brightest: float) -> None:
    """Eight bits would leave two of 300 of 65,535 levels."""
    options = {"depth": 1, "embed_dim": 32, "class_token": task == "lut"}
    one = build_task({"name": task}, build_encoder(EncoderSpec("nano", (16, 16), 2, options=options)))
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * brightest
    images = images.round().byte() if brightest == 255 else images
    unit = images.float() / 255 if brightest == 255 else images
    mean, std = unit.mean((0, 2, 3)), unit.std((0, 2, 3))
    one.normalized_by(mean.tolist(), std.tolist())

    drawn = augment_views(one, (unit - one.mean) / one.std, torch.Generator().manual_seed(5))
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(5))))
    trained = zip(*(one.augment(image, rng) for image in images), strict=True)
    for ours, theirs in zip(drawn, map(torch.stack, trained), strict=True):
        if brightest == 255:
            assert torch.equal(ours, (theirs.float() / 255 - one.mean) / one.std)
        else:
            torch.testing.assert_close(ours * one.std + one.mean, theirs, atol=1e-5 * brightest, rtol=1e-5)
