"""Windows cover an image, agree with the plain model, and bands change nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from patchloom.dense import answers, augment
from patchloom.dense.annotations.base import IGNORED, Objects
from patchloom.dense.answers import detect_images, segment_image, segment_images
from patchloom.dense.detector import Detections
from patchloom.dense.metrics import from_run_lengths
from patchloom.dense.pictures import (
    BoxRow,
    MapRow,
    class_colours,
    detection_picture,
    draw_boxes,
    draw_label_map,
    draw_objects,
    ink_on,
    segmentation_picture,
)
from patchloom.dense.segmenter import SegmentLogits
from patchloom.look import sheet

MEAN, STD = (0.5,), (0.25,)
SIZE = (12, 18)


class Convolved(nn.Module):
    """Logits of 5 classes at a stride of 2, from some surroundings of each pixel."""

    size = SIZE

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(1, 5, 6, stride=2, padding=2)
        self.seen: list[int] = []

    def forward(self, images: torch.Tensor) -> SegmentLogits:
        self.seen.append(len(images))
        return SegmentLogits(self.layer(images), None)


class OwnValue(nn.Module):
    """Says of each pixel its own value, of 4."""

    size = SIZE

    def forward(self, images: torch.Tensor) -> SegmentLogits:
        values = (images * STD[0] + MEAN[0]) * 255 / 60
        return SegmentLogits(-((values - torch.arange(4.0).view(1, 4, 1, 1)) ** 2), None)


def some_image(h: int, w: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (1, h, w), generator=torch.Generator().manual_seed(seed)).byte()


def plainly(model: Convolved, image: torch.Tensor) -> torch.Tensor:
    logits = model(((image / 255 - MEAN[0]) / STD[0])[None]).main
    return F.interpolate(logits, image.shape[1:], mode="bilinear")[0]


def test_one_window_or_a_resized_image_is_answered_as_by_torch():
    model, image = Convolved(), some_image(*SIZE)
    large = image.repeat_interleave(3, 1).repeat_interleave(3, 2)
    with torch.inference_mode():
        expected = plainly(model, image).argmax(0)
        logits = plainly(model, augment.resized_for_test(large, 12))[None]
        smooth = F.interpolate(logits, large.shape[1:], mode="bilinear")[0].argmax(0)
        coarse = F.interpolate(logits, large.shape[1:])[0].argmax(0)
    model.seen.clear()
    answer = segment_image(model, image, MEAN, STD, side=12)
    assert answer.dtype == torch.int16 and model.seen == [1] and torch.equal(answer.long(), expected)
    assert torch.equal(answer, segment_image(model, image / 255, MEAN, STD, side=12))
    answer = segment_image(model, large, MEAN, STD, side=12).long()
    assert torch.equal(answer, smooth) and not torch.equal(answer, coarse)


@pytest.mark.parametrize("size", [SIZE, (5, 7), (12, 50), (41, 13), (37, 53)])
def test_every_pixel_is_answered_for(size):
    image = some_image(*size) % 4 * 60
    assert torch.equal(segment_image(OwnValue(), image, MEAN, STD, side=min(size)), image[0].short() // 60)


def test_logits_of_overlapping_windows_are_averaged():
    model, image = Convolved(), some_image(12, 30)
    with torch.inference_mode():
        total, count = torch.zeros(5, 12, 30), torch.zeros(30)
        for left in (0, 12):
            total[:, :, left : left + 18] += plainly(model, image[:, :, left : left + 18])
            count[left : left + 18] += 1
    answer = segment_image(model, image, MEAN, STD, side=12)
    assert torch.equal(answer.long(), (total / count).argmax(0))


@pytest.mark.parametrize("side", [12, 23, 60])
def test_an_answer_is_of_the_images_own_size_however_few_rows_are_in_memory(side, monkeypatch):
    model, image = Convolved(), some_image(31, 44)
    whole = segment_image(model, image, MEAN, STD, side)
    assert whole.shape == (31, 44)
    monkeypatch.setattr(answers, "BAND", 1)
    assert torch.equal(segment_image(model, image, MEAN, STD, side), whole)
    assert len(model.seen) >= 2 and max(model.seen) <= 8


@pytest.mark.parametrize("side", [12, None])
def test_several_images_at_once_are_answered_as_alone(side):
    sizes = [SIZE, (12, 18), (31, 44), (5, 7), (41, 13), (12, 19), (60, 60)]
    model, images = Convolved(), [some_image(*size, seed) for seed, size in enumerate(sizes)]
    alone = [segment_image(model, image, MEAN, STD, side) for image in images]
    each = [*model.seen]
    model.seen.clear()
    together = segment_images(model, images, MEAN, STD, side)
    assert all(map(torch.equal, together, alone)) and sum(model.seen) == sum(each)
    assert len(model.seen) == -(-sum(each) // 8) < len(each) and max(model.seen) == 8


class OneBox(nn.Module):
    """Finds what is brightest in each canvas, and something unsure."""

    size, sides = (20, 20), None

    def forward(self, images: torch.Tensor, sizes: list[tuple[int, int]]) -> list[Detections]:
        found = []
        for image, (h, w) in zip(images, sizes, strict=True):
            assert not image[:, h:].any() and not image[:, :, w:].any()  # nothing is there
            y, x = (image[0, :h, :w] > image[0, :h, :w].mean() + 0.5).nonzero().unbind(1)
            box = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1]).float()
            boxes = torch.stack([torch.tensor([0.0, 0, 1, 1]), box, torch.tensor([2.0, 2, 9, 9])])
            about = torch.tensor([2, 1, 0]), torch.tensor([0.4, 0.9, 0.01])
            found.append(Detections(boxes, *about, torch.ones(3, 28, 28)))
        return found


def test_boxes_come_back_to_the_images_own_pixels():
    image = torch.zeros(1, 40, 80, dtype=torch.uint8)
    image[:, 8:24, 40:60] = 255
    ((canvas, fit),) = detect_images(OneBox(), [image], MEAN, STD)
    found = fit.detected(canvas, 0.05)
    assert found.labels.tolist() == [1, 2] and found.scores.tolist() == pytest.approx([0.9, 0.4])
    assert found.boxes[0].tolist() == pytest.approx([40, 8, 60, 24])
    masks = from_run_lengths(found.masks, (40, 80))
    assert masks[0, 10:22, 42:58].all() and masks[0].sum() <= 18 * 22
    ((canvas, fit),) = detect_images(OneBox(), [image], MEAN, STD, score=0.0)
    assert len(fit.detected(canvas, 0.0)) == 3


def test_several_images_at_once_are_detected_as_alone():
    model, images = OneBox(), []
    for i, size in enumerate([(40, 80), (20, 20), (30, 10)]):
        images.append(torch.zeros(1, *size, dtype=torch.uint8))
        images[-1][:, 4 : 8 + 2 * i, 3:9] = 200 + i
    found = [fit.detected(one, 0.05) for one, fit in detect_images(model, images, MEAN, STD)]
    alone = [fit.detected(one, 0.05) for image in images for one, fit in detect_images(model, [image], MEAN, STD)]
    assert len({tuple(one.boxes[0].tolist()) for one in found}) == 3
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one.boxes, other.boxes) and torch.equal(one.scores, other.scores)


# Pictures of label maps and boxes: positions, distinct colours and names.

CLASSES = ("sky", "road", "a class with a long name that does not fit into a picture")
COLOURS = class_colours(3)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def shown(path: Path) -> list[int]:
    return [int((pixels(path) == colour).all(-1).sum()) for colour in COLOURS]


def an_image(h: int = 60, w: int = 80, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (channels, h, w), generator=torch.Generator().manual_seed(0)).byte()


def objects(*boxes: list[float], masks: bool = False, crowd: bool = False) -> Objects:
    m = len(boxes)
    labels, drawn = torch.arange(m) % 3, torch.zeros(m, 60, 80, dtype=torch.bool)
    for mask, (x0, y0, x1, y1) in zip(drawn, boxes, strict=True):
        mask[int(y0) : int(y1), int(x0) : int(x1)] = True
    return Objects(torch.tensor(boxes).view(-1, 4), labels, drawn if masks else None, torch.full((m,), crowd))


def test_colours_differ_clearly():
    for k in (1, 11, 20, 150):
        assert len(np.unique(class_colours(k), axis=0)) == k == len(class_colours(k))
    assert np.array_equal(class_colours(150)[:20], class_colours(20))
    apart = np.linalg.norm(class_colours(20)[:, None].astype(float) - class_colours(20)[None], axis=-1)
    assert np.sort(apart.ravel())[20] > 45
    assert ink_on(np.array([255, 255, 0])) == (0, 0, 0) and ink_on(np.array([0, 0, 255])) == (255, 255, 255)


def test_a_label_map_is_drawn_in_the_colours_of_the_legend(tmp_path):
    truth = torch.zeros(60, 80, dtype=torch.int16)
    truth[:, 40:], truth[:10] = 1, IGNORED
    answer = torch.full((60, 80), 2, dtype=torch.int16)
    row = MapRow(an_image(), truth, answer, "best: a.png")
    path = segmentation_picture([row], CLASSES, tmp_path / "maps.png")
    found = [one - 14 * 14 for one in shown(path)]  # without the squares of the legend
    tile = 60 * 80 * 16  # enlarged four times
    assert found == [tile * 5 // 12, tile * 5 // 12, tile]
    without = segmentation_picture([row._replace(truth=None)], CLASSES, tmp_path / "answer.png")
    assert shown(without)[0] == 0 and shown(without)[2] == shown(path)[2]
    assert pixels(without).shape[1] < pixels(path).shape[1]


@pytest.mark.parametrize("channels", [1, 5])
def test_images_of_any_channels_and_depth_are_drawn(channels, tmp_path):
    rows = [MapRow(an_image(channels=channels) / 255 * 0.01, None, torch.zeros(60, 80, dtype=torch.int16), "dark")]
    assert pixels(segmentation_picture(rows, CLASSES, tmp_path / "maps.png"))[80:200, 40:200].max() > 200  # brightened


def test_a_picture_of_large_images_is_no_large_file(tmp_path, monkeypatch):
    row = MapRow(torch.randint(0, 256, (3, 300, 300)).byte(), None, torch.randint(0, 3, (300, 300)).short(), "noise")
    large = segmentation_picture([row], CLASSES, tmp_path / "maps.png").stat().st_size
    monkeypatch.setattr(sheet, "MOST_BYTES", large // 2)
    assert segmentation_picture([row], CLASSES, tmp_path / "maps.png").stat().st_size <= large // 2


def test_boxes_masks_and_crowds_stand_where_they_are():
    def drawn(**how):
        white = np.full((240, 320, 3), 255, np.uint8)
        return np.asarray(draw_boxes(white, objects([10, 20, 40, 50], **how), CLASSES, None, 4.0))

    ys, xs = np.nonzero((drawn() == COLOURS[0]).all(-1))
    assert (xs.min(), ys.max(), xs.max()) == (40, 199, 159) and ys.min() < 80  # its name stands above it
    assert (drawn()[90:190, 50:150] == 255).all()
    assert np.abs(drawn(masks=True)[90:190, 50:150] - (0.6 * 255 + 0.4 * COLOURS[0])).max() <= 1
    assert 30 < (drawn(crowd=True)[90:190, 40] == COLOURS[0]).all(-1).sum() < 70  # dashes


def test_detections_are_drawn_from_a_score_on(tmp_path):
    sure, unsure = torch.tensor([0.9, 0.4, 0.2]), torch.tensor([0.3, 0.4, 0.2])
    found = objects([5, 20, 30, 50], [40, 20, 70, 50], [10, 10, 20, 20], masks=True)
    row = BoxRow(an_image() // 2, objects([5, 20, 30, 50]), found, sure, "worst: b.png")
    first, *others = shown(detection_picture([row], CLASSES, tmp_path / "boxes.png"))
    assert first > 2000 and others == [0, 0]
    path = detection_picture([row._replace(scores=unsure, truth=None)], CLASSES, tmp_path / "unsure.png")
    assert shown(path)[1] > 1000 and shown(path)[::2] == [0, 0]
    nothing = row._replace(answer=objects(), scores=torch.zeros(0), truth=objects())
    assert detection_picture([nothing], CLASSES, tmp_path / "nothing.png").exists()


def test_an_image_by_itself(tmp_path):
    draw_label_map(an_image(500, 2000), torch.ones(500, 2000).short(), CLASSES, tmp_path / "map.png")
    assert pixels(tmp_path / "map.png").shape[1] == 1600 + 2 + 40
    draw_objects(an_image(), objects([5, 20, 30, 50]), torch.tensor([0.5]), CLASSES, tmp_path / "box.png")
    assert pixels(tmp_path / "box.png").shape == (240, 320, 3)
