"""Weights of any origin, fitted to an existing encoder or task, which keeps its sizes, or to a new encoder.

Weights are matched by timm's names, position embeddings and the patch projection are resampled as in timm, and every
other difference is listed in `LoadedWeights`, or rejected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.build import build_encoder, depth_of, stock_encoder
from patchloom.nets.checkpoints.format import HUB_CONFIG, HUB_IMAGES, EncoderCard, is_on_hub, load_encoder_file
from patchloom.nets.checkpoints.live import LiveEncoder
from patchloom.nets.checkpoints.origin import (
    TIMMS_EPS,
    Weights,
    check_model,
    kind_of,
    seems_rotary,
    statistics_in_words,
)
from patchloom.nets.checkpoints.programs import (
    AGREEMENT,
    ENCODER,
    EXTREMA_PROGRAM,
    PIXEL_DECODER,
    POSITION_DECODER,
    TEACHER_ENCODER,
    TEACHER_PREFIX,
    ForeignCheckpoint,
    Program,
    describe_leftovers,
    eva_names,
    is_teacher,
    place_of,
    position_axis_order,
    select_prefix,
    timm_names,
)
from patchloom.nets.checkpoints.read import State
from patchloom.nets.checkpoints.resize import (
    POSITIONS_KEY,
    PROJECTION_KEY,
    Misfit,
    fit_biases,
    fit_positions,
    fit_projection,
    format_grid,
    square_grid,
)
from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.encode import entry_width, grid_size, heads_by_stage
from patchloom.nets.heads import InstanceHead, Stem, Use
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import Network


class LoadedWeights(NamedTuple):
    """Result of `load_published`.

    Attributes:
        source: source of the weights, and the part of it if there are several.
        matched: names of the encoder that were loaded.
        missing: names of the encoder that the source does not have; they keep their values.
        unexpected: names of the source that were left out. Other parts of a file, such as an optimiser's state, are
            counted per part.
        resampled: changes made to fit, such as "pos_embed: from a grid of 14x14 to 4x4".
        lost: the names in ``unexpected`` without which the encoder's blocks compute something else than in the source.
        foreign: the file, if a known program wrote it.
    """

    source: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resampled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    foreign: ForeignCheckpoint | None = None

    def sentences(self) -> list[str]:
        """Return one to five lines for the log: the counts, then lost, missing, unexpected and resampled weights."""
        lines = [
            f"Weights from {self.source}: {len(self.matched)} matched, {len(self.missing)} missing, "
            f"{len(self.unexpected)} unexpected, {len(self.resampled)} resampled or adapted."
        ]
        if self.lost:
            lines.append(f"This is NOT the encoder that was trained, only a start: {self.why_not()}.")
        for what, names, mark in (
            ("Missing there, kept as initialised", self.missing, ", "),
            ("Unexpected, left out", self.unexpected, ", "),
            ("Resampled or adapted", self.resampled, "; "),
        ):
            if names:
                more = f"{mark}and {len(names) - 8} more" if len(names) > 8 else ""
                lines.append(f"{what}: {mark.join(names[:8])}{more}.")
        return lines

    def why_not(self) -> str:
        """Describe the lost weights."""
        more = f" and {len(self.lost) - 1} more" if len(self.lost) > 1 else ""
        made = "; --model.init_values 1 makes one" if all(name.endswith(".gamma") for name in self.lost) else ""
        return f"it has {self.lost[0]}{more}, for which this encoder has no place{made}"

    def refuse_parts(self, path: Path | None, remedy: str, called: str) -> None:
        """Raise an error for an encoder that is partly random, or lacks a part of the trained one.

        Args:
            path: file of the weights.
            remedy: remedy if the weights are another model's.
            called: name of the model.
        """
        own = _blocks(self.matched)
        deeper = [name for name in self.unexpected if re.search(r"(^|\.)blocks\.", name)]
        more = any((found := _BLOCK.search(name)) and found[0] not in own for name in self.lost)
        if self.lost and not more:  # another depth has another remedy
            raise PatchloomError(
                f"{path} cannot be evaluated as a plain ViT: {self.why_not()}, so it would not be the encoder that was "
                "trained. Use it with pretrain --init instead"
            )
        if self.missing or deeper:
            what = f"lacks {self.missing[0]}" if self.missing else f"also has {deeper[0]}"
            count = len(self.matched)
            raise PatchloomError(
                f"{path} is not {called}: {count} of the {count + len(self.missing)} weights match, and it {what}, so "
                f"{remedy}"
            )


# weights that change the result of the blocks, and that a plain ViT, or this one, does not have
_STAGE = re.compile(r"(^|\.)layers\.\d+\.$")
_STAGES = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.")
_BLOCK = re.compile(r"(layers\.\d+\.)?blocks\.\d+\.")
_BESIDE_BLOCKS = re.compile(r"(reg|dist)_token$|norm_pre\.|rope\.freqs$|.*relative_position_bias_table")
_IN_BLOCK = re.compile(r"ls\d\.gamma$|attn\.([qk]_)?norm\.|attn\.qkv\.bias$|mlp\.(norm\.|w\d|fc1_g)|.*bias_table$")
_OF_EVA = (".gamma_1", ".attn.q_bias", ".attn.q_proj.weight")  # names that only an Eva has


class _Selected(NamedTuple):
    """Weights by their names after the prefix in the source, and other contents."""

    source: str
    weights: State
    prefix: str
    others: list[str]


def load_published(
    vit: Encoder,
    source: str | Path | Weights,
    weights: State | None = None,
    like: Encoder | None = None,
    task: str = "",
    network: Network | None = None,
) -> LoadedWeights:
    """Load published weights into an encoder in place; if an error is raised, the encoder is unchanged.

    Weights become float32. Learned position embeddings of another grid [1 prefix+n d], and a patch projection [d c p p]
    of another patch size (FlexiViT, arXiv:2212.08013, section 3.4) or of 3 channels, are resampled as in timm. The
    number of heads cannot be seen in weights: it must be the source's. Torch's random state is unchanged. With
    ``weights``, perhaps of an encoder ``like`` another, ``source`` is only a name. ``network`` chooses between student
    and teacher of a known program; None is the student for its own ``task``, and the one that its authors evaluate
    else.
    """
    target = dict(vit.state_dict())
    foreign: ForeignCheckpoint | None = None
    if weights is None:
        read = source if isinstance(source, Weights) else Weights(source)
        source, states, foreign = read.source, read.states, read.foreign
        grid, heads = read.sizes
    else:
        states = [("", weights)]
        grid, heads = (None, None) if like is None else (grid_size(like), heads_by_stage(like))
    _check_heads(str(source), heads, vit)
    if foreign is None:
        found = _choose(str(source), [(path, timm_names(state)) for path, state in states], target)
    else:
        program = foreign.program
        whose = network or ("student" if task and task == program.task else program.evaluated)
        if (usual := program.heads.get(vit.embed_dim)) is not None:
            _check_heads(f"{source} is of {program.name}, whose encoder", [usual], vit)
        teacher = ", its teacher" if whose == "teacher" and program.task else ""
        place = f"{foreign.place}, " if foreign.place else ""
        found = _choose(str(source), [("", foreign.encoder(whose))], target)
        found = found._replace(source=f"{source} ({place}of {program.name}{teacher})", others=list(foreign.left))
    table = found.weights.get(POSITIONS_KEY)
    if grid is None and table is not None and table.ndim == 3 and (foreign is not None or position_axis_order(table)):
        side = square_grid(table.shape[1], {"cls_token": 1})[1]  # known programs train on squares
        grid = (side, side) if side else None
    changes = _fit_norm(found.weights, target)
    fitting = {name: _numbers(found, name) for name in target if name in found.weights}
    changes += fit_projection(fitting, target)
    changes += fit_positions(vit, found.source, found.weights, fitting, target, grid)
    changes += fit_biases(vit, fitting, target)
    for name, value in fitting.items():
        if value.shape != target[name].shape:
            raise _misfit(found, name, value, target[name], entry_width(vit))
    vit.load_state_dict(fitting, strict=False)
    unexpected = [name for name in found.weights if name not in fitting]
    return LoadedWeights(
        found.source,
        tuple(fitting),
        tuple(name for name in target if name not in fitting),
        tuple([found.prefix + name for name in unexpected] + found.others),
        tuple(changes),
        tuple(found.prefix + name for name in unexpected if _changes(name, target)),
        foreign,
    )


def _check_heads(source: str, heads: list[int] | None, vit: Encoder) -> None:
    """Raise an error for an encoder with other attention heads, which have the same weights; None: unknown."""
    own = heads_by_stage(vit)
    if heads is None or heads == own or len(heads) != len(own):  # other stages are reported by their weights
        return
    here, there = ((str(one[0]) if len(one) == 1 else f"'{one}'") for one in (own, heads))
    raise Misfit(
        f"{source} has {there} attention heads, and this encoder {here}",
        f"give --model.num_heads {there}, or leave out --model and its options",
    )


def _fit_norm(weights: State, target: State) -> list[str]:
    """Take the norm of pooled features as the norm of all tokens, in place, if only the source pools before it."""
    if "norm.weight" not in target or "fc_norm.weight" in target:
        return []
    if "norm.weight" in weights or "fc_norm.weight" not in weights:
        return []
    for part in ("weight", "bias"):
        if f"fc_norm.{part}" in weights:
            weights[f"norm.{part}"] = weights.pop(f"fc_norm.{part}")
    return ["norm: the fc_norm of pooled features, for every token"]


def _changes(name: str, target: State) -> bool:
    """Return whether the encoder's blocks compute something else without this weight."""
    block = _BLOCK.match(name)
    if block is None:
        return _BESIDE_BLOCKS.match(name) is not None
    lacking = not any(own.startswith(block[0]) for own in target)
    return lacking or _IN_BLOCK.match(name[block.end() :]) is not None


def _choose(source: str, states: list[tuple[str, State]], target: State) -> _Selected:
    """Return the state dict, and the prefix of its names, that match most of the encoder's weights."""
    if any(name.endswith(_OF_EVA) for name in target):
        states = [(path, eva_names(state, target)) for path, state in states]
    ranked: list[tuple[tuple[Any, ...], str, State, str]] = []
    for order, (path, state) in enumerate(states):
        named, alike = Counter[str](), Counter[str]()
        for name, value in state.items():
            parts = name.split(".")
            for i in range(len(parts)):
                if (ours := ".".join(parts[i:])) in target:
                    named[name.removesuffix(ours)] += 1
                    alike[name.removesuffix(ours)] += value.shape == target[ours].shape
        for prefix, count in named.items():
            # students and teachers have the same shapes, and papers use the teacher
            ranked.append(((alike[prefix], count, is_teacher(path, prefix), -order), path, state, prefix))
    largest = max(states, key=lambda one: len(one[1]), default=("", {}))
    _, path, state, prefix = max(ranked, key=lambda one: one[0], default=((), *largest, ""))
    expected = [name for name in target if _BLOCK.match(name)]
    if _STAGE.search(prefix):  # names of a Swin's blocks look like a ViT's
        raise PatchloomError(f"{source} holds a Swin, and this encoder is a plain ViT: give the --model of a Swin")
    there = [name for name in expected if prefix + name in state]
    if 2 * len(there) < len(expected) or _blocks(there) != _blocks(expected):
        if not state:
            raise PatchloomError(
                f"{source} holds no tensors: give a file with a state_dict of timm's names, or timm:NAME"
            )
        theirs, here = _depths(select_prefix(prefix, state)), _depths(expected)
        if theirs and here and theirs != here:
            fact = f"{source} has stages of {theirs} blocks and this encoder {here}"
            raise Misfit(fact, f"give --model.depths '{theirs}'")
        depth, own = len(_blocks(there)), len(_blocks(expected))
        if 0 < depth < own:
            raise Misfit(f"{source} has {depth} blocks and this encoder {own}", f"give --model.depth {depth}")
        raise PatchloomError(
            f"{source} has {len(there)} of the {len(expected)} weights of this encoder's blocks: its names are like "
            f"{', '.join(list(state)[:3])}, and timm's, like {expected[0]}, are expected"
        )
    if place := place_of(path, prefix):
        source = f"{source} ({place})"
    return _Selected(source, select_prefix(prefix, state), prefix, describe_leftovers(prefix, state, states))


def _blocks(names: Iterable[str]) -> set[str]:
    """Return the beginnings of the blocks that names of weights belong to."""
    return {found[0] for name in names if (found := _BLOCK.match(name))}


def _depths(names: Iterable[str]) -> list[int]:
    """Return the number of blocks in each stage of a Swin, from names of weights."""
    blocks = {(int(found[1]), int(found[2])) for name in names if (found := _STAGES.match(name))}
    return [count for _, count in sorted(Counter(stage for stage, _ in blocks).items())]


def _numbers(found: _Selected, name: str) -> Tensor:
    """Return a weight as finite float32; errors mention its name in the source."""
    value, where = found.weights[name].detach(), f"{found.prefix}{name} in {found.source}"
    if not value.is_floating_point() or value.layout is not torch.strided:
        raise PatchloomError(f"{where} is {value.dtype}, not floating-point: save the weights unquantized")
    value = value.float()
    if not value.isfinite().all():
        raise PatchloomError(f"{where} has values that are not finite: take an earlier checkpoint")
    return value


def _misfit(found: _Selected, name: str, value: Tensor, own: Tensor, width: int) -> Misfit:
    """Describe a mismatch of shapes and the remedy; ``width`` is the encoder's."""
    first, advice = found.weights.get("blocks.0.norm1.weight"), "give the --model of these weights"
    if first is not None and first.numel() != width:
        theirs = first.numel()
        advice = f"the width there is {theirs}, here {width}: give "
        if seems_rotary(found.weights):
            advice += "its name in timm, such as --model vit_small_patch16_dinov3"
        else:
            size = {192: "tiny", 384: "small", 768: "base", 1024: "large"}.get(theirs)
            advice += f"--model vit_{size}_patch16_224, or " if size else ""
            advice += f"--model.embed_dim {theirs} with the num_heads of these weights"
    elif name == PROJECTION_KEY and value.ndim == 4:
        advice = f"give --channels {value.shape[1]} and images of as many (@bands= behind their name chooses)"
    elif name == "reg_token" and value.ndim == 3:
        advice = f"give --model.reg_tokens {value.shape[1]}"
    elif ".mlp.fc1." in name and value.ndim:
        advice = f"give --model.mlp_ratio {len(value) / width:g}"
    return Misfit(f"{found.source} does not fit this encoder, as {name} is {_shapes(value, own)}", advice)


def _shapes(theirs: Tensor, own: Tensor) -> str:
    return f"{format_grid(theirs.shape)} there and {format_grid(own.shape)} here"


# A new encoder in eval mode, and its card.


def load_pretrained(
    source: str | Path, model: str | None = None, option: str = "--model", network: Network | None = None
) -> tuple[Encoder, EncoderCard]:
    """Load an encoder in eval mode, and its card, from any source that `kind_of` knows.

    ``model`` is timm's name of the model, for a file of weights alone, and ``option`` the option that sets it.
    ``network`` is as in `load_published`.
    """
    check_model(source, model, option)
    if isinstance(source, LiveEncoder):
        return source.load()
    if kind_of(source) in ("timm", "patchloom"):
        return load_encoder_file(source)
    try:
        return _load_foreign(Weights(source), model, option, network)
    except PatchloomError as problem:  # the message names the usual option; its kind has the exit code
        problem.args = (str(problem).replace("--model ", f"{option} "),)
        raise


def _load_foreign(
    weights: Weights, model: str | None, option: str, network: Network | None
) -> tuple[Encoder, EncoderCard]:
    """Load an encoder from weights without a card of patchloom's; its card's note describes what was done."""
    source, path, program, stated = weights.source, weights.path, weights.program, weights.stated
    assert path is not None  # timm's have no path
    if network == "teacher" and not (weights.foreign and weights.foreign.encoder_of("teacher")):
        raise PatchloomError(f"{source} has no teacher beside a student: leave out --network")
    spec = None
    with torch.random.fork_rng(devices=[]):
        if model is None:
            spec = weights.encoder_spec()
            vit = build_encoder(spec)
            called, task = f"{spec.model} by its sizes", program.name if program else stated.name
        else:
            stock_encoder(model)
            vit = cast(Encoder, timm.create_model(model, pretrained=False, num_classes=0))
            called, task = model, f"timm:{model}"
    statistics, by = weights.statistics(model)
    if statistics is None and model is None:
        raise PatchloomError(
            f"{source} does not have the statistics of its images: put its {HUB_IMAGES} beside {HUB_CONFIG}"
        )
    if statistics is None:
        about = cast(dict[str, Any], vit.pretrained_cfg)
        statistics = tuple(about["mean"]), tuple(about["std"])
        if tags := timm.list_pretrained(f"{model}.*"):
            by += f", whose weights differ in this (a tag, such as in {tags[-1]}, chooses)"
    if spec is not None and len(statistics[0]) != spec.channels:
        raise PatchloomError(
            f"{source} is for images of {spec.channels} channels, and they are normalised by {len(statistics[0])} "
            "means there: use it with pretrain --init instead"
        )
    try:
        done = load_published(vit, weights, network=network)
    except Misfit as problem:
        remedies = ["use it with pretrain --init instead"] * (option == "--model")
        remedies += [f"give another {option}"] * (model is not None)
        raise PatchloomError(f"{problem.fact}: {' or '.join(remedies) or 'give another encoder'}") from problem
    shape = weights.architecture
    known = model is not None and program is not None and shape is not None
    remedy = "leave out --model, because its sizes are known" if known else "give another --model"
    done.refuse_parts(path, remedy, called)
    notes = done.sentences()
    if shape is not None and model is None and stated.spec is None:
        notes.append(shape.sentence())
    if stated.eps != TIMMS_EPS:
        notes.append(f"Norms add {TIMMS_EPS:g} to variances, as in timm; its {HUB_CONFIG} has {stated.eps:g}.")
    notes.append(f"Images are normalised as {by}: {statistics_in_words(*statistics)}.")
    name = path.name.partition(".")[0]
    if weights.kind == "hub":  # a fetched file lies in a cache
        name = str(source).rpartition("/")[2] if is_on_hub(source) else path.resolve().parent.name
    return vit.eval(), EncoderCard(spec, *statistics, task, name, note=" ".join(notes), license=stated.license)


def load_bare_module(path: Path, use: Use, network: Network | None = None) -> nn.Module | None:
    """Load a module beside the encoder for ``use`` from a file of ExtreMA, in eval mode; None for other files.

    It is the class attention, or the first layer of the projection, of the same network as the encoder.
    """
    weights = Weights(path)
    foreign, shape = weights.foreign, weights.architecture
    if foreign is None or shape is None or foreign.program is not EXTREMA_PROGRAM:
        return None
    owner = AGREEMENT if network == "student" else TEACHER_PREFIX
    head, first = (select_prefix(f"{owner}.{part}.", foreign.weights) for part in ("instance_head", "projection"))
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


# The weights of a known program beside the encoder, for the task that continues with them.


# parts that are taken as a whole or not at all, by patchloom's names and in words; a teacher's only with the student's
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
_POSITIONS = f"{PIXEL_DECODER}.positions"


def inherit(foreign: ForeignCheckpoint, task: nn.Module, own_task: bool, source: str) -> list[str]:
    """Load decoders, heads, tokens and teacher of a file into a task in place; return sentences on the outcome."""
    program, teacher = foreign.program, foreign.encoder_of("teacher")
    encoders = ENCODER, TEACHER_ENCODER
    rest = {name: value for name, value in foreign.weights.items() if not name.startswith(encoders)}
    there = [words for beginning, words in _PARTS if any(name.startswith(beginning) for name in rest)]
    there += ["teacher's encoder"] * bool(teacher)
    if not there:
        return []
    if not own_task:
        ends = f": --task {program.task} continues with them" if program.task else ""
        return [f"Besides the encoder it has {', '.join(there)}, which are left out{ends}."]
    modules, done, left = dict(task.named_modules()), [], []
    taken: State = {}
    # fixed positions of a decoder are only in a state dict if they differ from patchloom's
    own = task.state_dict() | {name: one for name, one in task.named_buffers() if name == _POSITIONS}
    for beginning, words in _PARTS:
        theirs, mine = select_prefix(beginning, rest), select_prefix(beginning, own)
        student = theirs
        if beginning.startswith(TEACHER_PREFIX):  # a teacher starts equal to its student
            student = select_prefix(AGREEMENT + beginning.removeprefix(TEACHER_PREFIX), taken)
            theirs = theirs or student
        why = _part_misfit(beginning, theirs, mine, modules.get(beginning.rstrip(".")), program)
        why = why or ("" if student else "the student's is left out, too")
        if theirs and mine and not why:
            taken |= {beginning + name: value for name, value in theirs.items()}
            done.append(words)
        elif theirs:
            left.append(f"{words} ({why if mine else 'there is none here'})")
        elif mine:
            left.append(f"{words} (not in the file, kept as initialised)")
    if _POSITIONS in taken:
        cast(MAEDecoder, modules[PIXEL_DECODER]).keep_positions()
    task.load_state_dict(taken, strict=False)
    copy = modules.get(f"{TEACHER_PREFIX}.{ENCODER.rstrip('.')}")
    if teacher and isinstance(copy, Encoder):
        load_published(copy, source, weights=teacher)
        done.append("teacher's encoder")
    lines = [f"Also loaded, from {program.name}: {', '.join(done)}."] if done else []
    return lines + ([f"Left out: {'; '.join(left)}."] if left else [])


def _part_misfit(beginning: str, theirs: State, mine: State, module: nn.Module | None, program: Program) -> str:
    """Return the reason why a part does not fit, with the remedy; "" if it fits, or is on one side only."""
    if not theirs or not mine:
        return ""
    depth, here = depth_of(theirs), depth_of(mine)
    if isinstance(module, Decoder) and "norm.weight" in theirs and "norm.weight" in mine and theirs["norm.weight"].ndim:
        width = len(theirs["norm.weight"])
        heads = program.decoder_heads.get(width, module.heads)
        pixels_beside = beginning == f"{PIXEL_DECODER}." and program.task == "droppos"
        give = {
            "decoder_width": (width, len(mine["norm.weight"])),
            "pixel_decoder_depth" if pixels_beside else "decoder_depth": (depth, here),
            "decoder_heads": (heads, module.heads),
        }
        if options := [f"--task.{name} {value}" for name, (value, own) in give.items() if value != own]:
            return f"it is {width} wide and {depth} deep with {heads} heads: give {' '.join(options)} to take it"
    if beginning.endswith("instance_head.") and depth != here:
        return f"it is {depth} deep: give --task.attention_blocks {depth} to take it"
    positions = {"positions"} if beginning == f"{PIXEL_DECODER}." else set()
    for name in sorted({*theirs, *mine} - positions):
        if name not in theirs or name not in mine:
            return f"there is no {name} {'here' if name in theirs else 'there'}"
        value = theirs[name]
        if value.shape != mine[name].shape:
            return f"{name or 'it'} is {_shapes(value, mine[name])}"
        if mine[name].is_floating_point() and not (value.is_floating_point() and value.isfinite().all()):
            return f"{name or 'it'} has values that are not finite floating-point numbers"
    if "positions" in theirs and theirs["positions"].shape != mine["positions"].shape:
        return f"its positions are for {len(theirs['positions'])} patches, not {len(mine['positions'])}"
    return ""
