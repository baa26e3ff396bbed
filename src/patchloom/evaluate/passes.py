"""One pass of a frozen encoder over images, a batch at a time: whatever becomes of features, they are made here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data import Batch, Source, normalize, plain_batches
from patchloom.errors import PatchloomError
from patchloom.evaluate.pace import watched
from patchloom.nets.encode import input_channels, input_size
from patchloom.nets.weights import EncoderCard


def each_batch(
    vit: VisionTransformer,
    card: EncoderCard,
    source: Source,
    pools: Callable[[Tensor], dict[str, Tensor]],
    keep: Callable[[dict[str, Tensor], Batch], None],
    device: torch.device,
    batch_size: int = 256,
    workers: int = 0,
    half: bool = False,
    what: str = "",
    first: int = 0,
) -> None:
    """Apply ``pools`` to every image, labelled or not, and hand what it gives to ``keep``; no more is held.

    Args:
        vit: the encoder; it is moved to ``device``, and keeps its mode (train or eval).
        card: its mean and std normalise the images.
        source: images.
        pools: from normalised images [b c h w] to features [b ...] by name.
        keep: is given the features of a batch, float32 on the CPU, and the batch.
        device: where the encoder runs.
        batch_size: images per batch.
        workers: processes that read images.
        half: products are taken in bfloat16.
        what: is said to be done, if it takes a while; nothing is said without it.
        first: number of the batch to begin with, as for `plain_batches`.

    Raises:
        PatchloomError: no readable image, channels that the encoder does not take, or non-finite features.
    """
    channels, size = input_channels(vit), input_size(vit)
    training = vit.training
    vit.to(device).eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=half):
            batches = plain_batches(source, size, batch_size, workers, channels, device, first)
            for batch in watched(batches, -(-len(source) // batch_size) - first, what):
                images = normalize(batch.views[0], card.mean, card.std)
                tokens = {name: values.float().cpu() for name, values in pools(images).items()}
                if not all(values.isfinite().all() for values in tokens.values()):
                    raise PatchloomError(f"{card.name} gives features that are not finite: its training has diverged")
                keep(tokens, batch)
    finally:
        vit.train(training)
