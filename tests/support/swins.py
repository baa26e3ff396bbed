"""Small Swins for tests: two and three stages, windows that cover a stage and windows that do not."""

import torch
from perturbing import perturbed

from patchloom.nets.build import EncoderSpec, build_encoder

SIZES = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
DEEP = {"embed_dim": 8, "depths": [2, 2, 2], "num_heads": [1, 2, 2], "window_size": 4}


def spec_of(size=(32, 32), p=2, channels=3, **options):
    return EncoderSpec("swin-nano", size, p, channels, positions="none", options={**SIZES, **options})


def swin(size=(32, 32), p=2, channels=3, **options):
    """Build an encoder with perturbed weights, because zero biases would hide mistakes."""
    torch.manual_seed(0)
    return perturbed(build_encoder(spec_of(size, p, channels, **options)), 0.1).eval()
