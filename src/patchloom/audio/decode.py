"""Decoding of a sound file, or its bytes, into one channel of 16 bits at a requested rate."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data.conversions import record_conversion
from patchloom.data.decode import check_decoded_size, unreadable
from patchloom.errors import PatchloomError, pip_install
from patchloom.system.files import open_regular

_FULL = 2**15  # full scale of 16 bits
# low-pass filter: zero crossings on either side, Kaiser's beta (65 dB), and the middle of its edge as a share of the
# lower Nyquist frequency, so that the edge ends there
_ZEROS, _BETA, _EDGE = 32, 6.2, 0.95
_MOST_HERTZ = 768_000  # ultrasound recorders use less
_MOST_TIMES = 64  # times the samples per second of a file; 8,000 become 48,000 by a factor of 6
_BLOCK = 2**20  # values that are decoded at a time
_MOST_FACTOR = 2**18  # of a rate to another: the filter has 64 taps for each
_UNKNOWN = (0, 0xFFFFFFFF)  # sizes in the header of a WAV file that was written to a pipe
_LAST_PAGE = 4  # the flag of an Ogg page that ends a stream


class AudioHeader(NamedTuple):
    """Header of a sound file.

    Attributes:
        kind: format, such as "WAV 24 bits".
        rate: samples per second.
        channels: number of channels.
        samples: number of samples per channel.
    """

    kind: str
    rate: int
    channels: int
    samples: int


def read_recording(path: str | Path, rate: int) -> Tensor:
    """Decode a sound file: WAV, FLAC, Ogg (Vorbis, Opus) or MP3, of any rate, number of channels and depth.

    Channels are mixed to one by their mean. Floating-point samples beyond +-1 are clipped.
    `patchloom.data.conversions` records which of these conversions were made.

    Returns:
        int16 [1 1 n], as long as the recording.
    """
    library = soundfile()
    with unreadable(str(path), "a recording"), open_regular(path, follow=True) as file:
        return _decoded(library, file.read(), rate)


def decode_recording(content: bytes, name: str, rate: int) -> Tensor:
    """Decode the bytes of a sound file, see `read_recording`."""
    library = soundfile()
    with unreadable(name, "a recording"):
        return _decoded(library, content, rate)


def head_of(path: str | Path) -> AudioHeader:
    """Read the header of a sound file that `read_recording` can decode."""
    info = soundfile().info(os.fspath(path))
    depth = {"PCM_U8": "8", "PCM_S8": "8", "PCM_16": "16", "PCM_24": "24", "PCM_32": "32"}.get(info.subtype)
    depth = f" {depth} bits" if depth else " float" * (info.subtype in ("FLOAT", "DOUBLE"))
    return AudioHeader(f"{info.format.replace('MPEG', 'MP3')}{depth}", info.samplerate, info.channels, info.frames)


def soundfile() -> ModuleType:
    """Import the library that decodes, or raise an error that says how to install it."""
    try:
        import soundfile as library  # an extra
    except (ImportError, OSError) as error:  # OSError: without the library that it wraps
        raise PatchloomError(f"recordings are read by soundfile: {pip_install('audio')}") from error
    return library


def _decoded(library: ModuleType, content: bytes, rate: int) -> Tensor:
    """Decode to int16 [1 1 n]."""
    if not content:
        raise ValueError("the file is empty")
    # libsndfile would read a truncated WAV or Ogg file as a shorter one
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        at = 12
        while at + 8 <= len(content):
            size = int.from_bytes(content[at + 4 : at + 8], "little")
            there = len(content) - at - 8
            if content[at : at + 4] != b"data":
                at += 8 + size + size % 2
            elif size > there and size not in _UNKNOWN:
                raise ValueError(f"it is cut short: {there:,} of {size:,} bytes of samples are there")
            else:
                break
    elif content[:4] == b"OggS":
        page = content[content.rfind(b"OggS") :]
        whole = 27 + page[26] + sum(page[27 : 27 + page[26]]) if len(page) > 26 else 27
        if len(page) < whole or not page[5] & _LAST_PAGE:
            raise ValueError("it is cut short: its last page is missing")
    try:
        with library.SoundFile(BytesIO(content)) as file:
            wave = _mixed(file, len(content), rate)
    except library.LibsndfileError as error:
        raise ValueError(
            f"it is not a WAV, FLAC, Ogg or MP3 file, or broken ({error.error_string.rstrip('.')})"
        ) from error
    if file.samplerate != rate:
        record_conversion("resampled")
        wave = _as_integers(resample(wave, file.samplerate, rate))
    return torch.from_numpy(wave)[None, None]


def _mixed(file: Any, stored: int, rate: int) -> np.ndarray:
    """Read an open sound file of ``stored`` bytes, mixed to one channel: int16 [n], or float32 for other rates."""
    own = file.samplerate
    if own > _MOST_HERTZ:
        raise ValueError(f"its header says {own:,} samples per second, and at most {_MOST_HERTZ:,} can be read")
    if rate > _MOST_TIMES * own:
        raise ValueError(
            f"its header says {own:,} samples per second, which are too few for {rate:,}; give --rate {own} or so"
        )
    if max(own, rate) // math.gcd(own, rate) > _MOST_FACTOR:  # the filter would fill the memory
        raise ValueError(f"its header says {own:,} samples per second, which is no usual rate; resample it to {rate:,}")
    check_decoded_size(2 * math.ceil(file.frames * max(1, rate / own)), stored, "cut it into shorter recordings")
    floating = file.subtype in ("FLOAT", "DOUBLE")
    wave = np.empty(file.frames, np.int16 if own == rate else np.float32)
    done = 0
    # by blocks, since a file may have a thousand channels
    while len(samples := file.read(max(1, _BLOCK // file.channels), dtype="float32", always_2d=True)):
        if floating and not np.isfinite(samples).all():
            raise ValueError("it has samples that are not finite")
        if floating and np.abs(samples).max() > 1:  # lossy formats overshoot, too, and are meant to be clipped
            record_conversion("clipped")
            samples = samples.clip(-1, 1)
        mixed = samples.mean(1) if file.channels > 1 else samples[:, 0]
        wave[done : done + len(mixed)] = _as_integers(mixed) if own == rate else mixed
        done += len(mixed)
    if done < len(wave):
        raise ValueError(f"it is cut short: {len(wave) - done:,} of {len(wave):,} samples are missing")
    if not done:
        raise ValueError("it has no samples, only a header")
    if file.channels > 1:
        record_conversion("mixed")
    return wave


def _as_integers(wave: np.ndarray) -> np.ndarray:
    """Return samples in [-1, 1], float32 [n], as int16."""
    scaled = wave * _FULL
    return np.round(scaled, out=scaled).clip(-_FULL, _FULL - 1, out=scaled).astype(np.int16)


def resample(wave: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Resample a recording by a polyphase filter, which removes frequencies above half of either rate.

    Args:
        wave: float32 [n] at ``own`` samples per second.
        own, rate: samples per second, before and after.
    """
    from scipy.signal import resample_poly  # takes long to import, and most recordings have the rate

    return resample_poly(wave, rate, own, window=_low_pass(max(own, rate) // math.gcd(own, rate)))


@lru_cache(maxsize=8)
def _low_pass(times: int) -> np.ndarray:
    """Return a linear-phase low-pass filter, float32 [2 * _ZEROS * times + 1], that keeps the lowest 1/``times``."""
    from scipy.signal import firwin

    return firwin(2 * _ZEROS * times + 1, _EDGE / times, window=("kaiser", _BETA)).astype(np.float32)
