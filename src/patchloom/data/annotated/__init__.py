"""Images with annotations of their parts: a class for each pixel, or boxes and masks of objects."""

from patchloom.data.annotated.augment_boxes import BoxAugment, BoxTarget, fit_for_test, to_original
from patchloom.data.annotated.augment_pixels import PixelAugment, resized_for_test
from patchloom.data.annotated.base import IGNORED, Annotated, AnnotatedData, Objects
from patchloom.data.annotated.boxes import open_boxes
from patchloom.data.annotated.label_maps import class_ids, class_pixels
from patchloom.data.annotated.pixels import open_label_maps

__all__ = [
    "IGNORED",
    "Annotated",
    "AnnotatedData",
    "BoxAugment",
    "BoxTarget",
    "Objects",
    "PixelAugment",
    "class_ids",
    "class_pixels",
    "fit_for_test",
    "open_boxes",
    "open_label_maps",
    "resized_for_test",
    "to_original",
]
