"""Pictures of recordings: mel-frequency cepstral coefficients, or a mel spectrogram, computed on the batch's device.

Letters: b batch, n samples, k frequencies, m bands, h w rows and columns of the picture.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from patchloom.audio.config import GREY, SIXTH, Sound
from patchloom.errors import PatchloomError, listing
from patchloom.sizes import PatchSize, to_pair

FLOOR = 1e-6  # added to the energy of a band: digital silence has no logarithm
FULL_SCALE = 2**15  # full scale of 16 bits


def features(waves: Tensor, sound: Sound) -> Tensor:
    """Compute the features of recordings, as in the speech experiments of MP3 (section 3.1).

    A frame is weighted by a Hann window, and its power spectrum is summed in triangular bands that are evenly spaced on
    the mel scale (HTK's). The cosine transform (DCT-II, orthonormal) of the bands' natural logarithms gives the
    coefficients; the first ``bins`` are kept. ``logmel`` stops before the cosine transform.

    Args:
        waves: [b 1 1 n] int16, or float in [-1, 1]; all of ``sound.samples``.
        sound: settings of the features.

    Returns:
        float32 [b 1 h w], on the device of ``waves``.
    """
    tables = _tables(sound, waves.device)
    with torch.autocast(waves.device.type, enabled=False):
        flat = waves.flatten(1)
        unit = flat.float() / FULL_SCALE if flat.dtype == torch.int16 else flat.float()
        lengths = sound.window_samples, sound.hop_samples
        spectrum = torch.stft(unit, *lengths, window=tables.window, center=False, return_complex=True)  # [b k w]
        power = torch.view_as_real(spectrum).square().sum(-1)  # [b k w]
        energy = torch.log(tables.bands @ power + FLOOR)  # [b m w]
        return (energy if tables.cosines is None else tables.cosines @ energy)[:, None]


def pictures(waves: Tensor, sound: Sound) -> Tensor:
    """Convert recordings to pictures: features with mean 0.5, and 0 and 1 three standard deviations from it.

    Args:
        waves: [b 1 1 n], as in `features`.
        sound: settings with the mean and standard deviation of each row.

    Returns:
        float32 [b 1 h w].
    """
    assert sound.mean, "statistics come first"
    tables = _tables(sound, waves.device)
    return GREY + SIXTH * (features(waves, sound) - tables.mean) / tables.std


class _Tables(NamedTuple):
    """Window [n], bands [m k], cosines [h m] of coefficients or None, mean and std [h 1]."""

    window: Tensor
    bands: Tensor
    cosines: Tensor | None
    mean: Tensor
    std: Tensor


@lru_cache(maxsize=16)  # otherwise every batch would wait for constants to be copied to the device
def _tables(sound: Sound, device: torch.device) -> _Tables:
    check_sound(sound)
    m = sound.bins if sound.features == "logmel" else sound.bands
    bands = mel_bands(m, sound.window_samples, sound.rate, sound.low)
    cosines = None if sound.features == "logmel" else cosine_transform(sound.bins, m)
    window, mean, std = torch.hann_window(sound.window_samples), torch.tensor(sound.mean), torch.tensor(sound.std)
    cosines = None if cosines is None else cosines.to(device)
    return _Tables(window.to(device), bands.to(device), cosines, mean[:, None].to(device), std[:, None].to(device))


def check_sound(sound: Sound) -> None:
    """Refuse settings with which no picture can be made."""
    if sound.rate < 1000:
        raise PatchloomError(f"--rate {sound.rate} is too low for sound: give samples per second, such as 16000")
    if sound.samples < sound.window_samples:
        raise PatchloomError(
            f"--seconds {sound.seconds:g} is shorter than a frame of {1000 * sound.window:g} ms: give 1, or more"
        )
    if sound.features == "mfcc" and not 1 <= sound.bins <= sound.bands:
        raise PatchloomError(
            f"--bins {sound.bins} are too many coefficients for {sound.bands} bands: give {sound.bands} or fewer"
        )
    m = sound.bins if sound.features == "logmel" else sound.bands
    empty = int((mel_bands(m, sound.window_samples, sound.rate, sound.low).sum(1) == 0).sum())
    if empty:
        raise PatchloomError(
            f"--bins {m} are more bands than frames of {1000 * sound.window:g} ms resolve ({empty} would be empty): "
            "give fewer"
        )


def check_patches(sound: Sound, patch: PatchSize) -> None:
    """Refuse patches that do not divide the pictures, and name lengths of recordings that they divide."""
    rows, columns = to_pair(patch)
    if sound.bins % rows:
        fitting = max(1, round(sound.bins / rows)) * rows
        raise PatchloomError(
            f"patches of {rows} rows do not divide the {sound.bins} rows of the pictures: give --bins {fitting}"
        )
    if sound.frames % columns:
        below = sound.frames // columns * columns
        seconds = [((w - 1) * sound.hop_samples + sound.window_samples) / sound.rate for w in (below, below + columns)]
        lengths = listing([f"{length:.6g}" for length in seconds[not below :]])
        raise PatchloomError(
            f"patches of {columns} frames do not divide the {sound.frames} frames of {sound.seconds:g} s: give "
            f"--seconds {lengths}"
        )


def mel_bands(m: int, window: int, rate: int, low: float) -> Tensor:
    """Return triangles [m k] over a frame's frequencies, with peaks of 1, evenly spaced in mel up to half the rate."""
    frequencies = (
        torch.arange(window // 2 + 1, dtype=torch.float64) * rate / window
    )  # for an odd window, the last is below rate / 2
    ends = torch.linspace(_mel(low), _mel(rate / 2), m + 2, dtype=torch.float64)
    edges = 700 * (10 ** (ends / 2595) - 1)
    below, peak, above = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - below) / (peak - below), (above - frequencies) / (above - peak)
    return torch.minimum(rising, falling).clamp(min=0).float()


def _mel(frequency: float) -> float:
    return 2595 * math.log10(1 + frequency / 700)


def cosine_transform(h: int, m: int) -> Tensor:
    """Return the first ``h`` rows of the orthonormal DCT-II of ``m`` values, [h m]."""
    order, place = torch.arange(h, dtype=torch.float64)[:, None], torch.arange(m, dtype=torch.float64)
    waves = torch.cos(math.pi / m * (place + 0.5) * order) * math.sqrt(2 / m)
    waves[0] /= math.sqrt(2)
    return waves.float()
