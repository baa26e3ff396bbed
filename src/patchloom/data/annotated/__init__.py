"""Images with annotations of their parts: a class for each pixel, or boxes and masks of objects."""

from patchloom.data.annotated.augment_pixels import PixelAugment, resized_for_test
from patchloom.data.annotated.base import IGNORED, Annotated, AnnotatedData, Objects

__all__ = ["IGNORED", "Annotated", "AnnotatedData", "Objects", "PixelAugment", "resized_for_test"]
