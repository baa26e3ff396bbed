"""Checkpoints of other programs: recognition, and translation of their names to patchloom's.

One table has a row per program: marks that identify its files, and the name in a task of patchloom for each of its
names; the first prefix that fits counts. A name in parentheses is the reason why a weight is left out. Sources: the
programs as released by their authors. The golden vectors of MAE, DropPos, LUT, ExtreMA and Beyond Masking go through
these rows.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from patchloom.nets.checkpoints.read import State
from patchloom.nets.checkpoints.resize import POSITIONS_KEY, PROJECTION_KEY, square_grid
from patchloom.options.evaluate import Network
from patchloom.patches.positions import interleaved_sincos_1d, sincos_2d

MeanStd = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel, in [0, 1] units
NameRules = tuple[tuple[str, str], ...]

ENCODER, AGREEMENT = "encoder.", "questions.agreement"
TEACHER_PREFIX, PIXEL_DECODER, POSITION_DECODER = (
    f"{AGREEMENT}.teacher",
    "questions.pixels.decoder",
    "questions.positions.decoder",
)

TEACHER_ENCODER = f"{TEACHER_PREFIX}.{ENCODER}"

IMAGENET: MeanStd = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

_FIXED = "(fixed, and computed here)"

_MAE_DECODER: NameRules = (
    ("mask_token", f"{PIXEL_DECODER}.mask_token"),
    ("decoder_pos_embed", _FIXED),
    ("decoder_pred.", f"{PIXEL_DECODER}.answer."),
    ("decoder_", f"{PIXEL_DECODER}."),
)
_LABELS: NameRules = tuple((name, "(for labels)") for name in ("head.", "fc_norm.", "pooler.", "classifier."))


@dataclass(frozen=True)
class Program:
    """Program of a paper's authors, described by the contents of its files.

    Attributes:
        name: name of the program.
        marks: names, after a common prefix, that identify its files.
        names: pairs of prefixes of names, its own and patchloom's.
        task: task of patchloom that can continue with the weights beside the encoder; "" if none can.
        teacher: the same pairs for a separate state dict of the teacher, if its files have one.
        evaluated: the encoder whose frozen features the authors evaluate; all of them fine-tune the student.
        channels_last: whether its pixels of a patch run (row, column, channel); patchloom's run (channel, row,
            column).
        positions: halves of a fixed table of positions, if nothing else identifies the files: MAE's begins with the
            column, MoCo's with the row.
        heads: number of attention heads by width of the encoder, where it is not the usual one.
        decoder_heads: number of attention heads by width of the decoder.
        layer_scale: initial value of LayerScale, if it is used.
        saves_positions: whether its files have the encoder's positions; if not, they are fixed and computed here.
        statistics: mean and standard deviation that normalise its images.
    """

    name: str
    marks: tuple[str, ...]
    names: NameRules
    task: str = ""
    teacher: NameRules = ()
    evaluated: Network = "student"
    channels_last: bool = True
    positions: Literal["", "column first", "row first"] = ""
    heads: dict[int, int] = field(default_factory=dict)
    decoder_heads: dict[int, int] = field(default_factory=lambda: {512: 16})
    layer_scale: float = 1e-5
    saves_positions: bool = True
    statistics: MeanStd = IMAGENET


MAE_PROGRAM = Program(
    "MAE",
    marks=("decoder_embed.weight", "decoder_pred.weight", "mask_token"),
    names=(*_MAE_DECODER, ("", ENCODER)),
    task="mae",
)
DROPPOS_PROGRAM = Program(
    "DropPos",
    marks=("mask_pos_token", "decoder_pred.weight"),
    names=(
        ("mask_pos_token", "position_token"),
        ("decoder_pred.", f"{POSITION_DECODER}.answer."),
        ("decoder_", f"{POSITION_DECODER}."),
        ("mask_token", f"{PIXEL_DECODER}.mask_token"),
        ("aux_decoder_pos_embed", _FIXED),
        ("aux_decoder_pred.", f"{PIXEL_DECODER}.answer."),
        ("aux_decoder_", f"{PIXEL_DECODER}."),
        ("", ENCODER),
    ),
    task="droppos",
)
LUT_PROGRAM = Program(
    "LUT",
    marks=("decoder_pred.weight", "head.0.weight", "predictor.0.weight"),
    names=(
        ("head.", f"{AGREEMENT}.projection."),
        ("predictor.", f"{AGREEMENT}.prediction."),
        *_MAE_DECODER,
        ("", ENCODER),
    ),
    task="lut",
    teacher=(
        ("head.", f"{TEACHER_PREFIX}.projection."),
        ("predictor.", "(a teacher predicts nothing)"),
        ("mask_token", "(a teacher sees everything)"),
        ("decoder_", "(a teacher decodes nothing)"),
        ("", TEACHER_ENCODER),
    ),
)
EXTREMA_PROGRAM = Program(
    "ExtreMA",
    marks=("base_encoder.blocks_token.0.norm1.weight", "momentum_encoder.blocks_token.0.norm1.weight"),
    names=(
        ("base_encoder.cls_token", f"{AGREEMENT}.instance_head.token"),
        ("base_encoder.blocks_token.", f"{AGREEMENT}.instance_head.layers."),
        ("base_encoder.head.", f"{AGREEMENT}.projection."),
        ("base_encoder.", ENCODER),
        ("predictor.", f"{AGREEMENT}.prediction."),
        ("momentum_encoder.cls_token", f"{TEACHER_PREFIX}.instance_head.token"),
        ("momentum_encoder.blocks_token.", f"{TEACHER_PREFIX}.instance_head.layers."),
        ("momentum_encoder.head.", f"{TEACHER_PREFIX}.projection."),
        ("momentum_encoder.", TEACHER_ENCODER),
    ),
    task="extrema",
    evaluated="teacher",
)
MOCO_PROGRAM = Program(
    "MoCo v3",
    marks=("base_encoder.blocks.0.norm1.weight", "momentum_encoder.blocks.0.norm1.weight"),
    names=(
        ("base_encoder.head.", "(MoCo's projection)"),
        ("base_encoder.", ENCODER),
        ("predictor.", "(MoCo's prediction)"),
        ("momentum_encoder.", "(MoCo's teacher)"),
    ),
    heads={384: 12},
)
SIMMIM_PROGRAM = Program(
    "SimMIM",
    marks=("encoder.mask_token", "decoder.0.weight"),
    names=(("decoder.0.", f"{PIXEL_DECODER}."), ("encoder.mask_token", "mask_token"), ("encoder.", ENCODER)),
    task="simmim",
    channels_last=False,
    layer_scale=0.1,
)
BEYOND_MASKING_PROGRAM = Program(
    "Beyond Masking",
    marks=("encoder_to_decoder.weight", "decoder.head.weight"),
    names=(
        ("mask_token", f"{PIXEL_DECODER}.mask_token"),
        ("encoder_to_decoder.", f"{PIXEL_DECODER}.embed."),
        ("decoder.head.", f"{PIXEL_DECODER}.answer."),
        ("decoder.", f"{PIXEL_DECODER}."),
        ("encoder.cls_token", "(never used in its pre-training)"),
        ("encoder.", ENCODER),
    ),
    task="restore",
    decoder_heads={384: 6, 512: 8},
    saves_positions=False,
)
DINOV2_PROGRAM = Program(
    "DINOv2",
    marks=("mask_token", "blocks.0.ls1.gamma", "pos_embed"),
    names=(("mask_token", "(for DINOv2's own masks)"), *_LABELS, ("", ENCODER)),
    evaluated="teacher",
)
DINO_PROGRAM = Program(
    "DINO",
    marks=("backbone.blocks.0.norm1.weight", "head.mlp.0.weight"),
    names=(("head.", "(DINO's head)"), ("backbone.", ENCODER)),
    evaluated="teacher",
)
BARE_ENCODER_PROGRAM = Program(
    "MAE or a program built upon it",
    marks=(POSITIONS_KEY, "cls_token", "blocks.0.norm1.weight"),
    names=(*_LABELS, ("", ENCODER)),
    positions="column first",
)
BARE_MOCO_PROGRAM = Program(
    "MoCo v3",
    marks=(POSITIONS_KEY, "cls_token", "blocks.0.norm1.weight"),
    names=(*_LABELS, ("", ENCODER)),
    positions="row first",
    heads={384: 12},
)
# any other file: sizes can be read from it, too
ANY_PROGRAM = Program(
    "",
    marks=("blocks.0.norm1.weight", "patch_embed.proj.weight"),
    names=(*_LABELS, ("", ENCODER)),
    evaluated="teacher",
)
# a program whose marks also occur in another's files comes after that one
PROGRAMS = (
    *(DROPPOS_PROGRAM, LUT_PROGRAM, MAE_PROGRAM, EXTREMA_PROGRAM, MOCO_PROGRAM, SIMMIM_PROGRAM, BEYOND_MASKING_PROGRAM),
    *(DINOV2_PROGRAM, DINO_PROGRAM, BARE_ENCODER_PROGRAM, BARE_MOCO_PROGRAM, ANY_PROGRAM),
)


# Translation of weights of a ViT or Swin in other programs to timm's names, in the same order.


_BLOCK = r"((?:^|.*\.)blocks\.\d+\.)"
_RENAMED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(^|\.)blocks\.\d+\.(\d+\.)"), r"\1blocks.\2"),  # DINOv2's chunks, whose blocks are numbered on
    (re.compile(_BLOCK + r"gamma_([12])$"), r"\1ls\2.gamma"),
    (re.compile(r"(^|\.)(?:register|storage)_tokens$"), r"\1reg_token"),
)
_BIAS = re.compile(_BLOCK + r"attn\.q_bias$")
_MASK = re.compile(_BLOCK + r"attn\.qkv\.bias(_mask)?$")
_OF_VIT = re.compile(r"((?:^|.*\.)(blocks\.\d+\.))(?:ls([12])\.gamma|attn\.qkv\.(weight|bias))$")
_MERGING = re.compile(r"((?:^|.*\.)layers\.)(\d+)(\.downsample\..+)")
_COMPUTED = re.compile(r"(^|\.)layers\.\d+\.blocks\.\d+\.(attn\.relative_position_index|attn_mask)$")
_APART = re.compile(_BLOCK.replace("blocks", "(?:decoder_)?blocks") + r"attn\.q(_proj)?\.(weight|bias)$")

# transformers' names of a ViT, a ViTMAE or a DINOv2, as saved and as in its classes since 5.0, and the original names;
# applied in this order, after the prefix before `_OF_TRANSFORMERS` is removed
_OF_TRANSFORMERS = "embeddings.patch_embeddings.projection.weight"
_TRANSFORMERS = tuple(
    (re.compile(theirs), ours)
    for theirs, ours in (
        (r"^embeddings\.position_embeddings$", "pos_embed"),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.(cls_token|mask_token|register_tokens)$", r"\1"),
        (r"^decoder\.(decoder_(?:embed|norm|pred)\.|decoder_pos_embed$|mask_token$)", r"\1"),
        (r"^decoder\.(?:decoder_encoder\.layer|decoder_layers)\.(\d+)\.", r"decoder_blocks.\1."),
        (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
        (r"^layernorm\.", "norm."),
        (r"(blocks\.\d+\.)layernorm_before\.", r"\1norm1."),
        (r"(blocks\.\d+\.)layernorm_after\.", r"\1norm2."),
        (r"(blocks\.\d+\.)layer_scale([12])\.lambda1$", r"\1ls\2.gamma"),
        (r"(blocks\.\d+\.)attention\.attention\.(q|k|v)(?:uery|ey|alue)\.", r"\1attn.\2_proj."),
        (r"(blocks\.\d+\.)attention\.(q|k|v)_proj\.", r"\1attn.\2_proj."),
        (r"(blocks\.\d+\.)attention\.(?:output\.dense|o_proj)\.", r"\1attn.proj."),
        (r"(blocks\.\d+\.)intermediate\.dense\.", r"\1mlp.fc1."),
        (r"(blocks\.\d+\.)output\.dense\.", r"\1mlp.fc2."),
    )
)


def timm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the blocks and register tokens of other programs' ViTs in a state dict as in timm.

    - ``blocks.0.7.``, the block 7 in a chunk, becomes ``blocks.7.`` (DINOv2).
    - ``gamma_1`` of LayerScale becomes ``ls1.gamma`` (BEiT, SimMIM).
    - ``q_bias`` and ``v_bias`` become ``qkv.bias``, with zeros for the keys (BEiT, SimMIM, Beyond Masking).
    - separate ``q``, ``k`` and ``v`` become ``qkv``.
    - the names of transformers' ViT, ViTMAE and DINOv2 become those of the original programs.
    - ``register_tokens`` (DINOv2) and ``storage_tokens`` (DINOv3) become ``reg_token``.
    - ``qkv.bias_mask``, which is 0 for the keys, is left out; so is the bias that it removes (DINOv3).
    - ``layers.0.downsample.``, the patch merging at the end of a Swin's stage, becomes ``layers.1.downsample.``: in
      timm it begins the next stage; buffers computed from the windows' sizes are left out (Swin, SimMIM).

    Class attention (``blocks_token``) is not a block of a ViT and keeps its names.
    """
    prefix, table = "", _RENAMED
    for name in state:
        if name.endswith(_OF_TRANSFORMERS):
            prefix, table = name.removesuffix(_OF_TRANSFORMERS), _TRANSFORMERS + _RENAMED
            break
    # in timm there is no merging before stage 0
    ending = {found[1] for name in state if (found := _MERGING.fullmatch(name)) and found[2] == "0"}
    renamed = {}
    for name, value in state.items():
        name = name.removeprefix(prefix)
        for theirs, ours in table:
            name = theirs.sub(ours, name)
        found = _MERGING.fullmatch(name)
        if found is not None and found[1] in ending:
            name = f"{found[1]}{int(found[2]) + 1}{found[3]}"
        if not _COMPUTED.search(name):
            renamed[name] = value
    named: dict[str, Tensor] = {}
    done: set[str] = set()
    for name, value in renamed.items():
        found = _MASK.fullmatch(name)
        if name in done or (found is not None and found[2]):
            continue
        if found is not None and (mask := renamed.get(f"{name}_mask")) is not None and mask.shape == value.shape:
            value = torch.where(mask == 1, value, 0)
        whole, parts = name, [name]
        if found := _BIAS.fullmatch(name):
            whole, parts = f"{found[1]}attn.qkv.bias", [name, f"{found[1]}attn.v_bias"]
        elif found := _APART.fullmatch(name):
            whole = f"{found[1]}attn.qkv.{found[3]}"
            parts = [f"{found[1]}attn.{one}{found[2] or ''}.{found[3]}" for one in "qkv"]
        values = [renamed[part] for part in parts if part in renamed]
        if len(values) == len(parts) > 1 and value.ndim and all(part.shape == value.shape for part in values):
            if len(values) == 2:
                values.insert(1, torch.zeros_like(value))
            name, value = whole, torch.cat(values)
            done.update(parts)
        named[name] = value
    return {name: value for name, value in named.items() if name not in done}


def eva_names(state: dict[str, Tensor], target: Container[str]) -> dict[str, Tensor]:
    """Rename weights of `timm_names` as in timm's Eva, where ``target``, the names of an Eva, lacks a ViT's name.

    ``ls1.gamma`` becomes ``gamma_1``, and the thirds of ``qkv`` those of ``q_proj``, ``k_proj`` and ``v_proj``, or
    ``q_bias`` and ``v_bias``. A bias that an Eva lacks is left out if it is zero.
    """
    named: dict[str, Tensor] = {}
    for name, value in state.items():
        found = _OF_VIT.fullmatch(name)
        if found is None or not value.ndim or name.removeprefix(found[1].removesuffix(found[2])) in target:
            named[name] = value
            continue
        before, block, scale, kind = found.groups()
        if scale:
            named[f"{before}gamma_{scale}" if f"{block}gamma_{scale}" in target else name] = value
            continue
        parts = [(f"attn.{one}_proj.{kind}", f"attn.{one}_bias" if kind == "bias" else "") for one in "qkv"]
        own = [next((part for part in pair if block + part in target), None) for pair in parts]
        thirds = value.chunk(3)
        if len(thirds) != 3 or any(
            part is None and third.count_nonzero() for part, third in zip(own, thirds, strict=True)
        ):
            named[name] = value
            continue
        named |= {before + part: third for part, third in zip(own, thirds, strict=True) if part is not None}
    return named


# Recognition of programs, and translation to patchloom's names.


_PATCHES = 196  # number of patches of Beyond Masking's images: 224 pixels, patches of 16


class ForeignCheckpoint(NamedTuple):
    """File of one of these programs.

    Attributes:
        program: the program.
        place: place of the student's weights in the file, such as "state_dict.module".
        weights: weights by patchloom's names of a task, with the encoder and perhaps a teacher.
        left: names that are not used, with the reason.
    """

    program: Program
    place: str
    weights: State
    left: tuple[str, ...]

    def encoder(self, whose: Network) -> State:
        """Return the weights of one of its encoders by timm's names; the student's if there is no teacher."""
        return self.encoder_of(whose) or select_prefix(ENCODER, self.weights)

    def encoder_of(self, whose: Network) -> State:
        """Return the weights of its student's or teacher's encoder by timm's names; {} without it."""
        return select_prefix(TEACHER_ENCODER if whose == "teacher" else ENCODER, self.weights)


def recognise(states: list[tuple[str, State]]) -> ForeignCheckpoint | None:
    """Recognise the program that wrote a file, or `ANY_PROGRAM`; None without a ViT's weights."""
    named = [(path, timm_names(state)) for path, state in states]
    for program in PROGRAMS:
        places = [(path, prefix, state) for path, state in named for prefix in _prefixes(program, state)]
        if not places:
            continue
        teachers = [place for place in places if is_teacher(*place[:2])]
        students = [place for place in places if place not in teachers] or teachers
        if program.evaluated == "teacher" and not program.teacher and teachers:
            students = teachers  # of DINO's file only an encoder is used, the teacher's
        path, prefix, state = students[0]
        weights, left = translate_names(program, program.names, select_prefix(prefix, state))
        if program.teacher and teachers and teachers[0] is not students[0]:
            theirs, unused = translate_names(program, program.teacher, select_prefix(teachers[0][1], teachers[0][2]))
            weights |= theirs
            left += unused
        if not program.saves_positions:  # Beyond Masking's: row by row, and without the bias of the decoder's input
            projection, bridge = weights.get(f"{ENCODER}{PROJECTION_KEY}"), weights.get(f"{PIXEL_DECODER}.embed.weight")
            if projection is not None and projection.ndim == 4 and len(projection) % 2 == 0:
                weights[f"{ENCODER}{POSITIONS_KEY}"] = interleaved_sincos_1d(len(projection), _PATCHES)[None]
            if bridge is not None and bridge.ndim == 2 and len(bridge) % 2 == 0:
                weights[f"{PIXEL_DECODER}.embed.bias"] = torch.zeros(len(bridge))
                weights[f"{PIXEL_DECODER}.positions"] = interleaved_sincos_1d(len(bridge), _PATCHES)
        left += describe_leftovers(prefix, state, named, teachers if program.teacher else [])
        return ForeignCheckpoint(program, place_of(path, prefix), weights, tuple(left))
    return None


def translate_names(program: Program, names: NameRules, state: State) -> tuple[State, list[str]]:
    """Translate a program's state dict (or gradients) to patchloom's names; also list unused names with reasons.

    Tokens become flat, 1x1 convolutions linear layers, and the pixels of a patch have patchloom's order.
    """
    weights: State = {}
    left: dict[tuple[str, str], list[str]] = {}
    for name, value in state.items():
        row = next(((theirs, ours) for theirs, ours in names if name.startswith(theirs)), None)
        if row is None or row[1].startswith("("):
            left.setdefault(row or (name, ""), []).append(name)
        else:
            weights[row[1] + name.removeprefix(row[0])] = value
    projection = weights.get(f"{ENCODER}{PROJECTION_KEY}")
    for name, value in weights.items():
        if name.rpartition(".")[2] in ("mask_token", "position_token"):
            weights[name] = value.flatten()
        elif name.startswith((f"{PIXEL_DECODER}.answer.", f"{PIXEL_DECODER}.weight", f"{PIXEL_DECODER}.bias")):
            if value.ndim == 4:  # a convolution of 1x1
                value = value.flatten(1)
            if program.channels_last and projection is not None and projection.ndim == 4:
                c, h, w = projection.shape[1:]
                if value.ndim and len(value) == c * h * w:
                    value = value.unflatten(0, (h, w, c)).movedim(2, 0).flatten(0, 2)
            weights[name] = value
    unused = []
    for (_, why), same in left.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        unused.append(f"{same[0]}{more} {why}".rstrip())
    return weights, unused


def _prefixes(program: Program, state: State) -> list[str]:
    """Return the prefixes in a state dict that have all marks of a program."""
    first = program.marks[0]
    found = [name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")]
    found = [prefix for prefix in found if all(prefix + mark in state for mark in program.marks)]
    if program.positions:
        found = [prefix for prefix in found if position_axis_order(state[prefix + POSITIONS_KEY]) == program.positions]
    return found


def position_axis_order(table: Tensor) -> str:
    """Return the half order of a fixed table of positions [1 1+n d], as in `Program.positions`; "" if it is none."""
    side = square_grid(table.shape[1], {"cls_token": 1})[1] if table.ndim == 3 else 0
    if not side or table.shape[2] % 4 or not table.is_floating_point():
        return ""
    fixed, patches = sincos_2d(table.shape[2], (side, side)), table[0, -(side**2) :].float()
    for which, one in (("column first", fixed), ("row first", fixed.roll(table.shape[2] // 2, 1))):
        if torch.allclose(patches, one, atol=1e-2):  # tolerance for half precision
            return which
    return ""


def is_teacher(path: str, prefix: str) -> bool:
    """Return whether the weights at a place in a file are a moving average."""
    return not {"ema", "teacher"}.isdisjoint(f"{path}.{prefix}".replace("_", ".").split("."))


def place_of(path: str, prefix: str) -> str:
    """Return the place of weights in a file, such as "state_dict.module", from path and prefix."""
    return ".".join(part for part in (path, prefix.rstrip(".")) if part)


def select_prefix(prefix: str, state: State) -> State:
    """Return the weights whose names have a prefix, which is removed."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def describe_leftovers(
    prefix: str,
    state: State,
    named: list[tuple[str, State]],
    used: Sequence[tuple[str, str, State]] = (),
) -> list[str]:
    """List the rest of a file: other names of the same state dict, and the number of tensors in its other parts."""
    taken = (prefix, *(one[1] for one in used if one[2] is state))
    others = [name for name in state if not name.startswith(taken)]
    counts: dict[str, int] = {}
    for where, other in named:
        if other is not state and not any(other is one[2] for one in used):
            part = where.partition(".")[0] or "the top level"
            counts[part] = counts.get(part, 0) + len(other)
    return others + [f"{count} tensor{'s' * (count > 1)} of {part}" for part, count in counts.items()]
