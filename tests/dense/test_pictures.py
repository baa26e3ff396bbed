"""Pictures of label maps and boxes: positions, distinct colours and names."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.dense.annotations.base import IGNORED, Objects
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
from patchloom.look import sheet

CLASSES = ("sky", "road", "a class with a long name that does not fit into a picture")
COLOURS = class_colours(3)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def shown(path: Path) -> list[int]:
    """How many pixels of a picture are of the colour of each class."""
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
