"""What the sweeps over every task share: small tasks, and what their own augmentation makes of random images."""

import numpy as np
import torch

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.tasks import build_task, encoder_defaults

SIZE = (32, 24)


def spec_of(name, options, asked=None):
    """The encoder that the task wishes for where ``asked`` of it, with the class token that the test wants."""
    wishes = encoder_defaults({"name": name, **(asked or {})})
    positions = wishes.get("positions", ("sincos",))[0]
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    return EncoderSpec("nano", SIZE, 4, positions=positions, options={**sizes, **options})


def build(name, seed=0, asked=None, **options):
    """The task with the options ``asked`` of it, around an encoder with further ``options``."""
    torch.manual_seed(seed)
    return build_task({"name": name, **(asked or {})}, build_encoder(spec_of(name, options, asked)))


def views_of(task, b=8, seed=0):
    """What the task's own augmentation makes of random images."""
    rng = np.random.default_rng(seed)
    images = [torch.from_numpy(rng.integers(0, 256, (3, 40, 40), dtype=np.uint8)) for _ in range(b)]
    made = [task.augment(image, rng) for image in images]
    return [torch.stack(views).float() / 127.5 - 1 for views in zip(*made, strict=True)]
