"""Published weights as a start: whose they are is found from their names, and nothing is left out silently.

An encoder keeps its own sizes. Weights are put in by timm's names; position embeddings and the patch projection are
resampled as timm does it; every other difference is reported or refused. A pickle is only ever read as weights, never
run.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.encode import grid_size, patch_side
from patchloom.nets.fitting import POSITIONS, PROJECTION, Grid, State, by, fit_positions, fit_projection
from patchloom.nets.states import read_states
from patchloom.nets.weights import EncoderCard, is_ours, load_encoder, read_card, stock_encoder, weights_file


class Matched(NamedTuple):
    """What `load_public` did.

    Attributes:
        source: where the weights came from, and which ones were taken if there are several in it.
        matched: names of the encoder that were filled.
        missing: names of the encoder that the source does not have; they keep their values.
        unexpected: names of the source, as they stand there, that were left out. What lies in other parts of a file,
            such as an optimiser's state, is counted for each part.
        resampled: what was changed to fit, such as "pos_embed: from a grid of 14x14 to 4x4".
    """

    source: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resampled: tuple[str, ...]

    def sentences(self) -> list[str]:
        """One to four lines for the log: the counts, then what is missing, unexpected and resampled."""
        lines = [
            f"Weights from {self.source}: {len(self.matched)} matched, {len(self.missing)} missing, "
            f"{len(self.unexpected)} unexpected, {len(self.resampled)} resampled or adapted."
        ]
        for what, names, mark in (
            ("Missing there, so as initialised", self.missing, ", "),
            ("Unexpected, so left out", self.unexpected, ", "),
            ("Resampled or adapted", self.resampled, "; "),
        ):
            if names:
                more = f"{mark}and {len(names) - 8} more" if len(names) > 8 else ""
                lines.append(f"{what}: {mark.join(names[:8])}{more}.")
        return lines


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

    Raises:
        PatchloomError: nothing of that kind is there, it cannot be read without running code, fewer than half of the
            encoder's block weights are in it, a shape differs, or a weight is not a finite floating-point number.
    """
    target = dict(vit.state_dict())
    states, grid = _read(source) if weights is None else ([("", weights)], grid)
    found = _choose(str(source), states, target)
    fitting = {name: _numbers(found, name) for name in target if name in found.weights}
    changes = fit_projection(fitting, target)
    changes += fit_positions(vit, found.source, found.weights, fitting, target, grid)
    for name, value in fitting.items():
        if value.shape != target[name].shape:
            raise PatchloomError(_misfit(found, name, value, target[name], vit.embed_dim))
    vit.load_state_dict(fitting, strict=False)
    return Matched(
        found.source,
        tuple(fitting),
        tuple(name for name in target if name not in fitting),
        tuple([found.prefix + name for name in found.weights if name not in fitting] + found.others),
        tuple(changes),
    )


def load_plain(path: Path, model: str) -> tuple[VisionTransformer, EncoderCard]:
    """An encoder in eval mode, of a file that holds weights alone, and its card, whose note says what was done.

    Args:
        path: what torch or safetensors saved, as for `load_public`.
        model: timm's name of the model, which has sizes and the statistics of its images.

    Raises:
        PatchloomError: timm has no such model, or it cannot be served; the file cannot be read, or is not of it.
    """
    stock_encoder(model)
    with torch.random.fork_rng(devices=[]):
        vit = timm.create_model(model, pretrained=False, num_classes=0)
    done = load_public(vit, path)
    deeper = [name for name in done.unexpected if "blocks." in name]
    if done.missing or deeper:  # an encoder that is partly at random would be measured
        what = f"lacks {done.missing[0]}" if done.missing else f"has {deeper[0]} besides"
        count = len(done.matched)
        raise PatchloomError(
            f"{path} is not {model}: {count} of the {count + len(done.missing)} weights match, and it {what}, so give "
            "another --model"
        )
    mean, std = (tuple(vit.pretrained_cfg[name]) for name in ("mean", "std"))
    images = f"Images are normalised as timm does it for {model}: {timm_statistics(model)}."
    note = " ".join([*done.sentences(), images])
    return vit.eval(), EncoderCard(None, mean, std, f"timm:{model}", path.name.partition(".")[0], note=note)


def timm_statistics(model: str) -> str | None:
    """Mean and deviation by which timm normalises the images of a model of its own, in words; None of any other."""
    if not timm.is_model(model.split(".")[0]) or (about := timm.models.get_pretrained_cfg(model)) is None:
        return None
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (about.mean, about.std))
    return f"mean {mean}; standard deviation {std}"


def public_shape(source: str | Path, model: str | None = None) -> dict[str, Any] | None:
    """The model that a source says it is of, without fetching or reading its weights.

    Args:
        source: as for `load_public`.
        model: the name that a user gives the model of a file that only holds tensors.

    Returns:
        ``name``, ``patch_size``, ``positions`` and ``options`` as `patchloom.nets.build.EncoderSpec` takes them; None
        for a file that only holds tensors, since the number of heads leaves no trace in them, unless ``model`` is one
        of timm's.

    Raises:
        PatchloomError: timm has no such model, it cannot be served, or there is no such file.
    """
    if str(source).startswith("timm:"):
        return _stock_shape(str(source).removeprefix("timm:"))
    path = weights_file(source)
    if not is_ours(path):
        return _stock_shape(model) if model is not None and timm.is_model(model.split(".")[0]) else None
    spec = read_card(path).spec
    return {"name": spec.model, "patch_size": spec.patch_size, "positions": spec.positions, "options": spec.options}


def _stock_shape(name: str) -> dict[str, Any]:
    stock = stock_encoder(name)
    positions = "learned" if POSITIONS in stock.state_dict() else "none"
    return {"name": name.split(".")[0], "patch_size": patch_side(stock), "positions": positions, "options": {}}


def _read(source: str | Path) -> tuple[list[tuple[str, State]], Grid]:
    """The state dicts of a source by their paths in it, and the rows and columns of patches, if they are known.

    Whatever becomes an encoder's weights is read here: the names of other programs are to become timm's here, too.
    """
    if str(source).startswith("timm:"):
        with torch.random.fork_rng(devices=[]):
            vit, _ = load_encoder(source)
        return [("", vit.state_dict())], grid_size(vit)
    path, grid = weights_file(source), None
    if is_ours(path):
        spec = read_card(path).spec
        grid = spec.img_size[0] // spec.patch_size, spec.img_size[1] // spec.patch_size
    return read_states(path), grid


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
            teaches = not {"ema", "teacher"}.isdisjoint(re.split(r"[._]", f"{path}.{prefix}"))
            rank = (alike[prefix], count, teaches, -order)
            if best is None or rank > best[0]:
                best = rank, path, state, prefix
    expected = [name for name in target if name.startswith("blocks.")]
    _, path, state, prefix = best or ((), *max(states, key=lambda one: len(one[1]), default=("", {})), "")
    there = sum(prefix + name in state for name in expected)
    if 2 * there < len(expected):
        raise PatchloomError(_too_few(source, state, prefix, expected, there))
    if place := ".".join(part for part in (path, prefix.rstrip(".")) if part):
        source = f"{source} ({place})"
    elsewhere: Counter[str] = Counter()
    for where, other in states:
        if other is not state:
            elsewhere[where.partition(".")[0] or "the top level"] += len(other)
    others = [name for name in state if not name.startswith(prefix)]
    others += [f"{count} tensor{'s' * (count > 1)} of {part}" for part, count in elsewhere.items()]
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return _Found(source, weights, prefix, others)


def _too_few(source: str, state: State, prefix: str, expected: list[str], there: int) -> str:
    if not state:
        return f"{source} holds no tensors: give a file with a state_dict of timm's names, or timm:NAME"
    depth = len({name.split(".")[1] for name in expected if prefix + name in state})
    own = len({name.split(".")[1] for name in expected})
    if 0 < depth < own:
        return f"{source} has {depth} blocks and this encoder {own}: give --model.depth {depth}"
    return (
        f"{source} has {there} of the {len(expected)} weights of this encoder's blocks: its names are like "
        f"{', '.join(list(state)[:3])}, and timm's, like {expected[0]}, are expected"
    )


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
    elif ".mlp.fc1." in name:
        advice = f"give --model.mlp_ratio {len(value) / width:g}"
    shapes = f"{by(value.shape)} there and {by(own.shape)} here"
    return f"{found.source} does not fit this encoder, as {name} is {shapes}: {advice}"
