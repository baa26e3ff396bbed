"""Synthetic recordings, made from a seed: a hum, a hiss and a glide, whose order is the class."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from patchloom.data.contents import DRAWN, contents_of
from patchloom.data.sources.base import Source, digest
from patchloom.errors import PatchloomError
from patchloom.sound import Sound

# What a recording holds tells no class: a fall is the pitches of a rise the other way round.
TONES = tuple(" ".join(order) for glide in ("rise", "fall") for order in permutations(("hum", "hiss", glide)))

_LENGTH = (0.06, 0.14)  # of a sound, in seconds
_GAP = (-0.01, 0.12)  # seconds from the end of a sound to the next one
_EDGES = (0.008, 0.05)  # seconds in which a sound comes and goes: they tell the direction of time
_PITCH, _DETUNED = (90.0, 280.0), 1.4  # Hz of a voice, and by how much a sound of it is higher or lower at most
_GLIDE = (1.5, 2.1)  # the highest pitch of a glide over its lowest
_BRIGHT = 0.85  # a harmonic's amplitude over that of the one below
_FORMANTS, _WIDTH = ((350.0, 900.0), (1000.0, 2600.0)), 120.0  # Hz of a voice's resonances, and their bandwidth
_LOUD, _HISS = (0.3, 1.0), 0.3  # amplitudes of sounds, and of a hiss beside the others
_NOISE, _DULL = (0.001, 0.05), 0.95  # amplitude of the background, and its smoothing at most
_LOUDEST, _FULL = 0.5, 2**15 - 1
_STREAM = 0x70E5  # separates these random streams from those of the loader for the same seed


class Tones(Source):
    """Recordings of one second, int16 [1 1 rate]; recording i depends only on (seed, first + i) and the rate.

    Each has a voice of its own (pitch and timbre), which hums and glides, and a hiss; onset, lengths, loudness and
    background are random. The class is the order of the three, and whether the pitch rises or falls: what is in a
    recording, however it is counted, tells nothing of it. Twelve consecutive recordings, from a multiple of twelve,
    hold each class once. They are made on first use and then stay in memory.

    Args:
        count: number of recordings.
        seed: of an endless sequence of recordings.
        first: index of the first recording in that sequence.
        name: what the user typed.

    Raises:
        PatchloomError: fewer than 1 recording.
    """

    classes = TONES
    in_memory = True

    def __init__(self, count: int, seed: int = 0, first: int = 0, name: str = "tones") -> None:
        if count < 1:
            raise PatchloomError(f"tones:{count} asks for no recordings: ask for at least 1, as in tones:5000")
        self.count, self.seed, self.first, self.name, self.sound = count, seed, first, name, Sound()
        numbers, n = np.arange(first, first + count), len(TONES)
        orders = {block: _rng(seed, 1, block).permutation(n) for block in np.unique(numbers // n)}
        self.labels = np.array([orders[i // n][i % n] for i in numbers], dtype=np.int64)
        self._made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def read(self, i: int) -> Tensor:
        i = range(self.count)[i]
        if i not in self._made:
            wave = _synthesised(self.seed, self.first + i, TONES[self.labels[i]].split(), self.sound.rate)
            self._made[i] = torch.from_numpy(wave)[None, None]
        return self._made[i]

    def heard_as(self, sound: Sound) -> Source:
        heard = super().heard_as(sound)
        assert isinstance(heard, Tones)
        if sound.rate != self.sound.rate:
            heard._made = {}
        return heard

    def fingerprint(self) -> str:
        return digest(["tones 1", *map(str, (self.count, self.seed, self.first))])

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Hashes of (seed, number), from which the recordings follow; nothing is made."""
        numbers = range(self.count) if chosen is None else chosen.tolist()
        return contents_of(DRAWN, ([f"tones 1 {self.seed} {self.first + i}".encode()] for i in numbers))


def _rng(seed: int, kind: int, number: int) -> np.random.Generator:
    return np.random.default_rng((_STREAM, kind, seed, number))


def _synthesised(seed: int, number: int, order: list[str], rate: int) -> np.ndarray:
    """One second of the sounds in this ``order``, int16 [rate]."""
    from scipy.signal import lfilter  # takes long to import

    rng, noise = _rng(seed, 0, number), _rng(seed, 2, number)  # what is drawn from the first is the same at every rate
    pitch, background = (np.exp(rng.uniform(*np.log(ends))) for ends in (_PITCH, _NOISE))
    ratio, dull, rough = rng.uniform(*_GLIDE), rng.uniform(0, _DULL), rng.uniform(-0.6, 0.6)
    formants = [rng.uniform(*ends) for ends in _FORMANTS]
    lengths, gaps, loud = rng.uniform(*_LENGTH, 3), rng.uniform(*_GAP, 2), rng.uniform(*_LOUD, 3)
    own = pitch * rng.uniform(1 / _DETUNED, _DETUNED, 3)
    onsets = rng.uniform(0, 1 - lengths.sum() - gaps.sum()) + np.cumsum([0, *(lengths[:2] + gaps)])

    voice = np.zeros(rate)
    for k, sound in enumerate(order):
        n = round(lengths[k] * rate)
        seconds = np.arange(n) / rate
        if sound == "hiss":
            part = _HISS * lfilter([1], [1, rough], noise.standard_normal(n))
        else:
            way = {"hum": 0, "rise": 1, "fall": -1}[sound]
            bent = own[k] * ratio ** (way * (np.arange(n) / n - 0.5))
            # the sum of all harmonics, each weaker than the one below
            part = (1 / (1 - _BRIGHT * np.exp(2j * np.pi * np.cumsum(bent) / rate))).real - 1
        part *= np.minimum(1, seconds / _EDGES[0]) * np.clip((lengths[k] - seconds) / _EDGES[1], 0, 1)
        room = voice[round(onsets[k] * rate) :][:n]
        room += loud[k] * part[: len(room)]
    for formant in formants:
        radius, angle = np.exp(-np.pi * _WIDTH / rate), 2 * np.pi * min(formant / rate, 0.45)
        resonance = lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], voice)
        voice = 4 * resonance + 0.3 * voice
    voice *= _LOUDEST / np.abs(voice).max()
    wave = voice + lfilter([1 - dull], [1, -dull], background * noise.standard_normal(rate))
    return np.round(_FULL * wave.clip(-1, 1)).astype(np.int16)
