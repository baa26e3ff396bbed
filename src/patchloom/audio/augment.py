"""Excerpts of recordings, all of one length: the counterpart of image crops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.data.augment import RandomCrop, TwoViews
from patchloom.errors import PatchloomError
from patchloom.options.recipes import SHIFT
from patchloom.options.tasks import Sharing

_LEAST, _MOST = -(2**15), 2**15 - 1


class Excerpt:
    """Excerpts of a recording: its centre, or a random position in a longer one, a random shift and background noise.

    Shift and noise are those of the public program of TC-ResNet, whose data preparation MP3 keeps (section 4.1).

    Args:
        sound: settings with the length.
        shift: largest shift to either side in seconds; gaps are filled with silence.
        noise: recordings of noise, int16 [1 1 n] each; a random excerpt of one is added.
        noise_share: share of the excerpts to which noise is added.
        noise_volume: largest factor of the noise; it is drawn uniformly from 0 on.
        crop: the centre for all views (none), one random excerpt for all (shared), or one for each (own).
        n_views: number of views, as of `patchloom.data.augment.RandomCrop`; 2 for a student and a teacher.

    Attributes:
        size: size of the picture that is made from an excerpt.
        crops: number of different excerpts of a recording in a call.
    """

    def __init__(
        self,
        sound: Sound,
        shift: float = SHIFT,
        noise: Sequence[Tensor] = (),
        noise_share: float = 0.8,
        noise_volume: float = 0.1,
        crop: Sharing = "own",
        n_views: int = 1,
    ) -> None:
        self.sound, self.size, self.shift, self.noise = sound, sound.size, shift, tuple(noise)
        self.noise_share, self.noise_volume, self.crop, self.n_views = noise_share, noise_volume, crop, n_views
        self.crops = n_views if crop == "own" else 1

    def __call__(self, wave: Tensor, rng: np.random.Generator | None = None) -> tuple[Tensor, ...]:
        """Return ``n_views`` excerpts, int16 [1 1 ``sound.samples``] each, of a recording, int16 [1 1 n].

        The centre is the same without ``rng``.
        """
        if self.crop == "none":
            return (centre_excerpt(wave, self.sound),) * self.n_views
        assert rng is not None  # others are random
        return tuple(self._drawn(wave, rng) for _ in range(self.crops)) * (self.n_views // self.crops)

    def _drawn(self, wave: Tensor, rng: np.random.Generator) -> Tensor:
        n, length = wave.shape[-1], self.sound.samples
        most = round(self.shift * self.sound.rate)
        start = int(rng.integers(n - length + 1)) if n > length else -((length - n) // 2)
        excerpt = excerpt_at(wave, start + int(rng.integers(-most, most + 1)), length)
        if not self.noise or rng.random() >= self.noise_share:
            return excerpt
        noise = self.noise[int(rng.integers(len(self.noise)))]
        behind = excerpt_at(noise, int(rng.integers(max(1, noise.shape[-1] - length + 1))), length)
        mixed = excerpt.float() + float(rng.uniform(0, self.noise_volume)) * behind.float()
        return mixed.round().clamp(_LEAST, _MOST).to(torch.int16)


def centre_excerpt(wave: Tensor, sound: Sound) -> Tensor:
    """Return the centre of a recording [1 1 n], a shorter one padded with silence: [1 1 ``sound.samples``]."""
    n, length = wave.shape[-1], sound.samples
    return excerpt_at(wave, (n - length) // 2 if n > length else -((length - n) // 2), length)


def excerpt_at(wave: Tensor, start: int, length: int) -> Tensor:
    """Return ``length`` samples of a recording [1 1 n] from ``start``, with silence beyond its ends."""
    inside = wave[..., max(0, start) : max(0, start + length)]
    before = min(length, max(0, -start))
    excerpt = wave.new_zeros((1, 1, length))
    excerpt[..., before : before + inside.shape[-1]] = inside
    return excerpt


def for_recordings(augment: Any, sound: Sound, **options: Any) -> Excerpt:
    """Return the counterpart of ``augment``, which crops images, for recordings; ``options`` of `Excerpt`."""
    if getattr(augment, "color", "none") != "none":
        raise PatchloomError("recordings have no colours: give --task.color none")
    if isinstance(augment, TwoViews):
        return Excerpt(sound, **options, crop=augment.crop, n_views=augment.n_views)
    if type(augment) is not RandomCrop or tuple(augment.size) != sound.size:
        raise PatchloomError(
            "this task needs more of an image than its encoder is given, and recordings have one length: choose "
            "another --task, or another --task.degradation, such as mask"
        )
    return Excerpt(sound, **options)
