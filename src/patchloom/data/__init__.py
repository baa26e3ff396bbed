"""Images: sources (`sources/`), decoding (`read`), splits, crops, colours, and batches on their way to the device."""

from patchloom.data.batches import plain_batches, steps_of, steps_per_epoch, training_batches
from patchloom.data.cache import cache_images
from patchloom.data.contents import comparable, copies_among, copies_sentence
from patchloom.data.crop import CentreCrop, RandomCrop, TwoViews
from patchloom.data.formats import IMAGE_SUFFIXES
from patchloom.data.read import Unreadable, read_image, to_channels
from patchloom.data.sources.base import Data, Source
from patchloom.data.sources.builtin import BUILTIN
from patchloom.data.sources.objects import DataLike, is_given, is_object
from patchloom.data.sources.open import lasting, named, open_data, open_stored
from patchloom.data.sources.shapes import Annotation, Shapes
from patchloom.data.splits import hold_out, split_for_test
from patchloom.data.stats import Stats, channels_of, normalize, statistics_of, statistics_of_recordings
from patchloom.data.transfer import Arriving, Batch

__all__ = [
    "BUILTIN",
    "IMAGE_SUFFIXES",
    "Annotation",
    "Arriving",
    "Batch",
    "CentreCrop",
    "Data",
    "DataLike",
    "RandomCrop",
    "Shapes",
    "Source",
    "Stats",
    "TwoViews",
    "Unreadable",
    "cache_images",
    "channels_of",
    "comparable",
    "copies_among",
    "copies_sentence",
    "hold_out",
    "is_given",
    "is_object",
    "lasting",
    "named",
    "normalize",
    "open_data",
    "open_stored",
    "plain_batches",
    "read_image",
    "split_for_test",
    "statistics_of",
    "statistics_of_recordings",
    "steps_of",
    "steps_per_epoch",
    "to_channels",
    "training_batches",
]
