"""Features that are cached on the disc, so that ten probes of an encoder cost one pass over the images.

A file's name is a digest of everything that its features follow from: the weights, how the images are cut and
normalised, the precision, the images, and the versions of the programs. So a file is never out of date, only unused.
Labels are not in it: they are always the data's own. The folder is ``$XDG_CACHE_HOME/patchloom/features``, or
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
from patchloom.evaluate.features import Features, Precision, labelled, runs_in_bfloat16
from patchloom.files import cache_root, write_whole
from patchloom.nets.encode import attention_heads
from patchloom.nets.heads import InstanceHead
from patchloom.nets.weights import EncoderCard
from patchloom.version import __version__

MOST_BYTES = 5 * 10**9  # of all files together; those that were not used for longest go first
# The first is for changes of the code that makes features; torch's own version says nothing of the others.
_PROGRAMS = ("features 1", __version__, *(version(name) for name in ("torch", "torchvision", "timm", "pillow")))
_ABOUT = "patchloom-features"  # in the metadata: the names in their order, and a digest of the values


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
    """All of an encoder, and of how it runs, that its features follow from; arguments of `features.extract`."""
    device = torch.device(device)
    return (
        digest_of(vit.state_dict()),
        "" if head is None else json.dumps(head.sizes, sort_keys=True) + digest_of(head.state_dict()),
        # neither the heads nor a timm model's other options show in its weights
        json.dumps(card.name if card.spec is None else asdict(card.spec), sort_keys=True),
        f"{vit} {attention_heads(vit)} heads, {tuple(vit.patch_embed.img_size)} pixels",
        json.dumps([card.mean, card.std]),
        f"{device.type} {'bfloat16' if runs_in_bfloat16(device, precision) else 'float32'}",
    )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and values, in their order."""
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\0".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def remembered(
    about: Sequence[str], source: Source, make: Callable[[Source], Features], *, keep: bool = True
) -> Features:
    """``make(source)``, or what that gave before for the same images.

    A file that is damaged is made again. Where nothing can be written, nothing is cached.

    Args:
        about: all besides the images that the features follow from.
        source: images; those without a label are left out.
        make: a pass over the images.
        keep: False neither reads nor writes.

    Raises:
        PatchloomError: no labels, or what ``make`` raises.
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
    if source.stamp() == stamp:  # else the images changed while they were read
        _write(path, found)
    return found


def _read(path: Path, source: Source) -> Features | None:
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})[_ABOUT])
            tensors = {name: file.get_tensor(name) for name in about["names"]}
        if digest_of(tensors) != about["digest"]:
            return None
    except (OSError, SafetensorError, ValueError, LookupError, TypeError):  # none there, or whatever damage does to it
        return None
    with contextlib.suppress(OSError):  # removed just now, or somebody else's
        os.utime(path)
    places = tensors.pop("indices")
    labels = torch.from_numpy(source.labels[places.numpy()])
    missing = np.setdiff1d(np.arange(len(source)), places.numpy())
    return Features(tensors, labels, places, [source.describe(int(i)) for i in missing], cached=True)


def _write(path: Path, features: Features) -> None:
    tensors = {**features.tokens, "indices": features.indices}
    if sum(values.nbytes for values in tensors.values()) > MOST_BYTES:
        return
    about = {_ABOUT: json.dumps({"names": list(tensors), "digest": digest_of(tensors)})}
    with contextlib.suppress(PatchloomError):  # a full or read-only disc costs another pass, and nothing else
        write_whole(path, save({name: values.contiguous() for name, values in tensors.items()}, metadata=about))
    _make_room(path.parent)


def _make_room(folder: Path) -> None:
    """Remove the files that were not used for longest, until all together are within `MOST_BYTES`.

    Half-written files of processes that died are among them.
    """
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for file in found:
            with contextlib.suppress(OSError):  # another process removed it first
                files.append((file.stat().st_mtime_ns, file.stat().st_size, file.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
