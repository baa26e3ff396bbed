"""Whose program wrote a file of weights, and the same weights by our names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from patchloom.nets.fitting import POSITIONS, PROJECTION, State
from patchloom.nets.foreign import BEYOND_MASKING, ENCODER, PIXELS, PROGRAMS, TEACHER, Names, Program
from patchloom.nets.timm_names import timm_names
from patchloom.patches.positions import interleaved_sincos_1d, sincos_2d

_PATCHES = 196  # of the images of Beyond Masking's program: 224 pixels, patches of 16


class Foreign(NamedTuple):
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
        teacher = self.beginning(f"{TEACHER}.{ENCODER}") if whose == "teacher" else {}
        return teacher or self.beginning(ENCODER)

    def beginning(self, words: str) -> State:
        """The weights whose names begin with ``words``, by what follows."""
        return {name.removeprefix(words): one for name, one in self.weights.items() if name.startswith(words)}

    def rest(self) -> State:
        """All that is not an encoder, by our names."""
        encoders = (ENCODER, f"{TEACHER}.{ENCODER}")
        return {name: one for name, one in self.weights.items() if not name.startswith(encoders)}


def recognise(states: list[tuple[str, State]], programs: tuple[Program, ...] = PROGRAMS) -> Foreign | None:
    """Whose program wrote a file; None if it is none of these.

    Args:
        states: the state dicts in it by their paths, as `patchloom.nets.states.read_states` finds them.
        programs: which may have written it.
    """
    named = [(path, timm_names(state)) for path, state in states]
    for program in programs:
        places = [(path, prefix, state) for path, state in named for prefix in _prefixes(program, state)]
        if not places:
            continue
        teachers = [place for place in places if teaches(*place[:2])]
        students = [place for place in places if place not in teachers] or teachers
        if program.evaluated == "teacher" and not program.teacher and teachers:
            students = teachers  # of DINO nothing but an encoder is of use, and that is the teacher's
        path, prefix, state = students[0]
        weights, left = translated(program, program.names, under(prefix, state))
        if program.teacher and teachers and teachers[0] is not students[0]:
            theirs, unused = translated(program, program.teacher, under(teachers[0][1], teachers[0][2]))
            weights |= theirs
            left += unused
        if program is BEYOND_MASKING:
            weights |= _computed(weights)
        left += elsewhere(prefix, state, named, teachers if program.teacher else [])
        return Foreign(program, place_of(path, prefix), weights, tuple(left))
    return None


def translated(program: Program, names: Names, state: State) -> tuple[State, list[str]]:
    """A program's state dict (or gradients) by our names, and what is left out, with the reason.

    Args:
        program: whose it is.
        names: the table, which may be its teacher's.
        state: by its names after their common prefix; blocks by timm's.
    """
    weights: State = {}
    left: dict[tuple[str, str], list[str]] = {}
    for name, value in state.items():
        row = next(((theirs, ours) for theirs, ours in names if name.startswith(theirs)), None)
        if row is None or row[1].startswith("("):
            left.setdefault(row or (name, ""), []).append(name)
        else:
            weights[row[1] + name.removeprefix(row[0])] = value
    projection = weights.get(f"{ENCODER}{PROJECTION}")
    for name, value in weights.items():
        weights[name] = _as_here(program, name, value, projection)
    return weights, [f"{_some(names)} {why}".rstrip() for (_, why), names in left.items()]


def _as_here(program: Program, name: str, value: Tensor, projection: Tensor | None) -> Tensor:
    """A weight in the form that it has here: tokens flat, a 1x1 convolution as a linear layer, pixels in our order."""
    if name.rpartition(".")[2] in ("mask_token", "position_token"):
        return value.flatten()
    if not name.startswith((f"{PIXELS}.answer.", f"{PIXELS}.weight", f"{PIXELS}.bias")):
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
    projection, bridge = weights.get(f"{ENCODER}{PROJECTION}"), weights.get(f"{PIXELS}.embed.weight")
    more: State = {}
    if projection is not None and projection.ndim == 4 and len(projection) % 2 == 0:
        more[f"{ENCODER}{POSITIONS}"] = interleaved_sincos_1d(len(projection), _PATCHES)[None]
    if bridge is not None and bridge.ndim == 2 and len(bridge) % 2 == 0:
        more[f"{PIXELS}.embed.bias"] = torch.zeros(len(bridge))
        more[f"{PIXELS}.positions"] = interleaved_sincos_1d(len(bridge), _PATCHES)
    return more


def _prefixes(program: Program, state: State) -> list[str]:
    """The prefixes of a state dict under which are all marks of a program."""
    first = program.marks[0]
    found = [name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")]
    found = [prefix for prefix in found if all(prefix + mark in state for mark in program.marks)]
    if program.positions:
        found = [prefix for prefix in found if halves(state[prefix + POSITIONS]) == program.positions]
    return found


def halves(table: Tensor) -> str:
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


def teaches(path: str, prefix: str) -> bool:
    """Whether the weights at a place in a file are a moving average's."""
    return not {"ema", "teacher"}.isdisjoint(f"{path}.{prefix}".replace("_", ".").split("."))


def depth_of(names: Iterable[str], beginning: str = "") -> int:
    """How many blocks, or layers, weights have whose names go on so after ``beginning``."""
    counted = re.compile(re.escape(beginning) + r"(?:blocks|layers)\.(\d+)\.")
    return len({found[1] for name in names if (found := counted.match(name))})


def place_of(path: str, prefix: str) -> str:
    """Where in a file weights are whose names have a prefix, such as "state_dict.module"."""
    return ".".join(part for part in (path, prefix.rstrip(".")) if part)


def under(prefix: str, state: State) -> State:
    """The weights whose names have a prefix, by what follows it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def elsewhere(
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
