"""The card of a file of vectors: how they were made. It has no date, so that the same command gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchloom.data import Source
from patchloom.errors import PatchloomError
from patchloom.evaluate.cache import digest_of
from patchloom.evaluate.features import runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.encode import attention_heads, input_channels, input_size
from patchloom.nets.heads import InstanceHead
from patchloom.nets.hierarchical import Encoder
from patchloom.nets.weights import EncoderCard
from patchloom.version import __version__

KEY = "patchloom-embeddings-1"  # under which a file has its card
COUNTS = ("rows", "unreadable")  # what is known at the end alone

_RENAMED = "encoder name"  # of a run whose folder was renamed; its weights have a digest of their own
_NESTED = ("encoder", "preprocessing", "computed", "data")

Card = dict[str, Any]


def card_of(
    vit: Encoder,
    card: EncoderCard,
    head: InstanceHead | None,
    sources: Mapping[str, Source],
    settings: EvalSettings,
    *,
    pooling: str,
    layer: str,
    shape: tuple[int, ...],
    dtype: str,
) -> Card:
    """Everything on which the bytes of the vectors depend, but for `COUNTS`, as plain values of JSON.

    Args:
        vit, card: the encoder.
        head: that of the instance representation; None where it is not asked for.
        sources: images by the name of their split, in the order of the rows.
        settings: the device, and images of a batch.
        pooling, layer, shape, dtype: of a vector.
    """
    first = next(iter(sources.values()))
    half = runs_in_bfloat16(settings.at, "auto")
    prepared: Card = {"size": list(input_size(vit)), "channels": input_channels(vit)}
    prepared |= {"mean": list(card.mean), "std": list(card.std)}
    if card.sound is None:
        prepared |= {"crop": "the largest at the centre of that shape", "resize": "bicubic, antialiased"}
    else:
        prepared |= {"sound": asdict(card.sound)}
    encoder = {
        "name": card.name,
        "arguments": {"timm": card.timm_name} if card.spec is None else asdict(card.spec),
        "heads": attention_heads(vit),
        "weights_sha256": digest_of(vit.state_dict()),
        **({} if head is None else {"head_sha256": digest_of(head.state_dict())}),
    }
    made = {
        "encoder": encoder,
        "pooling": pooling,
        "layer": layer,
        "shape": list(shape),
        "dtype": dtype,
        "preprocessing": prepared,
        "computed": {"device": settings.at.type, "products": "bfloat16" if half else "float32"}
        | {"batch_size": settings.at_once},
        "data": {
            "name": plain(_one_spelling(first.name)),
            "splits": {name: len(source) for name, source in sources.items()},
            "fingerprint": fingerprints(sources),
        },
        "classes": list(map(plain, first.classes)),
        "patchloom": __version__,
    }
    found: Card = json.loads(as_text(made))
    return found


def _one_spelling(name: str) -> str:
    """The name of data; that of a folder without what can be left out, as in ./photos/."""
    place = Path(name).expanduser()
    return str(place) if place.is_dir() else name


def fingerprints(sources: Mapping[str, Source]) -> dict[str, str]:
    """Of each split, 16 hex digits that change when its images do."""
    return {name: source.fingerprint() for name, source in sources.items()}


def as_text(card: Card) -> str:
    """The card as it stands in a file."""
    return json.dumps(card)


def plain(text: str) -> str:
    """The same in UTF-8, which every format wants, and not every file name is."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def from_text(text: str | None, path: Path) -> Card:
    """The card that a file has.

    Raises:
        PatchloomError: it has none.
    """
    try:
        card = json.loads(text or "")
    except ValueError:
        card = None
    if not isinstance(card, dict) or not all(isinstance(card.get(name), dict) for name in _NESTED):
        raise PatchloomError(f"{path} is there already, and embed did not write it: choose another --to, or remove it")
    return card


def differences(mine: Card, other: Card) -> list[str]:
    """Names of what two cards say otherwise, `COUNTS` and the encoder's name aside; that of the weights comes first."""
    flat, its = _flat(mine), _flat(other)
    names = [name for name in dict.fromkeys([*flat, *its]) if flat.get(name) != its.get(name)]
    names = [name for name in names if name not in (*COUNTS, _RENAMED)]
    return sorted(names, key=lambda name: name != "encoder weights_sha256")


def _flat(card: Card) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in card.items():
        # all of them have names and sizes
        found |= {f"{name} {key}": one for key, one in value.items()} if name in _NESTED else {name: value}
    return found
