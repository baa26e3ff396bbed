"""One item of a list or Dataset that a program gives: its image, its label, and which axis of an array is which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from patchloom.data.arrays import from_array
from patchloom.data.noticed import notice
from patchloom.data.read import Unreadable, from_pil
from patchloom.data.sources.base import Source, digest
from patchloom.errors import PatchloomError

KINDS = (
    "give a folder, a list of paths, arrays or PIL images, an array [n h w c] or [n c h w], or a Dataset with a length"
)
Picture = np.ndarray | Tensor | Image.Image  # an image as programs have it
LOOKED_AT = 16  # items by which all are judged
TO_LABEL = "give tuples of an image and its label, or dicts with the keys image and label"


def image_of(item: Any) -> Any:
    """The image of an item: the first of a tuple, the one called ``image`` in a dict, or the item itself."""
    if isinstance(item, Mapping):
        return item["image"] if "image" in item else next(iter(item.values()), None)
    if isinstance(item, tuple | list):
        return item[0] if item else None
    return item


def label_of(item: Any) -> int | str | None:
    """The label of an item, a whole number or a word: the second of a tuple, the one called ``label`` in a dict."""
    found = None
    if isinstance(item, Mapping):
        found = item.get("label")
    elif isinstance(item, tuple | list) and len(item) > 1:
        found = item[1]
    if isinstance(found, Tensor | np.generic) and tuple(found.shape) == ():
        found = found.item()
    return found if isinstance(found, int | str) and not isinstance(found, bool) else None


def numbered(labels: Sequence[int | str | None]) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Names of the classes, and the labels as their numbers, int64 [n], -1 for none. Words are sorted.

    Raises:
        PatchloomError: some labels are numbers and some are words.
    """
    known = {label for label in labels if label is not None}
    if not known:
        return (), None
    words = sorted(label for label in known if isinstance(label, str))
    if len(words) not in (0, len(known)):
        raise PatchloomError(f"some labels are numbers and some are words, such as {words[0]}: write all in one way")
    numbers = {label: i for i, label in enumerate(words)} if words else {i: i for i in known if i >= 0}
    classes = tuple(words) if words else tuple(map(str, range(max(numbers, default=-1) + 1)))
    return classes, np.array([numbers.get(label, -1) for label in labels], dtype=np.int64)


def held(image: Any, name: str) -> Picture:
    """An image in memory, as programs have it; ``name`` is for the error.

    Raises:
        PatchloomError: it is none.
    """
    if isinstance(image, Tensor):
        return image.detach().cpu()
    if isinstance(image, Image.Image):
        try:
            image.load()  # a file that is still open cannot be shared by processes that read
        except Exception as error:  # decoders raise nearly anything
            raise Unreadable(f"{name} cannot be read as an image: {error}") from error
        return image
    if isinstance(image, np.ndarray) and image.dtype.kind not in "OUS":
        return image
    raise PatchloomError(f"{name} is of type {type(image).__name__}, and no image: {KINDS}")


def is_channels_first(images: Iterable[Picture], kind: str) -> bool:
    """Whether arrays are [c h w], and not [h w c]: there are fewer channels than pixels on either side.

    Args:
        images: in memory; PIL's and arrays [h w] say nothing about it.
        kind: what the program calls all of them, for the error.

    Raises:
        PatchloomError: some are one and some the other, some can be either, or have another number of dimensions.
    """
    shapes = dict.fromkeys(tuple(one.shape) for one in images if not isinstance(one, Image.Image))
    for shape in shapes:
        if len(shape) not in (2, 3):
            raise PatchloomError(f"an image of this {kind} is an array {said(shape)}: give [h w], [h w c] or [c h w]")
    fits = {(c, h, w): (c < min(h, w), w < min(c, h)) for c, h, w in (one for one in shapes if len(one) == 3)}
    unclear = next((shape for shape, fit in fits.items() if not any(fit)), None)
    if unclear:
        raise PatchloomError(
            f"an image of this {kind} is an array {said(unclear)}, in which channels cannot be told from rows and "
            "columns: give fewer channels than pixels on a side, or PIL images"
        )
    if len(set(fits.values())) > 1:
        one, other = (next(shape for shape, fit in fits.items() if fit[0] is first) for first in (True, False))
        raise PatchloomError(
            f"this {kind} has images {said(one)} with channels first and {said(other)} with channels last: turn all "
            "into one of them"
        )
    return any(first for first, _ in fits.values())


def said(shape: Sequence[int]) -> str:
    """A shape in messages."""
    return f"[{' '.join(map(str, shape))}]"


def decoded(image: Any, first: bool, name: str) -> Tensor:
    """An image as a tensor [c h w], uint8, or float32 in [0, 1].

    Args:
        image: as programs have it.
        first: whether channels are the first axis of an array, and not the last.
        name: for the error.

    Raises:
        Unreadable: it is none, or has values of which nobody can know the meaning.
    """
    try:
        picture = held(image, name)
        if isinstance(picture, Image.Image):
            deep = picture.mode == "F" or picture.mode.startswith("I;16")
            if picture.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9):
                notice("turned")
            upright = ImageOps.exif_transpose(picture)  # a copy: the program's own stays as it is
            return from_array(np.asarray(upright)) if deep else from_pil(upright)
        if isinstance(picture, Tensor):
            picture = (picture.float() if picture.dtype == torch.bfloat16 else picture).numpy()
        if picture.dtype == bool:
            picture = picture.astype(np.uint8) * 255
        return from_array(np.moveaxis(picture, 0, -1) if picture.ndim == 3 and first else picture)
    except Unreadable:
        raise
    except (ValueError, PatchloomError) as error:
        raise Unreadable(f"{name} cannot be read as an image: {error}") from error


def digest_of(source: Source, contents: np.ndarray) -> str:
    """A fingerprint of images and their labels, from the contents of all images or of a sample."""
    labels = [] if source.labels is None else source.labels.tolist()
    return digest([str(len(source)), contents.tobytes().hex(), *source.classes, *map(str, labels)])


def tried(source: Source, i: int) -> Tensor:
    """Image i, one of those that are looked at before all others.

    Raises:
        PatchloomError: it cannot be used; what is wrong with it is no damage, but likely to be wrong with all.
    """
    try:
        return source.read(i)
    except Unreadable as problem:
        raise PatchloomError(str(problem)) from problem


def pixels_of(source: Source, i: int) -> list[np.ndarray | bytes]:
    """The pixels [h w c] of image i, to be hashed; what it is called if it cannot be read."""
    try:
        return [np.ascontiguousarray(source.read(i).permute(1, 2, 0).numpy())]
    except Unreadable:
        return [source.describe(i).encode()]


def spread(n: int, count: int) -> list[int]:
    """Up to ``count`` of n indices, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)).tolist()
