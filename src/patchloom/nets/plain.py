"""A file of weights alone as an encoder: of which model it is, what is in it, and how its images are normalised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.hints import listing
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.fitting import POSITIONS
from patchloom.nets.foreign import ANY, EXTREMA, IMAGENET, TEACHER
from patchloom.nets.heads import InstanceHead, Stem, Use
from patchloom.nets.public import Matched, load_public
from patchloom.nets.recognise import Foreign, depth_of, recognise
from patchloom.nets.shape import Shape, positions_of, shape_of
from patchloom.nets.states import read_states
from patchloom.nets.weights import EncoderCard, is_ours, read_card, stock_encoder, weights_file
from patchloom.sides import compact


def load_plain(path: Path, model: str | None = None) -> tuple[VisionTransformer, EncoderCard]:
    """An encoder in eval mode, of a file that holds weights alone, and its card, whose note says what was done.

    Args:
        path: what torch or safetensors saved, as for `load_public`.
        model: timm's name of the model, which has sizes and the statistics of its images. It may be left out for what
            the authors' own programs saved, of the usual sizes.

    Raises:
        PatchloomError: timm has no such model, or it cannot be served; the file cannot be read, or is not of it; its
            model is not known; or its blocks have parts that a plain ViT has not.
    """
    if model is not None:
        stock_encoder(model)
    foreign, shape = read_foreign(path)
    program = foreign.program if foreign else None
    with torch.random.fork_rng(devices=[]):
        if model is not None:
            spec, vit = None, timm.create_model(model, pretrained=False, num_classes=0)
        elif foreign is None or program is None or shape is None:
            raise PatchloomError(_no_model(path, shape))
        else:
            sizes = (shape.side, shape.side), shape.patch_size, shape.channels
            spec = EncoderSpec(shape.model, *sizes, positions=shape.positions, options=shape.options)
            vit = build_encoder(spec)
    called = model or f"{shape.model} as its sizes tell"
    done = load_public(vit, path, foreign=foreign)
    _refuse_parts(path, called, done, shape if program and model else None)
    if program is not None and (model is None or "." not in model):
        (mean, std), by = IMAGENET, f"{program.name} does"
    else:
        (mean, std), by = (tuple(vit.pretrained_cfg[name]) for name in ("mean", "std")), f"timm does it for {model}"
    notes = done.sentences()
    if spec is not None:
        notes.append(assumed(shape))
    notes.append(f"Images are normalised as {by}: {statistics_in_words(mean, std)}.")
    task = f"timm:{model}" if spec is None else program.name
    return vit.eval(), EncoderCard(spec, mean, std, task, path.name.partition(".")[0], note=" ".join(notes))


def read_foreign(path: Path) -> tuple[Foreign | None, Shape | None]:
    """A file of an authors' program, or None; and the model of which its weights, or other ones, seem to be."""
    states = read_states(path)
    foreign = recognise(states)
    if foreign is not None:
        return foreign, shape_of(foreign.encoder(foreign.program.evaluated), foreign.program)
    other = recognise(states, (ANY,))
    return None, None if other is None else shape_of(other.encoder("student"))


def plain_module(path: Path, use: Use) -> nn.Module | None:
    """What ExtreMA's files have beside the encoder that is good for ``use``, in eval mode; None of any other file.

    That is the class attention, or the first layer of the projection, of the same net as the encoder.

    Raises:
        PatchloomError: the file cannot be read, or is damaged.
    """
    foreign, shape = read_foreign(path)
    if foreign is None or shape is None or foreign.program is not EXTREMA:
        return None
    head, first = (foreign.beginning(f"{TEACHER}.{part}.") for part in ("instance_head", "projection"))
    try:
        if use == "pooling":
            module: nn.Module = InstanceHead(shape.width, shape.heads, depth_of(head))
            module.load_state_dict(head, strict=True)
        else:
            module = Stem.fresh(shape.width, len(first["0.weight"]), "instance")
            module.load_state_dict({name: first[name] for name in module.state_dict()}, strict=True)
    except (KeyError, RuntimeError, TypeError) as problem:
        raise PatchloomError(f"{path} lacks a part of ExtreMA's heads: take a whole checkpoint") from problem
    return module.eval()


def assumed(shape: Shape) -> str:
    """What was read off the weights, and what was assumed, in a sentence."""
    return (
        f"Of which model they are was read off the weights ({shape}); {shape.heads} attention heads are assumed, which "
        "leave no trace in them."
    )


def _no_model(path: Path, shape: Shape | None) -> str:
    if shape is None:
        return (
            f"{path} holds weights alone, of sizes that do not tell the number of attention heads: give its name in "
            "timm, such as --model vit_small_patch16_224"
        )
    tags = timm.list_pretrained(shape.model)
    listed = f", such as {listing(tags[-2:])}" if tags else ""
    return (
        f"{path} holds weights alone, of the size of {shape.model} ({shape}), and does not tell how images are "
        f"normalised: give its name in timm, --model {shape.model}, with the tag of these weights{listed}"
    )


def _refuse_parts(path: Path, called: str, done: Matched, shape: Shape | None) -> None:
    """Refuse an encoder that is partly at random, or lacks a part with which it was trained: it would be measured."""
    if done.lost:
        raise PatchloomError(
            f"{path} cannot be evaluated as a plain ViT: {done.why_not()}, so it would not be the encoder that was "
            "trained. pretrain --init takes it as a start"
        )
    deeper = [name for name in done.unexpected if re.search(r"(^|\.)blocks\.", name)]
    if not done.missing and not deeper:
        return
    what = f"lacks {done.missing[0]}" if done.missing else f"has {deeper[0]} besides"
    count = len(done.matched)
    raise PatchloomError(
        f"{path} is not {called}: {count} of the {count + len(done.missing)} weights match, and it {what}, so "
        + ("leave out --model, since its sizes are known" if shape else "give another --model")
    )


def statistics_in_words(mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    """Mean and deviation per channel."""
    first, second = (", ".join(f"{value:g}" for value in values) for values in (mean, std))
    return f"mean {first}; standard deviation {second}"


def timm_statistics(model: str) -> str | None:
    """Mean and deviation by which timm normalises the images of a model of its own, in words; None of any other."""
    if not timm.is_model(model.split(".")[0]) or (about := timm.models.get_pretrained_cfg(model)) is None:
        return None
    return statistics_in_words(about.mean, about.std)


def public_shape(
    source: str | Path, model: str | None = None, read: tuple[Foreign | None, Shape | None] | None = None
) -> dict[str, Any] | None:
    """The model that a source says it is of, without fetching its weights.

    Args:
        source: as for `load_public`.
        model: the name that a user gives the model of a file that only holds tensors; None or auto: it is read off
            them, if their sizes are usual ones.
        read: what `read_foreign` found in such a file; None if nobody has looked yet.

    Returns:
        ``name``, ``patch_size``, ``positions`` and ``options`` as `patchloom.nets.build.EncoderSpec` takes them, and
        ``read_off``, which of them were read off weights. None for a file that only holds tensors of unusual sizes,
        since the number of heads leaves no trace in them, unless ``model`` is one of timm's.

    Raises:
        PatchloomError: timm has no such model, it cannot be served, or there is no such file.
    """
    if str(source).startswith("timm:"):
        return _stock_shape(str(source).removeprefix("timm:"))
    path = weights_file(source)
    if is_ours(path):
        spec = read_card(path).spec
        return {"name": spec.model, "patch_size": spec.patch_size, "positions": spec.positions, "options": spec.options}
    named = model not in (None, "auto")
    if named and not timm.is_model(model.split(".")[0]):
        return None
    foreign, shape = read or read_foreign(path)
    if named:
        fixed = foreign is not None and positions_of(foreign.encoder("student"), foreign.program) == "sincos"
        return _stock_shape(model) | ({"positions": "sincos", "read_off": ("positions",)} if fixed else {})
    if shape is None:
        return None
    found = {"name": shape.model, "patch_size": shape.patch_size, "options": shape.options}
    if shape.positions != "none":  # else they are the task's to choose
        found["positions"] = shape.positions
    return found | {"read_off": tuple(found)}


def _stock_shape(name: str) -> dict[str, Any]:
    stock = stock_encoder(name)
    positions = "learned" if POSITIONS in stock.state_dict() else "none"
    patch = compact(stock.patch_embed.patch_size)
    return {"name": name.split(".")[0], "patch_size": patch, "positions": positions, "options": {}}
