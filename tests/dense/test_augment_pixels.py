import numpy as np
import pytest
import torch
from refusing import refusal

from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.augment import PixelAugment, resized_for_test


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
