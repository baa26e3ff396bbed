"""What the authors' own programs save, and where it belongs here: one table of names a program.

A table has the beginnings of a program's names and what stands for each in a task of ours; the first that fits counts.
In parentheses is why something is left out. Sources: the programs as their authors released them. The golden vectors of
MAE, DropPos, LUT, ExtreMA and Beyond Masking go through these tables. `patchloom.nets.checkpoints.papers` uses them.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import read_metadata, read_weights
from patchloom.nets.checkpoints.resize import POSITIONS_KEY

NameRules = tuple[tuple[str, str], ...]

ENCODER, AGREEMENT = "encoder.", "questions.agreement"
TEACHER_PREFIX, PIXEL_DECODER, POSITION_DECODER = (
    f"{AGREEMENT}.teacher",
    "questions.pixels.decoder",
    "questions.positions.decoder",
)

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # by which all of these programs normalise images

_FIXED = "(fixed, and computed here)"

_MAE_DECODER: NameRules = (
    ("mask_token", f"{PIXEL_DECODER}.mask_token"),
    ("decoder_pos_embed", _FIXED),
    ("decoder_pred.", f"{PIXEL_DECODER}.answer."),
    ("decoder_", f"{PIXEL_DECODER}."),
)
_LABELS: NameRules = (("head.", "(for labels)"), ("fc_norm.", "(for labels)"))


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
    names: NameRules
    task: str = ""
    teacher: NameRules = ()
    evaluated: Literal["student", "teacher"] = "student"
    channels_last: bool = True
    positions: Literal["", "column first", "row first"] = ""
    heads: dict[int, int] = field(default_factory=dict)
    decoder_heads: dict[int, int] = field(default_factory=lambda: {512: 16})
    layer_scale: float = 1e-5


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
        ("", f"{TEACHER_PREFIX}.{ENCODER}"),
    ),
    evaluated="teacher",
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
        ("momentum_encoder.", f"{TEACHER_PREFIX}.{ENCODER}"),
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
)
DINOV2_PROGRAM = Program(
    "DINOv2",
    marks=("mask_token", "blocks.0.ls1.gamma", "pos_embed"),
    names=(("mask_token", "(for DINOv2's own masks)"), ("", ENCODER)),
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
# files of whom else: of them, too, the sizes can be read
ANY_PROGRAM = Program(
    "",
    marks=("blocks.0.norm1.weight", "patch_embed.proj.weight"),
    names=(*_LABELS, ("", ENCODER)),
    evaluated="teacher",
)
# one whose marks are in others' files, too, comes after theirs
PROGRAMS = (
    *(DROPPOS_PROGRAM, LUT_PROGRAM, MAE_PROGRAM, EXTREMA_PROGRAM, MOCO_PROGRAM, SIMMIM_PROGRAM, BEYOND_MASKING_PROGRAM),
    *(DINOV2_PROGRAM, DINO_PROGRAM, BARE_ENCODER_PROGRAM, BARE_MOCO_PROGRAM),
)


# State dicts in files that anybody may have written. A pickle is read as weights alone, and never run.


class _Bystander:
    """Stands for an object of NumPy's or pathlib's that a file keeps beside its weights: none of them is built."""

    def __init__(self, *given: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# papers' files keep their command line or configuration beside the weights, and a learning rate that NumPy computed:
# bare containers and numbers, in whose stead something stands that runs nothing
_HARMLESS: list[Any] = [
    argparse.Namespace,
    (OrderedDict, "yacs.config.CfgNode"),
    *((_Bystander, name) for name in ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")),
    *((_Bystander, name) for name in ("pathlib.PosixPath", "pathlib._local.PosixPath")),
]


_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".tar")  # what torch saves is called


def is_bare_weights(source: str | Path) -> bool:
    """Whether a file holds weights alone: others' files, since all that patchloom writes says what it is."""
    path = Path(source)
    if str(source).startswith("timm:") or not path.is_file():
        return False
    if path.suffix != ".safetensors":
        return path.suffix.lower() in _PICKLES
    return not any(key.startswith("patchloom-") for key in read_metadata(path, "encoder weights"))


def read_states(path: Path) -> list[tuple[str, dict[str, Tensor]]]:
    """Every state dict in a file, whoever wrote it, by the path of its keys there."""
    if path.suffix == ".safetensors":
        read_metadata(path, "weights")
        return [("", read_weights(path))]
    found, queue, seen = [], deque([("", _unpickle(path))]), set()
    while queue:
        place, value = queue.popleft()
        if not isinstance(value, dict) or id(value) in seen:  # a pickle may hold itself
            continue
        seen.add(id(value))
        items = list(dict.items(value))  # what value.items is, the pickle of an OrderedDict may have changed
        tensors = {str(key): item for key, item in items if isinstance(item, Tensor)}
        if tensors:
            found.append((place, tensors))
        queue.extend((f"{place}.{key}" if place else str(key), item) for key, item in items)
    return found


def _unpickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this pickle may fail, which is reported if it does
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        foreign = re.search(r"(?:GLOBAL|Trying to call reduce for|instantiate class) (\S+)", str(problem))
        what = f"Python objects ({foreign[1]}) that could run code" if foreign else "something else than weights"
        raise PatchloomError(
            f"{path} holds {what}, and was not loaded: save its state_dict alone, best as .safetensors"
        ) from problem
    except Exception as problem:  # a damaged or hostile file fails in any way that it likes
        reason = f"{type(problem).__name__}: {problem}".partition("\n")[0].partition(". ")[0][:200]
        raise PatchloomError(
            f"{path} cannot be read as weights ({reason}): is it whole, and did torch save it?"
        ) from problem
