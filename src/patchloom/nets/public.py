"""Published weights as a start: whose they are is found from their names, and nothing is left out silently.

An encoder keeps its own sizes. Weights are put in by timm's names; position embeddings and the patch projection are
resampled as timm does it; every other difference is reported or refused. A pickle is only ever read as weights, never
run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.encode import attention_heads, entry_width, grid_size
from patchloom.nets.fitting import PROJECTION, Grid, State, by, fit_biases, fit_positions, fit_projection
from patchloom.nets.recognise import Foreign, elsewhere, place_of, recognise, teaches, under
from patchloom.nets.states import read_states
from patchloom.nets.timm_names import timm_names
from patchloom.nets.weights import is_ours, load_encoder, read_card, weights_file


class Matched(NamedTuple):
    """What `load_public` did.

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
    foreign: Foreign | None = None

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


def load_public(
    vit: VisionTransformer,
    source: str | Path,
    weights: State | None = None,
    grid: tuple[int, int] | None = None,
    foreign: Foreign | None = None,
    task: str = "",
) -> Matched:
    """Put published weights into an encoder in place; it changes as a whole or, if an error is raised, not at all.

    Weights become float32. Learned position embeddings of another grid [1 prefix+n d], and a patch projection [d c p p]
    of another patch size (FlexiViT, arXiv:2212.08013, section 3.4) or of 3 channels, are resampled as timm does it.
    The number of heads leaves no trace in weights: it must be the source's. Torch's random numbers stay as they are.

    Args:
        vit: the encoder. Which of its parameters are trained stays as it is.
        source: ``timm:NAME`` for weights that timm publishes; a run's folder; a ``.safetensors`` file, patchloom's or
            with timm's names; any other file that torch saved, read by ``torch.load(weights_only=True)``.
        weights, grid: what was read already, by timm's names, and its rows and columns of patches; ``source`` is then
            only what it is called.
        foreign: the same of a file of the authors' own programs. Unless these are given, a file is looked at for that.
        task: that goes on with them. With a program's own task it is the student's encoder that is taken, else the one
            that the authors evaluate.

    Raises:
        PatchloomError: nothing of that kind is there, it cannot be read without running code, fewer than half of the
            encoder's block weights are in it, a shape differs, or a weight is not a finite floating-point number.
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
    return Matched(
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


def _of_program(source: str, foreign: Foreign, vit: VisionTransformer, target: State, task: str) -> _Found:
    """The encoder in a file of an authors' program.

    Raises:
        PatchloomError: fewer than half of the weights of the encoder's blocks are in it, or its heads are others.
    """
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


def _read(source: str | Path) -> tuple[list[tuple[str, State]], Grid, Foreign | None]:
    """The state dicts of a source by their paths in it.

    And, if they are known, the rows and columns of patches, and what an authors' program called its weights.
    """
    if str(source).startswith("timm:"):
        with torch.random.fork_rng(devices=[]):
            vit, _ = load_encoder(source)
        return [("", vit.state_dict())], grid_size(vit), None
    path, grid = weights_file(source), None
    if is_ours(path):
        return read_states(path), read_card(path).spec.grid, None
    states = read_states(path)
    return states, grid, recognise(states)


def _choose(source: str, states: list[tuple[str, State]], target: State) -> _Found:
    """The state dict, and the prefix of its names, by which most of the encoder's weights are found.

    Raises:
        PatchloomError: fewer than half of the weights of the encoder's blocks are found.
    """
    best: tuple[tuple[Any, ...], str, State, str] | None = None
    for order, (path, state) in enumerate(states):
        named, alike = Counter(), Counter()
        for name, value in state.items():
            parts = name.split(".")
            for i in range(len(parts)):
                if (ours := ".".join(parts[i:])) in target:
                    named[name.removesuffix(ours)] += 1
                    alike[name.removesuffix(ours)] += value.shape == target[ours].shape
        for prefix, count in named.items():
            # of a student and a teacher, which have the same shapes, papers use the teacher
            rank = (alike[prefix], count, teaches(path, prefix), -order)
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
    return _Found(source, under(prefix, state), prefix, elsewhere(prefix, state, states))


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
    elif name == PROJECTION and value.ndim == 4:
        advice = f"give --channels {value.shape[1]}"
    elif name == "reg_token" and value.ndim == 3:
        advice = f"give --model.reg_tokens {value.shape[1]}"
    elif ".mlp.fc1." in name and value.ndim:
        advice = f"give --model.mlp_ratio {len(value) / width:g}"
    shapes = f"{by(value.shape)} there and {by(own.shape)} here"
    return f"{found.source} does not fit this encoder, as {name} is {shapes}: {advice}"
