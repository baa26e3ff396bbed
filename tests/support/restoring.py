"""Restoration tasks, and images for them."""

import torch
from small import SIZES, seeded
from torch.nn import functional as F

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.tasks.restore import Restore
from patchloom.withhold.encoder_input import all_patches

DEGRADATIONS = ["masked", "zoom_in", "zoom_out", "fisheye", "wave", "blur", "decolorize", "none"]
WITH_RATIOS = [(kind, ratio) for kind in DEGRADATIONS for ratio in (0.0, 0.5) if (kind, ratio) != ("masked", 0.0)]
# strengths of which each image draws its own
MANY = {
    "zoom_in": {"scale": [0.4, 0.9]},
    "zoom_out": {"scale": [0.4, 0.9]},
    "fisheye": {"twist": [0.0, 1.0]},
    "wave": {"amplitude": [0.0, 0.2]},
    "blur": {"kernel": [3, 9]},
    "decolorize": {"saturation": [0.0, 1.0]},
}
MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)


def make(size=(32, 32), p=4, channels=3, statistics=True, **options):
    torch.manual_seed(0)
    task = Restore(build_encoder(EncoderSpec("nano", size, p, channels, options=SIZES)), **options)
    if statistics:
        task.normalized_by(MEAN[:channels], STD[:channels])
    return task


def pictures(task, b=3, seed=1):
    """Return smooth normalised images [b c H W] of the task's input size."""
    coarse = torch.rand(b, task.geometry.channels, 6, 6, generator=seeded(seed))
    return (F.interpolate(coarse, task.augment.size, mode="bicubic").clamp(0, 1) - task.mean) / task.std


def plain(task, images):
    return images * task.std + task.mean


def degraded(task, images, generator=None):
    """Return all patches of the task's views of images."""
    return task.degradation(all_patches(images, task.geometry.n), task.mean, task.std, generator)
