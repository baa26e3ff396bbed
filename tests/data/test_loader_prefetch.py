"""Transfer of batches to a device: in order, one ahead, and without waiting."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from patchloom.data.augment import TwoViews, draw_colors, plan_colors, recolor
from patchloom.data.loader import Batch, Prefetcher, training_batches
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.system.fake_cuda import CUDA, fake_cuda


def made(count, log):
    for number in range(count):
        log.append(f"read {number}")
        yield Batch((torch.full((2, 3, 4, 4), number, dtype=torch.uint8),), torch.tensor([number]), [f"lost {number}"])


def test_the_next_batch_is_sent_while_the_device_works():
    log = []
    arriving = Prefetcher(made(3, log), "cpu")
    for number in range(3):
        batch = next(arriving)
        log.append(f"step {number}")
        arriving.send()
        arriving.send()  # one is being copied already
        assert batch.indices.item() == number and batch.unreadable == [f"lost {number}"]
        assert batch.views[0].dtype == torch.uint8 and (batch.views[0] == number).all()
    with pytest.raises(StopIteration):
        next(arriving)
    assert log == ["read 0", "step 0", "read 1", "step 1", "read 2", "step 2"]


def test_errors_of_the_transfer_are_raised():
    def failing():
        yield from made(1, [])
        raise PatchloomError("no more")

    arriving = Prefetcher(failing(), "cpu")
    next(arriving)
    with pytest.raises(PatchloomError, match="no more"):
        arriving.send()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("color", ["none", "own"])
def test_batches_on_a_device_are_those_of_the_workers(color, workers):
    source, make = Shapes(20, size=16), TwoViews((16, 16), color=color)
    plain = list(training_batches(source, make, 4, 0, 0, 6))
    there = list(training_batches(source, make, 4, 0, 0, 6, workers, device="cpu"))
    assert len(plain) == len(there) == 6
    for one, two in zip(plain, there, strict=True):
        assert two.colors is None and (one.colors is None) == (color == "none")
        assert all(map(torch.equal, one.on("cpu").views, two.views)) and torch.equal(one.indices, two.indices)


def test_a_pinned_batch_is_the_same_batch(monkeypatch):
    # the type of torch's container does not matter
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
    monkeypatch.setattr(
        "torch.utils.data._utils.pin_memory.torch.accelerator.is_available", lambda: True, raising=False
    )
    batch = next(training_batches(Shapes(8, size=16), TwoViews((16, 16), color="own"), 4, 0, 0, 1))
    pinned = pin_memory(batch)
    assert isinstance(pinned, Batch) and pinned.views[0].data_ptr() != batch.views[0].data_ptr()
    assert all(map(torch.equal, pinned.on("cpu").views, batch.on("cpu").views))


def test_only_gpus_get_pinned_memory(monkeypatch):
    asked = []

    def loader(*given, pin_memory, **more):
        asked.append(pin_memory)
        return DataLoader(*given, **more)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("patchloom.data.workers.DataLoader", loader)
    monkeypatch.setattr("patchloom.data.loader.Prefetcher", lambda batches, *about: batches)
    for device in (None, "cpu", "cuda", torch.device("cuda", 1)):
        next(training_batches(Shapes(8, size=16), TwoViews((16, 16)), 4, 0, 0, 1, device=device))
    assert asked == [False, False, True, True]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_colours_and_numbers_of_a_batch_never_wait_for_a_gpu(channels):
    rng = np.random.default_rng(0)
    plan = plan_colors(torch.stack([draw_colors(rng) for _ in range(30)]), channels)
    assert plan.changes
    with fake_cuda():
        rows, factors = (torch.empty(one.shape, dtype=one.dtype, device=CUDA) for one in (plan.rows, plan.factors))
        images = torch.empty(30, channels, 8, 8, dtype=torch.uint8, device=CUDA)
        mean, std = (torch.empty(channels, 1, 1, device=CUDA) for _ in range(2))
        made = normalize(recolor(images, plan._replace(rows=rows, factors=factors)), mean, std)
        assert made.shape == images.shape and made.device == CUDA


def test_statistics_as_numbers_and_as_tensors_are_the_same():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.001)
    tensors = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    assert torch.equal(normalize(images, mean, std), normalize(images, *tensors))


def test_the_first_images_of_a_batch_have_their_own_colours():
    batch = next(training_batches(Shapes(20, size=16), TwoViews((16, 16), color="own"), 12, 0, 0, 1))
    for count in (1, 5, 12):
        some = batch.first(count)
        assert torch.equal(some.indices, batch.indices[:count]) and some.unreadable == batch.unreadable
        for one, two in zip(some.on("cpu").views, batch.on("cpu").views, strict=True):
            torch.testing.assert_close(one, two[:count])
