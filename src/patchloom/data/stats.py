"""Statistics of a source: number of channels, mean and standard deviation per channel, and median size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.augment import centre_excerpt
from patchloom.audio.config import GREY, SIXTH, Sound
from patchloom.audio.recordings import modality_of
from patchloom.audio.spectrogram import check_sound, features
from patchloom.data.augment import resize_part
from patchloom.data.conversions import ConversionCounts
from patchloom.data.decode import Unreadable, has_colours
from patchloom.data.modality import Modality
from patchloom.data.reading import Pass, sample_indices
from patchloom.data.source import Source
from patchloom.errors import PatchloomError

_PIXELS = 2**16  # summed at a time: their floats fit into the CPU cache, which is ten times faster for large images
_LOOKED = 8  # images that are looked at for `input_notes`
_FAR, _WIDE = 3.0, 8.0  # deviations of the mean, and ratio of deviations, that are noted: 12 of 16 bits are 1/16
_LEAST_STD = 1e-3  # otherwise images of one flat colour would be divided by 0


class Channel(NamedTuple):
    """Statistics of a channel over the images that were read.

    Attributes:
        name: name in the files; "" if they have none.
        mean, std: over all pixels, in [0, 1] units.
        least, most: range of the values.
        missing: mean fraction of missing pixels in an image, which are filled.
        constant: fraction of the images in which the channel is constant.
    """

    name: str
    mean: float
    std: float
    least: float
    most: float
    missing: float
    constant: float


def is_listed(channels: Sequence[Channel]) -> bool:
    """Return whether channels deserve a line each: those of plain photographs, grey or RGB, do not."""
    return len(channels) not in (1, 3) or any(one.name or one.missing for one in channels)


def channel_rows(channels: Sequence[Channel]) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each channel."""
    rows: list[tuple[str, ...]] = [("channel", "name", "mean", "std", "least", "most", "missing", "constant")]
    for number, (name, *values, missing, constant) in enumerate(channels, 1):
        rows.append((str(number), name, *(f"{one:.4f}" for one in values), f"{missing:.1%}", f"{constant:.1%}"))
    return rows


class Stats(NamedTuple):
    """Statistics of some images.

    Attributes:
        mean, std: per channel, over all pixels, in [0, 1] units.
        height, width: medians in pixels.
        sampled: number of images read.
        unreadable: names of images that could not be read.
        noticed: sentences on images that were converted when they were read.
        channels: statistics of each channel; () if they were not measured.
        sound: how recordings become pictures, with the mean and standard deviation of each row; None for images.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    height: int
    width: int
    sampled: int
    unreadable: list[str]
    noticed: tuple[str, ...] = ()
    channels: tuple[Channel, ...] = ()
    sound: Sound | None = None

    @property
    def modality(self) -> Modality:
        """Modality of the items."""
        return modality_of(self.sound)


class Moments:
    """Running sums for mean and standard deviation of each channel, its range, and the images where it is constant."""

    def __init__(self, channels: int) -> None:
        self.total, self.squares, self.pixels = np.zeros(channels), np.zeros(channels), 0
        self.least, self.most = np.full(channels, inf), np.full(channels, -inf)
        self.constant, self.images = np.zeros(channels), 0

    @classmethod
    def of_parts(cls, image: Tensor) -> list[Moments]:
        """Return the sums of each part of an image [c h w], uint8 or float in [0, 1]."""
        found, flat = [], image.flatten(1)
        for part in flat.split(_PIXELS, dim=1):
            values = part.float() / 255 if part.dtype == torch.uint8 else part
            found.append(own := cls(len(image)))
            own.total += values.sum(1, dtype=torch.float64).numpy()
            own.squares += values.square().sum(1, dtype=torch.float64).numpy()
            own.pixels += part.shape[1]
        ends = np.stack([end.numpy() for end in flat.aminmax(dim=1)]) / (255 if image.dtype == torch.uint8 else 1)
        (first := found[0]).least, first.most = ends
        first.constant, first.images = (ends[0] == ends[1]).astype(float), 1
        return found

    def add(self, image: Tensor) -> None:
        """Add the pixels of one image [c h w], uint8 or float in [0, 1]."""
        for part in self.of_parts(image):
            self.join(part)

    def join(self, other: Moments) -> None:
        """Add the sums of another, which has as many channels, or one: grey then counts in every channel."""
        self.total += other.total
        self.squares += other.squares
        self.pixels += other.pixels
        self.least, self.most = np.minimum(self.least, other.least), np.maximum(self.most, other.most)
        self.constant += other.constant
        self.images += other.images

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return both per channel, over all pixels, in [0, 1] units; the standard deviation is at least 0.001."""
        mean = self.total / self.pixels
        std = np.sqrt(np.maximum(self.squares / self.pixels - mean**2, _LEAST_STD**2))
        return tuple(mean.tolist()), tuple(std.tolist())

    def channels(self, counts: ConversionCounts) -> tuple[Channel, ...]:
        """Return the statistics of each channel, with names and missing pixels."""
        n = len(self.total)
        shares = counts.missing(n) / self.images, self.constant / self.images
        columns = *self.mean_and_std(), self.least, self.most, *shares
        return tuple(map(Channel._make, zip(counts.names(n), *(map(float, one) for one in columns), strict=True)))


def channels_of(source: Source, sample: int = 32, seed: int = 0) -> int:
    """Return the number of channels of the images, from a random sample: 1 if all are grey, 3 if only some are."""
    found: dict[int, str] = {}
    for i, channels in Pass(source, sample_indices(len(source), sample, seed), lambda _, image: len(image)):
        found.setdefault(channels, source.describe(i))
    return channels_for_all(found, source.name)


def channels_for_all(found: Mapping[int, str], name: str) -> int:
    """Return the number of channels to which all images are converted."""
    if len(found) > 1 and set(found) != {1, 3}:
        few, many = min(found), max(found)
        raise PatchloomError(
            f"{name} mixes images of {few} channel{'s' * (few > 1)} ({found[few]}) and of {many} ({found[many]}): move "
            "one kind out of the folder, or list the other in a CSV file and give that"
        )
    return max(found)


def statistics_of(source: Source, channels: int, sample: int = 1000, seed: int = 0) -> Stats:
    """Return statistics of a random sample of the images, converted to ``channels`` channels."""
    moments = Moments(channels)
    sizes: list[tuple[int, ...]] = []
    found: dict[int, str] = {}
    indices = sample_indices(len(source), sample, seed)
    made = Pass(source, indices, partial(_parts_of, source, channels), "auto")
    for i, (have, size, parts) in made:
        found.setdefault(have, source.describe(i))
        channels_for_all(found, source.name)
        if parts is None:
            source.read_as(i, channels)  # raises what the worker process met
        for part in parts or ():  # added in the order of the images, so that workers change no digit
            moments.join(part)
        sizes.append(size)
    height, width = np.median(sizes, axis=0)
    noticed, channel = made.sentences(), moments.channels(made.noticed)
    return Stats(*moments.mean_and_std(), round(height), round(width), len(sizes), made.unreadable, noticed, channel)


def _parts_of(
    source: Source, channels: int, i: int, image: Tensor
) -> tuple[int, tuple[int, ...], list[Moments] | None]:
    """Return channels, size and `Moments.of_parts` of an image; None if its channels cannot be converted."""
    parts = None
    with suppress(PatchloomError):
        parts = Moments.of_parts(source.with_channels(i, image, channels))
    return len(image), tuple(image.shape[-2:]), parts


def statistics_of_recordings(source: Source, sound: Sound, sample: int = 1000, seed: int = 0) -> Stats:
    """Return statistics of a random sample of recordings: per row of their pictures, for standardising these."""
    check_sound(sound)
    moments = Moments(sound.bins)
    made = Pass(source, sample_indices(len(source), sample, seed), lambda _, wave: centre_excerpt(wave, sound))
    for _, excerpt in made:
        moments.add(features(excerpt[None], sound)[0].transpose(0, 1))
    mean, std = moments.mean_and_std()
    read = len(made.indices) - len(made.broken)
    measured = replace(sound, mean=mean, std=std)
    return Stats((GREY,), (SIXTH,), *sound.size, read, made.unreadable, made.sentences(), sound=measured)


def unknown_stats(channels: int, sound: Sound | None = None) -> Stats:
    """Return placeholder statistics for steps whose results are not used; give ``sound`` for recordings."""
    if sound is None:
        return Stats((0.5,) * channels, (0.25,) * channels, 0, 0, 0, [])
    heard = replace(sound, mean=(0.0,) * sound.bins, std=(1.0,) * sound.bins)
    return Stats((GREY,), (SIXTH,), *sound.size, 0, [], sound=heard)


def measure(source: Source, channels: int | Literal["auto"], sound: Sound, sample: int = 1000) -> tuple[int, Stats]:
    """Return the number of channels, and statistics of a sample; for recordings, of their pictures by ``sound``."""
    if source.sound is not None:
        return 1, statistics_of_recordings(source.heard_as(sound), sound, sample)
    found = channels_of(source)
    channels = found if channels == "auto" else channels
    if found != channels and {found, channels} != {1, 3}:
        raise PatchloomError(
            f"--channels {channels} does not fit {source.name}, whose images have {found}: leave it out"
        )
    return channels, statistics_of(source, channels, sample)


def normalize(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """Normalise images: (x - mean) / std per channel, float32 [b c h w], contiguous, on the images' device.

    Args:
        images: [b c h w], uint8 or float in [0, 1].
        mean, std: a number per channel, in [0, 1] units; as tensors [c 1 1] on the images' device they are not copied.
    """
    images = images.contiguous()
    mean, std = (
        values
        if isinstance(values, Tensor)
        else torch.tensor(values).view(-1, 1, 1).to(images.device, non_blocking=True)
        for values in (mean, std)
    )
    if images.dtype != torch.uint8:
        return (images.float() - mean) / std
    if images.is_cuda:  # in one pass over the memory, which takes most of the time
        return torch.addcmul(-mean / std, images, 1 / (255 * std))
    return images.float().div_(255).sub_(mean).div_(std)


def variance_lost(source: Source, size: tuple[int, int], sample: int = 16, seed: int = 0) -> float:
    """Return the mean share of the pixel variance that is lost when images are reduced to cover ``size`` (h, w).

    Photographs lose less than a tenth, since their content is large; fine texture and thin lines vanish.
    """
    lost = []
    for _, image in Pass(source, sample_indices(len(source), sample, seed), lambda _, image: image):
        h, w = image.shape[-2:]
        factor, whole = max(size[0] / h, size[1] / w), _variance(image)
        if factor < 1 and whole:
            reduced = resize_part(image, 0, 0, h, w, (max(1, round(h * factor)), max(1, round(w * factor))))
            lost.append(max(0.0, 1 - _variance(reduced) / whole))
    return sum(lost) / len(lost) if lost else 0.0


def _variance(image: Tensor) -> float:
    return float(image.float().flatten(1).var(1, correction=0).sum())


def input_notes(source: Source, mean: Sequence[float], std: Sequence[float]) -> list[str]:
    """Return sentences on images that a model with these statistics was not made for, from a few images.

    They are on colours that a model of grey images drops, and on values of another scale.
    """
    if source.sound is not None or not len(source):
        return []
    moments, coloured = Moments(1), ""  # of all channels together
    for i in sample_indices(len(source), _LOOKED, seed=0):
        with suppress(Unreadable):
            image = source.read(i)
            if len(image) in (1, 3, len(mean)):  # others are refused
                moments.add(image.flatten()[None])
            if len(mean) == 1 and not coloured and has_colours(image):
                coloured = source.describe(i)
    notes = []
    if coloured:
        notes.append(f"colours are dropped, such as those of {coloured}: the model was trained on grey images")
    if moments.pixels:
        notes += scale_notes(*moments.mean_and_std(), mean, std)
    return notes


def scale_notes(
    mean: Sequence[float], std: Sequence[float], model_mean: Sequence[float], model_std: Sequence[float]
) -> list[str]:
    """Return a sentence on images whose values are far from those for which a model was normalised."""
    here, spread, theirs, unit = (sum(values) / len(values) for values in (mean, std, model_mean, model_std))
    centre, width = (here - theirs) / unit, spread / unit
    if abs(centre) < _FAR and 1 / _WIDE < width < _WIDE:
        return []
    return [
        f"normalised for this model, the images have mean {centre:.2g} and deviation {width:.2g} instead of about 0 "
        "and 1: if their values are on another scale (12 bits in 16-bit files), scale them"
    ]
