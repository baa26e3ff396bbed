"""Images with label maps in a Hugging Face data set: two columns of images, one of which holds label maps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from patchloom.data.annotated.label_files import read_ids
from patchloom.data.annotated.layout import TRAIN, part_named
from patchloom.data.annotated.stored_maps import StoredMaps, size_in_head
from patchloom.data.noticed import some_of
from patchloom.data.sources.base import digest
from patchloom.data.sources.hub import Hub, splits_of, stored_in
from patchloom.data.sources.label_maps import names_maps
from patchloom.errors import PatchloomError
from patchloom.hints import listing

if TYPE_CHECKING:  # slow to import, and an extra
    from datasets import Dataset


class HubMaps(StoredMaps):
    """Images and label maps in two columns of a data set. Rows without a label map are left out.

    Args:
        whole: the images of all rows.
        dataset: the rows.
        column: of the label maps.
        colours: for `read_ids`.

    Raises:
        PatchloomError: no row has a label map.
    """

    def __init__(self, whole: Hub, dataset: Dataset, column: str, colours: np.ndarray | None = None) -> None:
        from datasets import Image

        self.whole, self.column, self.colours = whole, column, colours
        self.labels = dataset.select_columns([column]).cast_column(column, Image(decode=False))
        there = [one is not None for one in self.labels[column]] if _has_nulls(self.labels) else [True] * len(whole)
        self.rows = np.flatnonzero(there)
        self.lacking = np.flatnonzero(~np.array(there, dtype=bool))
        if not len(self.rows):
            raise PatchloomError(f"{whole.name} {whole.split} has no label map in the column {column}: fill it")
        self.images = whole.subset(self.rows) if len(self.lacking) else whole

    def ids(self, i: int) -> np.ndarray:
        row, name = int(self.rows[i]), self.describe(i)
        stored = stored_in(self.labels, self.column, row, name)
        return read_ids(stored if isinstance(stored, bytes) else Path(stored), name, self.colours)

    def describe(self, i: int) -> str:
        return f"{self.column} of {self.images.describe(i)}"

    def fingerprint(self) -> str:
        return digest([self.whole.fingerprint(), self.column])

    def stamp(self) -> str | None:
        stamp = self.images.stamp()
        inside = self.labels.data.column(0).chunks
        if stamp is None or any(chunk.field("bytes").null_count > chunk.null_count for chunk in inside):
            return None
        return digest([stamp, self.column, "" if self.colours is None else str(self.colours.tolist())])

    def image_size(self, i: int) -> tuple[int, int]:
        stored = self.whole.stored(int(self.rows[i]))
        return size_in_head(stored if isinstance(stored, bytes) else Path(stored), self.images.describe(i))


def hub_maps(name: str, colours: np.ndarray | None = None) -> tuple[dict[str, HubMaps], dict[str, str], list[str]]:
    """Open ``hf:...`` with a column of images and one of label maps, called label, annotation, mask or the like.

    Args:
        name: what the user typed.
        colours: for `read_ids`.

    Returns:
        What `patchloom.data.annotated.pixels.assembled` takes: the parts, what the data calls each, and notes.

    Raises:
        PatchloomError: as `splits_of`, or the columns are not clear.
    """
    splits, state_of = splits_of(name)
    maps: dict[str, HubMaps] = {}
    words: dict[str, str] = {}
    notes = []
    for word, dataset in splits.items():
        part = part_named(word) or (TRAIN if len(splits) == 1 else None)
        if part is None or part in maps:
            notes.append(f"The split {word} is left out: only train, validation and test are taken")
            continue
        words[part] = word
        image, label = _columns(name, dataset)
        images = Hub(name, word, dataset.select_columns([image]), state_of(word))
        maps[part] = HubMaps(images, dataset, label, colours)
        if len(lacking := maps[part].lacking):
            examples = some_of((maps[part].whole.describe(int(i)) for i in lacking), len(lacking))
            notes.append(
                f"{len(lacking):,} of {len(dataset):,} rows of {word} have no label map: left out ({examples})"
            )
    if TRAIN not in maps:
        raise PatchloomError(f"{name} has the splits {', '.join(splits)}, and none is called train: rename one")
    return maps, words, notes


def _columns(name: str, dataset: Dataset) -> tuple[str, str]:
    """The columns of images and of label maps."""
    from datasets import Image

    found = [column for column, feature in dataset.features.items() if isinstance(feature, Image)]
    labels = [column for column in found if names_maps(column)]
    images = [column for column in found if column not in labels]
    if len(images) > 1 and "image" in images:
        images = ["image"]
    if len(images) != 1 or len(labels) != 1:
        raise PatchloomError(
            f"{name} has {'the columns ' + listing(found, 'and') if found else 'no columns'} of datasets.Image(): call "
            "that of the images image, and that of the label maps label"
        )
    return images[0], labels[0]


def _has_nulls(labels: Dataset) -> bool:
    return any(chunk.null_count for chunk in labels.data.column(0).chunks)
