import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusing import refusal
from torch.utils.data import DataLoader

from patchloom.data.augment import CentreCrop, RandomCrop, TwoViews, draw_colors, plan_colors, recolor
from patchloom.data.decode import Unreadable
from patchloom.data.loader import Batch, Prefetcher, plain_batches, steps_per_epoch, training_batches
from patchloom.data.source import Source
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.system.fake_cuda import CUDA, fake_cuda

CROP = RandomCrop((8, 8))


class Holed(Source):
    """Source whose image i has the value i everywhere; those in `holes` cannot be read, those in `deep` are float."""

    name = "holed"

    def __init__(self, n, holes=(), deep=()):
        self.n, self.holes, self.deep = n, set(holes), set(deep)

    def __len__(self):
        return self.n

    def read(self, i):
        if i in self.holes:
            raise Unreadable(f"{self.describe(i)} is broken")
        image = torch.full((1, 9, 9), i % 256, dtype=torch.uint8)
        return image / 255 if i in self.deep else image

    def fingerprint(self):
        return "holed"


def same(a, b):
    return (
        torch.equal(a.indices, b.indices)
        and all(map(torch.equal, a.views, b.views))
        and a.unreadable == b.unreadable
        and len(a.views) == len(b.views)
    )


@pytest.fixture(scope="module")
def shapes():
    return Shapes(23, size=16)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_resumed_run_sees_what_an_uninterrupted_one_would(shapes, workers):
    full = list(training_batches(shapes, CROP, 4, 7, 0, 12))
    tail = list(training_batches(shapes, CROP, 4, 7, 7, 12, workers=workers))
    assert len(full) == 12 and len(tail) == 5
    assert all(map(same, tail, full[7:]))


def test_epochs_and_seeds_differ(shapes):
    assert steps_per_epoch(23, 4) == 5 and [steps_per_epoch(n, 4, 2) for n in (1, 7, 8, 15, 16)] == [1, 1, 1, 1, 2]
    epochs = [list(training_batches(shapes, CROP, 4, 7, 5 * e, 5 * e + 5)) for e in (0, 1)]
    orders = [torch.cat([batch.indices for batch in epoch]).tolist() for epoch in epochs]
    assert all(len(set(order)) == 20 for order in orders) and orders[0] != orders[1]
    assert orders[0] != torch.cat([b.indices for b in training_batches(shapes, CROP, 4, 8, 0, 5)]).tolist()
    # The same image is cropped differently in another epoch, independent of its place in the batch.
    where = [{int(i): v for b in epoch for i, v in zip(b.indices, b.views[0], strict=True)} for epoch in epochs]
    both = set(where[0]) & set(where[1])
    assert both and all(not torch.equal(where[0][i], where[1][i]) for i in both)


def test_batches_are_what_the_source_and_augmentation_say(shapes):
    before = torch.random.get_rng_state()
    batch = next(training_batches(shapes, CROP, 4, 7, 6, 7))
    assert torch.equal(before, torch.random.get_rng_state()), "torch's generator is left alone"
    for i, view in zip(batch.indices.tolist(), batch.views[0], strict=True):
        assert torch.equal(view, CROP(shapes.read(i), np.random.default_rng((7, 1, i)))[0])
    assert batch.views[0].dtype == torch.uint8 and batch.indices.dtype == torch.int64 and batch.unreadable == []


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.sets(st.integers(0, 59)), st.integers(0, 9))
@example(2, 3, 4, set(), 0)
def test_processes_share_no_image_and_batches_repeat_none(n, batch_size, world, holes, step):
    if n < world:
        assert "processes" in refusal(training_batches, Holed(n), CROP, batch_size, 0, 0, 1, rank=0, world=world)
        return
    source = Holed(n, holes)
    if len(holes & set(range(n))) > n // 2:
        return
    came = []
    for rank in range(world):
        try:
            batches = list(
                training_batches(source, CROP, batch_size, 0, step, step + 1, channels=1, rank=rank, world=world)
            )
        except PatchloomError as error:
            assert "nothing" in str(error)
            continue
        assert len(batches[0].indices) <= min(batch_size, n // world)
        came += batches[0].indices.tolist()
    assert len(came) == len(set(came)) and not set(came) & holes
    if not holes & set(range(n)):
        assert len(came) == world * min(batch_size, n // world)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_replaced_and_reported(workers):
    holes = [3, 4, 11]
    batches = list(training_batches(Holed(30, holes), CROP, 6, 0, 0, 5, workers, channels=1))
    assert all(len(set(batch.indices.tolist())) == 6 for batch in batches)
    assert not set(torch.cat([batch.indices for batch in batches]).tolist()) & set(holes)
    assert {name for batch in batches for name in batch.unreadable} == {f"holed #{i}" for i in holes}
    values = batches[0].views[0].flatten(1)
    assert (values == batches[0].indices[:, None]).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_unreadable_images_and_wrong_channels_end_a_run_with_a_sentence(workers):
    for batches, said in (
        (training_batches(Holed(400, range(400)), CROP, 4, 0, 0, 1, workers, channels=1), "101 images of holed in a"),
        (training_batches(Holed(9, range(9)), CROP, 4, 0, 0, 1, workers, channels=1), "nothing in holed could be read"),
        (plain_batches(Holed(3, [0, 1, 2]), (8, 8), 2, workers, channels=1), "nothing in holed could be read"),
        (plain_batches(Holed(3), (8, 8), 2, workers, channels=5), "holed #0 has 1 channel where 5"),
    ):
        assert refusal(list, batches).startswith(said)


def test_one_deep_image_makes_the_batch_float():
    batches = list(plain_batches(Holed(4, deep=[1]), (8, 8), 2, channels=3))
    assert batches[0].views[0].dtype == torch.float32 and batches[1].views[0].dtype == torch.uint8
    torch.testing.assert_close(batches[0].views[0].mean((1, 2, 3)), torch.tensor([0, 1 / 255]))
    assert batches[0].views[0].shape == (2, 3, 8, 8)


def test_colours_keep_the_order_of_the_decoder():
    class Colours(Holed):
        def read(self, i):
            return torch.arange(3 * 99, dtype=torch.uint8).view(9, 11, 3).permute(2, 0, 1) + i

    (batch,) = plain_batches(Colours(4), (6, 6), 4)
    assert batch.views[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(batch.views[0][i], CentreCrop((6, 6))(Colours(4).read(i))[0]) for i in range(4))


@pytest.mark.parametrize(
    ("holes", "workers"),
    [([], 0), ([1], 0), ([0, 1, 2], 0), ([3, 4, 5, 6, 7], 0), ([0, 1, 2, 5, 6, 7], 0), ([0, 1, 2, 5, 6, 7], 2)],
)
def test_plain_batches_come_in_order_without_the_unreadable(workers, holes):
    batches = list(plain_batches(Holed(8, holes), (8, 8), 3, workers, channels=1))
    indices = torch.cat([batch.indices for batch in batches]).tolist()
    assert indices == [i for i in range(8) if i not in holes]
    assert all(len(batch.indices) == len(batch.views[0]) > 0 for batch in batches)
    assert sorted(name for batch in batches for name in batch.unreadable) == [f"holed #{i}" for i in holes]


def annotated_batches(source, first_step=0, steps=6, batch_size=4, truth=lambda i: torch.full((9, 9), i), **more):
    """Batches whose views and truths are cropped at the same random place; a truth contains its image's number."""

    def cut(image, truth, rng):
        top, left = rng.integers(4, size=2)
        return (image[:, top : top + 6, left : left + 6],), truth[top : top + 6, left : left + 6] + 100 * int(top)

    return list(training_batches(source, cut, batch_size, 3, first_step, steps, channels=1, truth=truth, **more))


@pytest.mark.parametrize("workers", [0, 2])
def test_truths_follow_the_images_and_a_resumed_run_sees_the_same(workers):
    full, tail = annotated_batches(Holed(11)), annotated_batches(Holed(11), first_step=3, workers=workers)
    for batch in full:
        assert len(batch.truths) == len(batch.indices) == 4
        assert [int(truth[0, 0]) % 100 for truth in batch.truths] == batch.indices.tolist()
        numbers = torch.stack([truth % 100 for truth in batch.truths])
        assert torch.equal(batch.views[0][:, 0], numbers.to(torch.uint8))
    assert len({int(truth[0, 0]) // 100 for batch in full for truth in batch.truths}) > 1
    assert all(map(same, tail, full[3:]))
    for one, other in zip(tail, full[3:], strict=True):
        assert all(map(torch.equal, one.truths, other.truths))
    assert [int(truth[0, 0]) % 100 for truth in full[0].first(2).truths] == full[0].indices[:2].tolist()
    assert len(full[0].on("cpu").truths) == 4


def test_the_truth_of_an_unreadable_image_is_replaced_with_it():
    def truth(i):
        assert i not in (3, 4)  # the truth of a missing image is not requested
        if i == 7:
            raise Unreadable("7.png is broken")
        return torch.full((9, 9), i)

    batches = annotated_batches(Holed(12, [3, 4]), truth=truth)
    seen = [[int(truth[0, 0]) % 100 for truth in batch.truths] for batch in batches]
    assert seen == [batch.indices.tolist() for batch in batches] and all(len(set(one)) == 4 for one in seen)
    assert {name for batch in batches for name in batch.unreadable} == {f"holed #{i}" for i in (3, 4, 7)}


def test_processes_take_their_parts_of_the_global_batch_with_their_truths():
    alone = annotated_batches(Holed(20), steps=2, batch_size=8)
    plain = training_batches(Holed(20), CROP, 8, 3, 0, 2, channels=1)
    ranks = [annotated_batches(Holed(20), steps=2, batch_size=4, rank=rank, world=2) for rank in (0, 1)]
    for whole, usual, first, second in zip(alone, plain, *ranks, strict=True):
        assert torch.equal(whole.indices, torch.cat([first.indices, second.indices]))
        assert all(torch.equal(a, b) for a, b in zip(whole.truths, first.truths + second.truths, strict=True))
        assert torch.equal(whole.indices, usual.indices) and usual.truths == ()


@pytest.mark.parametrize(("batches", "workers"), [(1, 0), (2, 1), (5, 4), (9, 7)])
def test_no_more_workers_than_can_read_ahead(batches, workers, monkeypatch):
    started = []
    monkeypatch.setattr(
        "patchloom.data.loader.in_workers",
        lambda made, numbers, workers, *_, **__: started.append(workers) or map(made.__getitem__, numbers),
    )
    source = Holed(2 * batches)
    assert len(list(plain_batches(source, (8, 8), 2, 7, channels=1))) == batches
    assert len(list(plain_batches(Holed(40), (8, 8), 2, 7, channels=1, first=3, stop=3 + batches))) == batches
    training = training_batches(source, CentreCrop((8, 8)), 2, 0, 10, 10 + batches, 7, channels=1)
    assert len(list(training)) == batches and started == [workers] * 3


# Transfer of batches to a device: in order, one ahead, and without waiting.


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
