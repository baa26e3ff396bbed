"""Which of an encoder's tokens become the vector of an image, and after which layer.

Letters as in `patchloom.nets.encode`: b batch, c channels, h w height and width, n patches, d width.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.spectrogram import pictures
from patchloom.data.loader import Batch
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.features import each_batch, runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import (
    attend_each,
    embed,
    encode,
    final_norm,
    input_channels,
    input_size,
    layer_names,
    patch_count,
    patch_layers,
    prefix_count,
)
from patchloom.nets.heads import InstanceHead, check_pooling, pooled_tokens, select_pooling, summaries, tokens_of
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.withhold.encoder_input import all_patches

Tokens = Literal["mean", "class", "prefix", "both", "instance", "patches"]
LAST = "norm"  # of `layer_names`: what the encoder gives at its end

Keep = Callable[[np.ndarray, np.ndarray], None]


def resolve_layer(vit: Encoder, layer: int | str) -> str:
    """That of `layer_names` which is meant by the number of a block, from 1, or by its name."""
    names = layer_names(vit)
    word = " ".join(str(layer).lower().replace("_", " ").split())
    if re.fullmatch(r"[0-9]{1,9}", word):
        word = f"{names[1].split()[0]} {int(word)}"
    if word not in names:
        blocks = f"{names[1]} to {names[-2].split()[1]}"
        raise PatchloomError(f"--layer cannot be {layer}: this encoder has {listing([names[0], blocks, LAST], 'and')}")
    return word


def vector_extractor(
    vit: Encoder, head: InstanceHead | None, pooling: Tokens, layer: str
) -> Callable[[Tensor], dict[str, Tensor]]:
    """What takes the vectors, by the name "vectors", from normalised images [b c h w].

    They are what the evaluations are given: at the end those of `pooled_tokens`, and the mean in each layer that of
    `extract` with ``layers``. Patch tokens at the end are normed, [b n d].
    """
    if pooling == "instance" and layer != LAST:
        raise PatchloomError("--pooling instance is of the last layer: leave out --layer, or take --pooling mean")
    if pooling != "patches":
        check_pooling(pooling, tokens_of(vit, head))
    if layer == LAST:
        if pooling == "patches":
            return lambda images: {"vectors": _last_patches(vit, images)}
        return lambda images: {"vectors": select_pooling(pooling, pooled_tokens(vit, images, head))}
    number = layer_names(vit).index(layer)

    def take(images: Tensor) -> dict[str, Tensor]:
        tokens = _tokens_after(vit, images, number).float()
        if pooling == "patches":
            return {"vectors": tokens[:, prefix_count(vit) :]}
        return {"vectors": select_pooling(pooling, summaries(vit, tokens))}

    return take


def _last_patches(vit: Encoder, images: Tensor) -> Tensor:
    """Patch tokens [b n d] after the last norm."""
    unnormed = encode(vit, all_patches(images, patch_count(vit)), norm=False)
    return final_norm(vit, unnormed).float()[:, prefix_count(vit) :]


def _tokens_after(vit: Encoder, images: Tensor, number: int) -> Tensor:
    """Tokens [b prefix+n d] of the layer with this number in `layer_names`; those behind it are not computed."""
    if is_hierarchical(vit):
        return next(islice(patch_layers(vit, images), number, None)).flatten(1, 2)
    return next(islice(attend_each(vit, embed(vit, all_patches(images, patch_count(vit)))), number, None))


class Encoding(NamedTuple):
    """An encoder, what of it is taken, and how it runs.

    Attributes:
        vit, card: the encoder.
        take: what `vector_extractor` gives.
        settings: the device, images of a batch, and who reads them.
    """

    vit: Encoder
    card: EncoderCard
    take: Callable[[Tensor], dict[str, Tensor]]
    settings: EvalSettings

    def each(self, source: Source, keep: Keep, workers: int = 0, what: str = "", first: int = 0) -> None:
        """Hand the vectors of each batch to ``keep``: numbers of images, int64 [b], and vectors [b ...] float32."""
        at, batch_size = self.settings.at, self.settings.at_once

        def hand(tokens: dict[str, Tensor], batch: Batch) -> None:
            keep(batch.indices.numpy(), tokens["vectors"].numpy())

        half = runs_in_bfloat16(at, "auto")
        each_batch(self.vit, self.card, source, self.take, hand, at, batch_size, workers, half, what, first)


@torch.inference_mode()
def vector_shape(vit: Encoder, card: EncoderCard, take: Callable[[Tensor], dict[str, Tensor]]) -> tuple[int, ...]:
    """The shape of the vector of one image: (d,), (2d,) or (n, d)."""
    if card.sound is None:
        image = torch.zeros(1, input_channels(vit), *input_size(vit))
    else:
        image = pictures(torch.zeros(1, 1, 1, card.sound.samples), card.sound)
    return tuple(take(normalize(image, card.mean, card.std))["vectors"].shape[1:])
