"""Whether an encoder and some data are of one kind, and recordings as the encoder was trained to hear them."""

from __future__ import annotations

from patchloom.data.sources.base import Data
from patchloom.errors import PatchloomError
from patchloom.sound import Sound


def heard_by(opened: Data, sound: Sound | None, encoder: str) -> Data:
    """The same data; recordings by the ``sound`` of an encoder.

    Args:
        opened: images or recordings.
        sound: of the encoder's card.
        encoder: its name, for the message.

    Raises:
        PatchloomError: images for an encoder of recordings, or the other way round.
    """
    if (opened.train.sound is None) != (sound is None):
        kind = "images" if sound is None else "recordings"
        raise PatchloomError(f"{encoder} is an encoder of {kind}, and {opened.train.name} holds {opened.train.noun}")
    return opened if sound is None else opened.heard_as(sound)
