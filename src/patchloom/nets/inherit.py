"""What a file of an authors' program has beside the encoder, given to the task that goes on with it."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from patchloom.nets.decode import Decoder
from patchloom.nets.fitting import State, by
from patchloom.nets.foreign import AGREEMENT, ENCODER, PIXELS, PLACES, TEACHER
from patchloom.nets.public import load_public
from patchloom.nets.recognise import Foreign, depth_of

# what is taken as a whole or not at all, by our names and in words; a teacher's only with the student's
_PARTS = (
    ("position_token", "[MASK] position token"),
    ("mask_token", "mask token"),
    (f"{PLACES}.", "position decoder"),
    (f"{PIXELS}.", "pixel decoder"),
    (f"{AGREEMENT}.instance_head.", "class attention"),
    (f"{AGREEMENT}.projection.", "projection"),
    (f"{AGREEMENT}.prediction.", "prediction"),
    (f"{TEACHER}.instance_head.", "teacher's class attention"),
    (f"{TEACHER}.projection.", "teacher's projection"),
)


def inherit(foreign: Foreign, task: nn.Module, own_task: bool, source: str) -> list[str]:
    """Put decoders, heads, tokens and teacher of a file into a task in place; and say what was done, in sentences.

    Args:
        foreign: the file.
        task: around an encoder that has its weights already.
        own_task: whether it is the task of the program that wrote the file; no other takes anything.
        source: what the file is called.
    """
    program, rest = foreign.program, foreign.rest()
    there = [words for beginning, words in _PARTS if any(name.startswith(beginning) for name in rest)]
    teacher = foreign.beginning(f"{TEACHER}.{ENCODER}")
    there += ["teacher's encoder"] * bool(teacher)
    if not there or not own_task:
        ends = f": --task {program.task} goes on with them" if program.task else ""
        return [f"Beside the encoder it has {', '.join(there)}, which are left out{ends}."] if there else []
    taken: State = {}
    done, left = [], []
    # fixed positions of a decoder are in no state dict, unless they are others than ours
    own = task.state_dict() | {name: one for name, one in task.named_buffers() if name == f"{PIXELS}.positions"}
    for beginning, words in _PARTS:
        theirs = {name: value for name, value in rest.items() if name.startswith(beginning)}
        mine = {name: value for name, value in own.items() if name.startswith(beginning)}
        student = f"{AGREEMENT}{beginning.removeprefix(TEACHER)}"
        if beginning.startswith(TEACHER) and not theirs:  # a teacher begins as its student does
            theirs = {
                beginning + name.removeprefix(student): one for name, one in taken.items() if name.startswith(student)
            }
        why = _misfit(beginning, theirs, mine, task, foreign)
        if beginning.startswith(TEACHER) and not any(name.startswith(student) for name in taken):
            why = why or "the student's is left out, too"
        if theirs and mine and not why:
            taken |= theirs
            done.append(words)
        elif theirs:
            left.append(f"{words} ({why if mine else 'here there is none'})")
        elif mine:
            left.append(f"{words} (not in the file, so as initialised)")
    if f"{PIXELS}.positions" in taken:
        _module(task, PIXELS).keep_positions()
    task.load_state_dict(taken, strict=False)
    copy = _module(task, f"{TEACHER}.{ENCODER.rstrip('.')}")
    if teacher and isinstance(copy, VisionTransformer):
        load_public(copy, source, weights=teacher)
        done.append("teacher's encoder")
    lines = [f"Taken besides, of {program.name}: {', '.join(done)}."] if done else []
    return lines + ([f"Left: {'; '.join(left)}."] if left else [])


def _module(task: nn.Module, name: str) -> nn.Module | None:
    return dict(task.named_modules()).get(name)


def _misfit(beginning: str, theirs: State, mine: State, task: nn.Module, foreign: Foreign) -> str:
    """Why a part does not fit, with what to do; "" if it does."""
    decoder = _module(task, beginning.rstrip("."))
    if isinstance(decoder, Decoder) and (advice := _other_decoder(beginning, theirs, mine, decoder, foreign)):
        return advice
    if not theirs or not mine:
        return ""
    if beginning.endswith("instance_head.") and (depth := depth_of(theirs, beginning)) != depth_of(mine, beginning):
        return f"it is {depth} deep: give --task.attention_blocks {depth} to take it"
    for name in sorted({*theirs, *mine} - {f"{PIXELS}.positions"}):
        if name not in theirs or name not in mine:
            where = "here" if name in theirs else "there"
            return f"{where} is no {name.removeprefix(beginning)}"
        if theirs[name].shape != mine[name].shape:
            sizes = f"{by(theirs[name].shape)} there and {by(mine[name].shape)} here"
            return f"{name.removeprefix(beginning) or 'it'} is {sizes}"
        if mine[name].is_floating_point() and not (theirs[name].is_floating_point() and theirs[name].isfinite().all()):
            return f"{name.removeprefix(beginning) or 'it'} has values that are not finite floating-point numbers"
    positions = f"{PIXELS}.positions"
    if positions in theirs and theirs[positions].shape != mine[positions].shape:
        return f"its positions are of {len(theirs[positions])} patches, and here are {len(mine[positions])}"
    return ""


def _other_decoder(beginning: str, theirs: State, mine: State, decoder: Decoder, foreign: Foreign) -> str:
    """What is other about a decoder's width, depth or heads, with the options that give the same."""
    norm = f"{beginning}norm.weight"
    if norm not in theirs or norm not in mine or not theirs[norm].ndim:
        return ""
    width, depth = len(theirs[norm]), depth_of(theirs, beginning)
    heads = foreign.program.decoder_heads.get(width, decoder.heads)
    pixels_beside = beginning == f"{PIXELS}." and foreign.program.task == "droppos"
    give = {
        "decoder_width": (width, len(mine[norm])),
        "pixel_decoder_depth" if pixels_beside else "decoder_depth": (depth, depth_of(mine, beginning)),
        "decoder_heads": (heads, decoder.heads),
    }
    options = [f"--task.{name} {value}" for name, (value, here) in give.items() if value != here]
    if not options:
        return ""
    return f"it is {width} wide and {depth} deep with {heads} heads: give {' '.join(options)} to take it"
