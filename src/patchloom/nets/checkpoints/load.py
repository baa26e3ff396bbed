"""Loading of encoders in eval mode, and their cards, from any source: patchloom's, timm's, the papers', the Hub's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.build import build_encoder, stock_encoder
from patchloom.nets.checkpoints.fit import load_published
from patchloom.nets.checkpoints.format import HUB_CONFIG, HUB_IMAGES, EncoderCard, is_on_hub, load_encoder_file
from patchloom.nets.checkpoints.live import LiveEncoder
from patchloom.nets.checkpoints.origin import TIMMS_EPS, Weights, check_model, kind_of, statistics_in_words
from patchloom.nets.checkpoints.programs import AGREEMENT, TEACHER_PREFIX, depth_of
from patchloom.nets.checkpoints.resize import Misfit
from patchloom.nets.heads import InstanceHead, Stem, Use
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import Network


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
    except PatchloomError as problem:  # the message names the usual option
        raise PatchloomError(str(problem).replace("--model ", f"{option} ")) from problem


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
        tag = timm.list_pretrained(f"{model}.*")[-1]
        by += f", whose weights differ in this (a tag, such as in {tag}, chooses)"
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
    if foreign is None or shape is None or not foreign.beginning(f"{TEACHER_PREFIX}.instance_head."):
        return None
    owner = AGREEMENT if network == "student" else TEACHER_PREFIX
    head, first = (foreign.beginning(f"{owner}.{part}.") for part in ("instance_head", "projection"))
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
