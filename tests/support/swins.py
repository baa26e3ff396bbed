"""Small Swins for tests: two and three stages, windows that cover a stage and windows that do not."""

import torch

from patchloom.nets.build import EncoderSpec, build_encoder

SIZES = {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
DEEP = {"embed_dim": 8, "depths": [2, 2, 2], "num_heads": [1, 2, 2], "window_size": 4}


def spec_of(size=(32, 32), p=2, channels=3, **options):
    return EncoderSpec("swin-nano", size, p, channels, positions="none", options={**SIZES, **options})


def swin(size=(32, 32), p=2, channels=3, **options):
    """Build an encoder with perturbed weights, because zero biases would hide mistakes."""
    torch.manual_seed(0)
    net = build_encoder(spec_of(size, p, channels, **options))
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return net.eval()
