"""Modality of recordings: all differences from images."""

import numpy as np
import pytest
import torch
from refusing import refusal
from spoken import SOUND, Tones

from patchloom.audio.augment import Excerpt
from patchloom.audio.recordings import modality_of
from patchloom.audio.spectrogram import pictures
from patchloom.data.augment import RandomCrop
from patchloom.data.loader import training_batches
from patchloom.data.modality import IMAGES, Modality
from patchloom.data.sources.synthetic import Shapes

HEARD = modality_of(SOUND)


def test_every_name_of_images_has_a_counterpart():
    words = [name for name, value in vars(Modality).items() if isinstance(value, str) and not name.startswith("__")]
    assert len(words) >= 7
    for name in words:
        assert getattr(HEARD, name) != getattr(IMAGES, name), name


def test_a_crop_of_images_becomes_an_excerpt_with_the_sources_noise():
    crop, noise = RandomCrop(SOUND.size), (torch.ones(1, 1, 800, dtype=torch.int16),)
    source = Tones(2)
    source.noise = noise
    assert Shapes(2).cut(crop, shift=0.3) is crop
    cut = source.subset([1]).cut(crop, shift=0.02, noise_share=0.5, noise_volume=0.2)
    assert isinstance(cut, Excerpt) and cut.noise == noise and cut.shift == 0.02
    assert (cut.noise_share, cut.noise_volume) == (0.5, 0.2)
    assert HEARD.centre(SOUND.size).crop == "none"
    assert "of 8x9, and the encoder is for 8x8" in refusal(HEARD.centre, (8, 8), name="birds")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_batch_of_recordings_is_pictures_of_the_excerpts_that_the_seed_draws(device):
    source, cut = Tones(4), Excerpt(SOUND)
    (batch,) = training_batches(source, source.cut(RandomCrop(SOUND.size)), 6, 3, 0, 1, channels=1, device=device)
    rows = batch.indices.tolist()
    waves = torch.stack([cut(source.read(i), np.random.default_rng((3, 0, i)))[0] for i in rows])
    assert torch.equal(batch.views[0], pictures(waves, SOUND)) and batch.views[0].dtype == torch.float32


def test_pictures_of_recordings_are_coloured_upright_and_images_stay():
    images = torch.zeros(1, 1, *SOUND.size)
    assert IMAGES.colours(images, (0.5,), (0.2,)) == (images, (0.5,), (0.2,))
    images[..., 0, :] = 9
    colours, mean, std = HEARD.colours(images, (0.5,), (1 / 6,))
    assert colours.shape[1] == 3 and (mean, std) == ((0.0,) * 3, (1.0,) * 3)
    assert colours[0, :, -1].min() > colours[0, :, 0].min() and "every 10 ms" in HEARD.axes and not IMAGES.axes
