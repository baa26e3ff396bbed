"""Shared parts of the sweeps over all tasks: small tasks, and their augmentations of random images."""

import tempfile
from functools import cache
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.tasks import build_task, encoder_defaults
from patchloom.tasks.check import random_views as views_of

__all__ = ["FRAMES", "OBLONG", "PLAIN", "TEACHER", "asked_of", "build", "spec_of", "views_of"]

SIZE = (32, 24)
# what of an encoder, beside options of timm's, a sweep may ask for
USUAL = {"img_size": SIZE, "patch_size": 4, "channels": 3}
FRAMES = {"img_size": (40, 98), "patch_size": (40, 1), "channels": 1}  # a second of sound
OBLONG = {"patch_size": (8, 4)}
SQUARE = {"img_size": (32, 32), "patch_size": 8}  # has no more patches than a patch has pixels
TEACHER = "a frozen teacher"  # in options: the file that `teacher_file` makes
PLAIN = "weights alone"  # in options: a file of timm's weights by timm's names
NEEDED = {"distill": {"features_of": TEACHER}}  # options without a default


@cache
def teacher_file(channels: int = 3) -> str:
    """Write an encoder with another width, patch size, grid and statistics than those of the sweeps."""
    spec = EncoderSpec("nano", (16, 16), 8, channels, options={"embed_dim": 16, "depth": 1, "num_heads": 2})
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.2, 0.3)[:channels]
    path = Path(tempfile.mkdtemp()) / "teacher.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_encoder(build_encoder(spec), EncoderCard(spec, mean, std, "mae", "teacher"), path)
    return str(path)


@cache
def plain_file() -> str:
    """Write weights of timm's smallest ViT, which needs no network."""
    path = Path(tempfile.mkdtemp()) / "vit_tiny.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    return str(path)


def asked_of(name, asked=None, channels=3):
    """Return a task's name and options, including the required ones."""
    options = NEEDED.get(name, {}) | (asked or {})
    return {"name": name} | {
        key: teacher_file(channels) if value == TEACHER else plain_file() if value == PLAIN else value
        for key, value in options.items()
    }


def spec_of(name, options, asked=None):
    """Build the encoder for the task with options ``asked``, with the test's class token or sizes."""
    defaults = encoder_defaults(asked_of(name, asked))
    positions = defaults.get("positions", ("sincos",))[0]
    square = SQUARE if (asked or {}).get("smoothing") == "program" else {}
    usual = {**USUAL, **square, "embed_dim": 32, "depth": 2, "num_heads": 2, **options}
    sizes = {key: usual.pop(key) for key in USUAL}
    return EncoderSpec("nano", **sizes, positions=positions, options=usual)


def build(name, seed=0, asked=None, **options):
    """Build the task with options ``asked`` around an encoder with further ``options``."""
    torch.manual_seed(seed)
    spec = spec_of(name, options, asked)
    return build_task(asked_of(name, asked, spec.channels), build_encoder(spec))
