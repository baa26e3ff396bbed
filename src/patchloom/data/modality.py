"""What a source holds, as far as it matters downstream: its words, and how its items become an encoder's pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from patchloom.data.augment import CentreCrop
from patchloom.data.decode import to_channels
from patchloom.sizes import PatchSize


class Modality:
    """Images: what is read is a picture already.

    Another modality overrides what differs, so that no other code asks for it; `patchloom.audio.recordings` is one.

    Attributes:
        item, noun, an_item: what one and several of its items are called, and one with its article.
        values: what a picture is made of.
        raw: the control without an encoder, which is given ``pictured``.
        error, flat: names of the measure of a reconstruction, and of its simplest baseline.
        blank: how an item is of which nothing can be learnt.
        if_few: what to do where there are few, after a colon; "" where nothing is known.
        resizable: whether a part of a picture, enlarged or reduced, is still such an item.
        top_down: whether the first row of a picture is drawn at its top.
        axes: a sentence on the axes and colours of a picture that is drawn; "" where nobody needs one.
        column_seconds: what a column of a picture lasts; 0 where columns are no time.
        own_size: height and width that every picture has, and why; None where pictures are cut to any size.
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
    if_few: str = (
        ": begin with weights that timm publishes (--init timm:NAME), and compare with them (patchloom evaluate knn "
        "timm:NAME)"
    )
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

    def words(self, template: str) -> str:
        """A text with {item}, {an_item}, {noun} and {values} filled in; {Noun} and such are capitalised."""
        words = {"item": self.item, "an_item": self.an_item, "noun": self.noun, "values": self.values}
        return template.format(**words, **{name.capitalize(): word.capitalize() for name, word in words.items()})

    def counted(self, n: int) -> str:
        """A number of items, as "1 image" or "1,000 images"."""
        return f"{n:,} {self.item if n == 1 else self.noun}"

    def plain(self) -> dict[str, Any] | None:
        """How items become pictures, as plain values; None where they are pictures."""
        return None

    def preparation(self) -> dict[str, Any]:
        """What is done to an item before the pixels are normalised, for the card of a file of vectors."""
        return {"crop": "the largest at the centre of that shape", "resize": "bicubic, antialiased"}

    def check_patches(self, patch: PatchSize) -> None:
        """Refuse patches that do not divide pictures of `own_size`."""

    def with_channels(self, item: Tensor, channels: int) -> Tensor:
        """What a source read, with as many channels."""
        return to_channels(item, channels)

    def centre(self, size: tuple[int, int], native: bool = False, name: str = "") -> Callable[..., tuple[Tensor, ...]]:
        """What cuts the middle out of an item of ``name``, whose picture has to be of ``size`` (h, w)."""
        return CentreCrop(size, native)

    def cut(self, crop: Any, noise: Sequence[Tensor] = (), **excerpts: Any) -> Any:
        """What cuts an item at random for training: ``crop``, which cuts images, or what stands for it."""
        return crop

    def pictures(self, items: Tensor) -> Tensor:
        """The pictures [b c h w] of items that were cut, on their device."""
        return items

    def random(self, b: int, channels: int, size: tuple[int, int]) -> Tensor:
        """Items of noise, for steps of which only the cost matters; ``size`` (h, w) is that of their pictures."""
        return torch.randint(256, (b, channels, *size), dtype=torch.uint8)

    def colours(
        self, pictures: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> tuple[Tensor, Sequence[float], Sequence[float]]:
        """Normalised pictures [b c h w] as they are drawn, and the mean and deviation that they have then."""
        return pictures, mean, std


IMAGES = Modality()
