"""The pictures of recordings as code of torch alone, for whoever uses an encoder without patchloom."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from patchloom.data.sound.features import FLOOR
from patchloom.sound import Sound

_BANDS = """\
# triangles that are evenly spaced on the mel scale
ends = 2595 * torch.log10(1 + torch.tensor([{low}, {top}], dtype=torch.float64) / 700)
edges = 700 * (10 ** (torch.linspace(*ends.tolist(), {m} + 2, dtype=torch.float64) / 2595) - 1)[:, None]
hertz = torch.arange({k}, dtype=torch.float64) * {rate} / {n}
rising, falling = (hertz - edges[:-2]) / edges.diff(dim=0)[:-1], (edges[2:] - hertz) / edges.diff(dim=0)[1:]
bands = torch.minimum(rising, falling).clamp(min=0).float()
"""
_COSINES = """\
# the first {h} rows of the orthonormal DCT-II
angles = torch.pi / {m} * (torch.arange({m}).double() + 0.5) * torch.arange({h})[:, None]
cosines = (torch.cos(angles) * (2 / {m}) ** 0.5).float()
cosines[0] /= 2**0.5
"""
_PICTURES = '''\
# of each row, over the recordings of the training
mean = {mean}[:, None]
std = {std}[:, None]


def pictures(waves):
    """Standardised features [b 1 {h} {w}] of waveforms [b {samples}] in [-1, 1]: {seconds:g} s at {rate:,} Hz."""
    window = torch.hann_window({n})
    spectrum = torch.stft(waves, {n}, {hop}, window=window, center=False, return_complex=True)
    energy = torch.log(bands @ spectrum.abs().square() + {floor})
    return (({features} - mean) / std)[:, None]
'''
_LINE = 100


def code_of_pictures(sound: Sound) -> str:
    """Code that defines ``pictures``, a function from waveforms to what an encoder is given.

    Args:
        sound: with the mean and deviation of each row.
    """
    logmel = sound.features == "logmel"
    return (_BANDS + _COSINES * (not logmel) + _PICTURES).format(
        low=sound.low,
        top=sound.rate / 2,
        m=sound.bins if logmel else sound.bands,
        k=sound.window_samples // 2 + 1,
        h=sound.bins,
        w=sound.frames,
        mean=_tensor(sound.mean),
        std=_tensor(sound.std),
        samples=sound.samples,
        seconds=sound.seconds,
        rate=sound.rate,
        n=sound.window_samples,
        hop=sound.hop_samples,
        floor=FLOOR,
        features="energy" if logmel else "cosines @ energy",
    )


def _tensor(values: Sequence[float]) -> str:
    """Some numbers to a line, each with all digits that float32 holds."""
    numbers = fill(
        ", ".join(f"{value:.9g}" for value in values), _LINE, initial_indent="    ", subsequent_indent="    "
    )
    return f"torch.tensor([\n{numbers}\n])"
