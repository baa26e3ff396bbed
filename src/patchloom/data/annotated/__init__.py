"""Images with annotations of their parts: a class for each pixel, or boxes and masks of objects."""

from patchloom.data.annotated.augment_pixels import PixelAugment, resized_for_test
from patchloom.data.annotated.base import IGNORED, Annotated, AnnotatedData, Objects
from patchloom.data.annotated.label_maps import class_ids, class_pixels
from patchloom.data.annotated.pixels import open_label_maps

__all__ = [
    "IGNORED",
    "Annotated",
    "AnnotatedData",
    "Objects",
    "PixelAugment",
    "class_ids",
    "class_pixels",
    "open_label_maps",
    "resized_for_test",
]
