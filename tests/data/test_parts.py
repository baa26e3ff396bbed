"""Random crops that a device resizes: the draws of the readers' crops, and their pixels up to rounding."""

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from patchloom.data import parts
from patchloom.data.augment import ColoredCrop, ImagePart, RandomCrop, TwoViews
from patchloom.data.loader import Batch, training_batches
from patchloom.data.parts import PackedParts
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.system.fake_cuda import CUDA, fake_cuda


def pictures(channels: int = 3, deep: bool = False) -> Source:
    """Return images of odd sizes with ``channels`` channels; with ``deep``, the first is of more than 8 bits."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (h, w, channels), dtype=np.uint8) for h, w in rng.integers(9, 90, (13, 2)).tolist()]
    return open_data([arrays[0] / np.float32(255) if deep else arrays[0], *arrays[1:]]).train


def random_parts(rng: np.random.Generator, channels: int, smooth: bool) -> list[ImagePart]:
    """Draw parts of images of any size, to views of one size."""
    size, found = tuple(rng.integers(1, 130, 2).tolist()), []
    for i in range(5):
        height, width = rng.integers(1, 300, 2).tolist()
        h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        box = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
        image = torch.from_numpy(rng.integers(0, 256, (height, width, channels), dtype=np.uint8)).permute(2, 0, 1)
        if smooth:
            image = torch.nn.functional.avg_pool2d(image.float()[None], 3, 1, 1)[0].to(torch.uint8)
        found.append(ImagePart(image, box, size, mirrored=i % 2 == 0))
    return found


@pytest.mark.parametrize(("channels", "smooth"), [(1, False), (2, True), (3, False), (3, True), (5, False)])
def test_views_are_those_of_the_readers_up_to_rounding(channels, smooth, monkeypatch):
    monkeypatch.setattr(parts, "_MOST", 10**6)  # all are resized by the device
    rng, different, values = np.random.default_rng(channels), 0, 0
    for _ in range(12):
        drawn = random_parts(rng, channels, smooth)
        apart = (PackedParts.of(drawn).on("cpu").int() - torch.stack([one.view() for one in drawn]).int()).abs()
        assert apart.max() <= 1
        different, values = different + int(apart.sum()), values + apart.numel()
    assert different / values < 1e-4


def test_a_view_without_resizing_is_the_part_and_a_reader_resizes_much_larger_ones():
    image = torch.randint(256, (3, 400, 300), dtype=torch.uint8)
    drawn = [ImagePart(image, (3, 5, 16, 24), (16, 24)), ImagePart(image, (0, 26, 16, 24), (16, 24), mirrored=True)]
    plain, mirrored = PackedParts.of(drawn).on("cpu")
    assert torch.equal(plain, image[:, 3:19, 5:29]) and torch.equal(mirrored, image[:, :16, 26:50].flip(-1))
    for box, most in (((0, 0, 400, 300), 10 * 10), ((0, 0, 20, 20), 20 * 20)):
        part = ImagePart(image, box, (10, 10), mirrored=True)
        packed = PackedParts.of([part])
        assert packed.layout[0, 1:3].prod() == most
        assert (packed.on("cpu")[0].int() - part.view().int()).abs().max() <= 1


def test_parts_of_a_batch_do_not_depend_on_how_many_are_resized_at_once(monkeypatch):
    packed = PackedParts.of(random_parts(np.random.default_rng(0), 3, smooth=False))
    whole = packed.on("cpu")
    for at_once in (1, 2 * whole[0].numel()):
        monkeypatch.setattr(parts, "_AT_ONCE", at_once)
        assert torch.equal(packed.on("cpu"), whole)
    assert torch.equal(packed.first(2).on("cpu"), whole[:2])


CROPS = {
    "one": RandomCrop((16, 24)),
    "native": RandomCrop((16, 24), native=True, flip=False),
    "coloured": ColoredCrop((16, 24)),
    **{f"two {crop}": TwoViews((16, 24), crop=crop) for crop in ("none", "shared", "own")},
    "two coloured": TwoViews((16, 24), color="own"),
}


@pytest.mark.parametrize(
    ("name", "channels", "deep"), [*((name, c, False) for name in CROPS for c in (1, 3)), ("two own", 3, True)]
)
def test_batches_have_the_boxes_mirrors_and_colours_of_the_readers(name, channels, deep):
    source, crop, floats = pictures(channels, deep), CROPS[name], 0
    expected = training_batches(source, crop, 4, 3, 0, 6, channels=channels, device="cpu")
    found = training_batches(source, crop.without_resizing(), 4, 3, 0, 6, int(name == "one"), channels, device="cpu")
    for one, two in zip(expected, found, strict=True):
        assert torch.equal(one.indices, two.indices) and len(one.views) == len(two.views) and not two.parts
        for mine, its in zip(one.views, two.views, strict=True):
            assert mine.dtype == its.dtype
            if deep and mine.is_floating_point():  # the batch with the image of more than 8 bits is the readers' own
                assert torch.equal(mine, its)
                floats += 1
                continue
            scale = 255 if mine.is_floating_point() else 1
            apart = scale * (mine.float() - its.float()).abs()
            assert apart.mean() < 1e-2
            assert apart.max() <= 1 or scale == 255  # a change of colours amplifies a difference
    assert bool(floats) == deep


def test_a_batch_in_pinned_memory_is_the_same(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
    crop = CROPS["two coloured"]
    for make in (crop, crop.without_resizing()):
        batch = next(training_batches(pictures(), make, 4, 0, 0, 1))
        pinned = pin_memory(batch)
        assert isinstance(pinned, Batch) and bool(pinned.parts) == (make is not crop)
        one, two = ((it.parts[0].pixels if it.parts else it.views[0]).data_ptr() for it in (batch, pinned))
        assert one != two and all(map(torch.equal, pinned.on("cpu").views, batch.on("cpu").views))
        assert all(map(torch.equal, pinned.first(3).on("cpu").views, (view[:3] for view in batch.on("cpu").views)))


def test_what_changes_a_resized_crop_is_refused():
    for crop in (RandomCrop((8, 8), border="padded"), RandomCrop((8, 8), randaugment=lambda view, rng: view)):
        with pytest.raises(ValueError, match="resizing"):
            crop.without_resizing()


def test_resizing_never_waits_for_a_gpu():
    packed = PackedParts.of(random_parts(np.random.default_rng(1), 3, smooth=False))
    tallest, widest = packed.layout[:, 1:3].amax(0).tolist()
    with fake_cuda():
        pixels, layout = (
            torch.empty(one.shape, dtype=one.dtype, device=CUDA) for one in (packed.pixels, packed.layout)
        )
        views = parts._views(pixels, layout, tallest, widest, 3, packed.size)
    assert views.shape == (5, 3, *packed.size) and views.dtype == torch.uint8 and views.device == CUDA


def test_products_are_not_rounded_to_tf32(monkeypatch):
    packed = PackedParts.of(random_parts(np.random.default_rng(0), 3, smooth=False))
    resize, place, found = parts._views, torch.backends.cuda.matmul, []
    monkeypatch.setattr(parts, "_views", lambda *given: found.append(place.allow_tf32) or resize(*given))
    before = place.allow_tf32
    try:
        for allowed in (True, False):
            place.allow_tf32 = allowed
            packed.on("cpu")
            assert place.allow_tf32 == allowed
    finally:
        place.allow_tf32 = before
    assert found and not any(found)
