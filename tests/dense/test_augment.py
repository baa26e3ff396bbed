"""Random views of images with label maps or boxes: places, sizes and colours, and the plain fit for the test."""

import tracemalloc

import numpy as np
import pytest
import torch
from refusing import refusal

from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.synthetic import Shapes
from patchloom.dense.annotations.base import IGNORED, Objects
from patchloom.dense.annotations.boxes import BoxedImages, compress_outline
from patchloom.dense.augment import BoxAugment, BoxTarget, PixelAugment, fit_for_test, resized_for_test, to_original

H, W = 60, 90


def rectangles(*boxes: tuple[int, ...], channels: int = 3, masks: bool = True) -> tuple[torch.Tensor, Objects]:
    """A dark image with a bright rectangle a box, each in another channel, and its objects."""
    image = torch.full((channels, H, W), 20, dtype=torch.uint8)
    drawn = torch.zeros(len(boxes), H, W, dtype=torch.bool)
    for k, (x0, y0, x1, y1) in enumerate(boxes):
        drawn[k, y0:y1, x0:x1] = True
        image[k % channels][drawn[k]] = 220
    m = len(boxes)
    at = torch.tensor(boxes, dtype=torch.float32).reshape(m, 4)
    return image, Objects(at, torch.arange(m), drawn if masks else None, torch.zeros(m, dtype=torch.bool))


def viewed(augment: BoxAugment, image: torch.Tensor, truth: Objects, seed: int = 0) -> tuple[torch.Tensor, BoxTarget]:
    (view,), target = augment(image, truth, np.random.default_rng(seed))
    return view, target


def box_of(inside: torch.Tensor) -> torch.Tensor:
    ys, xs = inside.nonzero().T
    return torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]).float()


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_rectangle_is_found_again_where_the_box_says(seed, masks):
    image, truth = rectangles((10, 8, 34, 30), (50, 20, 80, 55), masks=masks)
    view, (objects, (h, w)) = viewed(BoxAugment((64, 80), (0.4, 2.5)), image, truth, seed)
    assert view.shape == (3, 64, 80) and view.dtype == torch.uint8
    assert not view[:, h:].any() and not view[:, :, w:].any() and view[:, :h, :w].all()
    for k, (label, box) in enumerate(zip(objects.labels.tolist(), objects.boxes, strict=True)):
        if (box[2:] - box[:2]).min() < 5:
            continue
        bright = view[label] > 120
        assert (box_of(bright) - box).abs().max() <= 1
        if masks:
            assert objects.masks.shape[1:] == (64, 80) and (box_of(objects.masks[k]) - box).abs().max() <= 1
            assert (bright == objects.masks[k]).float().mean() > 0.98


def test_it_flips_crops_enlarges_and_shrinks():
    image, truth = rectangles((10, 8, 34, 30))
    targets = [viewed(BoxAugment(90, (0.5, 2.0)), image, truth, seed)[1] for seed in range(60)]
    heights = {target.size for target in targets}
    assert len(heights) > 20 and (90, 90) in heights and min(heights)[1] < 60
    assert any(not len(target.objects.labels) for target in targets)  # cropped away
    fitting = [viewed(BoxAugment(90, (1, 1)), image, truth, seed)[1].objects.boxes[0, 0] for seed in range(20)]
    assert {round(start.item()) for start in fitting} == {10, 90 - 34}


def test_scale_one_without_flip_is_the_plain_resize_of_the_test():
    image, truth = rectangles((10, 8, 34, 30), (50, 20, 90, 60))
    view, target = viewed(BoxAugment((40, 70), (1, 1), flip=False), image, truth)
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


def test_it_is_a_function_of_its_generator_alone_and_writes_nothing_into_its_input():
    image, truth = rectangles((10, 8, 34, 30), (50, 20, 80, 55))
    given = image, truth.boxes, truth.masks
    copies, before = [one.clone() for one in given], torch.get_rng_state()
    augment = BoxAugment(48, (0.5, 2.0), color=True)
    one, first = viewed(augment, image, truth, 5)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(1)
    two, second = viewed(augment, image, truth, 5)
    assert torch.equal(one, two) and torch.equal(first.objects.boxes, second.objects.boxes)
    assert not torch.equal(one, viewed(augment, image, truth, 6)[0]) and all(map(torch.equal, given, copies))


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("deep", [False, True])
def test_channels_and_depth_stay_and_three_channels_change_their_colours(channels, deep):
    image, truth = rectangles((10, 8, 34, 30), channels=channels)
    image = image.float() / 255 if deep else image
    changed = []
    for seed in range(8):
        one, two = (viewed(BoxAugment(48, color=color), image, truth, seed)[0] for color in (False, True))
        assert one.shape == two.shape == (channels, 48, 48) and one.dtype == two.dtype == image.dtype
        assert not deep or (two.min() >= 0 and two.max() <= 1)
        changed.append(not torch.equal(one, two))
    assert any(changed) == (channels == 3)


def test_images_without_objects_and_objects_of_less_than_a_pixel():
    for masks in (True, False):
        view, (objects, _) = viewed(BoxAugment(32), *rectangles(masks=masks))
        assert view.shape == (3, 32, 32) and objects.boxes.shape == (0, 4)
        assert objects.masks.shape == (0, 32, 32) if masks else objects.masks is None
    image, truth = rectangles((10, 8, 12, 40), (40, 8, 80, 40))  # at a third, the first is less than a pixel wide
    _, (objects, _) = viewed(BoxAugment(30, (1, 1), flip=False), image, truth)
    assert objects.labels.tolist() == [1] and len(objects.masks) == 1


@pytest.mark.parametrize("masks", [True, False])
def test_an_object_as_large_as_the_image_is_kept_at_every_size(masks):
    """Scaled in float32, its box may reach out of the view by rounding."""
    image, truth = rectangles((0, 0, W, H), masks=masks)
    for side in range(20, 200):
        _, (objects, (h, w)) = viewed(BoxAugment(side, (1, 1), flip=False), image, truth)
        torch.testing.assert_close(objects.boxes, torch.tensor([[0.0, 0.0, w, h]]))


def test_the_box_of_a_cut_object_is_that_of_the_rest_of_its_mask():
    shapes, tighter = Shapes(8), 0
    for i in range(8):
        label, box, mask = shapes.annotation(i)
        about = torch.tensor([label]), torch.from_numpy(mask)[None], torch.zeros(1) > 0
        for seed in range(6):
            truth = Objects(torch.tensor([box]).float(), *about)
            _, (objects, _) = viewed(BoxAugment(32, (2, 3)), shapes.read(i), truth, seed)
            for found, left in zip(objects.boxes, objects.masks, strict=True):
                at_edge = (found <= 0) | (found >= 32)
                tighter += int(at_edge.any() and not at_edge.all())
                assert (box_of(left) - found).abs().max() <= 1
    assert tighter > 10


def test_masks_are_decoded_one_at_a_time():
    m, side = 60, 512
    corners = np.random.default_rng(0).integers(0, side - 40, (m, 2))
    outlines = [[[x, y, x + 40, y, x + 40, y + 30, x, y + 30]] for x, y in corners.tolist()]
    boxes = np.concatenate([corners, corners + [40, 30]], 1).astype(np.float32)
    packed = PackedStrings([compress_outline(outline, side, side) for outline in outlines])
    arrays = np.array([[side, side]]), np.array([m]), boxes, np.zeros(m, np.int64), np.zeros(m, bool)
    data = BoxedImages(Shapes(1), ("cell",), *arrays, packed)
    image, augment = torch.zeros(3, side, side, dtype=torch.uint8), BoxAugment(96, (0.5, 3.0))
    expected = [viewed(augment, image, data.truth(0), seed)[1] for seed in range(5)]
    tracemalloc.start()
    found = [viewed(augment, image, data.subset([0]).outlined(0), seed)[1] for seed in range(5)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < m * side * side / 2  # bytes: all masks at once would be twice that
    for one, other in zip(found, expected, strict=True):
        assert one.size == other.size and len(one.objects.labels)
        assert one.objects.boxes.equal(other.objects.boxes) and one.objects.masks.equal(other.objects.masks)


@pytest.mark.parametrize(("shape", "largest"), [((30, 40), (48, 64)), ((20, 100), (16, 80)), ((100, 20), (80, 16))])
def test_the_shorter_side_is_drawn_and_the_longer_one_bounded(shape, largest):
    """Multi-scale training and single-scale testing: shorter sides of 24 to 48 pixels, longer ones up to 80."""
    image, augment = torch.zeros(1, *shape, dtype=torch.uint8), BoxAugment(96, flip=False, sides=(24, 48, 80))
    sizes = {viewed(augment, image, rectangles(masks=False)[1], seed)[1].size for seed in range(200)}
    assert max(sizes) == largest and all(max(size) <= 80 and min(size) <= 48 for size in sizes)
    if shape == (30, 40):
        assert {min(size) for size in sizes} == set(range(24, 49))
    canvas, factor, size = fit_for_test(image, 96, (48, 80))
    assert size == largest and canvas.shape == (1, 96, 96) and factor == pytest.approx(largest[0] / shape[0])


def rng(seed=0):
    return np.random.default_rng(seed)


def numbered(height, width):
    """An image whose pixels, in two channels, say where they are, and the label map that says the same."""
    rows, columns = np.mgrid[:height, :width].astype(np.int16)
    image = torch.from_numpy(np.stack([rows, columns])).to(torch.uint8)
    return image, torch.from_numpy(rows * 100 + columns)


def blocks(height, width, side=16):
    """A label map of large squares, 0 and 1 in turn, and the grey image that shows it as 0 and 200."""
    rows, columns = np.mgrid[:height, :width] // side
    labels = torch.from_numpy(((rows + columns) % 2).astype(np.int16))
    return (labels[None] * 200).to(torch.uint8), labels


def test_scale_1_without_flip_is_a_crop_of_the_own_pixels():
    image, labels = numbered(90, 60)
    tops = set()
    for seed in range(5):
        (view,), truth = PixelAugment((32, 24), None, (1, 1), flip=False)(image, labels, rng(seed))
        assert view.dtype == torch.uint8 and view.shape == (2, 32, 24) and truth.dtype == torch.int16
        top, left = view[:, 0, 0].tolist()
        assert torch.equal(view, image[:, top : top + 32, left : left + 24])
        assert torch.equal(truth, labels[top : top + 32, left : left + 24])
        tops.add(top)
    assert len(tops) > 1
    (view,), truth = PixelAugment((90, 60), 60, (1, 1), flip=False)(image, labels, rng())
    assert torch.equal(view, image) and torch.equal(truth, labels)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("scale", [(0.5, 0.6), (1, 1), (1.5, 2.5)])
def test_labels_stay_where_their_pixels_are(scale, deep):
    image, labels = blocks(160, 200)
    image = image / 255 if deep else image
    for seed in range(6):
        (view,), truth = PixelAugment((64, 80), 160, scale)(image, labels, rng(seed))
        counts = truth != IGNORED
        agree = (view[0] * (255 if deep else 1) > 100) == (truth == 1)
        assert agree[counts].float().mean() > 0.985  # half a pixel beside one another they would be 0.95


def test_every_second_view_is_mirrored_with_its_labels():
    image, labels = numbered(20, 30)
    flipped = 0
    for seed in range(40):
        (view,), truth = PixelAugment((20, 30), None, (1, 1))(image, labels, rng(seed))
        mirrored = bool(view[1, 0, 0] == 29)
        flipped += mirrored
        assert torch.equal(view, image.flip(-1) if mirrored else image)
        assert torch.equal(truth, labels.flip(-1) if mirrored else labels)
    assert 10 <= flipped <= 30


def test_the_shorter_side_becomes_what_was_asked_and_the_aspect_stays():
    image, labels = blocks(100, 200)
    for scale, (h, w) in ((1.0, (32, 64)), (0.5, (16, 32))):
        counts = PixelAugment((64, 64), 32, (scale, scale), flip=False)(image, labels, rng())[1] != IGNORED
        assert counts[:h, :w].all() and counts.sum() == h * w


def test_padding_is_ignored_and_has_the_mean_colour():
    image, mean = torch.tensor([10, 20, 30]).byte()[:, None, None].repeat(1, 10, 12), torch.tensor([30, 20, 30])
    image[0, :5] = 50
    augment, labels = PixelAugment((16, 20), None, (1, 1), flip=False, color=False), torch.ones(10, 12).short()
    (view,), truth = augment(image, labels, rng())
    assert torch.equal(view[:, :10, :12], image) and (truth[:10, :12] == 1).all()
    for part, ignored in ((view[:, 10:], truth[10:]), (view[:, :, 12:], truth[:, 12:])):
        assert (ignored == IGNORED).all() and (part == mean[:, None, None]).all()


def test_a_crop_of_mostly_one_class_is_drawn_again():
    labels = torch.zeros(200, 200, dtype=torch.int16)
    labels[:, 150:] = 1
    labels[:20] = IGNORED
    image = torch.zeros(1, 200, 200, dtype=torch.uint8)
    augment = PixelAugment((40, 40), None, (1, 1))
    shares = []
    for seed in range(60):
        truth = augment(image, labels, rng(seed))[1]
        counts = np.bincount(truth[truth != IGNORED].numpy(), minlength=2)
        shares.append(counts.max() / counts.sum())
    assert np.mean(np.array(shares) <= 0.75) > 0.6  # of plain crops 13 % are so
    labels[:] = 0
    assert (augment(image, labels, rng())[1] == 0).all()  # nothing better to be had


def test_colours_change_where_there_are_three_channels_and_labels_do_not():
    rows = torch.arange(64, dtype=torch.uint8)
    image = torch.stack(
        [(rows * 4)[None].expand(64, 64), (255 - rows * 2)[:, None].expand(64, 64), torch.full((64, 64), 90)]
    )
    image, labels = image.to(torch.uint8), torch.zeros(64, 64, dtype=torch.int16)
    changed = PixelAugment((64, 64), None, (1, 1), flip=False)
    views = [changed(image, labels, rng(seed))[0][0] for seed in range(8)]
    assert sum(not torch.equal(view, image) for view in views) >= 6 and views[0].dtype == torch.uint8
    # a reddish picture stays reddish: channels are never swapped
    red = torch.tensor([200, 40, 40], dtype=torch.uint8)[:, None, None].expand(3, 64, 64)
    assert all(int(changed(red, labels, rng(seed))[0][0][:, 0, 0].argmax()) == 0 for seed in range(40))
    for channels in (1, 5):
        many = torch.randint(0, 256, (channels, 64, 64), dtype=torch.uint8)
        assert torch.equal(changed(many, labels, rng())[0][0], many)


def test_a_view_is_a_function_of_the_generator_alone():
    image, labels = torch.randint(0, 256, (3, 50, 70), dtype=torch.uint8), blocks(50, 70)[1]
    augment = PixelAugment((32, 32), 40)
    before = torch.random.get_rng_state()
    (a,), x = augment(image, labels, rng(5))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(1)
    (b,), y = augment(image, labels, rng(5))
    assert torch.equal(a, b) and torch.equal(x, y) and not torch.equal(a, augment(image, labels, rng(6))[0][0])


def test_test_images_keep_their_aspect():
    image = torch.randint(0, 256, (3, 40, 60), dtype=torch.uint8)
    assert resized_for_test(image, 20).shape == (3, 20, 30) and resized_for_test(image, 80).shape == (3, 80, 120)
    assert torch.equal(resized_for_test(image, 40), image)
    deep = resized_for_test(image.permute(0, 2, 1) / 255, 20)
    assert deep.shape == (3, 30, 20) and deep.dtype == torch.float32


def test_a_label_map_of_another_size_is_refused():
    labels = torch.zeros(30, 20, dtype=torch.int16)
    said = refusal(PixelAugment((8, 8), None), torch.zeros(1, 20, 30), labels, rng())
    assert "20 x 30" in said and "30 x 20" in said
