"""A dozen recordings of a run that learns from sound: their pictures, and the sound to be heard."""

from __future__ import annotations

import io
import wave

import numpy as np
from PIL import Image

from patchloom.data import Source, Unreadable, plain_batches
from patchloom.errors import PatchloomError
from patchloom.look.spectrograms import axes_sentence, in_colours
from patchloom.report.content import Picture, Recording
from patchloom.report.pictures import data_uri, webp
from patchloom.waiting import Waiting

COUNT = 12
BUDGET = 1_000_000  # bytes of all sounds as data URIs
_QUALITY = 80
_WORD = 2  # bytes of a sample
_AS_TEXT = 4 / 3  # bytes of a data URI for one of its content


def recordings_of(source: Source, count: int = COUNT, budget: int = BUDGET) -> list[Recording]:
    """Recordings evenly spread over a source; what cannot be read is left out.

    Args:
        source: as the encoder hears them.
        count: how many.
        budget: bytes of the sounds; longer ones are cut, which their captions say.

    Raises:
        PatchloomError: it holds images, or none can be read.
    """
    sound = source.sound
    if sound is None:
        raise PatchloomError(f"{source.name} holds images, of which nothing can be heard")
    places = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int))
    some = source.subset(places)
    most = int(budget / len(places) / _AS_TEXT / _WORD)
    found = []
    with Waiting(f"reading {len(some)} recordings"):
        for batch in plain_batches(some, sound.size, len(some), channels=1):
            drawn = in_colours(batch.views[0], (0.0,), (1.0,))
            pixels = (drawn.permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)
            for i, shown in zip(batch.indices.tolist(), pixels, strict=True):
                try:
                    samples = some.read(i).flatten().numpy()
                except Unreadable:  # it was replaced since
                    continue
                found.append(_recording(some, i, shown, samples[:most], len(samples), sound.rate))
    return [one._replace(caption=f"{one.caption} {axes_sentence(sound)}") for one in found]


def _recording(source: Source, i: int, shown: np.ndarray, samples: np.ndarray, length: int, rate: int) -> Recording:
    name = source.place(i) or source.describe(i)
    label = -1 if source.labels is None else int(source.labels[i])
    said = [f"{source.classes[label]}." if label >= 0 else "", f"{length / rate:.3g} s."]
    if len(samples) < length:
        said.append(f"To be heard are the first {len(samples) / rate:.3g} s.")
    uri, width, height = webp(Image.fromarray(shown), max(shown.shape), _QUALITY)
    picture = Picture(name, "", f"Spectrogram of {name}", uri, width, height)
    return Recording(name, " ".join(filter(None, said)), picture, data_uri("audio/wav", wav(samples, rate)))


def wav(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of one channel; samples [n] int16, ``rate`` of them a second."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(_WORD)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()
