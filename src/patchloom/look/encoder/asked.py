"""What every picture of an encoder is made of: encoders, images, and a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data import Source, normalize, plain_batches
from patchloom.errors import PatchloomError
from patchloom.look.sheets import Title
from patchloom.nets.encode import input_channels, input_size
from patchloom.nets.heads import InstanceHead
from patchloom.nets.hierarchical import Encoder, is_hierarchical
from patchloom.nets.weights import EncoderCard

UNTRAINED = "untrained"
Heads = Literal["each", "mean"]
QUERIES = 4  # patches at most of which attention is drawn together, as in ExtreMA's Fig. 1


class NamedEncoder(NamedTuple):
    """An encoder in eval mode at the size at which it is looked at.

    Attributes:
        name: above its pictures and beside its curves.
        vit: the encoder; `input_size` and `patch_size` of it are true.
        card: tells how images become its input. Its ``spec`` may have another size.
        head: the class attention beside it, of ExtreMA; None without one.
    """

    name: str
    vit: Encoder
    card: EncoderCard
    head: InstanceHead | None = None


class Place(NamedTuple):
    """A point of an image: pixels from the left, and from the top, of what the encoder is given."""

    x: float
    y: float


@dataclass(frozen=True)
class Asked:
    """What a user wants to see, as each picture is given it.

    Attributes:
        encoder: of which the pictures are.
        beside: others for curves: by default its untrained twin, and whatever the user named.
        source: images, or recordings as the encoder hears them.
        folder: where the pictures go.
        images: how many are drawn, 1 to 8, evenly spread over ``source``.
        seed: of whatever is drawn by lot.
        query: of which patch something is asked; None: the picture chooses.
        queries: of which patches attention is drawn as the mean of all heads; none: the picture chooses.
        heads: whether attention is drawn of each head, or as their mean.
        exemplar: file of an image whose like retrieval looks for in each image; None: crops of the images ask.
        blocks: numbers, from 1, of the blocks that are drawn; None: the picture chooses.
        steps: of a fit; None: as many as the paper has, or, on a CPU, as are done within minutes.
        device: on which all is computed; the encoders are there.
    """

    encoder: NamedEncoder
    source: Source
    folder: Path
    beside: tuple[NamedEncoder, ...] = ()
    images: int = 8
    seed: int = 0
    query: Place | None = None
    queries: tuple[Place, ...] = ()
    heads: Heads = "each"
    exemplar: Path | None = None
    blocks: tuple[int, ...] | None = None
    steps: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def pictures(self, most: int | None = None, of: NamedEncoder | None = None, times: int = 1) -> Tensor:
        """Images [b c h w], normalised as the encoder wants them, on the device, evenly spread over the source.

        Args:
            most: how many at most; ``images`` without it.
            of: the encoder that is given them, if it is not the one that was asked for: size and statistics differ.
            times: as large as the encoder takes them, for what cuts parts out of them.
        """
        count = min(len(self.source), self.images if most is None else most)
        places = np.unique(np.linspace(0, len(self.source) - 1, count).round().astype(int))
        one = of or self.encoder
        some = self.source.subset(places)
        size = (times * input_size(one.vit)[0], times * input_size(one.vit)[1])
        batches = plain_batches(some, size, 32, channels=input_channels(one.vit), device=self.device)
        return torch.cat([normalize(batch.views[0], one.card.mean, one.card.std) for batch in batches])

    def all_encoders(self) -> tuple[NamedEncoder, ...]:
        """The one that was asked for, and those beside it."""
        return (self.encoder, *self.beside)

    def title(self, what: str) -> Title:
        """What stands above a sheet."""
        return Title(f"{self.encoder.name}: {what}")


def refuse_swin(vit: Encoder, what: str) -> None:
    """Refuse what makes no sense on windows that are merged from stage to stage.

    Raises:
        PatchloomError: it is one.
    """
    if is_hierarchical(vit):
        raise PatchloomError(f"{what} is of encoders whose patches all attend to one another, which a Swin is not")


# draws one kind of picture, and returns the files
Draw = Callable[[Asked], Sequence[Path]]
