import re

import numpy as np
import pytest
import torch
from PIL import Image
from pseudo_cuda import CUDA, pseudo_cuda
from refusing import refusal

from patchloom.audio.config import Sound
from patchloom.data.augment import RandomCrop
from patchloom.data.loader import training_batches
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import channels_of, input_notes, measure, normalize, statistics_of
from patchloom.data.workers import in_workers
from patchloom.errors import PatchloomError
from patchloom.system.device import cores


def test_channels(tmp_path, draw):
    draw("a/1.png", grey=True)
    draw("a/2.png", grey=True)
    assert channels_of(open_data(tmp_path).train) == 1
    draw("a/3.png")
    assert channels_of(open_data(tmp_path).train) == 3


def test_measure_agrees_with_numpy(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((4, 5), (6, 9), (8, 30))]
    for i, array in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", array if i else (array / 255).astype(np.float32))
    (tmp_path / "broken.jpg").write_bytes(b"no")
    stats = statistics_of(open_data(tmp_path).train, 3)
    pixels = np.concatenate([array.reshape(-1, 3) for array in arrays]) / 255
    np.testing.assert_allclose(stats.mean, pixels.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.std, pixels.std(0), rtol=1e-5)
    assert (stats.height, stats.width, stats.sampled) == (6, 9, 3)
    assert stats.unreadable == [str(tmp_path / "broken.jpg")]


@pytest.mark.parametrize(
    ("values", "noted"), [((128, 60), False), ((6, 2), True), ((128, 1), True), ((20, 12), False), ((128, 0), True)]
)
def test_images_of_another_scale_are_noted(tmp_path, values, noted):
    centre, spread = values
    pixels = np.random.default_rng(0).normal(centre, spread, (8, 16, 16)).clip(0, 255).astype(np.uint8)
    for i, array in enumerate(pixels):
        Image.fromarray(array).save(tmp_path / f"{i}.png")
    said = input_notes(open_data(tmp_path).train, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert bool(said) == noted
    assert not said or "instead of about 0 and 1: if their values are on another scale" in said[0]


def test_a_sample_is_random_but_fixed_by_its_seed():
    shapes = Shapes(40, size=16)
    one, again, other = (statistics_of(shapes, 3, sample=8, seed=seed) for seed in (0, 0, 1))
    assert one == again != other and one.sampled == 8


def test_flat_images_keep_a_floor_under_std(tmp_path):
    np.save(tmp_path / "a.npy", np.full((4, 4), 100, np.uint8))
    stats = statistics_of(open_data(tmp_path).train, 1)
    assert stats.std == (1e-3,)
    assert normalize(torch.full((1, 1, 2, 2), 100, dtype=torch.uint8), stats.mean, stats.std).abs().max() < 1e-3


@pytest.mark.parametrize(("method", "workers"), [("fork", [cores()]), ("spawn", [])])
def test_worker_processes_change_no_digit(tmp_path, draw, monkeypatch, method, workers):
    """Where they are not forked, starting them takes longer than this sample."""
    monkeypatch.setattr("patchloom.data.reading.multiprocessing.get_start_method", lambda: method)
    for number in range(20):
        draw(f"{number:02}.png", 300, 290)  # more pixels than are summed at a time
    (tmp_path / "07.png").write_bytes(b"no")
    source, started = open_data(tmp_path).train, []
    alone = statistics_of(source, 1)
    monkeypatch.setattr("patchloom.data.reading._WORTH", 0.0)
    monkeypatch.setattr(
        "patchloom.data.reading.in_workers", lambda *given: started.append(given[2]) or in_workers(*given)
    )
    assert statistics_of(source, 1) == alone
    assert started == workers
    assert len(alone.unreadable) == 1 and alone.sampled == 19


def test_nothing_readable_names_the_first_problem(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"no")
    (tmp_path / "b.jpg").write_bytes(b"no")
    said = refusal(channels_of, open_data(tmp_path).train)
    assert re.search(r"nothing could be read in .*: .*a\.jpg cannot be read", said)


def test_normalize():
    images = torch.randint(0, 256, (4, 2, 5, 5), dtype=torch.uint8)
    mean, std = (0.2, 0.6), (0.5, 0.1)
    tensors = [torch.tensor(values).view(2, 1, 1) for values in (mean, std)]
    expected = (images / 255 - tensors[0]) / tensors[1]
    torch.testing.assert_close(normalize(images, mean, std), expected)
    assert torch.equal(normalize(images, *tensors), normalize(images, mean, std))
    last = normalize(images.contiguous(memory_format=torch.channels_last), mean, std)
    torch.testing.assert_close(last, expected)
    assert last.is_contiguous()
    floats = images / 255
    kept = floats.clone()
    torch.testing.assert_close(normalize(floats, mean, std), expected)
    assert torch.equal(floats, kept) and normalize(floats.half(), mean, std).dtype == torch.float32


def test_a_gpu_normalizes_in_one_pass():
    images = torch.randint(0, 256, (4, 3, 8, 6), dtype=torch.uint8).to(memory_format=torch.channels_last)
    mean, std = (0.2, 0.5, 0.6), (0.5, 0.1, 0.25)
    with pseudo_cuda():
        there = normalize(images.to("cuda"), mean, std)
        assert there.device == CUDA and there.is_contiguous() and there.dtype == torch.float32
    torch.testing.assert_close(there.cpu(), normalize(images, mean, std), rtol=0, atol=2e-6)


def test_one_image_of_other_channels_is_named(tmp_path, draw):
    for i in range(120):
        draw(f"{i:03}.png")
    np.save(tmp_path / "113.npy", np.zeros((8, 10, 5), np.uint8))
    source = open_data(tmp_path).train
    said = refusal(measure, source, "auto", Sound())
    assert re.search(r"mixes images of 3 channels .*000.png.* and of 5 \(.*113.npy\)", said)
    measure(source, "auto", Sound(), sample=5)  # which does not meet it
    batches = training_batches(source, RandomCrop((8, 8)), 8, 0, 0, 15)
    assert "113.npy has 5 channels where 3 are expected" in refusal(list, batches)
    five = source.subset([113])
    assert re.search("--channels 3 does not fit .*5", refusal(measure, five, 3, Sound()))
    assert measure(five, 5, Sound())[0] == measure(five, "auto", Sound())[0] == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_of_the_source_is_one_sentence(monkeypatch, workers):
    class Gone(Shapes):
        in_memory = False

        def read(self, i):
            if i >= 9:
                raise PatchloomError("the shard is gone: mount it again")
            return super().read(i)

    monkeypatch.setattr("patchloom.data.reading._WORTH", 0.0)
    monkeypatch.setattr("patchloom.data.reading.cores", lambda: workers)
    assert refusal(statistics_of, Gone(12, size=16), 3) == "the shard is gone: mount it again"
