"""Settings that turn recordings into pictures: rate, length and features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from patchloom.errors import typed_fields
from patchloom.options.pretrain import FeatureKind, PretrainOptions

# A picture shows the mean of a row as middle grey, and black and white three standard deviations from it. With these
# numbers as mean and standard deviation of its one channel, the input of an encoder is the standardised features.
GREY, SIXTH = 0.5, 1 / 6


@dataclass(frozen=True)
class Sound:
    """Settings that turn a recording into a picture of ``bins`` rows and one column per frame.

    Attributes:
        rate: samples per second to which recordings are resampled.
        seconds: length to which recordings are cut or padded.
        features: mel-frequency cepstral coefficients, or the logarithm of the mel spectrogram.
        bins: rows of the picture: coefficients, or bands.
        bands: bands of the mel spectrogram from which coefficients are computed; for logmel there are ``bins`` bands.
        window: length of a frame in seconds.
        hop: seconds from the start of a frame to that of the next.
        low: lower edge of the first band in Hz; the last one ends at half the rate.
        mean, std: mean and standard deviation of each row over the training recordings; () before they are measured.
    """

    rate: int = PretrainOptions.rate
    seconds: float = PretrainOptions.seconds
    features: FeatureKind = PretrainOptions.features
    bins: int = PretrainOptions.bins
    bands: int = 64
    window: float = 0.03
    hop: float = 0.01
    low: float = 20.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def samples(self) -> int:
        """Samples per recording."""
        return round(self.rate * self.seconds)

    @property
    def window_samples(self) -> int:
        """Samples per frame."""
        return round(self.rate * self.window)

    @property
    def hop_samples(self) -> int:
        """Samples from the start of a frame to that of the next."""
        return max(1, round(self.rate * self.hop))

    @property
    def frames(self) -> int:
        """Columns of the picture; last samples that do not fill a frame are left out."""
        return 1 + (self.samples - self.window_samples) // self.hop_samples

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.bins, self.frames


_RANGES = {
    **{"rate": (1, 10**6), "seconds": (0, 3600), "bins": (1, 4096), "bands": (1, 4096)},
    **{"window": (0, 60), "hop": (0, 60), "low": (0, 10**6), "mean": (-1e9, 1e9), "std": (0, 1e9)},
}
_LARGEST = 2**28  # samples of a recording, and values of its picture


def sound_from(plain: Any) -> Sound | None:
    """Rebuild a `Sound` from its plain values, as in JSON or YAML, and check it; None stays None."""
    if plain is None:
        return None
    sound = Sound(**typed_fields(Sound, plain, _RANGES))
    if not 1 <= sound.window_samples <= sound.samples <= _LARGEST or sound.bins * sound.frames > _LARGEST:
        raise ValueError(f"no picture can be made of {sound.seconds:g} s in frames of {sound.window:g} s")
    if not len(sound.mean) == len(sound.std) or len(sound.mean) not in (0, sound.bins):
        raise ValueError(f"mean and std of {sound.bins} rows are {len(sound.mean)} and {len(sound.std)} numbers")
    return sound
