"""Frozen features, with all poolings in one pass over the data. Letters: n images, d width, c channels, h w size."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils._pytree import tree_map_only

from patchloom.audio.compatibility import wrong_kind_error
from patchloom.data.loader import Batch, plain_batches
from patchloom.data.modality import Modality
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import (
    attention_heads,
    encode_each,
    input_channels,
    input_size,
    layer_names,
    patch_count,
    prefix_count,
)
from patchloom.nets.heads import InstanceHead, pooled_tokens, poolings_of, select_pooling
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.options.evaluate import Precision
from patchloom.system.device import choose_precision, fetch_behind
from patchloom.system.files import cache_root, regular, write_whole
from patchloom.version import __version__
from patchloom.withhold.encoder_input import all_patches

# One pass of a frozen encoder over images in batches; all features are computed here.


def each_batch(
    vit: Encoder,
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
    stop: int | None = None,
    test_crop: float = 1.0,
) -> None:
    """Apply ``pools`` to every image, labelled or not, and pass the result to ``keep``; nothing else is stored.

    Args:
        vit: encoder; moved to ``device``, its mode (train or eval) is kept.
        pools: function from normalised images [b c h w] to features [b ...] by name.
        keep: called with the features of a batch, float32 on the CPU, and the batch.
        half: compute products in bfloat16.
        what: status message for slow passes; "" prints none.
        first, stop: range of batch numbers, ``stop`` excluded, as for `plain_batches`.
        test_crop: side of the centre crop over the short side of the resized image, as in `CentreCrop`.
    """
    channels, size = input_channels(vit), input_size(vit)
    training = vit.training
    vit.to(device).eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=half):
            reading = batch_size, workers, channels, device, first
            batches = plain_batches(source, size, *reading, stop=stop, test_crop=test_crop)
            count = (-(-len(source) // batch_size) if stop is None else stop) - first

            def compute(batch: Batch) -> dict[str, Tensor]:
                found = pools(normalize(batch.views[0], card.mean, card.std))
                return {name: values.float() for name, values in found.items()}

            for batch, tokens in results_ahead(track_progress(batches, count, what), compute):
                if not all(values.isfinite().all() for values in tokens.values()):
                    raise PatchloomError(f"{card.name} gives features that are not finite: its training has diverged")
                keep(tokens, batch)
    finally:
        vit.train(training)


Item = TypeVar("Item")


def results_ahead(items: Iterable[Item], compute: Callable[[Item], Any]) -> Iterator[tuple[Item, Any]]:
    """Yield each item, such as a batch, with what ``compute`` makes of it; tensors in that are then on the CPU.

    A GPU gets the next item before the results of one are read, so that it always has work.
    """
    under_way: tuple[Item, Any, torch.cuda.Event | None] | None = None
    for item in items:
        made, event = fetch_behind(compute(item))
        if under_way is not None:
            yield _arrived(*under_way)
        under_way = item, made, event
    if under_way is not None:
        yield _arrived(*under_way)


def _arrived(item: Item, made: Any, event: torch.cuda.Event | None) -> tuple[Item, Any]:
    if event is None:
        return item, tree_map_only(Tensor, Tensor.cpu, made)
    event.synchronize()
    return item, tree_map_only(Tensor, Tensor.clone, made)  # so that the next items take the same page-locked memory


_PIXELS_SIDE = 32


@dataclass(frozen=True)
class ImageFeatures:
    """Features of images, on the CPU.

    Attributes:
        tokens: [n d] float32 by name: "class" (if the encoder has that token), "mean", "prefix" (with registers)
            and "instance" (with an instance head), or "pixels", or the layers of `layer_names`.
        labels: [n] int64; -1 for unlabelled images, if these are included.
        indices: [n] int64, indices of the images in the source.
        unreadable: names of images that could not be read.
        cached: whether the features come from the cache.
        groups: [n] int64, groups of images that splits keep together; None: none.
        noun: "images" or "recordings".
    """

    tokens: dict[str, Tensor]
    labels: Tensor
    indices: Tensor
    unreadable: list[str]
    cached: bool = False
    groups: Tensor | None = None
    noun: str = "images"

    def poolings(self) -> tuple[str, ...]:
        return poolings_of(self.tokens)

    def pooled(self, pooling: str) -> Tensor:
        """Return features [n d], or [n 2d] for "both", which concatenates class token and mean."""
        return select_pooling(pooling, self.tokens)


@dataclass(frozen=True)
class FeatureOptions:
    """Options of frozen features, the same for an encoder and its controls.

    Attributes:
        test_crop: side of the centre crop over the short side of the resized image, as in `CentreCrop`.
        last_norm: whether the tokens pass the encoder's last norm.
    """

    test_crop: float = 1.0
    last_norm: bool = True

    def check(self, source: Source) -> None:
        if self.test_crop < 1 and not source.modality.resizable:
            raise wrong_kind_error("test_crop", source)

    def plain(self) -> dict[str, Any]:
        """Return the values that differ from the default, for rows and keys of the cache."""
        return {name: value for name, value in asdict(self).items() if value != asdict(USUAL_FEATURES)[name]}

    def sentences(self, size: tuple[int, int]) -> list[str]:
        """Describe what differs from the default, for an encoder of images of ``size``."""
        said = []
        if self.test_crop < 1:
            (h, w), (tall, wide) = size, (int(side / self.test_crop) for side in size)
            said = [f"Images are resized to cover {tall}x{wide}, and their centre of {h}x{w} is cut (--test_crop)."]
        return said if self.last_norm else [*said, "Features are taken before the encoder's last norm (--last_norm)."]


USUAL_FEATURES = FeatureOptions()


def has_labels(source: Source | None) -> bool:
    """Return whether at least one image of a source has a label (-1 means none)."""
    return source is not None and source.labels is not None and bool((source.labels >= 0).any())


def count_classes(source: Source) -> int:
    """Return the number of classes that occur among the labelled images of a source."""
    return len(np.unique(known_labels(source)))


def known_labels(source: Source) -> np.ndarray:
    """Return the labels of the labelled images of a source, in order."""
    return np.empty(0, np.int64) if source.labels is None else source.labels[source.labels >= 0]


def labels_of(source: Source, indices: Tensor | None = None) -> Tensor:
    """Return labels [n] int64 of a labelled source, or those of the images ``indices`` [m]."""
    assert source.labels is not None, f"{source.name} has no labels"
    return torch.from_numpy(source.labels if indices is None else source.labels[indices.numpy()])


def class_names(source: Source) -> tuple[str, ...]:
    """Return the names of classes 0 ... c-1."""
    return source.classes or tuple(map(str, range(int(labels_of(source).max()) + 1)))


def groups_of(source: Source, indices: Tensor) -> Tensor | None:
    """Return groups [m] int64 of the images ``indices`` [m], which splits keep together; None without groups."""
    return None if source.groups is None else torch.from_numpy(source.groups[indices.numpy()])


def only_labelled(source: Source) -> Source:
    if not has_labels(source):
        why = f"{source.no_labels}, so " if source.no_labels else ""
        raise PatchloomError(f"{source.name} has no labels: {why}{source.to_label}")
    assert source.labels is not None  # by has_labels
    known = source.labels >= 0
    return source if known.all() else source.subset(np.flatnonzero(known))


def extract(
    vit: Encoder,
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
    test_crop: float = 1.0,
) -> ImageFeatures:
    """Compute features of every labelled image in one pass.

    These are the class token, the mean of the patch tokens, the mean of class token and registers, and the instance
    representation, after the encoder's last norm; ``layers`` gives instead the mean of the patch tokens in every layer
    of `layer_names`.
    """
    device, patches = torch.device(device), patch_count(vit)

    def layer_means(images: Tensor) -> dict[str, Tensor]:
        assert not is_hierarchical(vit)  # refused by `layers`
        given = all_patches(images, patches)
        each = encode_each(vit, given)
        means = (tokens[:, prefix_count(vit) :].float().mean(1) for tokens in each)
        return dict(zip(layer_names(vit), means, strict=True))

    if head is not None:
        head.to(device)
    pools = layer_means if layers else partial(pooled_tokens, vit, head=head)
    return one_pass(vit, card, only_labelled(source), pools, device, batch_size, workers, precision, what, test_crop)


def runs_in_bfloat16(device: torch.device, precision: Precision) -> bool:
    """Return whether products are computed in bfloat16; auto chooses it on GPUs that support it."""
    return trains_in_bfloat16(device, precision) and (precision != "auto" or device.type != "cpu")


def trains_in_bfloat16(device: torch.device, precision: Precision) -> bool:
    """Return whether products in training are computed in bfloat16; auto is that of pre-training."""
    return (choose_precision(device.type)[0] if precision == "auto" else precision) == "bfloat16"


def one_pass(
    vit: Encoder,
    card: EncoderCard,
    source: Source,
    pools: Callable[[Tensor], dict[str, Tensor]],
    device: torch.device,
    batch_size: int = 256,
    workers: int = 0,
    precision: Precision = "auto",
    what: str = "",
    test_crop: float = 1.0,
) -> ImageFeatures:
    """Apply ``pools``, from normalised images [b c h w] to features [b d] by name, to every image, labelled or not.

    Other arguments are those of `extract`.
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
    each_batch(vit, card, source, pools, keep, device, batch_size, workers, half, what, test_crop=test_crop)
    return with_labels({name: torch.cat(parts) for name, parts in found.items()}, source, indices, unreadable)


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
    test_crop: float = 1.0,
) -> ImageFeatures:
    """Return normalised pixels as features "pixels" [n c·h·w], the control without an encoder."""
    source = only_labelled(source) if labels else source
    pixels, indices, unreadable = [], [], []
    small = size if whole else raw_size(source.modality, size)
    batches = plain_batches(source, small, batch_size, workers, len(mean), test_crop=test_crop)
    for batch in track_progress(batches, -(-len(source) // batch_size), what):
        pixels.append(normalize(batch.views[0], mean, std).flatten(1))
        indices.append(batch.indices)
        unreadable += batch.unreadable
    return with_labels({"pixels": torch.cat(pixels)}, source, indices, unreadable)


def pixels_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width to which `pixel_features` reduces images of ``size``."""
    h, w = size
    shrink = min(1.0, _PIXELS_SIDE / max(h, w))
    return max(1, round(h * shrink)), max(1, round(w * shrink))


def raw_size(modality: Modality, size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of the raw control for an encoder of ``size``."""
    return pixels_size(size) if modality.resizable else size


def with_labels(
    tokens: dict[str, Tensor], source: Source, indices: list[Tensor], unreadable: list[str], cached: bool = False
) -> ImageFeatures:
    """Return features of the images of a source at ``indices``, in batches, with their labels and groups."""
    places = torch.cat(indices)
    labels = torch.full_like(places, -1) if source.labels is None else labels_of(source, places)
    return ImageFeatures(tokens, labels, places, unreadable, cached, groups_of(source, places), source.noun)


# Cache of features on disc, so that ten probes of an encoder need one pass over the images.


MAX_BYTES = 5 * 10**9  # limit for all files; the least recently used are removed first
# increase the first number if the code that computes features changes
_PROGRAMS = ("features 2", __version__, *(version(name) for name in ("torch", "torchvision", "timm", "pillow")))
_ABOUT = "patchloom-features"  # metadata key: the names in order and a digest of the values


def about_encoder(
    vit: Encoder,
    card: EncoderCard,
    device: torch.device | str,
    head: InstanceHead | None = None,
    precision: Precision = "auto",
) -> tuple[str, ...]:
    """Return all properties of an encoder and its device that affect its features; arguments of `features.extract`."""
    device = torch.device(device)
    return (
        digest_tensors(vit.state_dict()),
        "" if head is None else json.dumps(head.sizes, sort_keys=True) + digest_tensors(head.state_dict()),
        # the weights show neither the number of heads nor other options of a timm model
        json.dumps(card.timm_name if card.spec is None else asdict(card.spec), sort_keys=True),
        f"{vit} {attention_heads(vit)} heads, {input_size(vit)} pixels",
        json.dumps([one for one in (card.mean, card.std, card.modality.plain()) if one is not None]),
        f"{device.type} {'bfloat16' if runs_in_bfloat16(device, precision) else 'float32'}",
    )


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values, in order."""
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\0".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def load_or_extract(
    make: Callable[[Source], ImageFeatures], about: Sequence[str], source: Source, *, keep: bool = True
) -> ImageFeatures:
    """Return ``make(source)`` or its cached result for the same images.

    Damaged files are ignored and replaced. Without write access nothing is cached.
    """
    stamp = source.stamp() if keep else None
    if stamp is None:
        return make(source)
    name = hashlib.sha256("\0".join([*_PROGRAMS, *about, stamp]).encode("utf-8", "surrogateescape")).hexdigest()
    path = cache_root() / "features" / f"{name}.safetensors"
    found = _read(path, source)
    if found is not None:
        return found
    found = make(source)
    if source.stamp() == stamp:  # else the images changed during the pass
        _write(path, found)
    return found


def _read(path: Path, source: Source) -> ImageFeatures | None:
    try:
        with safe_open(regular(path), "pt") as file:
            about = json.loads((file.metadata() or {})[_ABOUT])
            tensors = {name: file.get_tensor(name) for name in about["names"]}
        if digest_tensors(tensors) != about["digest"]:
            return None
    except (OSError, SafetensorError, ValueError, LookupError, TypeError):  # missing or damaged
        return None
    with contextlib.suppress(OSError):  # just removed, or owned by another user
        os.utime(path)
    places = tensors.pop("indices")
    missing = np.setdiff1d(np.arange(len(source)), places.numpy())
    return with_labels(tensors, source, [places], [source.describe(int(i)) for i in missing], cached=True)


def _write(path: Path, features: ImageFeatures) -> None:
    tensors = {**features.tokens, "indices": features.indices}
    if sum(values.nbytes for values in tensors.values()) > MAX_BYTES:
        return
    about = {_ABOUT: json.dumps({"names": list(tensors), "digest": digest_tensors(tensors)})}
    with contextlib.suppress(PatchloomError):  # with a full or read-only disc, features are computed again
        write_whole(path, save({name: values.contiguous() for name, values in tensors.items()}, metadata=about))
    files = []  # the least recently used, and partial ones of dead processes, are removed until the limit is met
    with contextlib.suppress(OSError), os.scandir(path.parent) as found:
        for file in found:
            with contextlib.suppress(OSError):  # another process removed it first
                files.append((file.stat().st_mtime_ns, file.stat().st_size, file.path))
    total = sum(size for _, size, _ in files)
    for _, size, name in sorted(files):
        if total <= MAX_BYTES:
            return
        with contextlib.suppress(OSError):
            os.unlink(name)
        total -= size
