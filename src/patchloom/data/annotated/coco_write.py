"""Objects as COCO JSON, for evaluation, for other programs, and for what a detector has found."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from patchloom.data.annotated.base import Annotated, Objects
from patchloom.data.annotated.outlines import run_lengths
from patchloom.waiting import Waiting


def as_coco(annotated: Annotated[Objects]) -> dict[str, Any]:
    """All that is known of annotated images, as one COCO JSON file has it.

    Image i has the id i + 1, class k the id k + 1, and annotations are numbered from 1: to COCO's tools, 0 is none.

    Args:
        annotated: masks become RLE with compressed ``counts``; where there are none, annotations have no segmentation.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    with Waiting("gathering the objects of annotated images", len(annotated)) as waiting:
        for i in range(len(annotated)):
            height, width = annotated.size(i)
            name = annotated.images.place(i) or annotated.images.describe(i)
            images.append({"id": i + 1, "file_name": name, "width": width, "height": height})
            for one in coco_annotations(i, annotated.truth(i)):
                annotations.append({"id": len(annotations) + 1, **one})
            waiting.advance()
    return {"images": images, "annotations": annotations, "categories": coco_categories(annotated.classes)}


def coco_categories(classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The classes as COCO JSON lists them; class k has the id k + 1."""
    return [{"id": k + 1, "name": name} for k, name in enumerate(classes)]


def coco_annotations(i: int, objects: Objects, scores: Tensor | None = None) -> list[dict[str, Any]]:
    """The objects of one image as entries of COCO JSON, without ids of their own.

    Args:
        i: number of the image, from 0; its id is i + 1.
        objects: in pixels of the image.
        scores: float [m], if they are what a detector has found; COCO's results have ``score`` and no ``iscrowd``.
    """
    entries: list[dict[str, Any]] = []
    for k, (x0, y0, x1, y1) in enumerate(objects.boxes.tolist()):
        entry = {
            "image_id": i + 1,
            "category_id": int(objects.labels[k]) + 1,
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "area": (x1 - x0) * (y1 - y0),
        }
        if objects.masks is not None:
            entry["segmentation"] = run_lengths(objects.masks[k].numpy())
            entry["area"] = float(objects.masks[k].sum())
        entries.append(entry | ({"iscrowd": int(objects.crowd[k])} if scores is None else {"score": float(scores[k])}))
    return entries
