"""Frozen features, every pooling in one pass over the data. Letters: n images, d width, c channels, h w size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data import Batch, Source, normalize, plain_batches
from patchloom.errors import PatchloomError
from patchloom.evaluate.pace import watched
from patchloom.evaluate.passes import each_batch
from patchloom.machine import bfloat16_pays
from patchloom.nets.encode import (
    attend_each,
    embed,
    layer_names,
    patch_count,
    prefix_count,
)
from patchloom.nets.heads import InstanceHead
from patchloom.nets.pooling import pooled_by, pooled_tokens, poolings_of
from patchloom.nets.weights import EncoderCard
from patchloom.withhold.encoder_input import all_patches

Pooling = Literal["class", "mean", "prefix", "instance", "both"]
Precision = Literal["auto", "float32", "bfloat16"]

PIXELS_SIDE = 32


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images, on the CPU.

    Attributes:
        tokens: [n d] float32 by name: "class" (if the encoder has that token), "mean", "prefix" (if it has registers)
            and "instance" (if there is an instance head), or "pixels", or the layers of `layer_names`.
        labels: [n] int64; -1 for images without one, where those were asked for, too.
        indices: [n] int64, of the images in the source.
        unreadable: names of images that could not be read.
        cached: whether they come from the cache of an earlier pass.
        groups: [n] int64, of images that no split may part; None: any may be.
        noun: what they are called: images or recordings.
    """

    tokens: dict[str, Tensor]
    labels: Tensor
    indices: Tensor
    unreadable: list[str]
    cached: bool = False
    groups: Tensor | None = None
    noun: str = "images"

    def poolings(self) -> tuple[str, ...]:
        """Values that `pooled` takes."""
        return poolings_of(self.tokens)

    def pooled(self, pooling: str) -> Tensor:
        """[n d], or [n 2d] for "both", which concatenates class token and mean.

        Raises:
            PatchloomError: the encoder has no class token, no registers, or no instance head.
        """
        return pooled_by(pooling, self.tokens)


def has_labels(source: Source | None) -> bool:
    """Whether at least one image of a source has a label (-1 means none)."""
    return source is not None and source.labels is not None and bool((source.labels >= 0).any())


def classes_of(source: Source) -> int:
    """Number of classes that occur among the labelled images of a source."""
    return len(np.unique(source.labels[source.labels >= 0])) if has_labels(source) else 0


def labels_of(source: Source, indices: Tensor | None = None) -> Tensor:
    """Labels [n] int64 of a labelled source; with ``indices`` [m], those of these images [m]."""
    assert source.labels is not None, f"{source.name} has no labels"
    return torch.from_numpy(source.labels if indices is None else source.labels[indices.numpy()])


def groups_of(source: Source, indices: Tensor) -> Tensor | None:
    """Groups [m] int64 of the images ``indices`` [m], which no split may part; None if any may be."""
    return None if source.groups is None else torch.from_numpy(source.groups[indices.numpy()])


def labelled(source: Source) -> Source:
    """The images of a source that have a label.

    Raises:
        PatchloomError: there are none.
    """
    if not has_labels(source):
        why = f"{source.no_labels}, so " if source.no_labels else ""
        raise PatchloomError(f"{source.name} has no labels: {why}{source.to_label}")
    return source if (source.labels >= 0).all() else source.subset(np.flatnonzero(source.labels >= 0))


def extract(
    vit: VisionTransformer,
    card: EncoderCard,
    source: Source,
    *,
    device: torch.device | str,
    batch_size: int = 256,
    workers: int = 0,
    precision: Precision = "auto",
    head: InstanceHead | None = None,
    layers: bool = False,
    what: str = "",
) -> ImageFeatures:
    """Features of every labelled image, in one pass.

    These are the class token, the mean of the patch tokens, that of class token and registers, and the instance
    representation, after the encoder's last norm; with ``layers`` instead the mean of the patch tokens in every layer
    of `layer_names`.

    Args:
        vit: the encoder; it is moved to ``device``, and keeps its mode (train or eval).
        card: its mean and std normalise the images.
        source: images; those without a label are left out.
        device: where the encoder runs.
        batch_size: images per batch.
        workers: processes that read images.
        precision: float32, or bfloat16 autocast; auto is bfloat16 where a CUDA device has it.
        head: gives the instance representation; it is moved to ``device``. Its mode does not matter.
        layers: features of every layer.
        what: is said to be done, if it takes a while; nothing is said without it.

    Raises:
        PatchloomError: no labels, no readable image, channels that the encoder does not take, or non-finite features.
    """
    device, patches = torch.device(device), patch_count(vit)

    def layer_means(images: Tensor) -> dict[str, Tensor]:
        each = attend_each(vit, embed(vit, all_patches(images, patches)))
        means = (tokens[:, prefix_count(vit) :].float().mean(1) for tokens in each)
        return dict(zip(layer_names(vit), means, strict=True))

    if head is not None:
        head.to(device)
    pools = layer_means if layers else partial(pooled_tokens, vit, head=head)
    return one_pass(vit, card, labelled(source), pools, device, batch_size, workers, precision, what)


def runs_in_bfloat16(device: torch.device, precision: Precision) -> bool:
    """Whether products are taken in bfloat16; auto takes them where a CUDA device has that type."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bfloat16"


def trains_in_bfloat16(device: torch.device, precision: Precision) -> bool:
    """Whether products of a training are taken in bfloat16; auto takes them wherever that is faster."""
    if precision == "auto" and device.type == "cpu":
        return bfloat16_pays()[0]
    return runs_in_bfloat16(device, precision)


def one_pass(
    vit: VisionTransformer,
    card: EncoderCard,
    source: Source,
    pools: Callable[[Tensor], dict[str, Tensor]],
    device: torch.device,
    batch_size: int = 256,
    workers: int = 0,
    precision: Precision = "auto",
    what: str = "",
) -> ImageFeatures:
    """Apply ``pools``, from normalised images [b c h w] to features [b d] by name, to every image, labelled or not.

    All else is as for `extract`.
    """
    found: dict[str, list[Tensor]] = {}
    indices: list[Tensor] = []
    unreadable: list[str] = []

    def keep(tokens: dict[str, Tensor], batch: Batch) -> None:
        for name, values in tokens.items():
            found.setdefault(name, []).append(values)
        indices.append(batch.indices)
        unreadable.extend(batch.unreadable)

    half = runs_in_bfloat16(device, precision)
    each_batch(vit, card, source, pools, keep, device, batch_size, workers, half, what)
    return _features({name: torch.cat(parts) for name, parts in found.items()}, source, indices, unreadable)


def pixel_features(
    source: Source,
    size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 256,
    workers: int = 0,
    what: str = "",
    whole: bool = False,
    labels: bool = True,
) -> ImageFeatures:
    """Normalised pixels as features "pixels" [n c·h·w], the control without any encoder.

    Args:
        source: images.
        size: (h, w) of the encoder's input in pixels; that of images is reduced in proportion to at most 32 a side.
        mean, std: for the normalisation, in [0, 1] units; their length is the number of channels.
        batch_size: images at once.
        workers: processes that read images.
        what: as for `extract`.
        whole: images are pictures of recordings, too, which are not reduced.
        labels: those without a label are left out.

    Raises:
        PatchloomError: as `extract`.
    """
    source = labelled(source) if labels else source
    pixels, indices, unreadable = [], [], []
    # pictures of recordings are small, and made as large as they are
    small = size if whole or source.sound is not None else pixels_size(size)
    batches = plain_batches(source, small, batch_size, workers, len(mean))
    for batch in watched(batches, -(-len(source) // batch_size), what):
        pixels.append(normalize(batch.views[0], mean, std).flatten(1))
        indices.append(batch.indices)
        unreadable += batch.unreadable
    return _features({"pixels": torch.cat(pixels)}, source, indices, unreadable)


def pixels_size(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width to which `pixel_features` reduces images of ``size``."""
    h, w = size
    shrink = min(1.0, PIXELS_SIDE / max(h, w))
    return max(1, round(h * shrink)), max(1, round(w * shrink))


def _features(tokens: dict[str, Tensor], source: Source, indices: list[Tensor], unreadable: list[str]) -> ImageFeatures:
    places = torch.cat(indices)
    labels = torch.full_like(places, -1) if source.labels is None else labels_of(source, places)
    groups = groups_of(source, places)
    return ImageFeatures(tokens, labels, places, unreadable, groups=groups, noun=source.noun)
