"""Modality of recordings: their names, their conversion to pictures, and the display of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.augment import Excerpt, for_recordings
from patchloom.audio.config import Sound
from patchloom.audio.spectrogram import check_patches, pictures
from patchloom.data.modality import IMAGES, Modality
from patchloom.errors import PatchloomError
from patchloom.sizes import PatchSize

_COLOURS = "magma"  # perceptually uniform, and its ends differ from the colours of hatching
_HEIGHT, _WIDTH = 120, 300  # approximate pixels to which small pictures are enlarged


@lru_cache(maxsize=64)
def modality_of(sound: Sound | None) -> Modality:
    """Return the modality of recordings with these settings; that of images if ``sound`` is None."""
    return IMAGES if sound is None else Recordings(sound)


@dataclass(frozen=True)
class Recordings(Modality):
    """Recordings, int16 [1 1 n], which are converted to pictures batch by batch, on the training device.

    When pictures are displayed, time runs to the right, the first row is at the bottom, and light is high.
    """

    sound: Sound

    item = "recording"
    noun = "recordings"
    an_item = "a recording"
    values = "values"
    raw = "raw features"
    pictured = "the pictures of the recordings"
    error = "reconstruction error"
    flat = "patch mean"
    blank = "silent"
    if_few = ""
    resizable = False  # an enlarged part of a recording would be another sound
    top_down = False

    @property
    def axes(self) -> str:
        sound = self.sound
        up = f"coefficients 1 to {sound.bins}"
        if sound.features == "logmel":
            up = f"{sound.bins} bands from {sound.low:g} to {sound.rate / 2:,.0f} Hz, evenly on the mel scale"
        return (
            f"Left to right: {sound.seconds:g} s, a frame every {1000 * self.column_seconds:g} ms. Bottom to top: "
            f"{up}; dark is three standard deviations of a row below its mean, light three above."
        )

    @property
    def column_seconds(self) -> float:
        return self.sound.hop_samples / self.sound.rate

    @property
    def own_size(self) -> tuple[tuple[int, int], str]:
        return self.sound.size, f"{self.sound.bins} rows and a column every 10 ms"

    def plain(self) -> dict[str, Any]:
        return asdict(self.sound)

    def preparation(self) -> dict[str, Any]:
        return {"sound": self.plain()}

    def check_patches(self, patch: PatchSize) -> None:
        check_patches(self.sound, patch)

    def with_channels(self, item: Tensor, channels: int) -> Tensor:
        return item

    def centre(self, size: tuple[int, int], native: bool = False, name: str = "", test_crop: float = 1.0) -> Excerpt:
        if self.sound.size != tuple(size):
            h, w = self.sound.size
            raise PatchloomError(
                f"pictures of {name} are of {h}x{w}, and the encoder is for {size[0]}x{size[1]}: give the "
                "--seconds, --rate and --bins that it was trained with"
            )
        return Excerpt(self.sound, crop="none")

    def cut(self, crop: Any, noise: Sequence[Tensor] = (), **excerpts: Any) -> Excerpt:
        return for_recordings(crop, self.sound, noise=noise, **excerpts)

    def pictures(self, items: Tensor) -> Tensor:
        return pictures(items, self.sound)

    def random(self, b: int, channels: int, size: tuple[int, int]) -> Tensor:
        return torch.randint(-(2**15), 2**15, (b, 1, 1, self.sound.samples), dtype=torch.int16)

    def colours(
        self, pictures: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> tuple[Tensor, Sequence[float], Sequence[float]]:
        """Return colours [b 3 H W] in [0, 1], the first row at the bottom; nan and inf stay.

        Small sides are enlarged by a whole factor each, so that a frame stays a sharp column.
        """
        import matplotlib

        plain = pictures.detach().float().cpu()[:, 0].flip(1) * torch.tensor(std) + torch.tensor(mean)
        table = torch.from_numpy(matplotlib.colormaps[_COLOURS](np.arange(256))[:, :3]).float()
        shade = (plain.nan_to_num(nan=0.0).clamp(0, 1) * (len(table) - 1)).round().long()
        colours = torch.where(plain.isfinite()[..., None], table[shade], plain[..., None]).permute(0, 3, 1, 2)
        for axis, enough in ((2, _HEIGHT), (3, _WIDTH)):
            colours = colours.repeat_interleave(max(1, round(enough / colours.shape[axis])), axis)
        return colours, (0.0,) * 3, (1.0,) * 3
