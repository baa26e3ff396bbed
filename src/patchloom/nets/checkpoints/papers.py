"""Published weights as a start: whose they are is found from their names, and nothing is left out silently.

An encoder keeps its own sizes. Weights are put in by timm's names; position embeddings and the patch projection are
resampled as timm does it; every other difference is reported or refused. A pickle is only ever read as weights, never
run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import is_encoder_file, load_encoder_file, read_encoder_card, weights_file
from patchloom.nets.checkpoints.read import (
    BEYOND_MASKING_PROGRAM,
    ENCODER,
    PIXEL_DECODER,
    PROGRAMS,
    TEACHER_PREFIX,
    NameRules,
    Program,
    read_states,
)
from patchloom.nets.checkpoints.resize import (
    POSITIONS_KEY,
    PROJECTION_KEY,
    OptionalGrid,
    State,
    fit_biases,
    fit_positions,
    fit_projection,
    format_grid,
)
from patchloom.nets.encode import attention_heads, entry_width, grid_size
from patchloom.nets.swin import Encoder
from patchloom.patches.positions import interleaved_sincos_1d, sincos_2d

# Weights of a ViT or Swin under other programs' names, brought under timm's: the same weights in the same order.


_BLOCK = r"((?:^|.*\.)blocks\.\d+\.)"
_CHUNK = re.compile(r"(^|\.)blocks\.\d+\.(\d+\.)")  # DINOv2 trains its blocks in chunks, and counts them through
_SCALE = re.compile(_BLOCK + r"gamma_([12])$")
_BIAS = re.compile(_BLOCK + r"attn\.q_bias$")
_MERGING = re.compile(r"((?:^|.*\.)layers\.)(\d+)(\.downsample\..+)")
_COMPUTED = re.compile(r"(^|\.)layers\.\d+\.blocks\.\d+\.(attn\.relative_position_index|attn_mask)$")
_APART = re.compile(_BLOCK + r"attn\.q(_proj)?\.(weight|bias)$")


def timm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of other programs with timm's names for what is in a ViT's blocks, and for register tokens.

    - ``blocks.0.7.``, the block 7 in a chunk, becomes ``blocks.7.`` (DINOv2).
    - ``gamma_1`` of LayerScale becomes ``ls1.gamma`` (BEiT, SimMIM).
    - ``q_bias`` and ``v_bias`` become ``qkv.bias``, with zeros for the keys (BEiT, SimMIM, Beyond Masking).
    - ``q``, ``k`` and ``v`` apart become ``qkv``.
    - ``register_tokens`` becomes ``reg_token`` (DINOv2).
    - ``layers.0.downsample.``, the patch merging that ends a Swin's stage, becomes ``layers.1.downsample.``, since in
      timm it begins the next one; what follows from the windows' sizes is left out (Swin, SimMIM).

    Class attention (``blocks_token``) is no block of a ViT and stays as it is.
    """
    state = _merging({_CHUNK.sub(r"\1blocks.\2", name): value for name, value in state.items()})
    named: dict[str, Tensor] = {}
    done: set[str] = set()
    for name, value in state.items():
        if name in done:
            continue
        if found := _SCALE.fullmatch(name):
            name = f"{found[1]}ls{found[2]}.gamma"
        elif name == "register_tokens" or name.endswith(".register_tokens"):
            name = name.removesuffix("register_tokens") + "reg_token"
        elif found := _BIAS.fullmatch(name):
            if values := _alike(state, [name, f"{found[1]}attn.v_bias"]):
                done.update(values)
                q, v = values.values()
                name, value = f"{found[1]}attn.qkv.bias", torch.cat([q, torch.zeros_like(q), v])
        elif found := _APART.fullmatch(name):
            if values := _alike(state, [f"{found[1]}attn.{one}{found[2] or ''}.{found[3]}" for one in "qkv"]):
                done.update(values)
                name, value = f"{found[1]}attn.qkv.{found[3]}", torch.cat(list(values.values()))
        named[name] = value
    return {name: value for name, value in named.items() if name not in done}


def _merging(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of a Swin's patch merging as timm's."""
    merging = {name: found for name in state if (found := _MERGING.fullmatch(name))}
    ending = {found[1] for found in merging.values() if found[2] == "0"}  # in timm nothing is merged before stage 0
    named = {}
    for name, value in state.items():
        if (found := merging.get(name)) and found[1] in ending:
            name = f"{found[1]}{int(found[2]) + 1}{found[3]}"
        if not _COMPUTED.search(name):
            named[name] = value
    return named


def _alike(state: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The weights of these names if all are there and can be put one below the other, else none."""
    found = {name: state[name] for name in names if name in state}
    shapes = {value.shape for value in found.values()}
    return found if len(found) == len(names) and len(shapes) == 1 and len(next(iter(shapes))) else {}


# Whose program wrote a file of weights, and the same weights by our names.


_PATCHES = 196  # of the images of Beyond Masking's program: 224 pixels, patches of 16


class ForeignCheckpoint(NamedTuple):
    """A file of one of these programs.

    Attributes:
        program: whose it is.
        place: of the student's weights in it, such as "state_dict.module".
        weights: by our names, those of a task, the encoder and a teacher among them.
        left: what has no place here, with the reason.
    """

    program: Program
    place: str
    weights: State
    left: tuple[str, ...]

    def encoder(self, whose: Literal["student", "teacher"]) -> State:
        """The weights of one of its encoders by timm's names; of the student's if there is no teacher's."""
        teacher = self.beginning(f"{TEACHER_PREFIX}.{ENCODER}") if whose == "teacher" else {}
        return teacher or self.beginning(ENCODER)

    def beginning(self, words: str) -> State:
        """The weights whose names begin with ``words``, by what follows."""
        return {name.removeprefix(words): one for name, one in self.weights.items() if name.startswith(words)}

    def rest(self) -> State:
        """All that is not an encoder, by our names."""
        encoders = (ENCODER, f"{TEACHER_PREFIX}.{ENCODER}")
        return {name: one for name, one in self.weights.items() if not name.startswith(encoders)}


def recognise(states: list[tuple[str, State]], programs: tuple[Program, ...] = PROGRAMS) -> ForeignCheckpoint | None:
    """Whose program wrote a file; None if it is none of these."""
    named = [(path, timm_names(state)) for path, state in states]
    for program in programs:
        places = [(path, prefix, state) for path, state in named for prefix in _prefixes(program, state)]
        if not places:
            continue
        teachers = [place for place in places if is_teacher(*place[:2])]
        students = [place for place in places if place not in teachers] or teachers
        if program.evaluated == "teacher" and not program.teacher and teachers:
            students = teachers  # of DINO nothing but an encoder is of use, and that is the teacher's
        path, prefix, state = students[0]
        weights, left = translate_names(program, program.names, select_prefix(prefix, state))
        if program.teacher and teachers and teachers[0] is not students[0]:
            theirs, unused = translate_names(program, program.teacher, select_prefix(teachers[0][1], teachers[0][2]))
            weights |= theirs
            left += unused
        if program is BEYOND_MASKING_PROGRAM:
            weights |= _computed(weights)
        left += describe_leftovers(prefix, state, named, teachers if program.teacher else [])
        return ForeignCheckpoint(program, place_of(path, prefix), weights, tuple(left))
    return None


def translate_names(program: Program, names: NameRules, state: State) -> tuple[State, list[str]]:
    """A program's state dict (or gradients) by our names, and what is left out, with the reason."""
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
        weights[name] = _as_here(program, name, value, projection)
    return weights, [f"{_some(names)} {why}".rstrip() for (_, why), names in left.items()]


def _as_here(program: Program, name: str, value: Tensor, projection: Tensor | None) -> Tensor:
    """A weight in the form that it has here: tokens flat, a 1x1 convolution as a linear layer, pixels in our order."""
    if name.rpartition(".")[2] in ("mask_token", "position_token"):
        return value.flatten()
    if not name.startswith((f"{PIXEL_DECODER}.answer.", f"{PIXEL_DECODER}.weight", f"{PIXEL_DECODER}.bias")):
        return value
    if value.ndim == 4:
        value = value.flatten(1)
    if program.channels_last and projection is not None and projection.ndim == 4:
        c, h, w = projection.shape[1:]
        if value.ndim and len(value) == c * h * w:
            return value.unflatten(0, (h, w, c)).movedim(2, 0).flatten(0, 2)
    return value


def _computed(weights: State) -> State:
    """What Beyond Masking's program computes and never saves, positions row by row; and a bias that it has not."""
    projection, bridge = weights.get(f"{ENCODER}{PROJECTION_KEY}"), weights.get(f"{PIXEL_DECODER}.embed.weight")
    more: State = {}
    if projection is not None and projection.ndim == 4 and len(projection) % 2 == 0:
        more[f"{ENCODER}{POSITIONS_KEY}"] = interleaved_sincos_1d(len(projection), _PATCHES)[None]
    if bridge is not None and bridge.ndim == 2 and len(bridge) % 2 == 0:
        more[f"{PIXEL_DECODER}.embed.bias"] = torch.zeros(len(bridge))
        more[f"{PIXEL_DECODER}.positions"] = interleaved_sincos_1d(len(bridge), _PATCHES)
    return more


def _prefixes(program: Program, state: State) -> list[str]:
    """The prefixes of a state dict under which are all marks of a program."""
    first = program.marks[0]
    found = [name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")]
    found = [prefix for prefix in found if all(prefix + mark in state for mark in program.marks)]
    if program.positions:
        found = [prefix for prefix in found if position_axis_order(state[prefix + POSITIONS_KEY]) == program.positions]
    return found


def position_axis_order(table: Tensor) -> str:
    """Which fixed table of positions [1 1+n d] this is, as `Program` says it of its files; "" if it is none."""
    if table.ndim != 3 or table.shape[2] % 4 or not table.is_floating_point():
        return ""
    side = next((side for prefix in (1, 0) if (side := whole_root(table.shape[1] - prefix))), 0)
    if not side:
        return ""
    fixed, patches = sincos_2d(table.shape[2], (side, side)), table[0, -(side**2) :].float()
    for which, one in (("column first", fixed), ("row first", fixed.roll(table.shape[2] // 2, 1))):
        if torch.allclose(patches, one, atol=1e-2):  # in half precision, too
            return which
    return ""


def whole_root(n: int) -> int:
    """The side of a square of ``n`` patches; 0 if there is none."""
    side = math.isqrt(max(0, n))
    return side if side**2 == n else 0


def is_teacher(path: str, prefix: str) -> bool:
    """Whether the weights at a place in a file are a moving average's."""
    return not {"ema", "teacher"}.isdisjoint(f"{path}.{prefix}".replace("_", ".").split("."))


def depth_of(names: Iterable[str], beginning: str = "") -> int:
    """How many blocks, or layers, weights have whose names go on so after ``beginning``."""
    counted = re.compile(re.escape(beginning) + r"(?:blocks|layers)\.(\d+)\.")
    return len({found[1] for name in names if (found := counted.match(name))})


def place_of(path: str, prefix: str) -> str:
    """Where in a file weights are whose names have a prefix, such as "state_dict.module"."""
    return ".".join(part for part in (path, prefix.rstrip(".")) if part)


def select_prefix(prefix: str, state: State) -> State:
    """The weights whose names have a prefix, by what follows it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def describe_leftovers(
    prefix: str,
    state: State,
    named: list[tuple[str, State]],
    used: Sequence[tuple[str, str, State]] = (),
) -> list[str]:
    """What else is in a file: other names of the same state dict, and how many tensors are in its other parts."""
    others = [name for name in state if not name.startswith((prefix, *(one[1] for one in used if one[2] is state)))]
    counts: dict[str, int] = {}
    for where, other in named:
        if other is not state and not any(other is one[2] for one in used):
            part = where.partition(".")[0] or "the top level"
            counts[part] = counts.get(part, 0) + len(other)
    return others + [f"{count} tensor{'s' * (count > 1)} of {part}" for part, count in counts.items()]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class LoadedWeights(NamedTuple):
    """What `load_published` did.

    Attributes:
        source: where the weights came from, and which ones were taken if there are several in it.
        matched: names of the encoder that were filled.
        missing: names of the encoder that the source does not have; they keep their values.
        unexpected: names of the source, as they stand there, that were left out. What lies in other parts of a file,
            such as an optimiser's state, is counted for each part.
        resampled: what was changed to fit, such as "pos_embed: from a grid of 14x14 to 4x4".
        lost: those of ``unexpected`` without which the encoder's blocks compute something else than in the source.
        foreign: the file, if it is of an authors' program.
    """

    source: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resampled: tuple[str, ...]
    lost: tuple[str, ...] = ()
    foreign: ForeignCheckpoint | None = None

    def sentences(self) -> list[str]:
        """One to five lines for the log: the counts, then what is lost, missing, unexpected and resampled."""
        lines = [
            f"Weights from {self.source}: {len(self.matched)} matched, {len(self.missing)} missing, "
            f"{len(self.unexpected)} unexpected, {len(self.resampled)} resampled or adapted."
        ]
        if self.lost:
            lines.append(f"This is NOT the encoder that was trained, only a start: {self.why_not()}.")
        for what, names, mark in (
            ("Missing there, so as initialised", self.missing, ", "),
            ("Unexpected, so left out", self.unexpected, ", "),
            ("Resampled or adapted", self.resampled, "; "),
        ):
            if names:
                more = f"{mark}and {len(names) - 8} more" if len(names) > 8 else ""
                lines.append(f"{what}: {mark.join(names[:8])}{more}.")
        return lines

    def why_not(self) -> str:
        """What is lost, in words."""
        more = f" and {len(self.lost) - 1} more" if len(self.lost) > 1 else ""
        made = "; --model.init_values 1 makes one" if all(name.endswith(".gamma") for name in self.lost) else ""
        return f"it has {self.lost[0]}{more}, for which this encoder has no place{made}"


# what changes what the blocks compute, and no plain ViT, or not this one, has
_STAGE = re.compile(r"(^|\.)layers\.\d+\.$")
_STAGES = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.")
_INSIDE = re.compile(r"^reg_token$|relative_position_bias_table|\.ls\d\.gamma$|[qk]_norm\.|\.mlp\.w\d|\.mlp\.fc1_g")


class _Found(NamedTuple):
    """Weights by what follows the prefix of their names in the source, and what else is there."""

    source: str
    weights: State
    prefix: str
    others: list[str]


def load_published(
    vit: Encoder,
    source: str | Path,
    weights: State | None = None,
    grid: tuple[int, int] | None = None,
    foreign: ForeignCheckpoint | None = None,
    task: str = "",
) -> LoadedWeights:
    """Put published weights into an encoder in place; it changes as a whole or, if an error is raised, not at all.

    Weights become float32. Learned position embeddings of another grid [1 prefix+n d], and a patch projection [d c p p]
    of another patch size (FlexiViT, arXiv:2212.08013, section 3.4) or of 3 channels, are resampled as timm does it.
    The number of heads leaves no trace in weights: it must be the source's. Torch's random numbers stay as they are.
    """
    target = dict(vit.state_dict())
    states = [("", weights or {})]
    if weights is None and foreign is None:
        states, grid, foreign = _read(source)
    if foreign is not None:
        found = _of_program(str(source), foreign, vit, target, task)
    else:
        found = _choose(str(source), [(path, timm_names(state)) for path, state in states], target)
    fitting = {name: _numbers(found, name) for name in target if name in found.weights}
    changes = fit_projection(fitting, target)
    changes += fit_positions(vit, found.source, found.weights, fitting, target, grid)
    changes += fit_biases(fitting, target)
    for name, value in fitting.items():
        if value.shape != target[name].shape:
            raise PatchloomError(_misfit(found, name, value, target[name], entry_width(vit)))
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


def _changes(name: str, target: State) -> bool:
    """Whether the encoder's blocks compute something else without this weight."""
    block = re.match(r"blocks\.\d+\.", name)
    return _INSIDE.search(name) is not None and (block is None or f"{block[0]}norm1.weight" in target)


def _of_program(source: str, foreign: ForeignCheckpoint, vit: Encoder, target: State, task: str) -> _Found:
    """The encoder in a file of an authors' program."""
    program = foreign.program
    whose = "student" if task and task == program.task else program.evaluated
    heads = program.heads.get(vit.embed_dim)
    if heads not in (None, attention_heads(vit)):
        raise PatchloomError(
            f"{source} is of {program.name}, whose encoders of this width have {heads} attention heads, and this one "
            f"has {attention_heads(vit)}: give --model.num_heads {heads}, or no --model at all"
        )
    own = _choose(source, [("", foreign.encoder(whose))], target)
    teacher = ", its teacher" if whose == "teacher" and program.task else ""
    place = f"{foreign.place}, " if foreign.place else ""
    return own._replace(source=f"{source} ({place}of {program.name}{teacher})", others=list(foreign.left))


def _read(source: str | Path) -> tuple[list[tuple[str, State]], OptionalGrid, ForeignCheckpoint | None]:
    """The state dicts of a source by their paths in it.

    And, if they are known, the rows and columns of patches, and what an authors' program called its weights.
    """
    if str(source).startswith("timm:"):
        with torch.random.fork_rng(devices=[]):
            vit, _ = load_encoder_file(source)
        return [("", vit.state_dict())], grid_size(vit), None
    path, grid = weights_file(source), None
    if is_encoder_file(path):
        return read_states(path), read_encoder_card(path).own_spec.grid, None
    states = read_states(path)
    return states, grid, recognise(states)


def _choose(source: str, states: list[tuple[str, State]], target: State) -> _Found:
    """The state dict, and the prefix of its names, by which most of the encoder's weights are found."""
    best: tuple[tuple[Any, ...], str, State, str] | None = None
    for order, (path, state) in enumerate(states):
        named, alike = Counter[str](), Counter[str]()
        for name, value in state.items():
            parts = name.split(".")
            for i in range(len(parts)):
                if (ours := ".".join(parts[i:])) in target:
                    named[name.removesuffix(ours)] += 1
                    alike[name.removesuffix(ours)] += value.shape == target[ours].shape
        for prefix, count in named.items():
            # of a student and a teacher, which have the same shapes, papers use the teacher
            rank = (alike[prefix], count, is_teacher(path, prefix), -order)
            if best is None or rank > best[0]:
                best = rank, path, state, prefix
    expected = [name for name in target if name.startswith(("blocks.", "layers."))]
    _, path, state, prefix = best or ((), *max(states, key=lambda one: len(one[1]), default=("", {})), "")
    if _STAGE.search(prefix):  # its blocks have the names of a ViT's
        raise PatchloomError(f"{source} holds a Swin, and this encoder is a plain ViT: give the --model of a Swin")
    there = sum(prefix + name in state for name in expected)
    if 2 * there < len(expected):
        raise PatchloomError(_too_few(source, state, prefix, expected, there))
    if place := place_of(path, prefix):
        source = f"{source} ({place})"
    return _Found(source, select_prefix(prefix, state), prefix, describe_leftovers(prefix, state, states))


def _too_few(source: str, state: State, prefix: str, expected: list[str], there: int) -> str:
    if not state:
        return f"{source} holds no tensors: give a file with a state_dict of timm's names, or timm:NAME"
    if expected[0].startswith("layers."):
        theirs, here = _depths(name.removeprefix(prefix) for name in state), _depths(expected)
        if theirs and theirs != here:
            return f"{source} has stages of {theirs} blocks and this encoder {here}: give --model.depths '{theirs}'"
    depth = len({name.split(".")[1] for name in expected if prefix + name in state})
    own = len({name.split(".")[1] for name in expected})
    if 0 < depth < own:
        return f"{source} has {depth} blocks and this encoder {own}: give --model.depth {depth}"
    return (
        f"{source} has {there} of the {len(expected)} weights of this encoder's blocks: its names are like "
        f"{', '.join(list(state)[:3])}, and timm's, like {expected[0]}, are expected"
    )


def _depths(names: Iterable[str]) -> list[int]:
    """Blocks in each stage of a Swin, as weights' names tell."""
    blocks = {(int(found[1]), int(found[2])) for name in names if (found := _STAGES.match(name))}
    return [count for _, count in sorted(Counter(stage for stage, _ in blocks).items())]


def _numbers(found: _Found, name: str) -> Tensor:
    """A weight as finite float32, or an error with the name that it has in its source."""
    value, where = found.weights[name].detach(), f"{found.prefix}{name} in {found.source}"
    if not value.is_floating_point() or value.layout is not torch.strided:
        raise PatchloomError(f"{where} is {value.dtype}, not floating-point: save the weights unquantized")
    value = value.float()
    if not value.isfinite().all():
        raise PatchloomError(f"{where} has values that are not finite: take an earlier checkpoint")
    return value


def _misfit(found: _Found, name: str, value: Tensor, own: Tensor, width: int) -> str:
    """What differs, and what to do; ``width`` is the encoder's."""
    first, advice = found.weights.get("blocks.0.norm1.weight"), "give the --model of which these weights are"
    if first is not None and first.numel() != width:
        size = {192: "tiny", 384: "small", 768: "base", 1024: "large"}.get(first.numel())
        named = f"--model vit_{size}_patch16_224, or " if size else ""
        advice = f"the width there is {first.numel()}, here {width}: give {named}--model.embed_dim {first.numel()} "
        advice += "with the num_heads of these weights"
    elif name == PROJECTION_KEY and value.ndim == 4:
        advice = f"give --channels {value.shape[1]}"
    elif name == "reg_token" and value.ndim == 3:
        advice = f"give --model.reg_tokens {value.shape[1]}"
    elif ".mlp.fc1." in name and value.ndim:
        advice = f"give --model.mlp_ratio {len(value) / width:g}"
    shapes = f"{format_grid(value.shape)} there and {format_grid(own.shape)} here"
    return f"{found.source} does not fit this encoder, as {name} is {shapes}: {advice}"
