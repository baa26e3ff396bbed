"""Whether an encoder and some data are of one kind, and recordings as the encoder was trained to hear them."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.audio.augment import centre_excerpt
from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.audio.spectrogram import FULL_SCALE
from patchloom.data.decode import Unreadable
from patchloom.data.source import Data, Source
from patchloom.errors import PatchloomError


def with_encoder_sound(opened: Data, sound: Sound | None, encoder: str) -> Data:
    """The same data; recordings by the ``sound`` of an encoder."""
    if (opened.train.sound is None) != (sound is None):
        noun = modality_of(sound).noun
        raise PatchloomError(f"{encoder} is an encoder of {noun}, and {opened.train.name} holds {opened.train.noun}")
    return opened.heard_as(sound)


def wrong_kind_error(option: str, source: Source) -> PatchloomError:
    """What to raise where an option of images is given for recordings, or the other way round."""
    kind = "images" if source.modality.own_size else "recordings"
    return PatchloomError(f"--{option} is for {kind}, and {source.name} holds {source.noun}: leave it out")


def first_waves(source: Source, count: int) -> Tensor:
    """The first ``count`` recordings that can be read, as others have them: float32 [b n] in [-1, 1]."""
    assert source.sound is not None
    waves: list[Tensor] = []
    problem: Unreadable | None = None
    for i in range(len(source)):
        try:
            waves.append(centre_excerpt(source.read(i), source.sound).flatten())
        except Unreadable as error:
            problem = error
        if len(waves) == count:
            break
    if not waves and problem is not None:
        raise problem
    return torch.stack(waves).float() / FULL_SCALE
