"""Excerpts have one length, lie in the recording, and depend only on the generator."""

import numpy as np
import torch
from refusing import refusal

from patchloom.audio.augment import Excerpt, excerpt_at, for_recordings
from patchloom.audio.config import Sound
from patchloom.data.augment import RandomCrop, TwoViews

SOUND = Sound(rate=1000, seconds=0.1)  # 100 samples


def counting(n: int) -> torch.Tensor:
    return torch.arange(1, n + 1, dtype=torch.int16)[None, None]


def test_short_recordings_are_padded_and_long_ones_cut():
    (short,) = Excerpt(SOUND, crop="none")(counting(60))
    assert short.shape == (1, 1, 100) and torch.equal(short[..., 20:80], counting(60))
    assert not short[..., :20].any() and not short[..., 80:].any()
    (long,) = Excerpt(SOUND, crop="none")(counting(301))
    assert long[0, 0, 0] == 101 and long[0, 0, -1] == 200
    (same,) = Excerpt(SOUND, crop="none")(counting(100))
    assert torch.equal(same, counting(100))
    assert excerpt_at(counting(5), -2, 4).flatten().tolist() == [0, 0, 1, 2]
    assert excerpt_at(counting(5), 3, 4).flatten().tolist() == [4, 5, 0, 0]
    assert excerpt_at(counting(5), 9, 2).flatten().tolist() == [0, 0]
    assert excerpt_at(counting(5), -9, 2).flatten().tolist() == [0, 0]


def test_random_excerpts_of_long_recordings_and_shifts_of_short_ones():
    excerpt, rngs = Excerpt(SOUND, shift=0), map(np.random.default_rng, range(400))
    starts = [int(excerpt(counting(500), rng)[0][0, 0, 0]) for rng in rngs]
    assert min(starts) < 20 and max(starts) > 380 and max(starts) <= 401
    shifts = set()
    for i in range(200):
        (one,) = Excerpt(SOUND, shift=0.01)(counting(100), np.random.default_rng(i))
        first = int((one[0, 0] == 50).nonzero()) - 49
        shifts.add(first)
        assert torch.equal(one, excerpt_at(counting(100), -first, 100))
    assert shifts == set(range(-10, 11))


def test_noise_is_added_to_a_share_of_excerpts_up_to_a_volume():
    silent, noise = torch.zeros(1, 1, 100, dtype=torch.int16), torch.full((1, 1, 5000), 10_000, dtype=torch.int16)
    excerpt = Excerpt(SOUND, 0, [noise], noise_share=0.8, noise_volume=0.1)
    levels = np.array([int(excerpt(silent, np.random.default_rng(i))[0].max()) for i in range(500)])
    assert 0.75 < (levels > 0).mean() < 0.85
    assert levels.max() <= 1000 and 400 < levels[levels > 0].mean() < 600
    loud = torch.full((1, 1, 100), 32_767, dtype=torch.int16)
    assert all(excerpt(loud, np.random.default_rng(i))[0].min() > 0 for i in range(20)), "clipped, and not wrapped"


def test_two_excerpts_are_separate_shared_or_central():
    rng = np.random.default_rng
    makes = [Excerpt(SOUND, crop=crop, n_views=2) for crop in ("own", "shared", "none")]
    own, shared, none = (make(counting(900), rng(0)) for make in makes)
    assert not torch.equal(*own) and torch.equal(*shared) and torch.equal(own[0], shared[0])
    assert torch.equal(none[0], Excerpt(SOUND, crop="none")(counting(900))[0]) and torch.equal(*none)
    assert [make.crops for make in makes] == [2, 1, 1]


def test_a_tasks_crops_become_excerpts_or_are_refused():
    size = SOUND.size
    assert for_recordings(RandomCrop(size), SOUND).n_views == 1
    two = for_recordings(TwoViews(size, crop="shared", color="none"), SOUND)
    assert (two.n_views, two.crop) == (2, "shared")
    assert "--task.color none" in refusal(for_recordings, TwoViews(size, crop="own", color="own"), SOUND)
    assert "needs more of an image" in refusal(for_recordings, RandomCrop((size[0] + 8, size[1] + 8)), SOUND)
