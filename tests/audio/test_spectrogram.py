"""Pictures of recordings equal those of an independent implementation, on every device."""

from dataclasses import replace

import librosa
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.audio.config import GREY, SIXTH, Sound, sound_from
from patchloom.audio.recordings import modality_of
from patchloom.audio.spectrogram import check_sound, features, pictures
from patchloom.data.loader import Batch, Prefetcher
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError


def waves(seed: int, b: int, samples: int, loud: float = 0.1) -> np.ndarray:
    """Coloured noise, int16 [b samples]."""
    noise = np.random.default_rng(seed).standard_normal((b, samples)).cumsum(1)
    return (noise / np.abs(noise).max() * loud * 32767).astype(np.int16)


def librosas(wave: np.ndarray, sound: Sound) -> np.ndarray:
    bands = sound.bins if sound.features == "logmel" else sound.bands
    lengths = {"n_fft": sound.window_samples, "hop_length": sound.hop_samples, "center": False}
    scale = {"n_mels": bands, "fmin": sound.low, "fmax": sound.rate / 2, "htk": True, "norm": None}
    energy = librosa.feature.melspectrogram(y=wave / 2**15, sr=sound.rate, power=2, window="hann", **lengths, **scale)
    logarithm = np.log(energy + 1e-6)
    return logarithm if sound.features == "logmel" else librosa.feature.mfcc(S=logarithm, n_mfcc=sound.bins)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 100),
    sound=st.sampled_from(
        [Sound(), Sound(8000), Sound(44_100, 0.5), Sound(features="logmel", bins=64), Sound(seconds=2.5, bins=13)]
    ),
)
def test_features_equal_librosas(seed, sound):
    wave = waves(seed, 2, sound.samples)
    ours = features(torch.from_numpy(wave)[:, None, None], sound)
    assert ours.shape == (2, 1, *sound.size) and ours.dtype == torch.float32
    for one, mine in zip(wave, ours, strict=True):
        theirs = librosas(one.astype(np.float64), sound)
        np.testing.assert_allclose(mine[0].numpy(), theirs, atol=1e-4 * max(1, np.abs(theirs).max()))


def test_a_second_has_the_papers_98_frames_and_16_bits_are_as_floats():
    assert Sound().size == (40, 98)
    wave = torch.from_numpy(waves(0, 3, 16_000))[:, None, None]
    assert torch.equal(features(wave, Sound()), features(wave.float() / 2**15, Sound()))
    silent = features(torch.zeros(1, 1, 1, 16_000, dtype=torch.int16), Sound())
    assert silent.isfinite().all()


def test_a_batch_becomes_standardised_pictures_once_on_its_device():
    wave = torch.from_numpy(waves(1, 8, 16_000))[:, None, None]
    raw = features(wave, Sound())
    mean, std = raw.mean((0, 1, 3)), raw.std((0, 1, 3))
    sound = replace(Sound(), mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    batch = next(Prefetcher(iter([Batch((wave,), torch.arange(8), [])]), "cpu", modality_of(sound).pictures))
    given = normalize(batch.views[0], (GREY,), (SIXTH,))
    torch.testing.assert_close(given, (raw - mean[:, None]) / std[:, None], rtol=1e-4, atol=1e-4)
    assert torch.equal(batch.on("cpu").views[0], batch.views[0])
    assert torch.equal(pictures(wave, sound), batch.views[0])


def test_features_are_float32_under_autocast():
    wave = torch.from_numpy(waves(2, 2, 16_000))[:, None, None]
    with torch.autocast("cpu", torch.bfloat16):
        inside = features(wave, Sound())
    assert torch.equal(inside, features(wave, Sound()))


def test_a_sound_is_rebuilt_from_plain_values():
    sound = Sound(8000, bins=20, mean=(0.5,) * 20, std=(1.0,) * 20)
    assert sound_from({**sound.__dict__, "mean": [0.5] * 20, "std": [1.0] * 20}) == sound
    assert sound_from(None) is None


@pytest.mark.parametrize(
    ("sound", "said"),
    [
        (Sound(seconds=0.02), "--seconds 0.02 is shorter than a frame of 30 ms"),
        (Sound(bins=65), "--bins 65 are too many coefficients for 64 bands"),
        (Sound(rate=500), "--rate 500 is too low"),
        (Sound(features="logmel", bins=400), "--bins 400 are more bands than frames of 30 ms resolve"),
    ],
)
def test_settings_without_a_picture_are_refused(sound, said):
    with pytest.raises(PatchloomError, match=said):
        check_sound(sound)
