"""The encoder's input and the functions that withhold parts of it.

Start from `all_patches`, then chain the functions below; each takes an `EncoderInput` and indices *into its visible
patches* and returns a new one. The order matters: `drop_positions` after `mask_patches` drops positions of the visible
patches. Indices come from `patchloom.patches.partition`, so randomness is always an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.patches.partition import complement
from patchloom.patches.tokens import gather_tokens


@dataclass(frozen=True)
class EncoderInput:
    """Input of the encoder for a batch.

    Attributes:
        images: [b c h w] pixels, normalised, perhaps degraded.
        visible: [b k] indices of the patches that enter, in the order in which they enter; or [v*b k] for v masks of
            every image, the first masks of all images first.
        masked: [b n-k] indices of the patches that do not enter, in any order; None if no question needs them.
        blank: [b k] True where the content is replaced by a mask token (SimMIM), or None.
        dropped: [b k] True where the position embedding is withheld (DropPos, MP3), or None.
        context: [b m] indices into ``visible`` of the patches that serve as keys and values (MP3); None: all.
        causal: whether every token attends to itself and to earlier ones only, class and register tokens first, then
            the patches in their order (NEPA).
        side_share: [b] fraction of the side of the target images that the images show; None: all of it.
        corner: [b 2] row and column of the images' upper left pixel in the original, after zooming in at a random
            place; None: they show the centre.
        targets: [b ...], or [v*b ...], by name, random draws that cannot be read off the images, such as the angle of
            a rotation, for the questions of the task.
    """

    images: Tensor
    visible: Tensor
    masked: Tensor | None = None
    blank: Tensor | None = None
    dropped: Tensor | None = None
    context: Tensor | None = None
    causal: bool = False
    side_share: Tensor | None = None
    corner: Tensor | None = None
    targets: Mapping[str, Tensor] = field(default_factory=dict, hash=False)

    def has_content(self) -> Tensor:
        """Return [b k], True where a visible patch kept its content."""
        return torch.ones_like(self.visible, dtype=torch.bool) if self.blank is None else ~self.blank

    def mean_patch_token(self, tokens: Tensor) -> Tensor:
        """Return the mean [b d] of the tokens [b prefix+k d] of patches that kept their content."""
        patches = tokens[:, tokens.shape[1] - self.visible.shape[1] :]
        if self.blank is None:
            return patches.mean(1)
        counted = self.has_content()[..., None]
        return (patches * counted).sum(1) / counted.sum(1)


def check_images(images: object, channels: int, size: tuple[int, int] | None, of: str) -> None:
    """Raise an error unless ``images`` is a float batch [b c h w] of so many channels, and of ``size`` (h, w) if given.

    Only shapes and types are read, so that a GPU does not wait. Without it, images of another size would be taken for
    their first rows of patches.
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        found = f"of the shape {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise PatchloomError(f"images are {found}: {of} takes a batch, a tensor [b c h w]")
    if images.shape[0] == 0:
        raise PatchloomError(f"images are an empty batch: {of} takes one image or more")
    if not images.is_floating_point():
        kind = str(images.dtype).removeprefix("torch.")
        raise PatchloomError(f"images are {kind}: convert them to float32 in [0, 1] and normalise them")
    h, w = images.shape[2:]
    if images.shape[1] != channels:
        raise PatchloomError(
            f"images have {images.shape[1]} channels, and {of} takes {channels}: give such images, or build an encoder "
            "for theirs"
        )
    if size is not None and (h, w) != tuple(size):
        raise PatchloomError(
            f"images have {h}x{w} pixels, and {of} takes {size[0]}x{size[1]}: resize them, or build the encoder for "
            "their size"
        )


def all_patches(images: Tensor, n: int) -> EncoderInput:
    """Return an input of images [b c h w] with all ``n`` patches in grid order."""
    order = torch.arange(n, device=images.device).expand(images.shape[0], n)
    return EncoderInput(images, order, masked=order[:, :0])


def mask_patches(given: EncoderInput, keep: Tensor, mask: Tensor | None = None) -> EncoderInput:
    """Let only the visible patches ``keep`` [b m] enter, in that order.

    Args:
        given: the input so far.
        keep: [b m] indices into its visible patches.
        mask: [b k-m] the other indices, in the order in which they are predicted; None: in grid order.
    """
    if given.context is not None:
        raise ValueError("limit the context after masking patches, not before: it indexes the visible ones")
    blank = None if given.blank is None else gather_tokens(given.blank, keep)
    dropped = None if given.dropped is None else gather_tokens(given.dropped, keep)
    masked = gather_tokens(given.visible, complement(keep, given.visible.shape[1]) if mask is None else mask)
    if given.masked is not None:
        masked = torch.cat([given.masked, masked], dim=1)
    visible = gather_tokens(given.visible, keep)
    return replace(given, visible=visible, masked=masked, blank=blank, dropped=dropped)


def blank_patches(given: EncoderInput, which: Tensor) -> EncoderInput:
    """Replace the content of the visible patches ``which`` [b m] by the task's mask token."""
    return replace(given, blank=_flagged(given, given.blank, which))


def drop_positions(given: EncoderInput, which: Tensor) -> EncoderInput:
    """Withhold the position embedding of the visible patches ``which`` [b m]."""
    return replace(given, dropped=_flagged(given, given.dropped, which))


def limit_context(given: EncoderInput, keep: Tensor) -> EncoderInput:
    """Let only the visible patches ``keep`` [b m] serve as keys and values; the others are still queries."""
    return replace(given, context=keep)


def _flagged(given: EncoderInput, already: Tensor | None, which: Tensor) -> Tensor:
    flags = torch.zeros_like(given.visible, dtype=torch.bool).scatter(1, which, True)
    return flags if already is None else flags | already
