"""The verb ``look``: pictures of a run's pretext task and of an encoder's features."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from patchloom.arguments import PathLike
from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike, is_object_name
from patchloom.data.sources.open import absolute_name, open_data, open_stored
from patchloom.display import print_line
from patchloom.errors import PatchloomError, listing, suggestion
from patchloom.look.context import QUERIES, ImagePoint, LookRequest, NamedEncoder
from patchloom.look.task_pictures import draw_task, title_of
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.checkpoints.live import LiveEncoder
from patchloom.nets.encode import input_size
from patchloom.nets.finetune import at_size
from patchloom.nets.heads import InstanceHead
from patchloom.nets.swin import Encoder, level_count
from patchloom.options.declare import verb
from patchloom.options.verbs import TASK_PICTURES, Look
from patchloom.results.claims import START, UNTRAINED
from patchloom.runs.encoder import encoder_place, load_encoder, load_extra_module, load_start
from patchloom.runs.folder import RunFolder, data_slug
from patchloom.runs.held_out import own_held_out
from patchloom.runs.task import LoadedTask, load_task, step_of_weights
from patchloom.sizes import to_pair
from patchloom.system.device import usable_device

# The pictures of an encoder, and the options that select them.


ALL_PICTURES = "all"
# names of the pictures, and the functions that draw them, imported when needed
PICTURES: Mapping[str, str] = {
    "attention": "patchloom.look.attention.draw_attention",
    "relative": "patchloom.look.attention_distance.draw_relative",
    "features": "patchloom.look.pca.draw_features",
    "correlation": "patchloom.look.correlation.draw_correlation",
    "depth": "patchloom.look.layer_statistics.draw_depth",
    "neighbours": "patchloom.look.neighbours.draw_neighbours",
    "retrieval": "patchloom.look.retrieval.draw_retrieval",
    "inversion": "patchloom.look.inversion.draw_inversion",
}


def parse_pictures(what: str | Sequence[str]) -> list[str]:
    """Return the names of the requested pictures, which may include `TASK_PICTURES`."""
    words = [word.strip() for word in (what.split(",") if isinstance(what, str) else what)]
    known = [TASK_PICTURES, *PICTURES, ALL_PICTURES]
    for word in words:
        if word not in known:
            raise PatchloomError(
                f"--what {word}: there is no such picture{suggestion(word, known, ':')} choose from {listing(known)}"
            )
    return [TASK_PICTURES, *PICTURES] if ALL_PICTURES in words else list(dict.fromkeys(words))


def parse_blocks(blocks: str | int | Sequence[int] | None, vit: Encoder) -> tuple[int, ...] | None:
    """Return numbers of blocks, from 1, such as those of ``3,12``; None if none are given."""
    if blocks is None:
        return None
    words = blocks.split(",") if isinstance(blocks, str) else [blocks] if isinstance(blocks, int) else blocks
    there = range(1, level_count(vit) + 1)
    numbers = tuple(int(word) if str(word).strip().isdecimal() else 0 for word in words)
    if not numbers or not set(numbers) <= set(there):
        raise PatchloomError(f"--blocks takes numbers from 1 to {len(there)}, such as 1,{len(there)}, not {blocks}")
    return tuple(sorted(set(numbers)))


def parse_points(query: str | Sequence[float] | None, size: tuple[int, int], most: int = 1) -> tuple[ImagePoint, ...]:
    """Return the points (x, y) in an image of ``size`` (h, w) of a query such as ``80,40``, in pixels.

    Semicolons separate several points, as in ``80,40;20,60``.
    """
    if query is None:
        return ()
    h, w = size
    try:
        numbers = [float(one) for one in (query.replace(";", ",").split(",") if isinstance(query, str) else query)]
    except ValueError:
        numbers = []
    places = tuple(ImagePoint(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=False))
    if len(numbers) == 2 * len(places) > 2 * most:
        raise PatchloomError(
            f"--query {query} has {len(places)} points: give {'one' if most == 1 else f'{most} or fewer'}"
            f"{', or only --what attention --heads mean, which takes several' if most == 1 else ''}"
        )
    if not places or len(numbers) % 2 or not all(0 <= one.x < w and 0 <= one.y < h for one in places):
        raise PatchloomError(
            f"--query {query} is not a point x,y in pixels of the encoder's input, {w} wide and {h} high: give one, "
            f"such as {w // 2},{h // 2}"
        )
    return places


def named_encoder(run: PathLike, model: str | None, size: tuple[int, int] | None, device: torch.device) -> NamedEncoder:
    """Load an encoder for pictures."""
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
            raise PatchloomError(f"--img_size is only for images, and {card.name} encodes recordings: leave it out")
        vit = at_size(vit, card, size)
    return NamedEncoder(name, vit.to(device).eval(), card, None if head is None else head.to(device).eval())


def untrained_encoder(encoder: NamedEncoder, seed: int, device: torch.device) -> NamedEncoder:
    """Return an untrained encoder of the same architecture and size."""
    twin, fresh = untrained_twin(encoder.card, encoder.head, seed)
    return _sized(UNTRAINED, twin, encoder.card, fresh, input_size(encoder.vit), device)


def disambiguate_encoders(places: Sequence[PathLike], found: Sequence[NamedEncoder]) -> list[NamedEncoder]:
    """Return comparable encoders with unique names: paths replace names that coincide or are "untrained"."""
    named = [str(Path(place)) for place in places]
    twice = [place for place, times in Counter(named).items() if times > 1]
    if twice:
        raise PatchloomError(f"{twice[0]} is given twice: give each encoder once")
    for other in found[1:]:
        if other.card.sound != found[0].card.sound:
            raise PatchloomError(
                f"{other.name} cannot be compared with {found[0].name}: their inputs differ (images or recordings, or "
                "other spectrograms)"
            )
    times = Counter([UNTRAINED, *(one.name for one in found)])
    return [one._replace(name=place) if times[one.name] > 1 else one for place, one in zip(named, found, strict=True)]


@contextmanager
def or_left_out(name: str, lenient: bool) -> Iterator[None]:
    """Report a picture that cannot be drawn on stderr if ``lenient``, instead of raising."""
    try:
        yield
    except PatchloomError as problem:
        if not lenient:
            raise
        print_line(f"{name} is left out: {problem}", file=sys.stderr)


def draw_pictures(names: Sequence[str], asked: LookRequest, lenient: bool) -> list[Path]:
    """Draw pictures of an encoder."""
    files: list[Path] = []
    for name in names:
        module, _, function = PICTURES[name].rpartition(".")
        with or_left_out(name, lenient):
            files += getattr(import_module(module), function)(asked)
    return files


# options that affect only some pictures of an encoder
_HEEDED = {
    "query": ("attention", "correlation"),
    "heads": ("attention",),
    "exemplar": ("retrieval",),
    "blocks": ("attention", "relative", "features", "inversion"),
    "steps": ("inversion",),
    "beside": ("relative", "depth", "retrieval"),
    **dict.fromkeys(("img_size", "model"), tuple(PICTURES)),
}


@verb(Look)
def look(options: Look) -> list[Path]:
    """Draw what a run's pretext task hides and what the model predicts, or what an encoder has learnt.

    Returns:
        Paths of the files written.

    Raises:
        PatchloomError: if there is no run or encoder, a checkpoint is damaged, the images do not fit, or there is no
            such picture.
    """
    run = encoder_place(options.run, options.mean, options.std)
    names = parse_pictures(options.what)
    if TASK_PICTURES in names and options.what != ALL_PICTURES and isinstance(run, LiveEncoder):
        raise PatchloomError(f"{run} has no run with a task to draw: give what='attention', or another of its pictures")
    if options.task is not None and TASK_PICTURES not in names:
        raise PatchloomError(
            f"--task has no effect on {listing(names, 'and')}: leave it out, or add {TASK_PICTURES} to --what"
        )
    for name, heeding in _HEEDED.items():
        if getattr(options, name) is not None and not set(heeding) & set(names):
            raise PatchloomError(f"--{name} is only for --what {listing(heeding)}: leave it out, or add one of them")
    pictures = [name for name in names if name != TASK_PICTURES]
    if not pictures:
        loaded = load_task(run, options.task)
        source, target = _images_for(run, loaded.card, options.data)
        target = Path(options.out) if options.out else target
        return _task_pictures(loaded, source, target, options.images, options.seed)
    at, beside = usable_device(options.device), options.beside
    size = None if options.img_size is None else to_pair(options.img_size)
    others = [] if beside is None else beside.split(",") if isinstance(beside, str) else beside
    places = [run, *(other.strip() for other in others)]
    found = [named_encoder(place, options.model if i == 0 else None, size, at) for i, place in enumerate(places)]
    encoder, *further = disambiguate_encoders(places, found)
    source, target = _images_for(run, encoder.card, options.data)
    several = QUERIES if options.heads == "mean" and pictures == ["attention"] else 1
    points = parse_points(options.query, input_size(encoder.vit), several)
    start = load_start(run)
    begun = [] if start is None else [_sized(START, *start, None, input_size(encoder.vit), at)]
    asked = LookRequest(
        encoder,
        source,
        Path(options.out) if options.out else target,
        (*begun, untrained_encoder(encoder, options.seed, at), *further),
        options.images,
        options.seed,
        points,
        options.heads or "each",
        None if options.exemplar is None else Path(options.exemplar),
        parse_blocks(options.blocks, encoder.vit),
        options.steps,
        at,
    )
    lenient, files = set(names) >= {TASK_PICTURES, *PICTURES}, list[Path]()
    if TASK_PICTURES in names:
        with or_left_out(TASK_PICTURES, lenient):
            files += _task_pictures(load_task(run, options.task), source, asked.folder, options.images, options.seed)
    files += draw_pictures(pictures, asked, lenient)
    if not files:
        raise PatchloomError(f"no picture of {encoder.name} could be drawn: see the reasons above")
    return files


def _images_for(run: str | Path, card: EncoderCard, data: DataLike | None) -> tuple[Source, Path]:
    """Return the images for pictures, given or held out by the run, and the folder for the pictures."""
    folder = RunFolder(run)
    if not folder.config.exists():
        if data is None:
            raise PatchloomError(f"{run} is not a run and has no images: give some, as in patchloom look {run} IMAGES")
        opened = with_encoder_sound(open_data(data), card.sound, card.name)
        return opened.test or opened.train, Path(f"pictures-{data_slug(card.name)}-{data_slug(data)}")
    settings = folder.read_config()
    own = data is None or absolute_name(data) == settings.data
    group = settings.group if own else None
    typed = f"patchloom look {folder.path} DATA"
    stored = (settings.data, os.fspath(folder.path), typed)
    opened = open_stored(*stored, group=group) if data is None else open_data(data, group=group)
    opened = with_encoder_sound(opened, card.sound, card.name)
    if own and is_object_name(settings.data):  # other objects may have the same name
        own = opened.train.fingerprint() == folder.read_data()["fingerprint"]
    if own or data is None:
        return own_held_out(folder, settings, opened.train).parts(opened.train)[1], folder.pictures
    return opened.test or opened.train, folder.path / f"pictures-{data_slug(data)}"


def _task_pictures(loaded: LoadedTask, source: Source, target: Path, images: int, seed: int) -> list[Path]:
    pretext, card, settings, folder, about = loaded
    done = step_of_weights(about)
    steps, rows = (done, about.get("steps", 0)), [row for row in about.get("rows", []) if int(row["step"]) <= done]
    doubt = folder.read_data().get("held_out_doubt", "")
    title = partial(title_of, folder.name, settings, steps, rows, doubt, noun=card.modality.noun)
    return draw_task(pretext, source, card, target, images=images, seed=seed, title=title)
