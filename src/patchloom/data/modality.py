"""Modality of a source: the names of its items, and how they become the input pictures of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from patchloom.data.augment import CentreCrop
from patchloom.data.decode import to_channels
from patchloom.sizes import PatchSize


class Modality:
    """Image modality: items are pictures already.

    Another modality overrides what differs, so that no other code has to distinguish them; see
    `patchloom.audio.recordings`.

    Attributes:
        item, noun, an_item: names of one and of several items, and of one with its article.
        values: name of the values of a picture.
        raw: name of the control without an encoder, whose input is ``pictured``.
        error, flat: names of the reconstruction error, and of its simplest baseline.
        blank: description of an item from which nothing can be learnt.
        if_few: advice for small data sets, after a colon; "" if there is none.
        resizable: whether an enlarged or reduced part of a picture is still a valid item.
        top_down: whether the first row of a picture is displayed at the top.
        axes: a sentence on the axes and colours of a displayed picture; "" if none is needed.
        column_seconds: duration of a column of a picture; 0 if columns are not time.
        own_size: height and width of every picture, and why; None if pictures can be cut to any size.
    """

    item: str = "image"
    noun: str = "images"
    an_item: str = "an image"
    values: str = "pixels"
    raw: str = "raw pixels"
    pictured: str = "the images"
    error: str = "pixel error"
    flat: str = "mean colour"
    blank: str = "of one colour"
    if_few: str = ": start from public weights of timm (--init timm:NAME)"
    resizable: bool = True
    top_down: bool = True

    @property
    def axes(self) -> str:
        return ""

    @property
    def column_seconds(self) -> float:
        return 0.0

    @property
    def own_size(self) -> tuple[tuple[int, int], str] | None:
        return None

    def counted(self, n: int) -> str:
        """Return a number of items in words, such as "1 image" or "1,000 images"."""
        return f"{n:,} {self.item if n == 1 else self.noun}"

    def plain(self) -> dict[str, Any] | None:
        """Return the settings that turn items into pictures, as plain values; None if items are pictures."""
        return None

    def preparation(self) -> dict[str, Any]:
        """Return the preprocessing of an item before normalisation, for the card of a file of vectors."""
        return {"crop": "the largest at the centre of that shape", "resize": "bicubic, antialiased"}

    def check_patches(self, patch: PatchSize) -> None:
        """Refuse patches that do not divide pictures of `own_size`."""

    def with_channels(self, item: Tensor, channels: int) -> Tensor:
        """Convert an item that a source read to ``channels`` channels."""
        return to_channels(item, channels)

    def centre(
        self, size: tuple[int, int], native: bool = False, name: str = "", test_crop: float = 1.0
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Return a centre crop for pictures of ``size`` (h, w); ``name`` is that of the source, for errors."""
        return CentreCrop(size, native, test_crop)

    def cut(self, crop: Any, noise: Sequence[Tensor] = (), **excerpts: Any) -> Any:
        """Return the random crop for training: ``crop`` for images, or its counterpart for other items."""
        return crop

    def pictures(self, items: Tensor) -> Tensor:
        """Convert cropped items to pictures [b c h w], on their device."""
        return items

    def random(self, b: int, channels: int, size: tuple[int, int]) -> Tensor:
        """Draw items of noise, for measuring the cost of steps; ``size`` (h, w) is that of their pictures."""
        return torch.randint(256, (b, channels, *size), dtype=torch.uint8)

    def colours(
        self, pictures: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> tuple[Tensor, Sequence[float], Sequence[float]]:
        """Prepare normalised pictures [b c h w] for display; return them with their mean and standard deviation."""
        return pictures, mean, std


IMAGES = Modality()
