"""The verb ``look``: pictures of a run's task, and of what an encoder sees."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from patchloom.calls import PathLike, checked
from patchloom.data import DataLike, Source, is_given, lasting, open_data, open_stored
from patchloom.data.sound.hearing import heard_by
from patchloom.errors import PatchloomError
from patchloom.hints import listing
from patchloom.look.encoder.asked import QUERIES, Asked, Heads
from patchloom.look.encoder.drawn import (
    PICTURES,
    TASK,
    draw_pictures,
    named_encoder,
    names_of,
    numbers_of,
    or_left_out,
    places_of,
    told_apart,
    untrained,
)
from patchloom.look.pictures import draw_task, title_of
from patchloom.look.sheets import ROWS
from patchloom.machine import usable_device
from patchloom.nets.encode import input_size
from patchloom.nets.weights import EncoderCard
from patchloom.runs.folder import RunFolder, plain_name
from patchloom.runs.held_out import own_held_out
from patchloom.runs.settings import TaskLike
from patchloom.runs.task import Loaded, load_task, step_of_weights
from patchloom.sides import both

# options that only some pictures of an encoder heed
_HEEDED = {
    "query": ("attention", "correlation"),
    "heads": ("attention",),
    "exemplar": ("retrieval",),
    "blocks": ("attention", "relative", "features", "inversion"),
    "steps": ("inversion",),
    "beside": ("relative", "depth", "retrieval"),
}


@checked
def look(
    run: PathLike,
    data: DataLike | None = None,
    *,
    what: str | list[str] = TASK,
    out: str | Path | None = None,
    images: int = ROWS,
    seed: int = 0,
    task: TaskLike | None = None,
    query: str | list[float] | None = None,
    heads: Heads | None = None,
    exemplar: str | Path | None = None,
    blocks: str | int | list[int] | None = None,
    steps: int | None = None,
    beside: str | list[str] | None = None,
    img_size: int | tuple[int, int] | None = None,
    model: str | None = None,
    device: str = "auto",
) -> list[Path]:
    """Draw what a run's task withholds from images and what comes back, or what an encoder sees.

    Args:
        run: the folder of a run; for pictures of an encoder also a file of one, or timm:NAME.
        data: images of any source; its test split if it has one. The run's own held-out images, if absent.
        what: task, the pictures of the pretext task; or pictures of the encoder, several between commas: attention,
            relative, features, correlation, depth, neighbours, retrieval, inversion; or all.
        out: folder for the pictures; ``RUN/pictures`` for the run's own images, else ``RUN/pictures-DATA``; for a file
            or timm:NAME ``pictures-NAME-DATA``, here.
        images: how many, up to 8.
        seed: of what is withheld, and of the untrained encoder.
        task: FILE.py:CLASS, or the class, of a task of your own that the run does not find again, or that has changed.
        query: x,y in pixels of what the encoder is given, whose patch attention and correlation ask about; by default a
            salient one of each image. With ``heads`` mean up to four points, as in 80,40;20,60.
        heads: attention of each head, a sheet an image, or their mean in the last block for four patches of each image.
        exemplar: file of an image: retrieval looks for the crop of each image that is most like it.
        blocks: numbers of the blocks that are drawn, from 1, such as 3,12; by default each picture chooses.
        steps: of the fit of inversion; 3,000 as in the paper, or 300 on a CPU.
        beside: further encoders for relative, depth and retrieval, between commas; the untrained one always is there.
        img_size: height and width in pixels at which the encoder is looked at, if not its own.
        model: timm's name of the model, where the encoder is a file of weights alone.
        device: where pictures of the encoder are computed: auto, cpu, cuda, or another name that torch has for it.

    Returns:
        The files.

    Raises:
        PatchloomError: no run or encoder there, a damaged checkpoint, images that do not fit, or no such picture.
    """
    if not 1 <= images <= ROWS:
        raise PatchloomError(f"--images must be 1 to {ROWS}, which is what a sheet has room for, not {images}")
    names = names_of(what)
    options = {"query": query, "heads": heads, "exemplar": exemplar, "blocks": blocks, "steps": steps, "beside": beside}
    options["img_size"] = img_size
    _refuse_idle(names, options | {"model": model}, task)
    pictures = [name for name in names if name != TASK]
    if not pictures:
        loaded = load_task(run, task)
        source, target = _images_for(run, loaded.card, data)
        return _task_pictures(loaded, source, Path(out) if out else target, images, seed)
    at = usable_device(device)
    size = None if img_size is None else both(img_size)
    others = [] if beside is None else beside.split(",") if isinstance(beside, str) else beside
    places = [run, *(other.strip() for other in others)]
    found = [named_encoder(place, model if i == 0 else None, size, at) for i, place in enumerate(places)]
    encoder, *further = told_apart(places, found)
    source, target = _images_for(run, encoder.card, data)
    several = QUERIES if heads == "mean" and pictures == ["attention"] else 1
    points = places_of(query, input_size(encoder.vit), several)
    asked = Asked(
        encoder,
        source,
        Path(out) if out else target,
        (untrained(encoder, seed, at), *further),
        images,
        seed,
        points[0] if points else None,
        points,
        heads or "each",
        None if exemplar is None else Path(exemplar),
        numbers_of(blocks, encoder.vit),
        steps,
        at,
    )
    lenient, files = set(names) >= {TASK, *PICTURES}, list[Path]()
    if TASK in names:
        with or_left_out(TASK, lenient):
            files += _task_pictures(load_task(run, task), source, asked.folder, images, seed)
    files += draw_pictures(pictures, asked, lenient)
    if not files:
        raise PatchloomError(f"no picture of {encoder.name} could be drawn: what is wrong stands above")
    return files


def _refuse_idle(names: list[str], options: dict[str, Any], task: TaskLike | None) -> None:
    """Refuse options that change nothing in the pictures that are wanted.

    Raises:
        PatchloomError: there is one.
    """
    if task is not None and TASK not in names:
        raise PatchloomError(
            f"--task changes nothing in {listing(names, 'and')}: leave it out, or add {TASK} to --what"
        )
    for name, value in options.items():
        heeding = _HEEDED.get(name, tuple(PICTURES))
        if value is not None and not set(heeding) & set(names):
            raise PatchloomError(f"--{name} is for --what {listing(heeding)}: leave it out, or name one of them")
    if options["steps"] is not None and options["steps"] < 1:
        raise PatchloomError(f"--steps must be 1 or more, not {options['steps']}")


def _images_for(run: str | Path, card: EncoderCard, data: DataLike | None) -> tuple[Source, Path]:
    """Images for pictures, and the folder for them: given ones, or those that a run held out.

    Raises:
        PatchloomError: none are given, and the encoder is of no run; none there; or the run's own come from a command.
    """
    folder = RunFolder(run)
    if not folder.config.exists():
        if data is None:
            raise PatchloomError(f"{run} is no run, so it has no images of its own: patchloom look {run} IMAGES")
        opened = heard_by(open_data(data), card.sound, card.name)
        return opened.test or opened.train, Path(f"pictures-{plain_name(card.name)}-{plain_name(data)}")
    settings = folder.read_config()
    own = data is None or lasting(data) == settings.data
    group = settings.group if own else None
    if data is None:
        typed = f"patchloom look {folder.path} DATA"
        opened = open_stored(settings.data, os.fspath(folder.path), typed, group=group)
    else:
        opened = open_data(data, group=group)
    opened = heard_by(opened, card.sound, card.name)
    if own and is_given(settings.data):  # so are others of the same number
        own = opened.train.fingerprint() == folder.read_data()["fingerprint"]
    if own:
        return own_held_out(folder, settings, opened.train).parts(opened.train)[1], folder.pictures
    return opened.test or opened.train, folder.path / f"pictures-{plain_name(data)}"


def _task_pictures(loaded: Loaded, source: Source, target: Path, images: int, seed: int) -> list[Path]:
    pretext, card, settings, folder, about = loaded
    done = step_of_weights(about)
    steps, rows = (done, about.get("steps", 0)), [row for row in about.get("rows", []) if int(row["step"]) <= done]
    doubt = folder.read_data().get("held_out_doubt", "")
    title = partial(title_of, folder.name, settings, steps, rows, doubt)
    return draw_task(pretext, source, card, target, images=images, seed=seed, title=title)
