"""Synthetic recordings: the same from a seed on every machine and at every rate; classes differ only in order."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from patchloom.audio.config import Sound
from patchloom.audio.spectrogram import features
from patchloom.data.sources import synthetic as sources_tones
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import TONES, Tones, _synthesised
from patchloom.errors import PatchloomError

HALF = replace(Sound(), rate=8000)


def test_a_recording_depends_on_seed_and_number_only():
    one, many = Tones(1, 3, first=30), Tones(32, 3)
    assert torch.equal(one.read(0), many.read(30)) and one.labels[0] == many.labels[30]
    others = [Tones(2, seed).read(i) for seed in (0, 1) for i in (0, 1)]
    assert all(not torch.equal(a, b) for k, a in enumerate(others) for b in others[:k])
    assert others[0].shape == (1, 1, 16_000) and others[0].dtype == torch.int16
    assert torch.equal(pickle.loads(pickle.dumps(many)).read(30), one.read(0))
    assert one.read(0) is one.read(0)


def test_recordings_never_change():
    """Runs that began with an earlier version continue with the same recordings, which have the same fingerprint."""
    tones = Tones(12)
    assert tones.labels.tolist() == [4, 11, 6, 8, 3, 2, 1, 7, 9, 10, 5, 0]
    wave = tones.read(0).double()
    assert wave.square().mean().sqrt().item() == pytest.approx(1510.93, rel=1e-4) and wave.abs().argmax() == 782


def test_each_class_comes_once_in_twelve_and_in_no_fixed_order():
    labels = Tones(240).labels.reshape(20, 12)
    assert (np.sort(labels, 1) == np.arange(12)).all() and len({tuple(block) for block in labels}) == 20
    assert len(set(TONES)) == 12 and all(len({*name.split()} & {"hum", "hiss", "rise", "fall"}) == 3 for name in TONES)


def test_another_rate_gives_the_same_sounds():
    tones = Tones(24)
    usual = tones.read(0)
    heard = tones.heard_as(HALF)
    assert heard.read(0).shape == (1, 1, 8000) and torch.equal(tones.read(0), usual)
    assert torch.equal(tones.heard_as(Sound(seconds=2.0)).read(0), usual)

    def loudness(wave, rate):
        return wave.flatten().double().unfold(0, rate // 20, rate // 20).square().mean(1).log()

    for i in range(24):
        both = torch.stack([loudness(tones.read(i), 16_000), loudness(heard.read(i), 8000)])
        assert torch.corrcoef(both)[0, 1] > 0.9, TONES[tones.labels[i]]
    assert Tones(2).heard_as(replace(Sound(), rate=1000)).read(1).shape == (1, 1, 1000)


def test_glides_and_the_order_of_sounds_match_the_class(monkeypatch):
    monkeypatch.setattr(sources_tones, "_LENGTH", (0.14, 0.14))  # long enough to be split into two parts
    right, alike = [], []
    for number in range(40):
        rise, fall, hum, again = (
            start_of(_synthesised(0, number, order.split(), 16_000))
            for order in ("rise hum hiss", "fall hum hiss", "hum hiss rise", "hum rise hiss")
        )
        right += [period(rise[:800]) > period(rise[900:]), period(fall[:800]) < period(fall[900:])]
        alike.append([np.corrcoef(hum, other)[0, 1] > 0.9 for other in (again, rise, fall)])
    assert np.mean(right) > 0.85
    assert np.mean(alike, 0)[0] > 0.8 and max(np.mean(alike, 0)[1:]) < 0.1


def start_of(wave: np.ndarray) -> np.ndarray:
    """Return a tenth of a second from the onset of a sound that is louder than the background."""
    return wave[np.flatnonzero(np.abs(wave) > 0.2 * np.abs(wave).max())[0] :][:1600].astype(float)


def period(wave: np.ndarray) -> int:
    """Return the period of a voice in samples: the lag with the highest autocorrelation."""
    whole = np.correlate(wave, wave, "full")[len(wave) - 1 :]
    return 40 + int(np.argmax(whole[40:300] / np.arange(len(wave), 0, -1)[40:300]))


def test_raw_features_hardly_help():
    """Chance is 8.3 %: classifiers of raw pictures and spectra are hardly better."""
    train, test = Tones(360), Tones(240, first=2**40)

    def rows(tones):
        return features(torch.stack([tones.read(i) for i in range(len(tones))]), Sound())[:, 0]

    seen, asked = rows(train), rows(test)
    mean, std = seen.mean((0, 2))[:, None], seen.std((0, 2))[:, None]
    seen, asked = (seen - mean) / std, (asked - mean) / std
    for kind, of, most in (
        ("pictures", lambda x: x.flatten(1), 0.2),
        ("spectra", lambda x: torch.cat([x.mean(2), x.std(2)], 1), 0.14),
    ):
        fitted = LogisticRegression(C=1e-3, max_iter=100).fit(of(seen), train.labels)
        assert fitted.score(of(asked), test.labels) < most, kind
    unit = [torch.nn.functional.normalize(x.flatten(1), dim=1) for x in (asked, seen)]
    near = torch.from_numpy(train.labels)[(unit[0] @ unit[1].T).topk(20).indices]
    assert (near.mode(1).values.numpy() == test.labels).mean() < 0.25


def test_by_name_with_copies_and_parts():
    data = open_data("tones:120", seed=3)
    assert len(data.train) == 120 and len(data.test) == 1000 and data.train.noun == "recordings"
    assert torch.equal(data.train.read(7), Tones(8, seed=3).read(7))
    assert len(open_data("tones").train) == 5000
    assert len({one.tobytes() for part in (data.train, data.test) for one in part.contents()}) == 1120
    assert (data.train.contents(np.array([5, 2])) == data.train.contents()[[5, 2]]).all()
    assert data.train.fingerprint() not in (data.test.fingerprint(), open_data("tones:120").train.fingerprint())


def test_refusals():
    for name, said in (("tones:0", "at least 1"), ("tones:many", "how many recordings: .* as in tones:5000")):
        with pytest.raises(PatchloomError, match=said):
            open_data(name)
    with pytest.raises(IndexError):
        Tones(3).read(3)
