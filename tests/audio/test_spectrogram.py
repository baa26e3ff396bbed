"""Pictures of recordings equal those of an independent implementation, on every device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from refusing import refusal
from scipy.fft import dct
from scipy.signal import get_window

from patchloom.audio.config import GREY, SIXTH, Sound, sound_from
from patchloom.audio.recordings import modality_of
from patchloom.audio.spectrogram import check_patches, check_sound, features, pictures
from patchloom.data.loader import Batch, Prefetcher
from patchloom.data.stats import normalize


def waves(seed: int, b: int, samples: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((b, samples)).cumsum(1)
    return (noise / np.abs(noise).max() * 0.1 * 32767).astype(np.int16)


SOUNDS = [Sound(), Sound(8000), Sound(44_100, 0.5), Sound(features="logmel", bins=64), Sound(seconds=2.5, bins=13)]


def band_count(sound: Sound) -> int:
    return sound.bins if sound.features == "logmel" else sound.bands


def numpys(wave: np.ndarray, sound: Sound) -> np.ndarray:
    """Return the features of a recording [n] from NumPy and SciPy: HTK's mel triangles, natural logarithm, DCT-II."""
    n, m = sound.window_samples, band_count(sound)
    frames = np.lib.stride_tricks.sliding_window_view(wave / 2**15, n)[:: sound.hop_samples]
    power = np.abs(np.fft.rfft(frames * get_window("hann", n), axis=1)) ** 2
    mel = np.linspace(*(2595 * np.log10(1 + hertz / 700) for hertz in (sound.low, sound.rate / 2)), m + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    hertz = np.fft.rfftfreq(n, 1 / sound.rate)
    triangles = [np.interp(hertz, edges[i : i + 3], [0, 1, 0]) for i in range(m)]
    logarithm = np.log(np.stack(triangles) @ power.T + 1e-6)
    return logarithm if sound.features == "logmel" else dct(logarithm, axis=0, norm="ortho")[: sound.bins]


def librosas(wave: np.ndarray, sound: Sound) -> np.ndarray:
    import librosa  # it compiles for seconds

    lengths = {"n_fft": sound.window_samples, "hop_length": sound.hop_samples, "center": False}
    scale = {"n_mels": band_count(sound), "fmin": sound.low, "fmax": sound.rate / 2, "htk": True, "norm": None}
    energy = librosa.feature.melspectrogram(y=wave / 2**15, sr=sound.rate, power=2, window="hann", **lengths, **scale)
    logarithm = np.log(energy + 1e-6)
    return logarithm if sound.features == "logmel" else librosa.feature.mfcc(S=logarithm, n_mfcc=sound.bins)


@pytest.mark.parametrize("independent", [numpys, pytest.param(librosas, marks=pytest.mark.slow)])
def test_features_equal_those_of_other_libraries(independent):
    for seed, sound in enumerate(SOUNDS):
        wave = waves(seed, 2, sound.samples)
        ours = features(torch.from_numpy(wave)[:, None, None], sound)
        assert ours.shape == (2, 1, *sound.size) and ours.dtype == torch.float32
        for one, mine in zip(wave, ours, strict=True):
            theirs = independent(one.astype(np.float64), sound)
            np.testing.assert_allclose(mine[0].numpy(), theirs, atol=1e-4 * max(1, np.abs(theirs).max()))


def test_a_second_has_98_frames_of_any_precision():
    assert Sound().size == (40, 98)
    wave = torch.from_numpy(waves(0, 3, 16_000))[:, None, None]
    assert torch.equal(features(wave, Sound()), features(wave.float() / 2**15, Sound()))
    silent = features(torch.zeros(1, 1, 1, 16_000, dtype=torch.int16), Sound())
    assert silent.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(features(wave, Sound()), features(wave.float() / 2**15, Sound()))


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


def test_a_sound_is_rebuilt_from_plain_values():
    sound = Sound(8000, bins=20, mean=(0.5,) * 20, std=(1.0,) * 20)
    assert sound_from({**sound.__dict__, "mean": [0.5] * 20, "std": [1.0] * 20}) == sound
    assert sound_from(None) is None


@pytest.mark.parametrize(
    ("sound", "said"),
    [
        (Sound(seconds=0.02), "--seconds 0.02"),
        (Sound(bins=65), "--bins 65 are too many coefficients for 64 bands"),
        (Sound(rate=999), "--rate 999 is too low"),
        (Sound(features="logmel", bins=400), "--bins 400 are more bands"),
    ],
)
def test_settings_without_a_picture_are_refused(sound, said):
    assert said in refusal(check_sound, sound)


def test_patches_that_do_not_divide_a_picture_are_refused_with_lengths_that_do():
    check_patches(Sound(), (8, 14))
    assert "do not divide the 40 rows" in refusal(check_patches, Sound(), (16, 14))
    assert "--bins 32" in refusal(check_patches, Sound(), (16, 14))
    assert "--seconds 0.98 or 1.14" in refusal(check_patches, Sound(), (8, 16))  # 96 and 112 frames
