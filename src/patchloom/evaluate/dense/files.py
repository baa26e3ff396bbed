"""Answers of models as files that other programs read: label maps as PNG, objects as COCO JSON."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from patchloom.evaluate.dense.found import Found, coco_tool
from patchloom.look.class_colours import class_colours


def label_png(labels: Tensor, ids: Sequence[int]) -> bytes:
    """A label map [h w] as a PNG: 8 bits with a palette, or 16 bits where a number is above 255.

    Args:
        labels: numbers of classes, from 0.
        ids: what stands for each class in the file.
    """
    deep = max(ids) > 255
    stored = np.array(ids, np.uint16 if deep else np.uint8)[labels.numpy()]
    page = Image.fromarray(stored)
    if not deep:
        palette = np.zeros((256, 3), np.uint8)
        palette[list(ids)] = class_colours(len(ids))
        page.putpalette(palette.tobytes())
    buffer = io.BytesIO()
    page.save(buffer, "PNG")
    return buffer.getvalue()


def coco_entries(found: Found) -> Iterator[dict[str, Any]]:
    """What was found in an image as COCO JSON has it, without ids of objects and image; class k has the id k + 1."""
    for i, (box, label, score) in enumerate(
        zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True)
    ):
        x0, y0, x1, y1 = (round(side, 2) for side in box)
        w, h = round(x1 - x0, 2), round(y1 - y0, 2)
        about = {"category_id": label + 1, "bbox": [x0, y0, w, h], "score": round(score, 4), "iscrowd": 0}
        if found.masks is None:
            yield about | {"area": round(w * h, 2)}
        else:
            mask = found.masks[i]
            lengths = {"size": [int(side) for side in mask["size"]], "counts": mask["counts"].decode()}
            yield about | {"area": int(coco_tool("mask").area(mask)), "segmentation": lengths}
