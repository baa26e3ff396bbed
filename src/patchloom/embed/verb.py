"""``embed``: the features of every image as a file, made a part at a time, and the nearest images in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from patchloom.calls import PathLike, checked
from patchloom.data import DataLike
from patchloom.data.sound.hearing import heard_by
from patchloom.embed.card import card_of
from patchloom.embed.files import format_of
from patchloom.embed.making import make, there, vector_of
from patchloom.embed.near import nearest, open_one, rows_of
from patchloom.embed.parts import Parts
from patchloom.embed.told import Embedded
from patchloom.embed.vectors import LAST, Encoding, Tokens, layer_named, shape_of, taker
from patchloom.errors import PatchloomError
from patchloom.evaluate.settings import EvalSettings, open_and_tell, tell_colours, telling
from patchloom.runs.encoder import check_model, load_encoder, load_extra_module
from patchloom.waiting import Waiting


@checked
def embed(
    run: PathLike,
    data: DataLike,
    *,
    to: str | Path | None = None,
    pooling: Tokens = "mean",
    layer: int | str = LAST,
    dtype: Literal["float32", "float16"] = "float32",
    near: str | Path | None = None,
    top: int = 10,
    device: str = "auto",
    batch_size: int | Literal["auto"] = "auto",
    workers: int | Literal["auto"] = "auto",
    model: str | None = None,
) -> Embedded:
    """Write the features of every image to a file that other programs read, with how they were made inside.

    They are what the evaluations are given. A part at a time reaches the disc; the same command goes on after a kill,
    and ends with the same bytes.

    Args:
        run: a run's folder, an encoder's ``.safetensors`` file, or ``timm:NAME``.
        data: images of any source, all of its splits, with or without labels.
        to: the file; its ending says how it is written: .parquet (by pyarrow, an extra), .npz or .safetensors.
        pooling: mean of the patch tokens, class token, prefix (mean of class token and registers), both mean and class
            token, instance (of an encoder with such a head), or all patches.
        layer: number of a block, from 1, or embedding; norm is what the encoder gives at its end.
        dtype: of the numbers that are written.
        near: an image, whose nearest in the file are printed.
        top: how many of them.
        device: what computes: auto (a GPU where there is one), cpu, cuda, or another name that torch has for it.
        batch_size: images at once; auto is 256.
        workers: processes that read images; auto depends on the device, and is 0 where starting them does not pay.
        model: timm's name of the model, where the encoder is a file of weights alone.

    Returns:
        What is in the file, and the nearest.

    Raises:
        PatchloomError: no such encoder, images or layer; a file that is taken or cannot be written; or no room for it.
    """
    if to is None:
        raise PatchloomError("say with --to where the vectors go: FILE.parquet, FILE.npz or FILE.safetensors")
    if top < 1:
        raise PatchloomError(f"--top must be 1 or more, not {top}")
    settings = EvalSettings(device=device, batch_size=batch_size, workers=workers, model=model)
    settings.check()
    check_model(run, model)
    file = Path(to).expanduser()
    format_of(file)
    asked = None if near is None else open_one(near)
    vit, about = load_encoder(run, model)
    head = load_extra_module(run, "pooling") if pooling == "instance" else None
    named = layer_named(vit, layer)
    encoding = Encoding(vit, about, taker(vit, head, pooling, named), settings)
    one = None if asked is None else heard_by(asked, about.sound, about.name).train
    with telling():
        opened = heard_by(open_and_tell(data), about.sound, about.name)
        tell_colours(opened.train, about)
    parts = {"train": opened.train} if opened.test is None else {"train": opened.train, "test": opened.test}
    parts |= {name: source for name, source in opened.others.items() if name not in parts}
    sources = parts if len(parts) > 1 else {"all": opened.train}
    shape = shape_of(vit, about, encoding.take)
    if head is not None:
        head.to(settings.at)
    with Waiting("looking at the encoder and the images"):
        how = {"pooling": pooling, "layer": named, "shape": shape, "dtype": dtype}
        card = card_of(vit, about, head, sources, settings, **how)
    written = Parts(file, sources, shape, np.dtype(dtype), settings.at_once)
    done = there(file, card, written) or make(file, card, written, encoding)
    done = replace(done, notes=(about.note, *done.notes) if about.note else done.notes)
    if one is None or near is None:
        return done
    with Waiting(f"looking for the nearest in {file}"):
        found = nearest(file, vector_of(one, encoding, dtype), top, rows_of(near, sources))
    return replace(done, near=str(near), neighbours=tuple(found))
