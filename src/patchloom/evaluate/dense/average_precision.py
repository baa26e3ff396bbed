"""Average precision of detection as COCO defines it (Lin et al., ECCV 2014; cocodataset.org/#detection-eval).

The numbers are those of pycocotools, by faster-coco-eval; that the two are equal is tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from patchloom.data.annotated.base import Annotated, Objects
from patchloom.evaluate.dense.found import Found, coco_tool, run_lengths
from patchloom.evaluate.dense.matches import Matches, matches_of

Kind = Literal["bbox", "segm"]


@dataclass(frozen=True)
class AveragePrecision:
    """Average precisions in [0, 1]; nan where the images have no object that asks for it.

    Attributes:
        ap: the mean over intersections over union of 0.5, 0.55, ... 0.95, and over the classes that have an object.
        ap50, ap75: at 0.5 and at 0.75.
        small, medium, large: as ``ap``, of objects of up to 32 x 32 pixels, up to 96 x 96, and above. The area of an
            object is that of its mask, or of its box where the data has no masks.
        classes: as ``ap``, of each class.
        matches: which finds are right in which image, for `patchloom.evaluate.dense.matches`.
    """

    ap: float
    ap50: float
    ap75: float
    small: float
    medium: float
    large: float
    classes: tuple[float, ...]
    matches: Matches = field(repr=False, compare=False)

    def there(self) -> dict[str, float]:
        """The numbers over all classes by their names in the literature, without those that ask for no object."""
        named = {"AP": self.ap, "AP50": self.ap50, "AP75": self.ap75}
        named |= {"APs": self.small, "APm": self.medium, "APl": self.large}
        return {name: value for name, value in named.items() if not math.isnan(value)}

    def by_class(self, names: Sequence[str]) -> dict[str, float]:
        """``ap`` of each class by its name, without those of which there is no object."""
        return {name: value for name, value in zip(names, self.classes, strict=True) if not math.isnan(value)}


def average_precision(
    truth: Sequence[Objects] | Annotated[Objects], found: Sequence[Found], classes: Sequence[str], kind: Kind
) -> AveragePrecision:
    """Compare what was found with what is there; of an image, the 100 surest finds count.

    Args:
        truth: of each image.
        found: in each image, in the same order.
        classes: their names.
        kind: whether boxes are compared or masks.

    Raises:
        PatchloomError: faster-coco-eval is not installed.
        ValueError: truth and finds of different numbers of images, or without the masks that are to be compared.
    """
    if len(truth) != len(found):
        raise ValueError(f"{len(found)} answers to {len(truth)} images")
    images: list[dict[str, Any]] = []
    there: list[dict[str, Any]] = []
    for i in range(len(truth)):
        objects = truth.outlined(i) if isinstance(truth, Annotated) else truth[i]
        _fits(kind, objects.has_masks, found[i].masks is not None)
        some, (h, w) = _annotations(i, len(there), objects, kind)
        images.append({"id": i, "height": h, "width": w})
        there += some
    categories = [{"id": i, "name": name} for i, name in enumerate(classes)]
    asked = coco_tool("coco").COCO({"images": images, "annotations": there, "categories": categories})
    answers = asked.loadRes([one for i, answer in enumerate(found) for one in _results(i, answer, kind)])
    run = coco_tool("faster_eval_api").COCOeval_faster(asked, answers, kind)
    run.evaluate()
    run.accumulate()
    # [thresholds recalls classes areas counts]: the last count is 100
    precision, thresholds = np.asarray(run.eval["precision"])[..., -1], run.params.iouThrs
    every = precision[:, :, :, 0]
    return AveragePrecision(
        ap=_mean(every),
        ap50=_mean(every[np.isclose(thresholds, 0.5)]),
        ap75=_mean(every[np.isclose(thresholds, 0.75)]),
        small=_mean(precision[:, :, :, 1]),
        medium=_mean(precision[:, :, :, 2]),
        large=_mean(precision[:, :, :, 3]),
        classes=tuple(_mean(every[:, :, k]) for k in range(len(classes))),
        matches=matches_of(truth, found, len(classes), run.ious),
    )


def _mean(precision: np.ndarray) -> float:
    """Over what is there: -1 is COCO's sign for a class without objects."""
    there = precision[precision > -1]
    return float(there.mean()) if there.size else math.nan


def _fits(kind: Kind, asked: bool, answered: bool) -> None:
    if kind == "segm" and not (asked and answered):
        raise ValueError(f"the {'answer' if asked else 'truth'} has no masks to be compared")


def _annotations(image: int, before: int, objects: Objects, kind: Kind) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Return the objects of an image as COCO has them, and its (h, w), 0 without masks; ``before``: earlier objects."""
    found, size = [], (0, 0) if objects.masks is None else (objects.masks.shape[1], objects.masks.shape[2])
    for i, (box, label, crowd) in enumerate(
        zip(objects.boxes.tolist(), objects.labels.tolist(), objects.crowd.tolist(), strict=True)
    ):
        x0, y0, x1, y1 = box
        mask = objects.mask(i) if objects.has_masks else None  # one at a time: hundreds of large ones fill the memory
        size = size if mask is None else (mask.shape[0], mask.shape[1])
        one = {
            "id": before + i + 1,  # 0 means that nothing is matched
            "image_id": image,
            "category_id": label,
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "area": (x1 - x0) * (y1 - y0) if mask is None else int(mask.sum()),
            "iscrowd": int(crowd),
        }
        if kind == "segm" and mask is not None:
            one["segmentation"] = run_lengths(mask[None])[0]
        found.append(one)
    return found, size


def _results(image: int, found: Found, kind: Kind) -> list[dict[str, Any]]:
    """The finds of an image as COCO has them. With a box beside its mask, the area of a find would be the box's."""
    results = []
    for i, (box, label, score) in enumerate(
        zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True)
    ):
        x0, y0, x1, y1 = box
        what = {"segmentation": found.masks[i]} if kind == "segm" else {"bbox": [x0, y0, x1 - x0, y1 - y0]}
        results.append({"image_id": image, "category_id": label, "score": score} | what)
    return results
