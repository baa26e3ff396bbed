"""Requests for pictures of an encoder on drawn shapes or tones."""

from pathlib import Path
from typing import Any

from spoken import Tones, encoder_of_sound

from patchloom.data.sources.synthetic import Shapes
from patchloom.look.context import LookRequest, NamedEncoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file
from patchloom.nets.encode import input_channels
from patchloom.nets.swin import Encoder


def named(vit: Encoder, name: str = "mine", **more: Any) -> NamedEncoder:
    c = input_channels(vit)
    return NamedEncoder(name, vit, EncoderCard(None, (0.5,) * c, (0.2,) * c, "mae", name), **more)


def asked_of(one: NamedEncoder, folder: Path, **more: Any) -> LookRequest:
    return LookRequest(one, Shapes(3), folder, **more)


def asked_of_sound(folder: Path, **more: Any) -> LookRequest:
    vit, card = load_encoder_file(encoder_of_sound(folder / "ear"))
    return LookRequest(NamedEncoder("ear", vit, card), Tones(1), folder, **more)
