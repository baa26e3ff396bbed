import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusing import refusal

from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.metrics import DetectedObjects, average_precision

SIZES = ((333, 500), (64, 48), (1280, 720), (97, 1001))  # h w
NAMES = ("ant", "bee", "cow")


def polygon(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Five corners [5 2], x and y in whole pixels."""
    centre = rng.uniform(0.3, 0.7, 2) * (width, height)
    turns = np.sort(rng.uniform(0, 2 * np.pi, 5)) + np.arange(5)
    far = rng.uniform(0.1, 0.28, (5, 1)) * (width, height)
    return (centre + far * np.stack([np.cos(turns), np.sin(turns)], 1)).round()


def digits(*values: float) -> str:
    return " ".join(f"{one:.6f}" for one in values)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One set of images, with outlines, as COCO, VOC, YOLO with boxes and YOLO with outlines."""
    root, rng = tmp_path_factory.mktemp("copies"), np.random.default_rng(0)
    places = {kind: root / kind for kind in ("coco", "voc", "yolo", "outlines")}
    coco = {"images": [], "annotations": [], "categories": [{"id": 5 * k + 2, "name": n} for k, n in enumerate(NAMES)]}
    for place in places.values():
        for folder in ("images", "annotations", "labels"):
            (place / folder).mkdir(parents=True)
    for i, (h, w) in enumerate(SIZES):
        for place in places.values():
            Image.new("L", (w, h)).save(place / "images" / f"{i}.png")
        coco["images"].append({"id": i, "file_name": f"{i}.png", "width": w, "height": h})
        objects, lines, outlines = "", "", ""
        for k, name in enumerate(NAMES):
            points = polygon(rng, h, w)
            (x0, y0), (x1, y1) = points.min(0), points.max(0)
            outline = {"bbox": [x0, y0, x1 - x0, y1 - y0], "segmentation": [points.ravel().tolist()]}
            coco["annotations"].append({"image_id": i, "category_id": 5 * k + 2, **outline})
            objects += (
                f"<object><name>{name}</name><bndbox><xmin>{x0 + 1:.0f}</xmin><ymin>{y0 + 1:.0f}</ymin>"
                f"<xmax>{x1:.0f}</xmax><ymax>{y1:.0f}</ymax></bndbox></object>"
            )
            box = (x0 + x1) / 2 / w, (y0 + y1) / 2 / h, (x1 - x0) / w, (y1 - y0) / h
            lines += f"{k} {digits(*box)}\n"
            outlines += f"{k} {digits(*(points / (w, h)).ravel())}\n"
        size = f"<size><width>{w}</width><height>{h}</height></size>"
        (places["voc"] / "annotations" / f"{i}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
        (places["yolo"] / "labels" / f"{i}.txt").write_text(lines)
        (places["outlines"] / "labels" / f"{i}.txt").write_text(outlines)
    (places["coco"] / "annotations" / "instances.json").write_text(json.dumps(coco))
    for kind in ("yolo", "outlines"):
        (places[kind] / "classes.txt").write_text("\n".join(NAMES))
    return places


def test_copies_in_every_format_are_the_same_set(copies):
    """Boxes within 0.01 pixels: YOLO's six digits are 0.001 of the longest side. Masks within 1 % of their pixels."""
    opened = {kind: open_boxes(place).train for kind, place in copies.items()}
    for one in opened.values():
        assert one.classes == NAMES and len(one) == len(SIZES)
    rng, found = np.random.default_rng(0), []
    for i in range(len(SIZES)):
        coco, voc, yolo, outlines = (opened[kind].truth(i) for kind in ("coco", "voc", "yolo", "outlines"))
        for other in (voc, yolo, outlines):
            torch.testing.assert_close(other.boxes, coco.boxes, atol=0.01, rtol=0)
            assert torch.equal(other.labels, coco.labels) and torch.equal(other.crowd, coco.crowd)
        assert torch.equal(voc.boxes, coco.boxes)
        assert voc.masks is None and yolo.masks is None and coco.masks.shape == outlines.masks.shape
        for a, b, box in zip(coco.masks, outlines.masks, coco.boxes.int().tolist(), strict=True):
            assert (a & b).sum() >= 0.99 * (a | b).sum() > 0
            assert a[box[1] : box[3], box[0] : box[2]].sum() == a.sum()  # the mask lies in its box
        moved = coco.boxes + torch.from_numpy(rng.uniform(-2, 2, coco.boxes.shape)).float()
        found.append(DetectedObjects(moved, coco.labels, torch.from_numpy(rng.random(len(moved))).float()))
    scores = {kind: average_precision(one, found, NAMES, "bbox") for kind, one in opened.items()}
    numbers = {tuple(one.means[name] for name in ("AP", "AP50", "AP75")) for one in scores.values()}
    assert 0.1 < scores["coco"].ap < 0.9 and len(numbers) == 1


def test_two_formats_in_one_folder_are_refused(copies, tmp_path):
    for kind in ("coco", "voc"):
        for path in copies[kind].rglob("*.*"):
            there = tmp_path / path.relative_to(copies[kind])
            there.parent.mkdir(exist_ok=True)
            there.write_bytes(path.read_bytes())
    said = refusal(open_boxes, tmp_path)
    assert all(one in said for one in ("COCO JSON (annotations/instances.json)", "Pascal VOC XML", "instead of"))
    assert len(open_boxes(tmp_path / "annotations" / "instances.json").train) == len(SIZES)
    for name in ("data", "more"):
        (tmp_path / f"{name}.yaml").write_text("names: [a]\ntrain: images")
    for path in (tmp_path / "annotations").iterdir():
        path.unlink()
    assert "holds data.yaml and more.yaml" in refusal(open_boxes, tmp_path)


def test_the_built_in_shapes():
    data = open_boxes("shapes:30", seed=3)
    assert len(data.train) == 30 and data.validation is None and len(data.test) == 2000
    truth = data.test.truth(5)
    x0, y0, x1, y1 = truth.boxes[0].int().tolist()
    assert truth.masks.shape == (1, 64, 64) and truth.masks[0, y0:y1, x0:x1].sum() == truth.masks.sum() > 0
    assert truth.labels.tolist() == [data.test.images.labels[5]] and data.test.size(5) == (64, 64)
    assert data.train.fingerprint() != open_boxes("shapes:30").train.fingerprint()
    some_of_them = data.train.subset([7, 2])
    assert torch.equal(some_of_them.truth(0).boxes, data.train.truth(7).boxes) and some_of_them.size(1) == (64, 64)


def test_data_without_boxes(tmp_path):
    assert "digits has no boxes" in refusal(open_boxes, "digits")
    assert "no annotations that are known" in refusal(open_boxes, str(tmp_path))
    assert "none does not exist" in refusal(open_boxes, str(tmp_path / "none"))
    assert "from one place" in refusal(open_boxes, [np.zeros((8, 8), np.uint8)])
