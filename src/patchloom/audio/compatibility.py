"""Compatibility of an encoder with data: the same kind of items, and recordings prepared as in its training."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from patchloom.audio.augment import centre_excerpt
from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.audio.spectrogram import FULL_SCALE
from patchloom.data.reading import Pass
from patchloom.data.source import Data, Source
from patchloom.errors import PatchloomError


def with_encoder_sound(opened: Data, sound: Sound | None, encoder: str) -> Data:
    """Return the data, with recordings prepared by the ``sound`` of an encoder."""
    if (opened.train.sound is None) != (sound is None):
        noun = modality_of(sound).noun
        raise PatchloomError(f"{encoder} is an encoder of {noun}, and {opened.train.name} holds {opened.train.noun}")
    return opened.heard_as(sound)


def wrong_kind_error(option: str, source: Source) -> PatchloomError:
    """Return the error for an option of images given with recordings, or the reverse."""
    kind = "images" if source.modality.own_size else "recordings"
    return PatchloomError(f"--{option} is for {kind}, and {source.name} holds {source.noun}: leave it out")


def first_waves(source: Source, count: int) -> Tensor:
    """Read the first ``count`` readable recordings in the form of other libraries: float32 [b n] in [-1, 1]."""
    sound = source.sound
    assert sound is not None
    waves = Pass(source, range(len(source)), lambda _, wave: centre_excerpt(wave, sound).flatten())
    return torch.stack([wave for _, wave in islice(waves, count)]).float() / FULL_SCALE
