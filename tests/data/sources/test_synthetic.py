import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refusal, refused

from patchloom.audio.config import Sound
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import SHAPES, TONES, Shapes, Tones, _signed


@settings(max_examples=15)
@given(st.integers(0, 2**40), st.integers(0, 150), st.sampled_from([16, 32, 64]), st.integers(1, 100))
def test_an_image_depends_on_seed_number_and_size_only(seed, number, size, more):
    one = Shapes(1, seed, size, first=number)
    many = Shapes(number + more, seed, size)
    assert torch.equal(one.read(0), many.read(number))
    assert one.labels[0] == many.labels[number]


def test_images_never_change_and_differ_by_seed_number_and_size():
    images = [Shapes(2, seed).read(i) for seed in (0, 1) for i in (0, 1)]
    assert all(not torch.equal(a, b) for k, a in enumerate(images) for b in images[:k])
    assert images[0].shape == (3, 64, 64) and images[0].dtype == torch.uint8
    assert Shapes(1, size=40).read(0).shape == (3, 40, 40)
    prints = [Shapes(*args).fingerprint() for args in ((5, 0, 64), (6, 0, 64), (5, 1, 64), (5, 0, 32), (5, 0, 64, 9))]
    assert len(set(prints)) == 5
    assert Shapes(5).subset([0, 1]).fingerprint() != Shapes(5).subset([1, 0]).fingerprint()
    shapes = Shapes(20)
    assert shapes.labels[:10].tolist() == [7, 4, 3, 0, 1, 2, 8, 6, 5, 9]
    assert sorted(shapes.labels[10:].tolist()) == list(range(10))
    assert shapes.read(0).double().mean((1, 2)).tolist() == pytest.approx([26.287, 120.449, 228.965], abs=0.01)
    means = [125.23, 100.77, 113.40, 104.42, 106.74, 99.31, 202.15, 85.16, 195.75, 125.72]
    assert [shapes.read(i).double().mean().item() for i in range(10)] == pytest.approx(means, abs=0.02)
    assert shapes.read(0)[1, 0, :8].tolist() == pytest.approx([111, 109, 107, 111, 106, 109, 110, 109], abs=1)  # noise


def test_the_edge_of_a_star_leads_from_tip_to_corner():
    star, tenth = SHAPES.index("star"), np.pi / 5
    for radius, angle in ((1, 2 * tenth * np.arange(5)), (0.4, 2 * tenth * np.arange(5) + tenth)):
        assert _signed(star, radius * np.cos(angle), radius * np.sin(angle)) == pytest.approx(np.zeros(5), abs=1e-6)
    # twice the area of the triangle of centre, tip and corner, by its longest side
    height = 0.4 * np.sin(tenth) / np.hypot(1 - 0.4 * np.cos(tenth), 0.4 * np.sin(tenth))
    assert _signed(star, np.zeros(1), np.zeros(1)) == pytest.approx([-height])


@pytest.mark.parametrize("size", [32, 64])
def test_mask_and_box_agree_with_the_picture(size):
    shapes = Shapes(60, seed=3, size=size)
    for i in range(60):
        label, (x0, y0, x1, y1), mask = shapes.annotation(i)
        assert label == shapes.labels[i] and mask.shape == (size, size) and mask.dtype == bool
        assert mask[y0:y1, x0:x1].sum() == mask.sum() > 0
        for edge in (mask[y0, x0:x1], mask[y1 - 1, x0:x1], mask[y0:y1, x0], mask[y0:y1, x1 - 1]):
            assert edge.any()
        assert 0 < x0 and 0 < y0 and x1 < size and y1 < size  # nothing is cut off
        assert 0.2 * size < max(x1 - x0, y1 - y0) < 0.7 * size
        # Inside, one colour and a little noise; and that colour differs from what surrounds it.
        picture = shapes.read(i).permute(1, 2, 0).float().numpy()
        core = mask.copy()
        for axis in (0, 1):
            core &= np.roll(core, 1, axis) & np.roll(core, -1, axis)
        if core.sum() > 10:
            colour = np.median(picture[core], 0)
            assert np.abs(picture[core] - colour).max() < 35
            assert np.linalg.norm(np.median(picture[~mask], 0) - colour) > 60


# Recordings: the same from a seed on every machine and at every rate; classes differ only in order.

HALF = replace(Sound(), rate=8000)


def test_recordings_never_change_and_depend_on_seed_and_number_only():
    one, many = Tones(1, 3, first=30), Tones(32, 3)
    assert torch.equal(one.read(0), many.read(30)) and one.labels[0] == many.labels[30]
    others = [Tones(2, seed).read(i) for seed in (0, 1) for i in (0, 1)]
    assert all(not torch.equal(a, b) for k, a in enumerate(others) for b in others[:k])
    assert others[0].shape == (1, 1, 16_000) and others[0].dtype == torch.int16
    assert torch.equal(pickle.loads(pickle.dumps(many)).read(30), one.read(0))
    assert one.read(0) is one.read(0)
    tones = Tones(12)
    assert tones.labels.tolist() == [4, 11, 6, 8, 3, 2, 1, 7, 9, 10, 5, 0]
    waves = torch.stack([tones.read(i) for i in range(12)]).flatten(1).double()
    loud = [1510.9, 1767.0, 2037.9, 2228.7, 2885.5, 1871.5, 2120.8, 2449.3, 1834.4, 1779.2, 1509.7, 1867.7]
    assert waves.square().mean(1).sqrt().tolist() == pytest.approx(loud, rel=1e-3)
    peaks = [782, 3196, 11384, 7899, 11080, 9725, 4173, 2396, 10766, 2629, 5320, 7945]
    assert waves.abs().argmax(1).tolist() == peaks


def test_another_rate_gives_the_same_sounds():
    tones = Tones(24)
    usual, heard = tones.read(0), tones.heard_as(HALF)
    assert heard.read(0).shape == (1, 1, 8000) and torch.equal(tones.read(0), usual)
    assert torch.equal(tones.heard_as(Sound(seconds=2.0)).read(0), usual)
    for i in range(24):
        waves = (tones.read(i), 16_000), (heard.read(i), 8000)
        loud = [
            wave.flatten().double().unfold(0, rate // 20, rate // 20).square().mean(1).log() for wave, rate in waves
        ]
        assert torch.corrcoef(torch.stack(loud))[0, 1] > 0.9, TONES[tones.labels[i]]


def test_by_name_with_copies_and_parts():
    data = open_data("tones:120", seed=3)
    assert len(data.train) == 120 and len(data.test) == 1000 and data.train.noun == "recordings"
    assert torch.equal(data.train.read(7), Tones(8, seed=3).read(7))
    assert len(open_data("tones").train) == 5000
    assert len({one.tobytes() for part in (data.train, data.test) for one in part.contents()}) == 1120
    assert (data.train.contents(np.array([5, 2])) == data.train.contents()[[5, 2]]).all()
    assert data.train.fingerprint() not in (data.test.fingerprint(), open_data("tones:120").train.fingerprint())


def test_refusals():
    for name, said in (("shapes:0", "at least 1"), ("tones:0", "at least 1"), ("tones:many", "tones:5000")):
        refused(name, said)
    assert "at least 16" in refusal(Shapes, 1, size=8)
    for source in (Shapes(3), Tones(3)):
        with pytest.raises(IndexError):
            source.read(3)
