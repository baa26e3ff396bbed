"""Synthetic data from a random seed: images of ten shapes on textured backgrounds, and recordings of sounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.data.duplicates import DRAWN_KIND, contents_of
from patchloom.data.source import Source, digest
from patchloom.errors import PatchloomError

SHAPES = ("disc", "ring", "triangle", "square", "hexagon", "star", "cross", "outlined triangle", "half disc", "arc")

_BLOCK = 32  # images drawn at once: few calls of numpy, and small enough for the processor's cache
_BITS, _LINES, _WAVES = 4, 1, 3
_COLOURS, _CONTRAST = 24, 0.6  # candidates for a shape's colour, and its wanted distance from the background's, in RGB
_BIT = 0.04  # largest half side of a rectangle of clutter, as a share of the image
_NOISE = 0.04  # width of the uniform noise on every pixel
_CYCLES, _SPREAD = (8, 20), 0.1  # of the background's waves: cycles across the image, and distance of their colours
_RADIUS = (0.2, 0.36)  # range of a shape's radius, as a share of the image
_SHAPE_STREAM = 0x5A9E  # separates these random streams from those of the loader for the same seed


class Annotation(NamedTuple):
    """Ground truth of a drawn image.

    Attributes:
        label: index into `SHAPES`.
        box: x0 y0 x1 y1 in pixels, x1 and y1 exclusive.
        mask: bool [h w].
    """

    label: int
    box: tuple[int, int, int, int]
    mask: np.ndarray


class Shapes(Source):
    """Synthetic images, uint8 [3 size size]; image i depends only on (seed, first + i, size).

    Ten consecutive images, from a multiple of ten, hold each class once. Images are drawn on first use and then stay in
    memory.

    Args:
        count: number of images.
        seed: random seed of an endless sequence of images.
        size: height and width in pixels.
        first: index of the first image in that sequence.
        name: name as the user typed it.
    """

    classes = SHAPES
    in_memory = True

    def __init__(self, count: int, seed: int = 0, size: int = 64, first: int = 0, name: str = "shapes") -> None:
        if count < 1:
            raise PatchloomError(f"shapes:{count} asks for no images: give at least 1, as in shapes:5000")
        if size < 16:
            raise PatchloomError(f"shapes of {size} pixels are too small to distinguish: give a size of at least 16")
        self.count, self.seed, self.size, self.first, self.name = count, seed, size, first, name
        numbers = np.arange(first, first + count)
        orders = {ten: _rng(_SHAPE_STREAM, seed, 1, ten).permutation(10) for ten in np.unique(numbers // 10)}
        self.labels = np.array([orders[i // 10][i % 10] for i in numbers], dtype=np.int64)
        self._drawn: dict[int, tuple[Tensor, int]] = {}  # by index: images drawn at once [b h w 3], and the place there

    def __len__(self) -> int:
        return self.count

    def read(self, i: int) -> Tensor:
        i = range(self.count)[i]
        if i not in self._drawn:
            first = i - i % _BLOCK
            self.make_ready(range(first, min(first + _BLOCK, self.count)))
        images, place = self._drawn[i]
        return images[place].permute(2, 0, 1)

    def make_ready(self, indices: Sequence[int] | np.ndarray) -> None:
        """Draw images that were not drawn yet, many at once."""
        todo = [i for i in map(int, indices) if i not in self._drawn]
        for start in range(0, len(todo), _BLOCK):
            some = todo[start : start + _BLOCK]
            images = torch.from_numpy(_draw(self._scenes(some), self.size))
            self._drawn.update((i, (images, place)) for place, i in enumerate(some))

    def annotation(self, i: int) -> Annotation:
        """Return class, box and mask of image i; the mask has the pixels that the shape covers by half or more."""
        scenes = self._scenes([range(self.count)[i]])
        mask = _distance(scenes, self.size)[0] <= 0
        ys, xs = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = int(xs[0]), int(ys[0]), int(xs[-1]) + 1, int(ys[-1]) + 1
        return Annotation(int(scenes.labels[0]), box, mask)

    def fingerprint(self) -> str:
        return digest(["shapes 2", *map(str, (self.count, self.seed, self.size, self.first))])

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return hashes of (seed, size, number), which determine the images; nothing is drawn."""
        numbers = range(self.count) if chosen is None else chosen.tolist()
        about = f"shapes 2 {self.seed} {self.size}"
        return contents_of(DRAWN_KIND, ([f"{about} {self.first + i}".encode()] for i in numbers))

    def _scenes(self, indices: Sequence[int]) -> _Scenes:
        assert self.labels is not None  # drawn images have them
        rngs, size = [_rng(_SHAPE_STREAM, self.seed, 0, self.first + i) for i in indices], self.size
        draws, every = _Draws(rngs, _NUMBERS, size), np.arange(len(rngs))
        radius = size * draws.uniform(*_RADIUS, 1)
        centre = draws.uniform(radius + 1, size - radius - 1, 2)
        ground = draws.random(3)
        second = np.clip(ground + draws.uniform(-_SPREAD, _SPREAD, 3), 0, 1)
        # The random colour whose distance from the background is nearest to _CONTRAST: the shape is easy to see,
        # yet distances between the pixels of two images are dominated by the background's colour.
        colours = draws.random(_COLOURS, 3)
        apart = np.sqrt(np.minimum(*(((colours - one[:, None]) ** 2).sum(2) for one in (ground, second))))
        shape = colours[every, np.abs(apart - _CONTRAST).argmin(1)]
        bits = [draws.uniform(0, size, _BITS, 2), size * draws.uniform(0.01, _BIT, _BITS, 2), draws.random(_BITS, 3)]
        lines = [
            draws.uniform(0, np.pi, _LINES, 1),
            size * draws.uniform(-0.5, 0.5, _LINES, 1),
            np.full((len(rngs), _LINES, 1), 0.008 * size),
            size * draws.uniform(0.1, 0.5, _LINES, 1),
            draws.random(_LINES, 3),
        ]
        turn, frequency = draws.uniform(0, 2 * np.pi, _WAVES), draws.uniform(*_CYCLES, _WAVES) * 2 * np.pi / size
        phase = draws.uniform(0, 2 * np.pi, _WAVES)
        return _Scenes(
            self.labels[list(indices)],
            np.concatenate([centre, radius, draws.uniform(0, 2 * np.pi, 1)], 1),
            np.stack([shape, ground, second], 1),
            np.concatenate(bits, 2),
            np.concatenate(lines, 2),
            np.stack([frequency * np.cos(turn), frequency * np.sin(turn), phase], 2),
            draws.noise,
        )


class _Scenes(NamedTuple):
    """Random values of b images. Lengths in pixels, colours in [0, 1]."""

    labels: np.ndarray  # int64 [b]
    places: np.ndarray  # [b 4]: x, y, radius, angle
    colours: np.ndarray  # [b 3 3]: shape, and two of the background
    bits: np.ndarray  # [b _BITS 7]: x, y, half width, half height, then a colour
    lines: np.ndarray  # [b _LINES 7]: angle, offset, half thickness, half length, then a colour
    waves: np.ndarray  # [b _WAVES 3]: frequency in x, in y (radians a pixel), phase
    noise: np.ndarray  # float32 [b h w]


def _rng(stream: int, seed: int, kind: int, number: int) -> np.random.Generator:
    return np.random.default_rng((stream, kind, seed, number))


class _Draws:
    """Random numbers of several images: each image has its own stream, and all take the same numbers in turn."""

    def __init__(self, rngs: Sequence[np.random.Generator], count: int, size: int) -> None:
        self.numbers, self.taken = np.empty((len(rngs), count)), 0
        self.noise = np.empty((len(rngs), size, size), np.float32)
        for rng, own, grain in zip(rngs, self.numbers, self.noise, strict=True):
            rng.random(out=own)  # one call per image: many small ones take longer than drawing
            rng.random(dtype=np.float32, out=grain)

    def random(self, *shape: int) -> np.ndarray:
        """Return the next numbers of each image, in [0, 1): [b, *shape]."""
        start, self.taken = self.taken, self.taken + math.prod(shape)
        return self.numbers[:, start : self.taken].reshape(-1, *shape)

    def uniform(self, low: float | np.ndarray, high: float | np.ndarray, *shape: int) -> np.ndarray:
        """Return the same in [low, high)."""
        return low + (high - low) * self.random(*shape)


_NUMBERS = 3 + 6 + 3 * _COLOURS + 7 * _BITS + 6 * _LINES + 3 * _WAVES + 1  # of an image, but for the noise


def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pixel centres: x [1 1 size] and y [1 size 1]."""
    line = np.arange(size, dtype=np.float32) + 0.5
    return line[None, None], line[None, :, None]


def _columns(values: np.ndarray) -> list[np.ndarray]:
    """Return the columns of [b k] as k arrays [b 1 1]."""
    return [column[:, None, None] for column in values.astype(np.float32).T]


def _fold(x: np.ndarray, y: np.ndarray, corners: int) -> tuple[np.ndarray, np.ndarray]:
    """Rotate points into the sector around the x axis of a figure with ``corners``-fold symmetry."""
    step = 2 * np.pi / corners
    angle = np.arctan2(y, x)
    angle -= step * np.round(angle / step)
    length = np.hypot(x, y)
    return length * np.cos(angle), length * np.abs(np.sin(angle))


def _signed(label: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the signed distance to the edge of a shape of radius 1 at 0, negative inside; exact near the edge."""
    match SHAPES[label]:
        case "disc":
            return np.hypot(x, y) - 0.9
        case "ring":
            return np.abs(np.hypot(x, y) - 0.75) - 0.2
        case "triangle":
            return _fold(x, y, 3)[0] - 0.5
        case "square":
            return np.maximum(np.abs(x), np.abs(y)) - 0.7
        case "hexagon":
            return _fold(x, y, 6)[0] - 0.85
        case "star":
            along, across = _fold(x, y, 5)
            inner = 0.4 * np.cos(np.pi / 5), 0.4 * np.sin(np.pi / 5)
            edge = np.array([inner[1], 1 - inner[0]]) / np.hypot(inner[1], 1 - inner[0])
            return (along - 1) * np.float32(edge[0]) + across * np.float32(edge[1])
        case "cross":
            long, short = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
            return np.maximum(long - 0.95, short - 0.28)
        case "outlined triangle":
            return np.abs(_fold(x, y, 3)[0] - 0.38) - 0.12
        case "half disc":
            return np.maximum(np.hypot(x - 0.45, y) - 0.95, x - 0.45)
        case _:
            return np.maximum(np.abs(np.hypot(x, y) - 0.75) - 0.2, x - 0.1)


def _distance(scenes: _Scenes, size: int) -> np.ndarray:
    """Return the signed distance to each scene's shape, in pixels: float32 [b h w]."""
    px, py = _grid(size)
    out = np.empty((len(scenes.labels), size, size), np.float32)
    for label in np.unique(scenes.labels):
        which = np.flatnonzero(scenes.labels == label)
        x0, y0, radius, angle = _columns(scenes.places[which])
        cos, sin = np.cos(angle) / radius, np.sin(angle) / radius
        x, y = (px - x0) * cos + (py - y0) * sin, (py - y0) * cos - (px - x0) * sin
        out[which] = _signed(int(label), x, y) * radius
    return out


def _paint(canvas: np.ndarray, distance: np.ndarray, colour: np.ndarray) -> None:
    """Paint colour [b 3] on canvas [b 3 h w] where distance [b h w] is negative, anti-aliased over one pixel."""
    cover = 0.5 - distance
    change = colour.astype(np.float32)[:, :, None, None] - canvas
    change *= np.clip(cover, 0, 1, out=cover)[:, None]  # in place: new arrays of this size cost more than the sums
    canvas += change


def _draw(scenes: _Scenes, size: int) -> np.ndarray:
    """Draw images uint8 [b h w 3]. Clutter lies behind the shape, so that mask and box are exact."""
    px, py = _grid(size)
    waves = [_columns(wave) for wave in scenes.waves.swapaxes(0, 1)]
    mix = 0.5 + sum(np.sin(px * fx + py * fy + phase) for fx, fy, phase in waves) / (2 * _WAVES)
    shape, ground, second = scenes.colours.swapaxes(0, 1).astype(np.float32)[..., None, None]
    canvas = ground + mix[:, None] * (second - ground)
    for line in scenes.lines.swapaxes(0, 1):
        angle, offset, thick, length = _columns(line[:, :4])
        x, y = px - size / 2, py - size / 2
        across = np.abs(x * np.cos(angle) + y * np.sin(angle) - offset) - thick
        along = np.abs(y * np.cos(angle) - x * np.sin(angle)) - length
        _paint(canvas, np.maximum(across, along), line[:, 4:])
    # small upright rectangles, for which only the pixels around each are touched
    window = np.arange(-int(_BIT * size) - 2, int(_BIT * size) + 3)
    image, channel = np.arange(len(canvas))[:, None, None, None], np.arange(3)[None, :, None, None]
    for bit in scenes.bits.swapaxes(0, 1):
        x, y = bit[:, 0], bit[:, 1]
        # Clamped to the border: window pixels that fall on the same image pixel have the same value.
        xs = np.clip(x.astype(int)[:, None] + window, 0, size - 1)
        ys = np.clip(y.astype(int)[:, None] + window, 0, size - 1)
        far_x, far_y = np.abs(xs + 0.5 - x[:, None]) - bit[:, 2:3], np.abs(ys + 0.5 - y[:, None]) - bit[:, 3:4]
        place = image, channel, ys[:, None, :, None], xs[:, None, None, :]
        part = canvas[place]
        _paint(part, np.maximum(far_x[:, None, :], far_y[:, :, None]).astype(np.float32), bit[:, 4:])
        canvas[place] = part
    _paint(canvas, _distance(scenes, size), shape[..., 0, 0])
    canvas += _NOISE * (scenes.noise[:, None] - 0.5)
    np.clip(canvas, 0, 1, out=canvas)
    canvas *= 255
    canvas += 0.5
    return np.ascontiguousarray(canvas.astype(np.uint8).transpose(0, 2, 3, 1))


# Synthetic recordings, made from a seed: a hum, a hiss and a glide, whose order is the class.


# The pitches of a recording do not reveal its class: a fall is a rise reversed in time.
TONES = tuple(" ".join(order) for glide in ("rise", "fall") for order in permutations(("hum", "hiss", glide)))

_LENGTH = (0.06, 0.14)  # length of a sound in seconds
_GAP = (-0.01, 0.12)  # seconds from the end of a sound to the next one
_EDGES = (0.008, 0.05)  # seconds in which a sound rises and decays: they reveal the direction of time
_PITCH, _DETUNED = (90.0, 280.0), 1.4  # Hz of a voice, and the largest factor between it and one of its sounds
_GLIDE = (1.5, 2.1)  # the highest pitch of a glide over its lowest
_BRIGHT = 0.85  # a harmonic's amplitude relative to that of the one below
_FORMANTS, _WIDTH = ((350.0, 900.0), (1000.0, 2600.0)), 120.0  # Hz of a voice's resonances, and their bandwidth
_LOUD, _HISS = (0.3, 1.0), 0.3  # amplitudes of sounds, and of a hiss relative to the others
_TONE_NOISE, _DULL = (0.001, 0.05), 0.95  # amplitude of the background noise, and its strongest smoothing
_LOUDEST, _FULL = 0.5, 2**15 - 1
_TONE_STREAM = 0x70E5  # see `_SHAPE_STREAM`


class Tones(Source):
    """Synthetic recordings of one second, int16 [1 1 rate]; recording i depends only on (seed, first + i) and the rate.

    Each has its own voice (pitch and timbre), which hums and glides, and a hiss; onset, lengths, loudness and
    background are random. The class is the order of the three sounds, and whether the pitch rises or falls. Statistics
    that ignore the order in time carry no information about it. Twelve consecutive recordings, from a multiple of
    twelve, hold each class once. They are made on first use and then stay in memory.

    Args:
        count: number of recordings.
        seed: random seed of an endless sequence of recordings.
        first: index of the first recording in that sequence.
        name: name as the user typed it.
    """

    classes = TONES
    in_memory = True

    def __init__(self, count: int, seed: int = 0, first: int = 0, name: str = "tones") -> None:
        if count < 1:
            raise PatchloomError(f"tones:{count} asks for no recordings: give at least 1, as in tones:5000")
        self.count, self.seed, self.first, self.name, self.sound = count, seed, first, name, Sound()
        numbers, n = np.arange(first, first + count), len(TONES)
        orders = {block: _rng(_TONE_STREAM, seed, 1, block).permutation(n) for block in np.unique(numbers // n)}
        self.labels = np.array([orders[i // n][i % n] for i in numbers], dtype=np.int64)
        self._made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def read(self, i: int) -> Tensor:
        i = range(self.count)[i]
        if i not in self._made:
            from scipy.signal import lfilter  # takes long to import

            assert self.labels is not None and self.sound is not None  # both are set in __init__
            rate = self.sound.rate
            # draws from the first generator are the same at every rate
            rng, noise = (_rng(_TONE_STREAM, self.seed, kind, self.first + i) for kind in (0, 2))
            pitch, background = (np.exp(rng.uniform(*np.log(ends))) for ends in (_PITCH, _TONE_NOISE))
            ratio, dull, rough = rng.uniform(*_GLIDE), rng.uniform(0, _DULL), rng.uniform(-0.6, 0.6)
            formants = [rng.uniform(*ends) for ends in _FORMANTS]
            lengths, gaps, loud = rng.uniform(*_LENGTH, 3), rng.uniform(*_GAP, 2), rng.uniform(*_LOUD, 3)
            own = pitch * rng.uniform(1 / _DETUNED, _DETUNED, 3)
            onsets = rng.uniform(0, 1 - lengths.sum() - gaps.sum()) + np.cumsum([0, *(lengths[:2] + gaps)])

            voice = np.zeros(rate)
            for k, sound in enumerate(TONES[self.labels[i]].split()):
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
            self._made[i] = torch.from_numpy(np.round(_FULL * wave.clip(-1, 1)).astype(np.int16))[None, None]
        return self._made[i]

    def _heard_as(self, sound: Sound) -> Source:
        heard = super()._heard_as(sound)
        assert isinstance(heard, Tones)
        if self.sound is None or sound.rate != self.sound.rate:
            heard._made = {}
        return heard

    def fingerprint(self) -> str:
        return digest(["tones 1", *map(str, (self.count, self.seed, self.first))])

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return hashes of (seed, number), which determine the recordings; nothing is made."""
        numbers = range(self.count) if chosen is None else chosen.tolist()
        return contents_of(DRAWN_KIND, ([f"tones 1 {self.seed} {self.first + i}".encode()] for i in numbers))
