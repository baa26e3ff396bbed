"""Which pictures of an encoder there are, and how those that a user names are drawn."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch

from patchloom.calls import PathLike
from patchloom.errors import PatchloomError
from patchloom.hints import listing, suggestion
from patchloom.look.encoder.asked import UNTRAINED, Asked, Draw, NamedEncoder, Place
from patchloom.nets.encode import input_size
from patchloom.nets.heads import InstanceHead
from patchloom.nets.hierarchical import Encoder, level_count
from patchloom.nets.variants import at_size
from patchloom.nets.weights import EncoderCard, untrained_twin
from patchloom.runs.encoder import load_encoder, load_extra_module

TASK, ALL = "task", "all"
# what each is called, and who draws it; imported when it is asked for
PICTURES: Mapping[str, str] = {
    "attention": "patchloom.look.encoder.attention.draw_attention",
    "relative": "patchloom.look.encoder.relative.draw_relative",
    "features": "patchloom.look.encoder.components.draw_features",
    "correlation": "patchloom.look.encoder.correlation.draw_correlation",
    "depth": "patchloom.look.encoder.depth.draw_depth",
    "neighbours": "patchloom.look.encoder.neighbours.draw_neighbours",
    "retrieval": "patchloom.look.encoder.retrieval.draw_retrieval",
    "inversion": "patchloom.look.encoder.inversion.draw_inversion",
}


def names_of(what: str | Sequence[str]) -> list[str]:
    """The pictures that are meant, `TASK` among them or not.

    Args:
        what: names, or one text of names between commas; `ALL` for all of them.

    Raises:
        PatchloomError: there is no such picture.
    """
    words = [word.strip() for word in (what.split(",") if isinstance(what, str) else what)]
    known = [TASK, *PICTURES, ALL]
    for word in words:
        if word not in known:
            raise PatchloomError(
                f"--what {word}: there is no such picture{suggestion(word, known, ':')} it takes {listing(known)}"
            )
    return [TASK, *PICTURES] if ALL in words else list(dict.fromkeys(words))


def numbers_of(blocks: str | int | Sequence[int] | None, vit: Encoder) -> tuple[int, ...] | None:
    """Numbers of blocks, from 1, such as those of ``3,12``; None where none are named.

    Raises:
        PatchloomError: what is no number of a block of this encoder.
    """
    if blocks is None:
        return None
    words = blocks.split(",") if isinstance(blocks, str) else [blocks] if isinstance(blocks, int) else blocks
    there = range(1, level_count(vit) + 1)
    numbers = tuple(int(word) if str(word).strip().isdecimal() else 0 for word in words)
    if not numbers or not set(numbers) <= set(there):
        raise PatchloomError(f"--blocks takes numbers from 1 to {len(there)}, such as 1,{len(there)}, not {blocks}")
    return tuple(sorted(set(numbers)))


def places_of(query: str | Sequence[float] | None, size: tuple[int, int], most: int = 1) -> tuple[Place, ...]:
    """Return the points of an image of ``size`` (h, w) that a query such as ``80,40`` names: x, y in pixels.

    Several stand between semicolons, as in ``80,40;20,60``.

    Raises:
        PatchloomError: it is none, or too many, or one lies outside.
    """
    if query is None:
        return ()
    h, w = size
    try:
        numbers = [float(one) for one in (query.replace(";", ",").split(",") if isinstance(query, str) else query)]
    except ValueError:
        numbers = []
    places = tuple(Place(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=False))
    if len(numbers) == 2 * len(places) > 2 * most:
        raise PatchloomError(
            f"--query {query} has {len(places)} points: give {'one' if most == 1 else f'{most} or fewer'}"
            f"{', or --what attention --heads mean alone, which takes several' if most == 1 else ''}"
        )
    if not places or len(numbers) % 2 or not all(0 <= one.x < w and 0 <= one.y < h for one in places):
        raise PatchloomError(
            f"--query takes x,y in pixels of what the encoder is given, {w} wide and {h} high, such as "
            f"{w // 2},{h // 2}: not {query}"
        )
    return places


def named_encoder(run: PathLike, model: str | None, size: tuple[int, int] | None, device: torch.device) -> NamedEncoder:
    """An encoder as it is looked at.

    Args:
        run, model: as `load_encoder` takes them.
        size: (h, w) of the images, if it is to be another one than its own.
        device: where it goes.

    Raises:
        PatchloomError: no encoder there, or a size that its patches do not divide.
    """
    vit, card = load_encoder(run, model)
    head = load_extra_module(run, "pooling")
    return _sized(card.name, vit, card, head if isinstance(head, InstanceHead) else None, size, device)


def _sized(
    name: str,
    vit: Encoder,
    card: EncoderCard,
    head: InstanceHead | None,
    size: tuple[int, int] | None,
    device: torch.device,
) -> NamedEncoder:
    if size is not None and size != input_size(vit):
        if card.sound is not None:
            raise PatchloomError(f"--img_size is for images, and {card.name} is an encoder of recordings: leave it out")
        vit = at_size(vit, card, size)
    return NamedEncoder(name, vit.to(device).eval(), card, None if head is None else head.to(device).eval())


def untrained(encoder: NamedEncoder, seed: int, device: torch.device) -> NamedEncoder:
    """The untrained twin of an encoder, at its size."""
    twin, fresh = untrained_twin(encoder.card, encoder.head, seed)
    return _sized(UNTRAINED, twin, encoder.card, fresh, input_size(encoder.vit), device)


def told_apart(places: Sequence[PathLike], found: Sequence[NamedEncoder]) -> list[NamedEncoder]:
    """Encoders that can stand beside one another; those of one name, or called untrained, are named by their places.

    Raises:
        PatchloomError: a place is named twice, or not all encoders are given the same.
    """
    named = [str(Path(place)) for place in places]
    twice = [place for place, times in Counter(named).items() if times > 1]
    if twice:
        raise PatchloomError(f"{twice[0]} is named twice: name each encoder once")
    for other in found[1:]:
        if other.card.sound != found[0].card.sound:
            raise PatchloomError(
                f"{other.name} cannot stand beside {found[0].name}: one of them is of recordings, and the other of "
                "images, or of recordings that become pictures otherwise"
            )
    times = Counter([UNTRAINED, *(one.name for one in found)])
    return [one._replace(name=place) if times[one.name] > 1 else one for place, one in zip(named, found, strict=True)]


@contextmanager
def or_left_out(name: str, lenient: bool) -> Iterator[None]:
    """Leave a picture out with a sentence, if ``lenient``, where it cannot be drawn."""
    try:
        yield
    except PatchloomError as problem:
        if not lenient:
            raise
        print(f"{name} is left out: {problem}", file=sys.stderr)


def draw_pictures(names: Sequence[str], asked: Asked, lenient: bool) -> list[Path]:
    """Draw pictures of an encoder.

    Args:
        names: of `PICTURES`.
        asked: encoder, images and folder.
        lenient: what makes no sense for this encoder is left out with a sentence.

    Returns:
        The files.

    Raises:
        PatchloomError: a picture that cannot be drawn, unless ``lenient``.
    """
    files: list[Path] = []
    for name in names:
        module, _, function = PICTURES[name].rpartition(".")
        draw: Draw = getattr(import_module(module), function)
        with or_left_out(name, lenient):
            files += draw(asked)
    return files
