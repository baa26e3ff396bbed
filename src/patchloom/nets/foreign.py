"""What the authors' own programs save, and where it belongs here: one table of names a program.

A table has the beginnings of a program's names and what stands for each in a task of ours; the first that fits counts.
In parentheses is why something is left out. Sources: the programs as their authors released them. The golden vectors of
MAE, DropPos, LUT, ExtreMA and Beyond Masking go through these tables. `patchloom.nets.recognise` uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from patchloom.nets.fitting import POSITIONS

Names = tuple[tuple[str, str], ...]

ENCODER, AGREEMENT = "encoder.", "questions.agreement"
TEACHER, PIXELS, PLACES = f"{AGREEMENT}.teacher", "questions.pixels.decoder", "questions.positions.decoder"

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # by which all of these programs normalise images

_FIXED = "(fixed, and computed here)"

_MAE_DECODER: Names = (
    ("mask_token", f"{PIXELS}.mask_token"),
    ("decoder_pos_embed", _FIXED),
    ("decoder_pred.", f"{PIXELS}.answer."),
    ("decoder_", f"{PIXELS}."),
)
_LABELS: Names = (("head.", "(for labels)"), ("fc_norm.", "(for labels)"))


@dataclass(frozen=True)
class Program:
    """A program of a paper's authors, by what its files hold.

    Attributes:
        name: what it is called.
        marks: names, after a prefix common to all, by which its files are known.
        names: their names and ours.
        task: of ours that goes on with what is not the encoder; "" where none does.
        teacher: their names and ours in a state dict of the teacher's own, where its files have one.
        evaluated: whose encoder the authors evaluate.
        channels_last: whether the pixels of a patch run (row, column, channel) there; here they run (channel, row,
            column).
        positions: halves of a fixed table of positions, where that is all by which the files are known: MAE's begins
            with the column, MoCo's with the row.
        heads: attention heads of encoders by their width, where they are not as usual.
        decoder_heads: of decoders by their width.
        layer_scale: with which LayerScale begins there, if there is any.
    """

    name: str
    marks: tuple[str, ...]
    names: Names
    task: str = ""
    teacher: Names = ()
    evaluated: Literal["student", "teacher"] = "student"
    channels_last: bool = True
    positions: Literal["", "column first", "row first"] = ""
    heads: dict[int, int] = field(default_factory=dict)
    decoder_heads: dict[int, int] = field(default_factory=lambda: {512: 16})
    layer_scale: float = 1e-5


MAE = Program(
    "MAE",
    marks=("decoder_embed.weight", "decoder_pred.weight", "mask_token"),
    names=(*_MAE_DECODER, ("", ENCODER)),
    task="mae",
)
DROPPOS = Program(
    "DropPos",
    marks=("mask_pos_token", "decoder_pred.weight"),
    names=(
        ("mask_pos_token", "position_token"),
        ("decoder_pred.", f"{PLACES}.answer."),
        ("decoder_", f"{PLACES}."),
        ("mask_token", f"{PIXELS}.mask_token"),
        ("aux_decoder_pos_embed", _FIXED),
        ("aux_decoder_pred.", f"{PIXELS}.answer."),
        ("aux_decoder_", f"{PIXELS}."),
        ("", ENCODER),
    ),
    task="droppos",
)
LUT = Program(
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
        ("head.", f"{TEACHER}.projection."),
        ("predictor.", "(a teacher predicts nothing)"),
        ("mask_token", "(a teacher sees everything)"),
        ("decoder_", "(a teacher decodes nothing)"),
        ("", f"{TEACHER}.{ENCODER}"),
    ),
    evaluated="teacher",
)
EXTREMA = Program(
    "ExtreMA",
    marks=("base_encoder.blocks_token.0.norm1.weight", "momentum_encoder.blocks_token.0.norm1.weight"),
    names=(
        ("base_encoder.cls_token", f"{AGREEMENT}.instance_head.token"),
        ("base_encoder.blocks_token.", f"{AGREEMENT}.instance_head.layers."),
        ("base_encoder.head.", f"{AGREEMENT}.projection."),
        ("base_encoder.", ENCODER),
        ("predictor.", f"{AGREEMENT}.prediction."),
        ("momentum_encoder.cls_token", f"{TEACHER}.instance_head.token"),
        ("momentum_encoder.blocks_token.", f"{TEACHER}.instance_head.layers."),
        ("momentum_encoder.head.", f"{TEACHER}.projection."),
        ("momentum_encoder.", f"{TEACHER}.{ENCODER}"),
    ),
    task="extrema",
    evaluated="teacher",
)
MOCO = Program(
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
SIMMIM = Program(
    "SimMIM",
    marks=("encoder.mask_token", "decoder.0.weight"),
    names=(("decoder.0.", f"{PIXELS}."), ("encoder.mask_token", "mask_token"), ("encoder.", ENCODER)),
    task="simmim",
    channels_last=False,
    layer_scale=0.1,
)
BEYOND_MASKING = Program(
    "Beyond Masking",
    marks=("encoder_to_decoder.weight", "decoder.head.weight"),
    names=(
        ("mask_token", f"{PIXELS}.mask_token"),
        ("encoder_to_decoder.", f"{PIXELS}.embed."),
        ("decoder.head.", f"{PIXELS}.answer."),
        ("decoder.", f"{PIXELS}."),
        ("encoder.cls_token", "(never used in its pre-training)"),
        ("encoder.", ENCODER),
    ),
    task="restore",
    decoder_heads={384: 6, 512: 8},
)
DINOV2 = Program(
    "DINOv2",
    marks=("mask_token", "blocks.0.ls1.gamma", "pos_embed"),
    names=(("mask_token", "(for DINOv2's own masks)"), ("", ENCODER)),
    evaluated="teacher",
)
DINO = Program(
    "DINO",
    marks=("backbone.blocks.0.norm1.weight", "head.mlp.0.weight"),
    names=(("head.", "(DINO's head)"), ("backbone.", ENCODER)),
    evaluated="teacher",
)
ONLY_ENCODER = Program(
    "MAE or a program built upon it",
    marks=(POSITIONS, "cls_token", "blocks.0.norm1.weight"),
    names=(*_LABELS, ("", ENCODER)),
    positions="column first",
)
ONLY_MOCO = Program(
    "MoCo v3",
    marks=(POSITIONS, "cls_token", "blocks.0.norm1.weight"),
    names=(*_LABELS, ("", ENCODER)),
    positions="row first",
    heads={384: 12},
)
# files of whom else: of them, too, the sizes can be read
ANY = Program(
    "",
    marks=("blocks.0.norm1.weight", "patch_embed.proj.weight"),
    names=(*_LABELS, ("", ENCODER)),
    evaluated="teacher",
)
# one whose marks are in others' files, too, comes after theirs
PROGRAMS = (
    *(DROPPOS, LUT, MAE, EXTREMA, MOCO, SIMMIM, BEYOND_MASKING),
    *(DINOV2, DINO, ONLY_ENCODER, ONLY_MOCO),
)
