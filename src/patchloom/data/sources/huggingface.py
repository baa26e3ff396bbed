"""Hugging Face data sets: a folder of parquet or arrow files, or a name on the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from patchloom.audio.config import Sound
from patchloom.audio.decode import soundfile
from patchloom.data.decode import Unreadable
from patchloom.data.notes import note_on_splits
from patchloom.data.source import Data, digest, in_classes, stamp_of_files
from patchloom.data.sources.files import EncodedFiles, Files
from patchloom.data.sources.names import choose_splits
from patchloom.data.sources.urls import error_line
from patchloom.errors import PatchloomError, pip_install
from patchloom.system.network import network_error

if TYPE_CHECKING:
    from datasets import Dataset


_BEGIN = "hf:"
_STORED = (".parquet", ".arrow")
_SAVED = ("dataset_dict.json", "state.json")
_CONFIGURED = ("README.md", ".huggingface.yaml")  # files in which the library looks for addresses


class Hub(EncodedFiles):
    """Images of one split of a map-style data set, or, if it has none, its recordings.

    Args:
        name: name as the user typed it.
        split: name of the split.
        dataset: data set of the library datasets.
        state: digest of the files, or of the hub's version, that the data set was made from.
    """

    def __init__(self, name: str, split: str, dataset: Dataset, state: str) -> None:
        from datasets import Audio, ClassLabel, Image, Value

        self.name, self.split, self.state = name, split, state
        kind: type[Image] | type[Audio] = Image
        column = _column(dataset, Image, "image")
        if column is None and (column := _column(dataset, Audio, "audio")) is not None:
            soundfile()
            kind, self.sound = Audio, Sound()
        if column is None:
            raise PatchloomError(
                f"{name} has the columns {', '.join(dataset.column_names)}, but no single column of images, nor one "
                "called image: store images as datasets.Image(), and recordings as datasets.Audio()"
            )
        # not decoded here, so that images are decoded and checked by the same code as in other sources
        self.image_column = column
        self.images = dataset.select_columns([column]).cast_column(column, kind(decode=False))
        values = [name for name, feature in dataset.features.items() if type(feature) is Value]
        self.values = dataset.select_columns(values) if values else None
        label = _column(dataset, ClassLabel, "label")
        if label is not None:
            self.classes = tuple(dataset.features[label].names)
            numbers = dataset.data.column(label).to_pylist()
            self.labels = np.array([-1 if number is None else number for number in numbers], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def stored(self, i: int) -> Path | bytes:
        try:
            image = self.images[i][self.image_column]
        except Exception as error:  # pyarrow has its own exceptions for damaged files
            raise Unreadable(f"{self.describe(i)} cannot be read: {error_line(error)}") from error
        if image is None or image["bytes"] is None and image["path"] is None:
            raise Unreadable(f"{self.describe(i)} has no image")
        return Path(image["path"]) if image["bytes"] is None else bytes(image["bytes"])

    def describe(self, i: int) -> str:
        return f"{self.name} {self.split} #{i}"

    def column(self, name: str) -> Sequence[str] | None:
        if self.values is None or name not in self.values.column_names:
            return None
        return ["" if value is None else str(value) for value in self.values[name]]

    def column_names(self) -> Sequence[str]:
        return [] if self.values is None else self.values.column_names

    def fingerprint(self) -> str:
        """Return a digest of the state of the files (or the hub's version), the split and the labels."""
        return digest(
            [self.state, self.split, str(len(self)), str(None if self.labels is None else self.labels.tolist())]
        )

    def stamp(self) -> str | None:
        inside = all(chunk.field("bytes").null_count == chunk.null_count for chunk in self.images.data.column(0).chunks)
        files = [file["filename"] for file in self.images.cache_files]
        rate = [] if self.sound is None else [str(self.sound.rate)]
        return digest([stamp_of_files(files), *files, *rate]) if files and inside else None


def is_hub(name: str) -> bool:
    """Return whether the user typed a Hugging Face data set: ``hf:...``, but not an address ``hf://...``."""
    return name.startswith(_BEGIN) and not name.startswith(f"{_BEGIN}//")


def hub_folder(name: str) -> bool:
    """Return whether this is a local folder that holds only data, and not a name on the hub.

    If there is a data set card or a script beside the data, the library would fetch the files that the card names, or
    run the script.
    """
    folder = Path(_parts(name)[0]).expanduser()
    return folder.is_dir() and not any(
        (folder / one).exists() for one in (*_CONFIGURED, f"{folder.absolute().name}.py")
    )


def absolute_hub_name(name: str) -> str:
    """Return the name with an absolute folder, if it names a folder."""
    place, config = _parts(name)
    here = str(Path(place).absolute()) if Path(place).exists() else place
    return f"{_BEGIN}{here}{'@' if config else ''}{config or ''}"


def open_hub(name: str) -> Data:
    """Open ``hf:FOLDER`` (parquet or arrow files, or what ``save_to_disk`` wrote) or ``hf:NAME``, with ``@CONFIG``.

    Training images are those of the split ``train``, or of the only split; test images those of ``test``, ``val`` or
    ``validation``, the first that exists.
    """
    splits, state = splits_of(name)
    first, second = choose_splits(splits)
    if first is None:
        if len(splits) > 1:
            raise PatchloomError(f"{name} has the splits {', '.join(splits)}, and none is called train: rename one")
        (first,), second = splits, None

    def source(split: str) -> Hub:
        return Hub(name, split, splits[split], state(split))

    train = source(first)
    test = None if second is None else in_classes(source(second), train.classes, second)
    sizes = {split: f"{len(rows):,}" for split, rows in splits.items()}
    trained, last = ("" if split is None else f"{split} ({sizes.pop(split)})" for split in (first, second))
    notes = (note_on_splits(trained, last, sizes, "join {} with train by concatenate_datasets"),) if sizes else ()
    # other splits may have other columns; these are skipped
    alike = [split for split in sizes if splits[split].features == splits[first].features]
    return Data(train, test, notes, {split: in_classes(source(split), train.classes) for split in alike})


def splits_of(name: str) -> tuple[dict[str, Dataset], Callable[[str], str]]:
    """Return the splits of a data set, named as in `open_hub`, and a function with the state of each for `Hub`."""
    place, config = _parts(name)
    try:
        import datasets
    except ImportError as error:
        raise PatchloomError(f"{name} needs the library datasets: {pip_install('hf')}") from error
    folder = Path(place).expanduser()
    if not place:
        raise PatchloomError(f"{name} names no data set: write hf:FOLDER, or hf:NAME as on the hub")
    stored: list[str] = []
    if folder.is_dir():
        stored = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in _STORED)
        if not stored:
            raise PatchloomError(f"{name} holds no {' or '.join(_STORED)} files: give a folder of images without hf:")
    try:
        if stored and any((folder / mark).is_file() for mark in _SAVED):
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder) if stored else place, config)
    except Exception as error:  # no network, no such name, a full disc, damaged files: each with its own exception
        raise network_error(f"{name} cannot be opened: {error_line(error)}", error) from error
    splits = found if isinstance(found, dict) else {str(found.split or "train"): found}

    def state(split: str) -> str:
        versions = sorted({Path(file["filename"]).parent.name for file in splits[split].cache_files})
        return Files(name, folder, stored).fingerprint() if stored else digest([place, str(config), *versions])

    return dict(splits), state


def _parts(name: str) -> tuple[str, str | None]:
    """Return folder or name, and configuration."""
    place = name.removeprefix(_BEGIN)
    if "@" not in place or Path(place).expanduser().is_dir():
        return place, None
    place, _, config = place.rpartition("@")
    return place, config


def _column(dataset: Dataset, kind: type, name: str) -> str | None:
    """Return the only column of a type, or among several the one with this name."""
    found = [column for column, feature in dataset.features.items() if isinstance(feature, kind)]
    return found[0] if len(found) == 1 else name if name in found else None
