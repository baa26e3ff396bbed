"""A cache of features on disc, so that ten probes of an encoder cost one pass over the images.

A file's name is a digest of everything on which its features depend: the weights, the crop and normalisation of the
images, the precision, the images, and the versions of the libraries. So a file is never out of date, only unused.
Labels are not cached but taken from the data. The folder is ``$XDG_CACHE_HOME/patchloom/features``, or
``~/.cache/patchloom/features``, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data import Source
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import ImageFeatures, Precision, groups_of, labelled, labels_of, runs_in_bfloat16
from patchloom.files import cache_root, write_whole
from patchloom.nets.encode import attention_heads, input_size
from patchloom.nets.heads import InstanceHead
from patchloom.nets.weights import EncoderCard
from patchloom.version import __version__

MAX_BYTES = 5 * 10**9  # of all files together; the least recently used are removed first
# the first is to be raised with changes of the code that computes features
_PROGRAMS = ("features 2", __version__, *(version(name) for name in ("torch", "torchvision", "timm", "pillow")))
_ABOUT = "patchloom-features"  # key of the metadata: the names in order, and a digest of the values


def cache_folder() -> Path:
    """The folder of the cached features."""
    return cache_root() / "features"


def about_encoder(
    vit: VisionTransformer,
    card: EncoderCard,
    device: torch.device | str,
    head: InstanceHead | None = None,
    precision: Precision = "auto",
) -> tuple[str, ...]:
    """Everything about an encoder, and how it runs, on which its features depend; arguments of `features.extract`."""
    device = torch.device(device)
    return (
        digest_of(vit.state_dict()),
        "" if head is None else json.dumps(head.sizes, sort_keys=True) + digest_of(head.state_dict()),
        # neither the number of heads nor other options of a timm model are seen in its weights
        json.dumps(card.timm_name if card.spec is None else asdict(card.spec), sort_keys=True),
        f"{vit} {attention_heads(vit)} heads, {input_size(vit)} pixels",
        json.dumps([card.mean, card.std, *([] if card.sound is None else [asdict(card.sound)])]),
        f"{device.type} {'bfloat16' if runs_in_bfloat16(device, precision) else 'float32'}",
    )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and values, in order."""
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\0".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def remembered(
    about: Sequence[str], source: Source, make: Callable[[Source], ImageFeatures], *, keep: bool = True
) -> ImageFeatures:
    """``make(source)``, or its cached result for the same images.

    Damaged files are ignored and replaced. Where nothing can be written, nothing is cached.

    Args:
        about: everything but the images on which the features depend.
        source: images; those without a label are left out.
        make: computes features in a pass over the images.
        keep: False neither reads nor writes the cache.

    Raises:
        PatchloomError: no labels, or an error of ``make``.
    """
    source = labelled(source)
    stamp = source.stamp() if keep else None
    if stamp is None:
        return make(source)
    name = hashlib.sha256("\0".join([*_PROGRAMS, *about, stamp]).encode("utf-8", "surrogateescape")).hexdigest()
    path = cache_folder() / f"{name}.safetensors"
    found = _read(path, source)
    if found is not None:
        return found
    found = make(source)
    if source.stamp() == stamp:  # otherwise the images changed while they were read
        _write(path, found)
    return found


def _read(path: Path, source: Source) -> ImageFeatures | None:
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})[_ABOUT])
            tensors = {name: file.get_tensor(name) for name in about["names"]}
        if digest_of(tensors) != about["digest"]:
            return None
    except (OSError, SafetensorError, ValueError, LookupError, TypeError):  # missing or damaged
        return None
    with contextlib.suppress(OSError):  # just removed, or of another user
        os.utime(path)
    places = tensors.pop("indices")
    labels = labels_of(source, places)
    missing = np.setdiff1d(np.arange(len(source)), places.numpy())
    unreadable = [source.describe(int(i)) for i in missing]
    groups = groups_of(source, places)
    return ImageFeatures(tensors, labels, places, unreadable, cached=True, groups=groups, noun=source.noun)


def _write(path: Path, features: ImageFeatures) -> None:
    tensors = {**features.tokens, "indices": features.indices}
    if sum(values.nbytes for values in tensors.values()) > MAX_BYTES:
        return
    about = {_ABOUT: json.dumps({"names": list(tensors), "digest": digest_of(tensors)})}
    with contextlib.suppress(PatchloomError):  # a full or read-only disc only costs another pass
        write_whole(path, save({name: values.contiguous() for name, values in tensors.items()}, metadata=about))
    _make_room(path.parent)


def _make_room(folder: Path) -> None:
    """Remove the least recently used files, half-written ones of dead processes too, down to `MAX_BYTES` in all."""
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for file in found:
            with contextlib.suppress(OSError):  # another process removed it first
                files.append((file.stat().st_mtime_ns, file.stat().st_size, file.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MAX_BYTES:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
