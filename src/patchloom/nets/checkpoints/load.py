"""A file of weights alone as an encoder: of which model it is, what is in it, and how its images are normalised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from patchloom.errors import PatchloomError, listing
from patchloom.nets.build import EncoderSpec, PositionKind, build_encoder
from patchloom.nets.checkpoints.format import (
    EncoderCard,
    is_encoder_file,
    read_encoder_card,
    stock_encoder,
    weights_file,
)
from patchloom.nets.checkpoints.papers import (
    ForeignCheckpoint,
    LoadedWeights,
    depth_of,
    load_published,
    position_axis_order,
    recognise,
    whole_root,
)
from patchloom.nets.checkpoints.read import (
    AGREEMENT,
    ANY_PROGRAM,
    BEYOND_MASKING_PROGRAM,
    ENCODER,
    EXTREMA_PROGRAM,
    IMAGENET,
    PIXEL_DECODER,
    POSITION_DECODER,
    TEACHER_PREFIX,
    Program,
    read_states,
)
from patchloom.nets.checkpoints.resize import POSITIONS_KEY, PROJECTION_KEY, State, format_grid
from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.heads import InstanceHead, Stem, Use
from patchloom.nets.swin import Encoder, patch_embedding
from patchloom.sizes import compact

# What a file of an authors' program has beside the encoder, given to the task that goes on with it.


# what is taken as a whole or not at all, by our names and in words; a teacher's only with the student's
_PARTS = (
    ("position_token", "[MASK] position token"),
    ("mask_token", "mask token"),
    (f"{POSITION_DECODER}.", "position decoder"),
    (f"{PIXEL_DECODER}.", "pixel decoder"),
    (f"{AGREEMENT}.instance_head.", "class attention"),
    (f"{AGREEMENT}.projection.", "projection"),
    (f"{AGREEMENT}.prediction.", "prediction"),
    (f"{TEACHER_PREFIX}.instance_head.", "teacher's class attention"),
    (f"{TEACHER_PREFIX}.projection.", "teacher's projection"),
)


def inherit(foreign: ForeignCheckpoint, task: nn.Module, own_task: bool, source: str) -> list[str]:
    """Put decoders, heads, tokens and teacher of a file into a task in place; and say what was done, in sentences."""
    program, rest = foreign.program, foreign.rest()
    there = [words for beginning, words in _PARTS if any(name.startswith(beginning) for name in rest)]
    teacher = foreign.beginning(f"{TEACHER_PREFIX}.{ENCODER}")
    there += ["teacher's encoder"] * bool(teacher)
    if not there or not own_task:
        ends = f": --task {program.task} goes on with them" if program.task else ""
        return [f"Beside the encoder it has {', '.join(there)}, which are left out{ends}."] if there else []
    taken: State = {}
    done, left = [], []
    # fixed positions of a decoder are in no state dict, unless they are others than ours
    own = task.state_dict() | {name: one for name, one in task.named_buffers() if name == f"{PIXEL_DECODER}.positions"}
    for beginning, words in _PARTS:
        theirs = {name: value for name, value in rest.items() if name.startswith(beginning)}
        mine = {name: value for name, value in own.items() if name.startswith(beginning)}
        student = f"{AGREEMENT}{beginning.removeprefix(TEACHER_PREFIX)}"
        if beginning.startswith(TEACHER_PREFIX) and not theirs:  # a teacher begins as its student does
            theirs = {
                beginning + name.removeprefix(student): one for name, one in taken.items() if name.startswith(student)
            }
        why = _misfit(beginning, theirs, mine, task, foreign)
        if beginning.startswith(TEACHER_PREFIX) and not any(name.startswith(student) for name in taken):
            why = why or "the student's is left out, too"
        if theirs and mine and not why:
            taken |= theirs
            done.append(words)
        elif theirs:
            left.append(f"{words} ({why if mine else 'here there is none'})")
        elif mine:
            left.append(f"{words} (not in the file, so as initialised)")
    if f"{PIXEL_DECODER}.positions" in taken:
        cast(MAEDecoder, _module(task, PIXEL_DECODER)).keep_positions()
    task.load_state_dict(taken, strict=False)
    copy = _module(task, f"{TEACHER_PREFIX}.{ENCODER.rstrip('.')}")
    if teacher and isinstance(copy, VisionTransformer):
        load_published(copy, source, weights=teacher)
        done.append("teacher's encoder")
    lines = [f"Taken besides, of {program.name}: {', '.join(done)}."] if done else []
    return lines + ([f"Left: {'; '.join(left)}."] if left else [])


def _module(task: nn.Module, name: str) -> nn.Module | None:
    return dict(task.named_modules()).get(name)


def _misfit(beginning: str, theirs: State, mine: State, task: nn.Module, foreign: ForeignCheckpoint) -> str:
    """Why a part does not fit, with what to do; "" if it does."""
    decoder = _module(task, beginning.rstrip("."))
    if isinstance(decoder, Decoder) and (advice := _other_decoder(beginning, theirs, mine, decoder, foreign)):
        return advice
    if not theirs or not mine:
        return ""
    if beginning.endswith("instance_head.") and (depth := depth_of(theirs, beginning)) != depth_of(mine, beginning):
        return f"it is {depth} deep: give --task.attention_blocks {depth} to take it"
    for name in sorted({*theirs, *mine} - {f"{PIXEL_DECODER}.positions"}):
        if name not in theirs or name not in mine:
            where = "here" if name in theirs else "there"
            return f"{where} is no {name.removeprefix(beginning)}"
        if theirs[name].shape != mine[name].shape:
            sizes = f"{format_grid(theirs[name].shape)} there and {format_grid(mine[name].shape)} here"
            return f"{name.removeprefix(beginning) or 'it'} is {sizes}"
        if mine[name].is_floating_point() and not (theirs[name].is_floating_point() and theirs[name].isfinite().all()):
            return f"{name.removeprefix(beginning) or 'it'} has values that are not finite floating-point numbers"
    positions = f"{PIXEL_DECODER}.positions"
    if positions in theirs and theirs[positions].shape != mine[positions].shape:
        return f"its positions are of {len(theirs[positions])} patches, and here are {len(mine[positions])}"
    return ""


def _other_decoder(beginning: str, theirs: State, mine: State, decoder: Decoder, foreign: ForeignCheckpoint) -> str:
    """What is other about a decoder's width, depth or heads, with the options that give the same."""
    norm = f"{beginning}norm.weight"
    if norm not in theirs or norm not in mine or not theirs[norm].ndim:
        return ""
    width, depth = len(theirs[norm]), depth_of(theirs, beginning)
    heads = foreign.program.decoder_heads.get(width, decoder.heads)
    pixels_beside = beginning == f"{PIXEL_DECODER}." and foreign.program.task == "droppos"
    give = {
        "decoder_width": (width, len(mine[norm])),
        "pixel_decoder_depth" if pixels_beside else "decoder_depth": (depth, depth_of(mine, beginning)),
        "decoder_heads": (heads, decoder.heads),
    }
    options = [f"--task.{name} {value}" for name, (value, here) in give.items() if value != here]
    if not options:
        return ""
    return f"it is {width} wide and {depth} deep with {heads} heads: give {' '.join(options)} to take it"


# Of which model weights are. Width, depth and patches can be read off them; heads follow the habit of the field.


# of a width: timm's name, the depth, and attention heads (Touvron et al. 2021; Dosovitskiy et al. 2021, Table 1)
_USUAL = {
    192: ("vit_tiny_patch16_224", 12, 3),
    384: ("vit_small_patch16_224", 12, 6),
    768: ("vit_base_patch16_224", 12, 12),
    1024: ("vit_large_patch16_224", 24, 16),
    1280: ("vit_huge_patch14_224", 32, 16),
}


class Architecture(NamedTuple):
    """The model that weights seem to be of.

    Attributes:
        model: timm's name of one of the same width, depth and patches, or else of the nearest.
        options: what differs from it, as `patchloom.nets.build.EncoderSpec` takes it.
        patch_size: side of a patch in pixels.
        side: height and width of the images in pixels.
        channels: of the images.
        positions: sincos for fixed embeddings of whatever kind, learned, or none.
        width, depth, heads: of the blocks; heads leave no trace in weights, so they are assumed.
    """

    model: str
    options: dict[str, Any]
    patch_size: int
    side: int
    channels: int
    positions: PositionKind
    width: int
    depth: int
    heads: int

    def __str__(self) -> str:
        return f"{self.width} wide, {self.depth} deep, patches of {self.patch_size} pixels"


def infer_architecture(weights: State, program: Program | None = None) -> Architecture | None:
    """What weights tell of their model; None for a width or depth at which the number of heads cannot be assumed."""
    projection, first = weights.get(PROJECTION_KEY), weights.get("blocks.0.mlp.fc1.weight")
    if projection is None or projection.ndim != 4 or first is None or first.ndim != 2:
        return None
    width, channels, p, across = projection.shape
    if any(weights[name].ndim != 3 for name in ("cls_token", "reg_token") if name in weights):
        return None
    depth = depth_of(weights)
    if width not in _USUAL or p != across or first.shape[1] != width:
        return None
    model, usual_depth, usual_heads = _USUAL[width]
    if depth != usual_depth and program is None:
        return None
    side = _grid_side(weights, p)
    if not side:
        return None
    heads = usual_heads if program is None else program.heads.get(width, usual_heads)
    options: dict[str, Any] = {}
    if depth != usual_depth:
        options["depth"] = depth
    if heads != usual_heads:
        options["num_heads"] = heads
    if len(first) != 4 * width:
        options["mlp_ratio"] = len(first) / width
    if "cls_token" not in weights:
        options["class_token"] = False
    if "reg_token" in weights:
        options["reg_tokens"] = weights["reg_token"].shape[1]
    if "blocks.0.ls1.gamma" in weights:
        options["init_values"] = 1e-5 if program is None else program.layer_scale
    positions = positions_of(weights, program)
    named = re.sub(r"patch\d+", f"patch{p}", model)
    return Architecture(
        named if timm.is_model(named) else model, options, p, p * side, channels, positions, width, depth, heads
    )


def positions_of(weights: State, program: Program | None) -> PositionKind:
    """Whether weights have positions, and whether these are fixed: as `Architecture` says it."""
    if POSITIONS_KEY not in weights:
        return "none"
    return "sincos" if program is BEYOND_MASKING_PROGRAM or position_axis_order(weights[POSITIONS_KEY]) else "learned"


def _grid_side(weights: State, p: int) -> int:
    """Patches along an image, as the position embeddings tell; those of 224 pixels where there are none."""
    table = weights.get(POSITIONS_KEY)
    if table is None:
        return 224 // p
    if table.ndim != 3:
        return 0
    tokens = [weights[name].shape[1] for name in ("cls_token", "reg_token") if name in weights]
    without = (sum(tokens), sum(tokens[:1]), 0)  # entries that are not of patches
    return next((side for count in without if (side := whole_root(table.shape[1] - count))), 0)


def load_bare_weights(path: Path, model: str | None = None) -> tuple[Encoder, EncoderCard]:
    """An encoder in eval mode, of a file that holds weights alone, and its card, whose note says what was done."""
    if model is not None:
        stock_encoder(model)
    foreign, shape = read_foreign(path)
    program = foreign.program if foreign else None
    spec: EncoderSpec | None = None
    with torch.random.fork_rng(devices=[]):
        if model is not None:
            vit = cast(Encoder, timm.create_model(model, pretrained=False, num_classes=0))
        elif foreign is None or program is None or shape is None:
            raise PatchloomError(_no_model(path, shape))
        else:
            sizes = (shape.side, shape.side), shape.patch_size, shape.channels
            spec = EncoderSpec(shape.model, *sizes, positions=shape.positions, options=shape.options)
            vit = build_encoder(spec)
            model_of = f"{shape.model} as its sizes tell"
    called = model or model_of
    done = load_published(vit, path, foreign=foreign)
    _refuse_parts(path, called, done, shape if program and model else None)
    if program is not None and (model is None or "." not in model):
        (mean, std), by = IMAGENET, f"{program.name} does"
    else:
        about = cast(dict[str, Any], vit.pretrained_cfg)
        (mean, std), by = (tuple(about[name]) for name in ("mean", "std")), f"timm does it for {model}"
    notes = done.sentences()
    if spec is not None and shape is not None:
        notes.append(describe_assumptions(shape))
    notes.append(f"Images are normalised as {by}: {statistics_in_words(mean, std)}.")
    task = f"timm:{model}" if spec is None or program is None else program.name
    return vit.eval(), EncoderCard(spec, mean, std, task, path.name.partition(".")[0], note=" ".join(notes))


def read_foreign(path: Path) -> tuple[ForeignCheckpoint | None, Architecture | None]:
    """A file of an authors' program, or None; and the model of which its weights, or other ones, seem to be."""
    states = read_states(path)
    foreign = recognise(states)
    if foreign is not None:
        return foreign, infer_architecture(foreign.encoder(foreign.program.evaluated), foreign.program)
    other = recognise(states, (ANY_PROGRAM,))
    return None, None if other is None else infer_architecture(other.encoder("student"))


def load_bare_module(path: Path, use: Use) -> nn.Module | None:
    """What ExtreMA's files have beside the encoder that is good for ``use``, in eval mode; None of any other file.

    That is the class attention, or the first layer of the projection, of the same net as the encoder.
    """
    foreign, shape = read_foreign(path)
    if foreign is None or shape is None or foreign.program is not EXTREMA_PROGRAM:
        return None
    head, first = (foreign.beginning(f"{TEACHER_PREFIX}.{part}.") for part in ("instance_head", "projection"))
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


def describe_assumptions(shape: Architecture) -> str:
    """What was read off the weights, and what was assumed, in a sentence."""
    return (
        f"Of which model they are was read off the weights ({shape}); {shape.heads} attention heads are assumed, which "
        "leave no trace in them."
    )


def _no_model(path: Path, shape: Architecture | None) -> str:
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


def _refuse_parts(path: Path, called: str, done: LoadedWeights, shape: Architecture | None) -> None:
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
    source: str | Path,
    model: str | None = None,
    read: tuple[ForeignCheckpoint | None, Architecture | None] | None = None,
) -> dict[str, Any] | None:
    """The model that a source says it is of, without fetching its weights."""
    if str(source).startswith("timm:"):
        return _stock_shape(str(source).removeprefix("timm:"))
    path = weights_file(source)
    if is_encoder_file(path):
        spec = read_encoder_card(path).own_spec
        return {"name": spec.model, "patch_size": spec.patch_size, "positions": spec.positions, "options": spec.options}
    named = None if model == "auto" else model
    if named is not None and not timm.is_model(named.split(".")[0]):
        return None
    foreign, shape = read or read_foreign(path)
    if named is not None:
        fixed = foreign is not None and positions_of(foreign.encoder("student"), foreign.program) == "sincos"
        return _stock_shape(named) | ({"positions": "sincos", "read_off": ("positions",)} if fixed else {})
    if shape is None:
        return None
    found = {"name": shape.model, "patch_size": shape.patch_size, "options": shape.options}
    if shape.positions != "none":  # else they are the task's to choose
        found["positions"] = shape.positions
    return found | {"read_off": tuple(found)}


def _stock_shape(name: str) -> dict[str, Any]:
    stock = stock_encoder(name)
    positions = "learned" if POSITIONS_KEY in stock.state_dict() else "none"
    patch = compact(patch_embedding(stock).patch_size)
    return {"name": name.split(".")[0], "patch_size": patch, "positions": positions, "options": {}}
