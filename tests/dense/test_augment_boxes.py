from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.synthetic import Shapes
from patchloom.dense.annotations.base import Objects
from patchloom.dense.annotations.boxes import BoxedImages, compress_outline
from patchloom.dense.augment import BoxAugment, fit_for_test, to_original

H, W = 60, 90


def rectangles(
    *boxes: tuple[int, int, int, int], channels: int = 3, masks: bool = True
) -> tuple[torch.Tensor, Objects]:
    """A dark image with a bright rectangle a box, each in another channel, and its objects."""
    image = torch.full((channels, H, W), 20, dtype=torch.uint8)
    drawn = torch.zeros(len(boxes), H, W, dtype=torch.bool)
    for k, (x0, y0, x1, y1) in enumerate(boxes):
        drawn[k, y0:y1, x0:x1] = True
        image[k % channels][drawn[k]] = 220
    m = len(boxes)
    at = torch.tensor(boxes, dtype=torch.float32).reshape(m, 4)
    return image, Objects(at, torch.arange(m), drawn if masks else None, torch.zeros(m, dtype=torch.bool))


def found(channel: torch.Tensor) -> torch.Tensor:
    """The box of the bright pixels."""
    ys, xs = (channel > 120).nonzero().T
    return torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]).float()


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_a_drawn_rectangle_is_found_again_where_the_box_says(seed, masks):
    image, truth = rectangles((10, 8, 34, 30), (50, 20, 80, 55), masks=masks)
    (view,), (objects, size) = BoxAugment((64, 80), (0.4, 2.5))(image, truth, np.random.default_rng(seed))
    assert view.shape == (3, 64, 80) and view.dtype == torch.uint8
    assert not view[:, size[0] :].any() and not view[:, :, size[1] :].any() and view[:, : size[0], : size[1]].all()
    for k, label in enumerate(objects.labels.tolist()):
        box = objects.boxes[k]
        if (box[2:] - box[:2]).min() < 5:
            continue
        assert (found(view[label]) - box).abs().max() <= 1
        if masks:
            ys, xs = objects.masks[k].nonzero().T
            inside = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
            assert objects.masks.shape[1:] == (64, 80) and (inside - box).abs().max() <= 1.0
            assert ((view[label] > 120) == objects.masks[k]).float().mean() > 0.98


def test_it_flips_crops_enlarges_and_shrinks():
    image, truth = rectangles((10, 8, 34, 30))
    augment = BoxAugment(90, (0.5, 2.0))
    targets = [augment(image, truth, np.random.default_rng(seed))[1] for seed in range(60)]
    heights = {target.size for target in targets}
    assert len(heights) > 20 and (90, 90) in heights and min(heights)[1] < 60
    fitting = BoxAugment(90, (1, 1))
    starts = {round(fitting(image, truth, np.random.default_rng(s))[1].objects.boxes[0, 0].item()) for s in range(20)}
    assert starts == {10, 90 - 34}
    assert any(not len(target.objects.labels) for target in targets)  # cropped away


def test_scale_one_without_flip_is_the_plain_resize_of_the_test():
    image, truth = rectangles((10, 8, 34, 30), (50, 20, 90, 60))
    (view,), target = BoxAugment((40, 70), (1, 1), flip=False)(image, truth, np.random.default_rng(0))
    canvas, factor, size = fit_for_test(image, (40, 70))
    assert torch.equal(view, canvas) and target.size == size == (40, 60) and factor == pytest.approx(2 / 3)
    torch.testing.assert_close(target.objects.boxes, truth.boxes * 2 / 3)
    torch.testing.assert_close(to_original(target.objects.boxes, factor, (H, W)), truth.boxes)


@pytest.mark.parametrize("shape", [(333, 500), (500, 333), (7, 100), (1000, 3), (1, 1)])
def test_boxes_come_back_to_the_last_pixel_of_the_image(shape):
    canvas, factor, (h, w) = fit_for_test(torch.zeros(1, *shape, dtype=torch.uint8), 128)
    assert canvas.shape == (1, 128, 128) and max(h, w) == 128 and min(h, w) >= 1
    whole = torch.tensor([[0.0, 0.0, w, h], [-3.0, -3.0, w + 9.0, h + 9.0]])
    torch.testing.assert_close(to_original(whole, factor, shape), torch.tensor([[0.0, 0.0, shape[1], shape[0]]] * 2))


def test_it_is_a_function_of_its_generator_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a GPU's stream begins anew"))
    image, truth = rectangles((10, 8, 34, 30), (50, 20, 80, 55))
    augment = BoxAugment(48, (0.5, 2.0), color=True)
    (one,), first = augment(image, truth, np.random.default_rng(5))
    torch.rand(1)
    before = torch.get_rng_state()
    (two,), second = augment(image, truth, np.random.default_rng(5))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, two) and torch.equal(first.objects.boxes, second.objects.boxes)
    (three,), _ = augment(image, truth, np.random.default_rng(6))
    assert not torch.equal(one, three)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("deep", [False, True])
def test_channels_and_depth_stay(channels, deep):
    image, truth = rectangles((10, 8, 34, 30), channels=channels)
    image = image.float() / 255 if deep else image
    changed = []
    for seed in range(8):
        plain, colored = BoxAugment(48, color=False), BoxAugment(48, color=True)
        (one,), _ = plain(image, truth, np.random.default_rng(seed))
        (two,), _ = colored(image, truth, np.random.default_rng(seed))
        assert one.shape == two.shape == (channels, 48, 48) and one.dtype == two.dtype == image.dtype
        assert not deep or (two.min() >= 0 and two.max() <= 1)
        changed.append(not torch.equal(one, two))
    assert any(changed) == (channels == 3)


def test_images_without_objects_and_objects_of_less_than_a_pixel():
    image, nothing = rectangles()
    for masks in (nothing.masks, None):
        truth = Objects(nothing.boxes, nothing.labels, masks, nothing.crowd)
        (view,), target = BoxAugment(32)(image, truth, np.random.default_rng(0))
        assert view.shape == (3, 32, 32) and target.objects.boxes.shape == (0, 4)
        assert target.objects.masks is None if masks is None else target.objects.masks.shape == (0, 32, 32)
    image, truth = rectangles((10, 8, 12, 40), (40, 8, 80, 40))  # at a third, the first is less than a pixel wide
    _, target = BoxAugment(30, (1, 1), flip=False)(image, truth, np.random.default_rng(0))
    assert target.objects.labels.tolist() == [1] and len(target.objects.masks) == 1


@pytest.mark.parametrize("masks", [True, False])
def test_an_object_as_large_as_the_image_is_kept_at_every_size(masks):
    """Scaled in float32, its box may reach out of the view by rounding."""
    image, truth = rectangles((0, 0, W, H), masks=masks)
    for side in range(20, 200):
        _, (objects, (h, w)) = BoxAugment(side, (1, 1), flip=False)(image, truth, np.random.default_rng(0))
        torch.testing.assert_close(objects.boxes, torch.tensor([[0.0, 0.0, w, h]]))


def test_the_box_of_a_cut_object_is_that_of_what_is_left_of_its_mask():
    shapes = Shapes(8)
    tighter = 0
    for i in range(8):
        label, box, mask = shapes.annotation(i)
        truth = Objects(
            torch.tensor([box]).float(), torch.tensor([label]), torch.from_numpy(mask)[None], torch.zeros(1) > 0
        )
        for seed in range(6):
            _, (objects, _) = BoxAugment(32, (2, 3))(shapes.read(i), truth, np.random.default_rng(seed))
            for found_box, left in zip(objects.boxes, objects.masks, strict=True):
                ys, xs = left.nonzero().T
                tight = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
                at_edge = (found_box <= 0) | (found_box >= 32)
                tighter += int(at_edge.any() and not at_edge.all())
                assert (tight - found_box).abs().max() <= 1
    assert tighter > 10


def test_what_is_given_is_not_written_into():
    image, truth = rectangles((10, 8, 34, 30))
    copies = image.clone(), truth.boxes.clone(), truth.masks.clone()
    for seed in range(5):
        BoxAugment(48, color=True)(image, truth, np.random.default_rng(seed))
    assert torch.equal(image, copies[0]) and torch.equal(truth.boxes, copies[1])
    assert torch.equal(truth.masks, copies[2])


def test_masks_are_decoded_one_at_a_time():
    m, side = 60, 512
    corners = np.random.default_rng(0).integers(0, side - 40, (m, 2))
    outlines = [[[x, y, x + 40, y, x + 40, y + 30, x, y + 30]] for x, y in corners.tolist()]
    boxes = np.array([[x, y, x + 40, y + 30] for x, y in corners], np.float32)
    numbers, crowd = np.zeros(m, np.int64), np.zeros(m, bool)
    packed = PackedStrings([compress_outline(outline, side, side) for outline in outlines])
    data = BoxedImages(Shapes(1), ("cell",), np.array([[side, side]]), np.array([m]), boxes, numbers, crowd, packed)
    image, augment = torch.zeros(3, side, side, dtype=torch.uint8), BoxAugment(96, (0.5, 3.0))
    expected = [augment(image, data.truth(0), np.random.default_rng(seed)) for seed in range(5)]
    tracemalloc.start()
    found = [augment(image, data.subset([0]).outlined(0), np.random.default_rng(seed)) for seed in range(5)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < m * side * side / 2  # bytes: all masks at once would be twice that
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one.size == other.size and len(one.objects.labels)
        assert one.objects.boxes.equal(other.objects.boxes) and one.objects.masks.equal(other.objects.masks)


@pytest.mark.parametrize(("shape", "largest"), [((30, 40), (48, 64)), ((20, 100), (16, 80)), ((100, 20), (80, 16))])
def test_the_shorter_side_is_drawn_and_the_longer_one_bounded(shape: tuple[int, int], largest: tuple[int, int]) -> None:
    """Multi-scale training and single-scale testing: shorter sides of 24 to 48 pixels, longer ones up to 80."""
    image = torch.zeros(1, *shape, dtype=torch.uint8)
    truth = Objects(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), None, torch.zeros(0, dtype=torch.bool))
    augment = BoxAugment(96, flip=False, sides=(24, 48, 80))
    sizes = {augment(image, truth, np.random.default_rng(seed))[1].size for seed in range(200)}
    assert max(sizes) == largest and all(max(size) <= 80 and min(size) <= 48 for size in sizes)
    if shape == (30, 40):
        assert {min(size) for size in sizes} == set(range(24, 49))
    canvas, factor, size = fit_for_test(image, 96, (48, 80))
    assert size == largest and canvas.shape == (1, 96, 96) and factor == pytest.approx(largest[0] / shape[0])
