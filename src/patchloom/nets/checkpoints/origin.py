"""Origin of weights: the kind of their source, the program that wrote them, and the encoder that they are of.

A source is a module of a Python call, ``timm:NAME``, a run's folder or a file of patchloom, a folder or repository of
the Hugging Face Hub, or a file of weights alone. `Weights` reads it on demand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm
import torch
import yaml
from timm.models.eva import Eva

from patchloom.errors import PatchloomError, listing
from patchloom.nets.build import (
    EncoderSpec,
    depth_of,
    options_in_weights,
    outline,
    own_names,
    spec_of_stock,
    stock_encoder,
)
from patchloom.nets.checkpoints.format import (
    ENCODER_FILE,
    HUB_CONFIG,
    HUB_IMAGES,
    HUB_README,
    UNKNOWN_LICENSE,
    EncoderCard,
    card_of,
    check_affordable,
    check_statistics,
    find_weights,
    is_on_hub,
    license_from,
    load_encoder_file,
    spec_from,
    timm_license,
    weights_file,
)
from patchloom.nets.checkpoints.live import LiveEncoder
from patchloom.nets.checkpoints.programs import (
    ANY_PROGRAM,
    ForeignCheckpoint,
    MeanStd,
    Program,
    position_axis_order,
    recognise,
)
from patchloom.nets.checkpoints.read import State, is_pickle, printable, read_metadata, read_states
from patchloom.nets.checkpoints.resize import POSITIONS_KEY, PROJECTION_KEY, OptionalGrid, square_grid, token_counts
from patchloom.nets.encode import grid_size, has_rotations, heads_by_stage
from patchloom.nets.swin import patch_embedding
from patchloom.options.pretrain import PositionKind
from patchloom.sizes import compact
from patchloom.system.documents import parse_json
from patchloom.system.files import read_bytes, read_text

Kind = Literal["module", "timm", "patchloom", "hub", "bare"]


def kind_of(source: str | Path) -> Kind:
    """Return the kind of a source.

    module: a module of a Python call; timm: ``timm:NAME``; patchloom: a run's folder or a file that patchloom wrote;
    hub: a folder in the format of the Hugging Face Hub, for timm or transformers, or ``timm:hf-hub:OWNER/NAME``; bare:
    any other file, with weights only.
    """
    if isinstance(source, LiveEncoder):
        return "module"
    if is_on_hub(source):
        return "hub"
    if str(source).startswith("timm:"):
        return "timm"
    path = Path(source)
    if path.is_dir():
        return "patchloom" if find_weights(path).name == ENCODER_FILE else "hub"
    if is_pickle(path) or not path.is_file():
        return "bare"
    ours = any(key.startswith("patchloom-") for key in read_metadata(path, "encoder weights"))
    return "patchloom" if ours else "bare"


def check_model(source: str | Path, model: str | None, option: str = "--model") -> None:
    """Raise an error if a model is named for a source that names its own model."""
    if model is not None and kind_of(source) != "bare":
        raise PatchloomError(
            f"{option} is for a file of weights alone, and {source} names its own model: leave out {option}"
        )


TIMMS_EPS = 1e-6


class Stated(NamedTuple):
    """What a source states about its weights, whatever these are.

    Attributes:
        spec: spec of their encoder.
        statistics: mean and standard deviation per channel that normalise its images.
        license: licence; "" for weights of patchloom that began with random ones.
        name: name of the model in its library, for a folder of the Hub.
        heads: number of attention heads, if that is stated without a spec.
        eps: value that its norms add to a variance.
    """

    spec: EncoderSpec | None
    statistics: MeanStd | None
    license: str
    name: str = ""
    heads: int | None = None
    eps: float = TIMMS_EPS


class Weights:
    """Weights at a source of any kind; each part is read on first access.

    Args:
        source: ``timm:NAME``, a folder or a file.

    Attributes:
        source: the argument.
        kind: kind of the source, as in `kind_of`.
        path: file of the weights; None for timm.
    """

    def __init__(self, source: str | Path):
        self.source = source
        self.kind = kind_of(source)
        self.path = None if self.kind == "timm" else weights_file(source)

    @cached_property
    def card(self) -> EncoderCard | None:
        """Card of an encoder's file of patchloom's."""
        return None if self.path is None else card_of(self.path)

    @cached_property
    def stated(self) -> Stated:
        """What the source states; nothing is fetched for it."""
        if self.path is None:
            name = str(self.source).removeprefix("timm:")
            return Stated(spec_of_stock(stock_encoder(name), name), _timm_statistics(name), timm_license(name))
        if self.card is not None:
            return Stated(self.card.own_spec, (self.card.mean, self.card.std), self.card.license)
        if self.kind == "hub":
            return _read_hub(self.path, self.states)
        about = {} if is_pickle(self.path) else read_metadata(self.path, "weights")
        return Stated(None, None, license_from(about.get("license")))

    @cached_property
    def states(self) -> list[tuple[str, State]]:
        """State dicts by their places in the file."""
        if self.path is not None:
            return read_states(self.path)
        with torch.random.fork_rng(devices=[]):
            return [("", load_encoder_file(self.source)[0].state_dict())]

    @property
    def sizes(self) -> tuple[OptionalGrid, list[int] | None]:
        """Grid of patches, and attention heads as in `heads_by_stage`, as far as the source states them."""
        if self.path is None:
            net = stock_encoder(str(self.source).removeprefix("timm:"))
        elif self.stated.spec is not None:
            net = outline(self.stated.spec)
        else:
            return None, None if self.stated.heads is None else [self.stated.heads]
        return grid_size(net), heads_by_stage(net)

    @cached_property
    def _recognised(self) -> ForeignCheckpoint | None:
        """The weights by patchloom's names, unless the source is patchloom's or timm's, so that nothing is inferred."""
        own = self.path is None or self.card is not None
        return None if own else recognise(self.states)

    @property
    def foreign(self) -> ForeignCheckpoint | None:
        """The weights by patchloom's names, if a known program wrote them."""
        found = self._recognised
        return None if found is None or found.program is ANY_PROGRAM else found

    @property
    def program(self) -> Program | None:
        """The program that wrote them, if known."""
        return self.foreign.program if self.foreign else None

    @cached_property
    def architecture(self) -> Architecture | None:
        """Architecture inferred from the weights."""
        found = self._recognised
        if found is None or self.unlike_plain is not None:
            return None
        return infer_architecture(found.encoder(found.program.evaluated), self.program, self.stated.heads)

    @cached_property
    def unlike_plain(self) -> tuple[str, tuple[str, ...]] | None:
        """Sign that weights of no known program are not, or may not be, a plain ViT's, and models of timm with it."""
        found = self._recognised
        if self.kind != "bare" or found is None or found.program is not ANY_PROGRAM:
            return None
        weights, written = found.encoder("student"), {name for _, state in self.states for name in state}
        if seems_rotary(weights):
            return "rotations of queries and keys", ("vit_small_patch16_dinov3",)
        if "norm_pre.weight" in weights:
            return "a norm before the blocks", ("vit_pe_core_small_patch16_384", "vit_base_patch16_clip_224")
        first, second = (weights.get(f"blocks.0.mlp.fc{i}.weight") for i in (1, 2))
        gated = first is not None and second is not None and len(first) != second.shape[-1]
        if gated or "blocks.0.mlp.fc1_g.weight" in weights:
            return "gated MLPs", ("eva02_small_patch14_224",)
        relative = any(name.endswith("relative_position_bias_table") for name in written)  # of BEiT
        if not relative and any(name.endswith("blocks.0.gamma_1") for name in written):
            return "scales called gamma_1", ("vit_small_patch16_rope_ape_224", "deit3_small_patch16_224")
        return None

    def encoder_spec(self) -> EncoderSpec:
        """Return the spec of their encoder, if it can be determined."""
        spec = self.stated.spec
        if spec is None:
            if self.architecture is None or (self.foreign is None and self.kind != "hub"):
                raise PatchloomError(self.why_no_model())
            spec = self.architecture.spec
        try:  # before memory is allocated
            check_affordable(outline(spec), (value for _, state in self.states for value in state.values()))
        except ValueError as problem:
            raise PatchloomError(
                f"{self.path} does not have a {spec.model} with its sizes ({problem}): is it whole?"
            ) from problem
        return spec

    def why_no_model(self) -> str:
        """Return the reason why their encoder cannot be determined, and the remedy."""
        path, shape = self.path, self.architecture
        if self.kind == "hub":
            return f"{path} is not a plain ViT that timm can build: its names or sizes differ"
        if self.unlike_plain is not None:
            sign, models = self.unlike_plain
            return (
                f"{path} holds weights alone, with {sign}: give its name in timm by --model, such as {listing(models)}"
            )
        if shape is None:
            return (
                f"{path} holds weights alone, and the number of attention heads does not follow from their sizes: give "
                "its name in timm, such as --model vit_small_patch16_224"
            )
        tags = timm.list_pretrained(shape.spec.model)
        listed = f", such as {listing(tags[-2:])}" if tags else ""
        return (
            f"{path} holds weights alone, of the size of {shape.spec.model} ({shape}), and does not say how images are "
            f"normalised: give its name in timm, --model {shape.spec.model}, with the tag of these weights{listed}"
        )

    def statistics(self, model: str | None = None) -> tuple[MeanStd | None, str]:
        """Return mean and deviation that normalise their images, and whose they are.

        ``model`` is timm's name of the model of bare weights. None: they are unknown, or weights of that name differ in
        them, and it has no tag.
        """
        if self.stated.statistics is not None:
            return self.stated.statistics, f"{self.source} states"
        if self.program is not None and (model is None or "." not in model):
            return self.program.statistics, f"in {self.program.name}"
        named = model if self.kind == "bare" else None
        return (None if named is None else _timm_statistics(named)), f"in timm for {model}"


def _timm_statistics(model: str) -> MeanStd | None:
    """Return the statistics of a timm model; without a tag, those that all weights of that name share."""
    name, _, tag = model.partition(".")
    if not timm.is_model(name):
        return None
    tags = [model] if tag else timm.list_pretrained(f"{name}.*") or [name]
    configs = [timm.models.get_pretrained_cfg(one) for one in tags]
    found = {(tuple(one.mean), tuple(one.std)) for one in configs if one is not None}
    return found.pop() if len(found) == 1 else None


def statistics_in_words(mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    """Format mean and deviation per channel."""
    first, second = (", ".join(f"{value:g}" for value in values) for values in (mean, std))
    return f"mean {first}; standard deviation {second}"


def public_shape(weights: Weights, model: str | None = None) -> dict[str, Any] | None:
    """Return the model of weights, as in `shape_of`, without fetching them; None if they do not show it.

    ``model`` is the name that the user gave to the model of bare weights, or auto.
    """
    named = None if model == "auto" else model
    if weights.card is not None:
        return shape_of(weights.card.own_spec, "img_size", "channels")
    if named is not None and weights.path is not None:
        if not timm.is_model(named.split(".")[0]):
            return None
        foreign = weights.foreign
        fixed = foreign is not None and positions_of(foreign.encoder("student"), foreign.program) == "sincos"
        return _trainable(spec_of_stock(stock_encoder(named), named)) | ({"positions": "sincos"} if fixed else {})
    if weights.unlike_plain is not None:
        raise PatchloomError(weights.why_no_model())
    if weights.stated.spec is not None:
        return _trainable(weights.stated.spec)
    if weights.architecture is None:
        return None
    found = shape_of(weights.architecture.spec)
    if found["positions"] == "none":  # the task chooses
        del found["positions"]
    return found


def _trainable(spec: EncoderSpec) -> dict[str, Any]:
    """Return the shape without options of norms after pooling: pre-training norms all tokens."""
    options = {name: value for name, value in spec.options.items() if name not in ("fc_norm", "final_norm")}
    return shape_of(replace(spec, options=options))


def shape_of(spec: EncoderSpec, *more: str) -> dict[str, Any]:
    """Return name, options, patch size and positions of an encoder, and ``more`` attributes of its spec."""
    shape = {name: getattr(spec, name) for name in ("patch_size", "positions", *more)}
    return {"name": spec.model, "options": spec.options} | shape


# A folder in the format of the Hugging Face Hub; its config.json is untrusted.


_MOST = 2**20  # bytes of a configuration file
_OF_TRANSFORMERS = ("vit", "vit_mae", "dinov2", "dinov2_with_registers")
_LARGEST_EPS = 1e-5  # transformers' ViTs add 1e-12 to variances, for weights trained with timm's 1e-6


def _read_hub(weights: Path, states: list[tuple[str, State]]) -> Stated:
    folder = weights.parent
    config = _read_json(folder / HUB_CONFIG)
    images = _read_json(folder / HUB_IMAGES) if (folder / HUB_IMAGES).is_file() else {}
    try:
        found = _of_timm(config, states) if "architecture" in config else _of_transformers(config, images)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError) as problem:
        reason = f"it lacks {problem}" if isinstance(problem, KeyError) else str(problem)
        raise PatchloomError(
            f"{folder / HUB_CONFIG} is not the configuration of a model that can be read "
            f"({printable(reason, 200)}): fetch it again, or give {weights.name} alone"
        ) from problem
    # the header of a model card states it, or else the configuration that timm writes
    about = config.get("pretrained_cfg")
    terms = license_from(about.get("license") if isinstance(about, dict) else None)
    with suppress(OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
        text = read_text(folder / HUB_README, most=_MOST, follow=True)
        # every value is a text: an impossible date would be a ValueError otherwise
        header = yaml.load(text.split("---\n")[1], yaml.BaseLoader) if text.startswith("---\n") else None
        if isinstance(header, dict):
            named = license_from(header.get("license_name" if header.get("license") == "other" else "license"))
            terms = terms if named == UNKNOWN_LICENSE else named
    return found._replace(license=terms)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_bytes(path, _MOST, follow=True))
        if not isinstance(found, dict):
            raise ValueError("it is not an object with names and values")
        return found
    except (OSError, ValueError, RecursionError) as problem:
        reason = printable(str(problem), 200)
        raise PatchloomError(f"{path} cannot be read as a configuration ({reason}): fetch it again") from problem


def _of_timm(config: Mapping[str, Any], states: list[tuple[str, State]]) -> Stated:
    """Read the format of timm's ``save_for_hf`` and of ``export --to hf``."""
    name, given = config["architecture"], dict(config.get("model_args") or {})
    about = config.get("pretrained_cfg", config)  # older configurations have its values beside the architecture
    stock = stock_encoder(name)
    channels, *size = about["input_size"]
    img_size = given.pop("img_size", size)
    sizes = {
        "img_size": [img_size] * 2 if isinstance(img_size, int) else img_size,
        "patch_size": given.pop("patch_size", None) or compact(patch_embedding(stock).patch_size),
        "channels": given.pop("in_chans", channels),
    }
    for set_here in ("num_classes", "global_pool", "pos_embed", "use_abs_pos_emb", "dynamic_img_size"):
        given.pop(set_here, None)
    if not given.get("fc_norm", True):  # default of an encoder without pooling
        del given["fc_norm"]
    weights = {key: value for _, state in states for key, value in state.items()}
    table = next((value for key, value in weights.items() if key.endswith(POSITIONS_KEY)), None)
    positions = positions_of({} if table is None else {POSITIONS_KEY: table}, None)
    if pooled := "fc_norm.weight" in weights:  # the pooling that a name or a configuration implies
        given["fc_norm"] = True
    if isinstance(stock, Eva):
        given = own_names(given) | ({"final_norm": "norm.weight" in weights} if pooled else {})
        positions = "rotary" if table is None and has_rotations(stock) else positions
    spec = spec_from({"model": name, **sizes, "positions": positions, "options": given})
    return Stated(spec, check_statistics(about["mean"], about["std"]), "", name)


def _of_transformers(config: Mapping[str, Any], images: Mapping[str, Any]) -> Stated:
    kind, heads, eps = config["model_type"], config["num_attention_heads"], config.get("layer_norm_eps", 1e-12)
    if kind not in _OF_TRANSFORMERS:
        raise ValueError(f"its model_type is {str(kind)[:40]!r}, and {listing(_OF_TRANSFORMERS)} can be read")
    if type(heads) is not int or not 1 <= heads <= 2**10:
        raise ValueError(f"num_attention_heads is {str(heads)[:40]!r}")
    if type(eps) not in (int, float) or not 0 <= eps <= _LARGEST_EPS:
        raise ValueError(f"layer_norm_eps is {str(eps)[:40]!r}, and timm's ViTs have 1e-6")
    if (act := config.get("hidden_act", "gelu")) != "gelu" or config.get("use_swiglu_ffn"):
        raise ValueError(f"its blocks have {'SwiGLU' if act == 'gelu' else str(act)[:40]!r}, and timm's ViTs have gelu")
    scale = images.get("rescale_factor", 1 / 255) if images.get("do_rescale", True) else 1.0
    if type(scale) is not float or abs(255 * scale - 1) > 1e-3:
        raise ValueError(f"its {HUB_IMAGES} multiplies images by {str(scale)[:40]}, and 1/255 is expected")
    mean, std = images.get("image_mean"), images.get("image_std")
    if images.get("do_normalize") is False:
        mean, std = [0.0] * 3, [1.0] * 3
    statistics = None if mean is None else check_statistics(mean, std)
    return Stated(None, statistics, "", kind, heads, eps)


# Inference of the architecture. Width, depth and patches can be read off weights; the number of heads is the usual one.


# by width: timm's name, depth, and attention heads (Touvron et al. 2021; Dosovitskiy et al. 2021, Table 1)
_USUAL = {
    192: ("vit_tiny_patch16_224", 12, 3),
    384: ("vit_small_patch16_224", 12, 6),
    768: ("vit_base_patch16_224", 12, 12),
    1024: ("vit_large_patch16_224", 24, 16),
    1280: ("vit_huge_patch14_224", 32, 16),
}


class Architecture(NamedTuple):
    """Architecture inferred from weights.

    Attributes:
        spec: encoder of a timm model with the same width, depth and patches, or of the nearest with options; its
            positions are sincos for any fixed embeddings, learned, or none.
        width, depth, heads: sizes of the blocks; heads cannot be seen in weights.
        assumed: whether the number of heads is the usual one, because nothing states it.
    """

    spec: EncoderSpec
    width: int
    depth: int
    heads: int
    assumed: bool = True

    def __str__(self) -> str:
        return f"{self.width} wide, {self.depth} deep, patches of {self.spec.patch_size} pixels"

    def sentence(self) -> str:
        """Describe what was inferred from the weights, and what was assumed."""
        heads = "are assumed, because weights do not show them" if self.assumed else f"are those in its {HUB_CONFIG}"
        return f"The architecture was inferred from the weights ({self}); {self.heads} attention heads {heads}."


def infer_architecture(weights: State, program: Program | None = None, heads: int | None = None) -> Architecture | None:
    """Infer the architecture from weights.

    Return None for a width or depth for which the number of heads cannot be assumed, unless ``heads`` is given.
    """
    projection, first = weights.get(PROJECTION_KEY), weights.get("blocks.0.mlp.fc1.weight")
    if projection is None or projection.ndim != 4 or first is None or first.ndim != 2:
        return None
    if any(weights[name].ndim != 3 for name in ("cls_token", "reg_token") if name in weights):
        return None
    width, channels, p, across = projection.shape
    if not width or p != across or first.shape[1] != width or seems_rotary(weights):
        return None
    model, usual_depth, usual_heads = _USUAL.get(width, ("vit_tiny_patch16_224", 12, 3))
    depth, tokens = depth_of(weights), token_counts(weights)
    if heads is None and (width not in _USUAL or (depth != usual_depth and program is None)):
        return None
    side, table = 224 // p, weights.get(POSITIONS_KEY)
    if table is not None:
        tokens.pop("dist_token", None)  # a plain ViT has none
        side = square_grid(table.shape[1], tokens)[1] if table.ndim == 3 else 0
    if not side:
        return None
    count = heads or (usual_heads if program is None else program.heads.get(width, usual_heads))
    usual = {"depth": usual_depth, "num_heads": usual_heads, "mlp_ratio": 4.0}
    usual |= {"embed_dim": width} if width in _USUAL else {}
    shown = options_in_weights(weights, count, 1e-5 if program is None else program.layer_scale)
    options = {name: value for name, value in shown.items() if value != usual.get(name)}
    named = re.sub(r"patch\d+", f"patch{p}", model)
    named = named if timm.is_model(named) else model
    spec = EncoderSpec(named, (p * side, p * side), p, channels, positions_of(weights, program), options)
    return Architecture(spec, width, depth, count, assumed=heads is None)


def positions_of(weights: State, program: Program | None) -> PositionKind:
    """Return the kind of positions of weights, as in `Architecture`."""
    if POSITIONS_KEY not in weights:
        return "none"
    computed = program is not None and not program.saves_positions
    return "sincos" if computed or position_axis_order(weights[POSITIONS_KEY]) else "learned"


def seems_rotary(weights: State) -> bool:
    """Return whether weights look like those of an encoder with rotations; most rotations leave no trace there."""
    marks = "rope.freqs", "rope_embed.periods"
    return not weights.keys().isdisjoint(marks) or ("reg_token" in weights and POSITIONS_KEY not in weights)
