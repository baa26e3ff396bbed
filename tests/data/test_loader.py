from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.augment import CentreCrop, RandomCrop
from patchloom.data.decode import Unreadable
from patchloom.data.loader import plain_batches, steps_per_epoch, training_batches
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.errors import PatchloomError

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
    assert steps_per_epoch(23, 4) == 5
    epochs = [list(training_batches(shapes, CROP, 4, 7, 5 * e, 5 * e + 5)) for e in (0, 1)]
    orders = [torch.cat([batch.indices for batch in epoch]).tolist() for epoch in epochs]
    assert all(len(set(order)) == 20 for order in orders) and orders[0] != orders[1]
    assert orders[0] != torch.cat([b.indices for b in training_batches(shapes, CROP, 4, 8, 0, 5)]).tolist()
    # The same image is cropped differently in another epoch, independent of its place in the batch.
    where = [{int(i): v for b in epoch for i, v in zip(b.indices, b.views[0], strict=True)} for epoch in epochs]
    both = set(where[0]) & set(where[1])
    assert both and all(not torch.equal(where[0][i], where[1][i]) for i in both)


def test_batches_are_what_the_source_and_augmentation_say(shapes):
    batch = next(training_batches(shapes, CROP, 4, 7, 6, 7))
    for i, view in zip(batch.indices.tolist(), batch.views[0], strict=True):
        assert torch.equal(view, CROP(shapes.read(i), np.random.default_rng((7, 1, i)))[0])
    assert batch.views[0].dtype == torch.uint8 and batch.indices.dtype == torch.int64 and batch.unreadable == []


def test_the_global_random_state_is_left_alone(shapes):
    before = torch.random.get_rng_state()
    list(training_batches(shapes, CROP, 4, 7, 0, 2))
    assert torch.equal(before, torch.random.get_rng_state())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.sets(st.integers(0, 59)), st.integers(0, 9))
def test_processes_share_no_image_and_batches_repeat_none(n, batch_size, world, holes, step):
    if n < world:
        with pytest.raises(PatchloomError, match="processes"):
            training_batches(Holed(n), CROP, batch_size, 0, 0, 1, rank=0, world=world)
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


def test_processes_cover_the_global_batch():
    source = Holed(20)
    alone = next(training_batches(source, CROP, 8, 0, 0, 1, channels=1)).indices.tolist()
    ranks = [next(training_batches(source, CROP, 4, 0, 0, 1, channels=1, rank=r, world=2)) for r in (0, 1)]
    assert [i for batch in ranks for i in batch.indices.tolist()] == alone


def test_a_set_smaller_than_a_batch_comes_whole_every_step():
    for batch in training_batches(Holed(5), CROP, 64, 0, 0, 3, channels=1):
        assert sorted(batch.indices.tolist()) == [0, 1, 2, 3, 4]
    assert [steps_per_epoch(n, 4, 2) for n in (1, 7, 8, 15, 16)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_replaced_and_reported(workers):
    holes = [3, 4, 11]
    batches = list(training_batches(Holed(30, holes), CROP, 6, 0, 0, 5, workers, channels=1))
    assert all(len(set(batch.indices.tolist())) == 6 for batch in batches)
    assert not set(torch.cat([batch.indices for batch in batches]).tolist()) & set(holes)
    assert {name for batch in batches for name in batch.unreadable} == {f"holed #{i}" for i in holes}
    values = batches[0].views[0].flatten(1)
    assert (values == batches[0].indices[:, None]).all()


def test_a_broken_file_in_a_folder(tmp_path, draw):
    for i in range(6):
        path = draw(f"{i}.png")
    path.write_bytes(path.read_bytes()[:60])
    source = open_data(tmp_path).train
    seen = [batch.unreadable for batch in training_batches(source, CROP, 2, 0, 0, 3)]
    assert [str(path)] in seen


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_unreadable_images_end_the_run_with_a_sentence(workers):
    with pytest.raises(PatchloomError, match="^101 images of holed in a row cannot be read") as caught:
        list(training_batches(Holed(400, range(400)), CROP, 4, 0, 0, 1, workers, channels=1))
    assert "\n" not in str(caught.value)
    with pytest.raises(PatchloomError, match="^nothing in holed could be read"):
        list(training_batches(Holed(9, range(9)), CROP, 4, 0, 0, 1, workers, channels=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_wrong_channels_name_the_image(workers):
    with pytest.raises(PatchloomError, match="^holed #0 has 1 channel where 5") as caught:
        list(plain_batches(Holed(3), (8, 8), 2, workers, channels=5))
    assert "\n" not in str(caught.value)


def test_one_deep_image_makes_the_batch_float():
    batches = list(plain_batches(Holed(4, deep=[1]), (8, 8), 2, channels=3))
    assert batches[0].views[0].dtype == torch.float32 and batches[1].views[0].dtype == torch.uint8
    torch.testing.assert_close(batches[0].views[0].mean((1, 2, 3)), torch.tensor([0, 1 / 255]))
    assert batches[0].views[0].shape == (2, 3, 8, 8)


def test_colour_keeps_the_order_of_the_decoder_and_its_values():
    class Colours(Holed):
        def read(self, i):
            return torch.arange(3 * 99, dtype=torch.uint8).view(9, 11, 3).permute(2, 0, 1) + i

    source = Colours(4)
    (batch,) = plain_batches(source, (6, 6), 4)
    assert batch.views[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(batch.views[0][i], CentreCrop((6, 6))(source.read(i))[0]) for i in range(4))


def test_several_views_are_separate():
    def two(image, rng):
        return CentreCrop((4, 4))(image) + CentreCrop((2, 2))(image)

    batch = next(training_batches(Holed(4), two, 3, 0, 0, 1, channels=1))
    assert [view.shape for view in batch.views] == [(3, 1, 4, 4), (3, 1, 2, 2)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("holes", [[], [1], [0, 1, 2], [3, 4, 5, 6, 7], [0, 1, 2, 5, 6, 7]])
def test_plain_batches_come_in_order_without_the_unreadable(workers, holes):
    batches = list(plain_batches(Holed(8, holes), (8, 8), 3, workers, channels=1))
    indices = torch.cat([batch.indices for batch in batches]).tolist()
    assert indices == [i for i in range(8) if i not in holes]
    assert all(len(batch.indices) == len(batch.views[0]) > 0 for batch in batches)
    assert sorted(name for batch in batches for name in batch.unreadable) == [f"holed #{i}" for i in holes]


def test_plain_batches_of_nothing():
    with pytest.raises(PatchloomError, match="nothing in holed"):
        list(plain_batches(Holed(3, [0, 1, 2]), (8, 8), 2, channels=1))


def test_worker_threads():
    class Threads(Holed):
        def read(self, i):
            return torch.full((1, 9, 9), torch.get_num_threads(), dtype=torch.uint8)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches = list(plain_batches(Threads(4), (8, 8), 2, workers=1, channels=1))
    finally:
        torch.set_num_threads(before)
    assert all((batch.views[0] == 1).all() for batch in batches)


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


def test_with_truths_the_order_of_images_stays():
    plain = training_batches(Holed(11), CROP, 4, 3, 0, 6, channels=1)
    assert all(torch.equal(a.indices, b.indices) for a, b in zip(annotated_batches(Holed(11)), plain, strict=True))
    assert next(training_batches(Holed(11), CROP, 4, 3, 0, 1, channels=1)).truths == ()


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


def test_processes_take_their_own_truths():
    alone = annotated_batches(Holed(20), steps=2, batch_size=8)
    ranks = [annotated_batches(Holed(20), steps=2, batch_size=4, rank=rank, world=2) for rank in (0, 1)]
    for whole, first, second in zip(alone, *ranks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole.truths, first.truths + second.truths, strict=True))
