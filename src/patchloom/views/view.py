"""The View: what the encoder may know of a batch. Withholding only ever takes away.

Start from `whole`, then chain the functions below; each takes a View and indices *into its visible patches* and
returns a new View. Order is meaning: `drop_positions` after `mask_patches` drops a share of the visible ones.
Indices come from `patchloom.views.tokens.deal`, so randomness is always an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchloom.views.tokens import take


@dataclass(frozen=True)
class View:
    """What the encoder may know of a batch.

    Attributes:
        images: [b c h w] pixels, normalised, perhaps degraded.
        visible: [b k] indices of the patches that enter, in the order in which they enter; or [v*b k], those of v views
            of every image, all images' first ones first.
        blank: [b k] True where the content is replaced by a mask token (SimMIM), or None.
        dropped: [b k] True where the position embedding is withheld (DropPos, MP3), or None.
        context: [b m] places within ``visible`` of the patches that serve as keys and values (MP3), or None: all do.
    """

    images: Tensor
    visible: Tensor
    blank: Tensor | None = None
    dropped: Tensor | None = None
    context: Tensor | None = None


def whole(images: Tensor, patches: int) -> View:
    """Everything: images [b c h w] of which all ``patches`` enter in their order."""
    order = torch.arange(patches, device=images.device)
    return View(images, order.expand(len(images), patches))


def mask_patches(view: View, keep: Tensor) -> View:
    """Let only the visible patches that ``keep`` [b m] names enter, in that order.

    Raises:
        ValueError: the context was limited before.
    """
    if view.context is not None:
        raise ValueError("limit the context after masking patches, not before: it names places among the visible ones")
    flags = {name: getattr(view, name) for name in ("blank", "dropped")}
    kept = {name: None if flag is None else take(flag, keep) for name, flag in flags.items()}
    return replace(view, visible=take(view.visible, keep), **kept)


def blank_patches(view: View, which: Tensor) -> View:
    """Replace the content of the visible patches ``which`` [b m] by the task's mask token."""
    return replace(view, blank=_flagged(view, view.blank, which))


def drop_positions(view: View, which: Tensor) -> View:
    """Withhold the position embedding of the visible patches ``which`` [b m]."""
    return replace(view, dropped=_flagged(view, view.dropped, which))


def limit_context(view: View, keep: Tensor) -> View:
    """Let only the visible patches ``keep`` [b m] serve as keys and values; the others may still ask."""
    return replace(view, context=keep)


def _flagged(view: View, already: Tensor | None, which: Tensor) -> Tensor:
    flags = torch.zeros_like(view.visible, dtype=torch.bool).scatter(1, which, True)
    return flags if already is None else flags | already
