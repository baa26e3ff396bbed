"""Images with annotations of their parts: a class for each pixel, or boxes and masks of objects."""

from patchloom.data.annotated.augment_boxes import BoxAugment, BoxTarget, fit_for_test, to_original
from patchloom.data.annotated.augment_pixels import PixelAugment, resized_for_test
from patchloom.data.annotated.base import IGNORED, Annotated, AnnotatedData, Objects
from patchloom.data.annotated.boxes import open_boxes
from patchloom.data.annotated.coco_write import as_coco, coco_annotations, coco_categories

__all__ = [
    "IGNORED",
    "Annotated",
    "AnnotatedData",
    "BoxAugment",
    "BoxTarget",
    "Objects",
    "PixelAugment",
    "as_coco",
    "coco_annotations",
    "coco_categories",
    "fit_for_test",
    "open_boxes",
    "resized_for_test",
    "to_original",
]
