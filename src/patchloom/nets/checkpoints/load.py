"""Loading of encoders from any source: patchloom's files, timm's, the papers' and Hugging Face's.

`Weights` determines the kind of a source and reads it; `load_pretrained` builds an encoder from it, and
`load_published` loads it into an existing encoder. That encoder keeps its sizes: weights are matched by timm's names,
position embeddings and the patch projection are resampled as in timm, and every other difference is reported or
rejected. A pickle is read as weights only, and never executed.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import timm
import torch
import yaml
from timm.models.eva import Eva
from torch import Tensor, nn

from patchloom.errors import PatchloomError, listing
from patchloom.nets.build import EncoderSpec, build_encoder, outline, own_names
from patchloom.nets.checkpoints.format import (
    ENCODER_FILE,
    HUB_CONFIG,
    HUB_IMAGES,
    HUB_README,
    UNKNOWN_LICENSE,
    EncoderCard,
    check_buffers,
    check_statistics,
    find_weights,
    is_encoder_file,
    is_on_hub,
    is_pickle,
    license_from,
    load_encoder_file,
    read_encoder_card,
    read_metadata,
    read_weights,
    spec_from,
    stock_encoder,
    timm_license,
    weights_file,
)
from patchloom.nets.checkpoints.live import LiveEncoder
from patchloom.nets.checkpoints.programs import (
    AGREEMENT,
    ANY_PROGRAM,
    ENCODER,
    PIXEL_DECODER,
    POSITION_DECODER,
    TEACHER_PREFIX,
    ForeignCheckpoint,
    MeanStd,
    Program,
    depth_of,
    describe_leftovers,
    eva_names,
    is_teacher,
    place_of,
    position_axis_order,
    recognise,
    select_prefix,
    square_side,
    timm_names,
    whole_root,
)
from patchloom.nets.checkpoints.resize import (
    POSITIONS_KEY,
    PROJECTION_KEY,
    Misfit,
    OptionalGrid,
    State,
    fit_biases,
    fit_positions,
    fit_projection,
    format_grid,
)
from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.encode import entry_width, grid_size, has_rotations, heads_by_stage
from patchloom.nets.heads import InstanceHead, Stem, Use
from patchloom.nets.swin import Encoder, patch_embedding
from patchloom.options.evaluate import Network
from patchloom.options.pretrain import PositionKind
from patchloom.sizes import compact
from patchloom.system.files import read_text, regular

# Kinds of sources.

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

    @property
    def says_itself(self) -> bool:
        """Whether the source is patchloom's or timm's, so that nothing has to be inferred from the weights."""
        return self.kind == "timm" or (self.path is not None and is_encoder_file(self.path))

    @cached_property
    def _published(self) -> Encoder:
        with torch.random.fork_rng(devices=[]):
            return load_encoder_file(self.source)[0]

    @cached_property
    def states(self) -> list[tuple[str, State]]:
        """State dicts by their places in the file."""
        return [("", self._published.state_dict())] if self.path is None else read_states(self.path)

    @property
    def grid(self) -> OptionalGrid:
        """Rows and columns of patches, if known."""
        if self.path is None:
            return grid_size(self._published)
        if self.says_itself:
            return read_encoder_card(self.path).own_spec.grid
        return None if self.hub is None or self.hub.spec is None else self.hub.spec.grid

    @cached_property
    def heads(self) -> list[int] | None:
        """Attention heads, as in `heads_by_stage`, if the source states them."""
        if self.path is None:
            return heads_by_stage(self._published)
        if self.says_itself:
            return heads_by_stage(outline(read_encoder_card(self.path).own_spec))
        if self.hub is None:
            return None
        if self.hub.spec is not None:
            return heads_by_stage(outline(self.hub.spec))
        return None if self.hub.heads is None else [self.hub.heads]

    @cached_property
    def hub(self) -> HubModel | None:
        """Contents of config.json, for a folder of the Hub."""
        return _read_hub(self) if self.kind == "hub" else None

    @cached_property
    def foreign(self) -> ForeignCheckpoint | None:
        """The weights by patchloom's names, if a known program wrote them."""
        return None if self.says_itself else recognise(self.states)

    @property
    def program(self) -> Program | None:
        """The program that wrote them, if known."""
        return self.foreign.program if self.foreign else None

    @cached_property
    def architecture(self) -> Architecture | None:
        """Architecture inferred from the weights."""
        heads = None if self.hub is None else self.hub.heads
        if self.foreign is not None:
            encoder = self.foreign.encoder(self.foreign.program.evaluated)
            return infer_architecture(encoder, self.foreign.program, heads)
        other = None if self.says_itself or self.unlike_plain else recognise(self.states, (ANY_PROGRAM,))
        return None if other is None else infer_architecture(other.encoder("student"), heads=heads)

    @cached_property
    def unlike_plain(self) -> Unlike | None:
        """Sign that weights of no known program are not, or may not be, those of a plain ViT."""
        if self.kind != "bare" or self.says_itself or self.foreign is not None:
            return None
        other = recognise(self.states, (ANY_PROGRAM,))
        return None if other is None else _unlike_plain(other.encoder("student"), self.states)

    def encoder_spec(self) -> EncoderSpec:
        """Return the spec of their encoder, if it can be determined."""
        shape = self.architecture
        if self.hub is not None and self.hub.spec is not None:
            spec = self.hub.spec
        elif shape is None or (self.foreign is None and self.hub is None):
            raise PatchloomError(_no_model(self, shape))
        else:
            sizes = (shape.side, shape.side), shape.patch_size, shape.channels
            spec = EncoderSpec(shape.model, *sizes, positions=shape.positions, options=shape.options)
        there = sum(value.numel() for _, state in self.states for value in state.values())
        net = outline(spec)
        if sum(one.numel() for one in net.parameters()) > 2 * there + 2**16:  # before memory is allocated
            raise PatchloomError(f"{self.path} holds fewer weights than {spec.model} has with its sizes: is it whole?")
        try:
            check_buffers(net)
        except ValueError as problem:
            raise PatchloomError(f"{spec.model} cannot be built with the sizes of {self.path}: {problem}") from problem
        return spec

    def statistics(self, vit: Encoder, model: str | None) -> tuple[MeanStd, str]:
        """Return mean and deviation that normalise the images of their encoder, and the source of that information."""
        if self.hub is not None and self.hub.statistics is not None:
            return self.hub.statistics, f"{self.source} states"
        if self.program is not None and (model is None or "." not in model):
            return self.program.statistics, f"in {self.program.name}"
        if model is None:
            raise PatchloomError(
                f"{self.source} does not have the statistics of its images: put its {HUB_IMAGES} beside {HUB_CONFIG}"
            )
        about = cast(dict[str, Any], vit.pretrained_cfg)
        by = f"in timm for {model}"
        if timm.is_model(model.partition(".")[0]) and _timm_statistics(model) is None:
            by += (
                f", whose weights differ in this (a tag, such as in {timm.list_pretrained(f'{model}.*')[-1]}, chooses)"
            )
        return (tuple(about["mean"]), tuple(about["std"])), by

    @property
    def license(self) -> str:
        """Licence that the source states, without fetching anything; "" for weights of patchloom from random ones."""
        if self.kind == "timm":
            return timm_license(str(self.source).removeprefix("timm:"))
        assert self.path is not None  # of a file
        if self.says_itself:
            return read_encoder_card(self.path).license
        if self.kind == "hub":
            return _hub_license(self.path.parent)
        return license_from(None if is_pickle(self.path) else read_metadata(self.path, "weights").get("license"))

    def own_statistics(self, model: str) -> MeanStd | None:
        """Return mean and deviation that normalise their images, without fetching them; None if unknown.

        For bare weights, those of timm's ``model``; None if weights of that name differ, and it has no tag.
        """
        if self.kind == "timm":
            return _timm_statistics(str(self.source).removeprefix("timm:"))
        if self.says_itself:
            assert self.path is not None  # a file of patchloom's
            card = read_encoder_card(self.path)
            return card.mean, card.std
        if self.hub is not None:
            return self.hub.statistics
        return self.program.statistics if self.program is not None else _timm_statistics(model)


# A folder in the format of the Hugging Face Hub; its config.json is untrusted.


_TIMMS_EPS = 1e-6


class HubModel(NamedTuple):
    """Model in a folder of the Hub.

    Attributes:
        name: name in its library.
        heads: number of attention heads, from transformers.
        spec: spec of the encoder, from timm; None for transformers.
        statistics: mean and standard deviation per channel; None if there are none.
        eps: value that its norms add to a variance.
    """

    name: str
    heads: int | None = None
    spec: EncoderSpec | None = None
    statistics: MeanStd | None = None
    eps: float = _TIMMS_EPS


_MOST = 2**20  # bytes of a configuration file
_OF_TRANSFORMERS = ("vit", "vit_mae", "dinov2", "dinov2_with_registers")
_LARGEST_EPS = 1e-5  # transformers' ViTs add 1e-12 to variances, for weights trained with timm's 1e-6


def _read_hub(weights: Weights) -> HubModel:
    assert weights.path is not None  # a folder
    folder = weights.path.parent
    config = _read_json(folder / HUB_CONFIG)
    images = _read_json(folder / HUB_IMAGES) if (folder / HUB_IMAGES).is_file() else {}
    try:
        if "architecture" in config:
            return _of_timm(config, weights.states)
        return _of_transformers(config, images)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError) as problem:
        raise PatchloomError(
            f"{folder / HUB_CONFIG} is not the configuration of a model that can be read "
            f"({_reason(problem)}): fetch it again, or give {weights.path.name} alone"
        ) from problem


def _reason(problem: BaseException) -> str:
    said = f"it lacks {problem}" if isinstance(problem, KeyError) else str(problem)
    return "".join(letter if letter.isprintable() else "?" for letter in said[:200])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path, most=_MOST, follow=True))
        if not isinstance(found, dict):
            raise ValueError("it is not an object with names and values")
        return found
    except (OSError, ValueError, RecursionError) as problem:
        raise PatchloomError(
            f"{path} cannot be read as a configuration ({_reason(problem)}): fetch it again"
        ) from problem


def _hub_license(folder: Path) -> str:
    """Return the licence in the header of a model card, or else in the configuration that timm writes."""
    with suppress(OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
        text = read_text(folder / HUB_README, most=_MOST, follow=True)
        # every value is a text: an impossible date would be a ValueError otherwise
        header = yaml.load(text.split("---\n")[1], yaml.BaseLoader) if text.startswith("---\n") else None
        if isinstance(header, dict):
            stated = header.get("license_name") if header.get("license") == "other" else header.get("license")
            if (found := license_from(stated)) != UNKNOWN_LICENSE:
                return found
    about = _read_json(folder / HUB_CONFIG).get("pretrained_cfg")
    return license_from(about.get("license") if isinstance(about, dict) else None)


def _of_timm(config: Mapping[str, Any], states: list[tuple[str, State]]) -> HubModel:
    """Read the format of timm's ``save_for_hf`` and of ``export --to hf``."""
    # older configurations have the values of pretrained_cfg beside the architecture
    name, given, about = (
        config["architecture"],
        dict(config.get("model_args") or {}),
        config.get("pretrained_cfg", config),
    )
    stock = stock_encoder(name)
    channels, *size = about["input_size"]
    channels = given.pop("in_chans", channels)
    sizes = {"img_size": given.pop("img_size", size), "patch_size": given.pop("patch_size", None)}
    sizes["patch_size"] = sizes["patch_size"] or compact(patch_embedding(stock).patch_size)
    if isinstance(sizes["img_size"], int):
        sizes["img_size"] = [sizes["img_size"]] * 2
    for set_here in ("num_classes", "global_pool", "pos_embed", "use_abs_pos_emb", "dynamic_img_size"):
        given.pop(set_here, None)
    if not given.get("fc_norm", True):  # default of an encoder without pooling
        del given["fc_norm"]
    table = next((value for _, state in states for key, value in state.items() if key.endswith(POSITIONS_KEY)), None)
    positions = positions_of({} if table is None else {POSITIONS_KEY: table}, None)
    names = {name for _, state in states for name in state}
    pooled = "fc_norm.weight" in names  # the pooling that a name or a configuration implies
    if pooled:
        given["fc_norm"] = True
    if isinstance(stock, Eva):
        given = own_names(given) | ({"final_norm": "norm.weight" in names} if pooled else {})
        positions = "rotary" if table is None and has_rotations(stock) else positions
    spec = spec_from({"model": name, **sizes, "channels": channels, "positions": positions, "options": given})
    assert spec is not None  # of an encoder
    return HubModel(name, spec=spec, statistics=check_statistics(about["mean"], about["std"]))


def _of_transformers(config: Mapping[str, Any], images: Mapping[str, Any]) -> HubModel:
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
    return HubModel(kind, heads, None, statistics, eps)


# State dicts in untrusted files. A pickle is read as weights only, and never executed.


class _Bystander:
    """Stand-in for an object of NumPy or pathlib that a file has beside its weights; the object is not built."""

    def __init__(self, *given: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# papers' files have their command line or configuration beside the weights, and a learning rate computed by NumPy:
# plain containers and numbers, replaced by stand-ins that execute nothing
_HARMLESS: list[Any] = [
    argparse.Namespace,
    (OrderedDict, "yacs.config.CfgNode"),
    *((_Bystander, name) for name in ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")),
    *((_Bystander, name) for name in ("pathlib.PosixPath", "pathlib._local.PosixPath")),
]


def read_states(path: Path) -> list[tuple[str, dict[str, Tensor]]]:
    """Read every state dict in a file of any program, by the path of its keys there."""
    if not is_pickle(path):
        read_metadata(path, "weights")
        return [("", read_weights(path))]
    found, queue, seen = [], deque([("", _unpickle(path))]), set()
    while queue:
        place, value = queue.popleft()
        if not isinstance(value, dict) or id(value) in seen:  # a pickle may contain itself
            continue
        seen.add(id(value))
        items = list(dict.items(value))  # the pickle of an OrderedDict may have replaced value.items
        tensors = {str(key): item for key, item in items if isinstance(item, Tensor)}
        for name, value in tensors.items():
            if not _is_stored(value):
                raise PatchloomError(
                    f"{path} does not store all numbers of {name[:80]!r}: save its state_dict again, with dense tensors"
                )
        if tensors:
            found.append((place, tensors))
        queue.extend((f"{place}.{key}" if place else str(key), item) for key, item in items)
    return found


def _is_stored(value: Tensor) -> bool:
    """Return whether all numbers of a tensor are in its file: a few bytes may stand for terabytes."""
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_nested:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _unpickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that this pickle may fail, which is reported if it does
            return torch.load(regular(path, follow=True), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        foreign = re.search(r"(?:GLOBAL|Trying to call reduce for|instantiate class) (\S+)", str(problem))
        what = f"Python objects ({foreign[1]}) that could run code" if foreign else "something other than weights"
        raise PatchloomError(
            f"{path} holds {what}, and was not loaded: save only its state_dict, preferably as .safetensors"
        ) from problem
    except Exception as problem:  # damaged and hostile files fail in many ways
        reason = f"{type(problem).__name__}: {problem}".partition("\n")[0].partition(". ")[0][:200]
        raise PatchloomError(
            f"{path} cannot be read as weights ({reason}): is it whole, and did torch save it?"
        ) from problem


# Published weights loaded into an existing encoder.


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
    resampled: tuple[str, ...]
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
    grid: OptionalGrid = None,
    foreign: ForeignCheckpoint | None = None,
    task: str = "",
    network: Network | None = None,
) -> LoadedWeights:
    """Load published weights into an encoder in place; if an error is raised, the encoder is unchanged.

    Weights become float32. Learned position embeddings of another grid [1 prefix+n d], and a patch projection [d c p p]
    of another patch size (FlexiViT, arXiv:2212.08013, section 3.4) or of 3 channels, are resampled as in timm. The
    number of heads cannot be seen in weights: it must be the source's. Torch's random state is unchanged. With
    ``weights`` and their ``grid``, or ``foreign``, ``source`` is only a name. ``network`` chooses between student and
    teacher of a known program; None is the student for its own ``task``, and the one that its authors evaluate else.
    """
    target = dict(vit.state_dict())
    states = [("", weights or {})]
    if weights is None and foreign is None:
        read = source if isinstance(source, Weights) else Weights(source)
        states, grid, foreign, source = read.states, read.grid, read.foreign, read.source
        check_heads(str(source), read.heads, vit)
    if foreign is not None:
        found = _of_program(str(source), foreign, vit, target, task, network)
    else:
        found = _choose(str(source), [(path, timm_names(state)) for path, state in states], target)
    table = found.weights.get(POSITIONS_KEY)
    if grid is None and table is not None and (foreign is not None or position_axis_order(table)):
        grid = (side, side) if (side := square_side(table)) else None  # known programs train on squares
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


def check_heads(source: str, heads: list[int] | None, vit: Encoder) -> None:
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


def _of_program(
    source: str, foreign: ForeignCheckpoint, vit: Encoder, target: State, task: str, network: Network | None
) -> _Selected:
    """Return the encoder in a file of a known program."""
    program = foreign.program
    whose = network or ("student" if task and task == program.task else program.evaluated)
    if (heads := program.heads.get(vit.embed_dim)) is not None:
        check_heads(f"{source} is of {program.name}, whose encoder", [heads], vit)
    own = _choose(source, [("", foreign.encoder(whose))], target)
    teacher = ", its teacher" if whose == "teacher" and program.task else ""
    place = f"{foreign.place}, " if foreign.place else ""
    return own._replace(source=f"{source} ({place}of {program.name}{teacher})", others=list(foreign.left))


def _choose(source: str, states: list[tuple[str, State]], target: State) -> _Selected:
    """Return the state dict, and the prefix of its names, that match most of the encoder's weights."""
    if any(name.endswith(_OF_EVA) for name in target):
        states = [(path, eva_names(state, target)) for path, state in states]
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
            # students and teachers have the same shapes, and papers use the teacher
            rank = (alike[prefix], count, is_teacher(path, prefix), -order)
            if best is None or rank > best[0]:
                best = rank, path, state, prefix
    expected = [name for name in target if _BLOCK.match(name)]
    _, path, state, prefix = best or ((), *max(states, key=lambda one: len(one[1]), default=("", {})), "")
    if _STAGE.search(prefix):  # names of a Swin's blocks look like a ViT's
        raise PatchloomError(f"{source} holds a Swin, and this encoder is a plain ViT: give the --model of a Swin")
    there = [name for name in expected if prefix + name in state]
    if 2 * len(there) < len(expected) or _blocks(there) != _blocks(expected):
        raise _too_few(source, state, prefix, expected, len(there))
    if place := place_of(path, prefix):
        source = f"{source} ({place})"
    return _Selected(source, select_prefix(prefix, state), prefix, describe_leftovers(prefix, state, states))


def _blocks(names: Iterable[str]) -> set[str]:
    """Return the beginnings of the blocks that names of weights belong to."""
    return {found[0] for name in names if (found := _BLOCK.match(name))}


def _too_few(source: str, state: State, prefix: str, expected: list[str], there: int) -> PatchloomError:
    if not state:
        return PatchloomError(f"{source} holds no tensors: give a file with a state_dict of timm's names, or timm:NAME")
    if expected[0].startswith("layers."):
        theirs, here = _depths(name.removeprefix(prefix) for name in state), _depths(expected)
        if theirs and theirs != here:
            fact = f"{source} has stages of {theirs} blocks and this encoder {here}"
            return Misfit(fact, f"give --model.depths '{theirs}'")
    depth, own = len(_blocks(name for name in expected if prefix + name in state)), len(_blocks(expected))
    if 0 < depth < own:
        return Misfit(f"{source} has {depth} blocks and this encoder {own}", f"give --model.depth {depth}")
    return PatchloomError(
        f"{source} has {there} of the {len(expected)} weights of this encoder's blocks: its names are like "
        f"{', '.join(list(state)[:3])}, and timm's, like {expected[0]}, are expected"
    )


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
        size = {192: "tiny", 384: "small", 768: "base", 1024: "large"}.get(first.numel())
        named = f"--model vit_{size}_patch16_224, or " if size else ""
        advice = f"the width there is {first.numel()}, here {width}: give {named}--model.embed_dim {first.numel()} "
        advice += "with the num_heads of these weights"
        if _seems_rotary(found.weights):
            advice = f"the width there is {first.numel()}, here {width}: give its name in timm, such as --model "
            advice += "vit_small_patch16_dinov3"
    elif name == PROJECTION_KEY and value.ndim == 4:
        advice = f"give --channels {value.shape[1]}"
    elif name == "reg_token" and value.ndim == 3:
        advice = f"give --model.reg_tokens {value.shape[1]}"
    elif ".mlp.fc1." in name and value.ndim:
        advice = f"give --model.mlp_ratio {len(value) / width:g}"
    shapes = f"{format_grid(value.shape)} there and {format_grid(own.shape)} here"
    return Misfit(f"{found.source} does not fit this encoder, as {name} is {shapes}", advice)


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


def inherit(foreign: ForeignCheckpoint, task: nn.Module, own_task: bool, source: str) -> list[str]:
    """Load decoders, heads, tokens and teacher of a file into a task in place; return sentences on the outcome."""
    program, rest = foreign.program, foreign.other_weights()
    there = [words for beginning, words in _PARTS if any(name.startswith(beginning) for name in rest)]
    teacher = foreign.beginning(f"{TEACHER_PREFIX}.{ENCODER}")
    there += ["teacher's encoder"] * bool(teacher)
    if not there or not own_task:
        ends = f": --task {program.task} continues with them" if program.task else ""
        return [f"Besides the encoder it has {', '.join(there)}, which are left out{ends}."] if there else []
    taken: State = {}
    done, left = [], []
    # fixed positions of a decoder are only in a state dict if they differ from patchloom's
    own = task.state_dict() | {name: one for name, one in task.named_buffers() if name == f"{PIXEL_DECODER}.positions"}
    for beginning, words in _PARTS:
        theirs = {name: value for name, value in rest.items() if name.startswith(beginning)}
        mine = {name: value for name, value in own.items() if name.startswith(beginning)}
        student = f"{AGREEMENT}{beginning.removeprefix(TEACHER_PREFIX)}"
        if beginning.startswith(TEACHER_PREFIX) and not theirs:  # a teacher starts equal to its student
            theirs = {
                beginning + name.removeprefix(student): one for name, one in taken.items() if name.startswith(student)
            }
        why = _part_misfit(beginning, theirs, mine, task, foreign)
        if beginning.startswith(TEACHER_PREFIX) and not any(name.startswith(student) for name in taken):
            why = why or "the student's is left out, too"
        if theirs and mine and not why:
            taken |= theirs
            done.append(words)
        elif theirs:
            left.append(f"{words} ({why if mine else 'there is none here'})")
        elif mine:
            left.append(f"{words} (not in the file, kept as initialised)")
    if f"{PIXEL_DECODER}.positions" in taken:
        cast(MAEDecoder, _module(task, PIXEL_DECODER)).keep_positions()
    task.load_state_dict(taken, strict=False)
    copy = _module(task, f"{TEACHER_PREFIX}.{ENCODER.rstrip('.')}")
    if teacher and isinstance(copy, Encoder):
        load_published(copy, source, weights=teacher)
        done.append("teacher's encoder")
    lines = [f"Also loaded, from {program.name}: {', '.join(done)}."] if done else []
    return lines + ([f"Left out: {'; '.join(left)}."] if left else [])


def _module(task: nn.Module, name: str) -> nn.Module | None:
    return dict(task.named_modules()).get(name)


def _part_misfit(beginning: str, theirs: State, mine: State, task: nn.Module, foreign: ForeignCheckpoint) -> str:
    """Return the reason why a part does not fit, with the remedy; "" if it fits."""
    decoder = _module(task, beginning.rstrip("."))
    if isinstance(decoder, Decoder) and (advice := _other_decoder(beginning, theirs, mine, decoder, foreign)):
        return advice
    if not theirs or not mine:
        return ""
    if beginning.endswith("instance_head.") and (depth := depth_of(theirs, beginning)) != depth_of(mine, beginning):
        return f"it is {depth} deep: give --task.attention_blocks {depth} to take it"
    for name in sorted({*theirs, *mine} - {f"{PIXEL_DECODER}.positions"}):
        if name not in theirs or name not in mine:
            where = "here" if name in theirs else "there"
            return f"there is no {name.removeprefix(beginning)} {where}"
        if theirs[name].shape != mine[name].shape:
            sizes = f"{format_grid(theirs[name].shape)} there and {format_grid(mine[name].shape)} here"
            return f"{name.removeprefix(beginning) or 'it'} is {sizes}"
        if mine[name].is_floating_point() and not (theirs[name].is_floating_point() and theirs[name].isfinite().all()):
            return f"{name.removeprefix(beginning) or 'it'} has values that are not finite floating-point numbers"
    positions = f"{PIXEL_DECODER}.positions"
    if positions in theirs and theirs[positions].shape != mine[positions].shape:
        return f"its positions are for {len(theirs[positions])} patches, not {len(mine[positions])}"
    return ""


def _other_decoder(beginning: str, theirs: State, mine: State, decoder: Decoder, foreign: ForeignCheckpoint) -> str:
    """Describe differences of a decoder's width, depth or heads, with the options that match them."""
    norm = f"{beginning}norm.weight"
    if norm not in theirs or norm not in mine or not theirs[norm].ndim:
        return ""
    width, depth = len(theirs[norm]), depth_of(theirs, beginning)
    heads = foreign.program.decoder_heads.get(width, decoder.heads)
    pixels_beside = beginning == f"{PIXEL_DECODER}." and foreign.program.task == "droppos"
    give = {
        "decoder_width": (width, len(mine[norm])),
        "pixel_decoder_depth" if pixels_beside else "decoder_depth": (depth, depth_of(mine, beginning)),
        "decoder_heads": (heads, decoder.heads),
    }
    options = [f"--task.{name} {value}" for name, (value, here) in give.items() if value != here]
    if not options:
        return ""
    return f"it is {width} wide and {depth} deep with {heads} heads: give {' '.join(options)} to take it"


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
        model: timm's name of a model with the same width, depth and patches, or of the nearest.
        options: differences from it, as in `patchloom.nets.build.EncoderSpec`.
        patch_size: side of a patch in pixels.
        side: height and width of the images in pixels.
        channels: number of channels of the images.
        positions: sincos for any fixed embeddings, learned, or none.
        width, depth, heads: sizes of the blocks; heads cannot be seen in weights.
        assumed: whether the number of heads is the usual one, because nothing states it.
    """

    model: str
    options: dict[str, Any]
    patch_size: int
    side: int
    channels: int
    positions: PositionKind
    width: int
    depth: int
    heads: int
    assumed: bool = True

    def __str__(self) -> str:
        return f"{self.width} wide, {self.depth} deep, patches of {self.patch_size} pixels"


def infer_architecture(weights: State, program: Program | None = None, heads: int | None = None) -> Architecture | None:
    """Infer the architecture from weights.

    Return None for a width or depth for which the number of heads cannot be assumed, unless ``heads`` is given.
    """
    projection, first = weights.get(PROJECTION_KEY), weights.get("blocks.0.mlp.fc1.weight")
    if projection is None or projection.ndim != 4 or first is None or first.ndim != 2:
        return None
    width, channels, p, across = projection.shape
    if any(weights[name].ndim != 3 for name in ("cls_token", "reg_token") if name in weights):
        return None
    depth = depth_of(weights)
    if _seems_rotary(weights):
        return None
    if (width not in _USUAL and heads is None) or p != across or first.shape[1] != width:
        return None
    model, usual_depth, usual_heads = _USUAL.get(width, ("vit_tiny_patch16_224", 12, 3))
    if depth != usual_depth and program is None and heads is None:
        return None
    side = _grid_side(weights, p)
    if not side:
        return None
    count = heads or (usual_heads if program is None else program.heads.get(width, usual_heads))
    options: dict[str, Any] = {} if width in _USUAL else {"embed_dim": width}
    if depth != usual_depth:
        options["depth"] = depth
    if count != usual_heads:
        options["num_heads"] = count
    if len(first) != 4 * width:
        options["mlp_ratio"] = len(first) / width
    if "cls_token" not in weights:
        options["class_token"] = False
    if "reg_token" in weights:
        options["reg_tokens"] = weights["reg_token"].shape[1]
    if "blocks.0.ls1.gamma" in weights:
        options["init_values"] = 1e-5 if program is None else program.layer_scale
    if "blocks.0.attn.qkv.weight" in weights and "blocks.0.attn.qkv.bias" not in weights:
        options["qkv_bias"] = False
    positions = positions_of(weights, program)
    named = re.sub(r"patch\d+", f"patch{p}", model)
    named = named if timm.is_model(named) else model
    return Architecture(named, options, p, p * side, channels, positions, width, depth, count, assumed=heads is None)


def positions_of(weights: State, program: Program | None) -> PositionKind:
    """Return the kind of positions of weights, as in `Architecture`."""
    if POSITIONS_KEY not in weights:
        return "none"
    computed = program is not None and not program.saves_positions
    return "sincos" if computed or position_axis_order(weights[POSITIONS_KEY]) else "learned"


def _seems_rotary(weights: State) -> bool:
    """Return whether weights look like those of an encoder with rotations; most rotations leave no trace there."""
    marks = "rope.freqs", "rope_embed.periods"
    return not weights.keys().isdisjoint(marks) or ("reg_token" in weights and POSITIONS_KEY not in weights)


class Unlike(NamedTuple):
    """Sign of weights that a plain ViT does not have, and names of models of timm that have it."""

    sign: str
    models: tuple[str, ...]


def _unlike_plain(weights: State, states: list[tuple[str, State]]) -> Unlike | None:
    """Return the sign of another model in ``weights``; ``states`` have their names in the file."""
    written = {name for _, state in states for name in state}
    if _seems_rotary(weights):
        return Unlike("rotations of queries and keys", ("vit_small_patch16_dinov3",))
    if "norm_pre.weight" in weights:
        return Unlike("a norm before the blocks", ("vit_pe_core_small_patch16_384", "vit_base_patch16_clip_224"))
    first, second = (weights.get(f"blocks.0.mlp.fc{i}.weight") for i in (1, 2))
    gated = first is not None and second is not None and len(first) != second.shape[-1]
    if gated or "blocks.0.mlp.fc1_g.weight" in weights:
        return Unlike("gated MLPs", ("eva02_small_patch14_224",))
    relative = any(name.endswith("relative_position_bias_table") for name in written)  # of BEiT
    if not relative and any(name.endswith("blocks.0.gamma_1") for name in written):
        return Unlike("scales called gamma_1", ("vit_small_patch16_rope_ape_224", "deit3_small_patch16_224"))
    return None


def _grid_side(weights: State, p: int) -> int:
    """Return the number of patches along an image from the position embeddings; without any, for 224 pixels."""
    table = weights.get(POSITIONS_KEY)
    if table is None:
        return 224 // p
    if table.ndim != 3:
        return 0
    tokens = [weights[name].shape[1] for name in ("cls_token", "reg_token") if name in weights]
    without = (sum(tokens), sum(tokens[:1]), 0)  # entries for other tokens
    return next((side for count in without if (side := whole_root(table.shape[1] - count))), 0)


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
    assert weights.path is not None  # timm's have no path
    foreign = weights.foreign
    if network == "teacher" and not (foreign and foreign.encoder_of("teacher")):
        raise PatchloomError(f"{weights.source} has no teacher beside a student: leave out --network")
    if model is not None:
        stock_encoder(model)
    program, shape = weights.program, weights.architecture
    with torch.random.fork_rng(devices=[]):
        if model is not None:
            spec, vit = None, cast(Encoder, timm.create_model(model, pretrained=False, num_classes=0))
        else:
            spec = weights.encoder_spec()
            vit = build_encoder(spec)
    (mean, std), by = weights.statistics(vit, model)
    if spec is not None and len(mean) != spec.channels:
        raise PatchloomError(
            f"{weights.source} is for images of {spec.channels} channels, and they are normalised by {len(mean)} means "
            "there: use it with pretrain --init instead"
        )
    try:
        done = load_published(vit, weights, network=network)
    except Misfit as problem:
        remedies = ["use it with pretrain --init instead"] * (option == "--model")
        remedies += [f"give another {option}"] * (model is not None)
        raise PatchloomError(f"{problem.fact}: {' or '.join(remedies) or 'give another encoder'}") from problem
    _refuse_parts(weights, model or (f"{spec.model} by its sizes" if spec else ""), done, model is not None)
    notes = done.sentences()
    if spec is not None and shape is not None and (weights.hub is None or weights.hub.spec is None):
        notes.append(describe_assumptions(shape))
    if weights.hub is not None and weights.hub.eps != _TIMMS_EPS:
        notes.append(f"Norms add {_TIMMS_EPS:g} to variances, as in timm; its {HUB_CONFIG} has {weights.hub.eps:g}.")
    notes.append(f"Images are normalised as {by}: {statistics_in_words(mean, std)}.")
    task = f"timm:{model}" if model else ""
    if spec is not None:
        task = program.name if program else weights.hub.name if weights.hub else ""
    name = weights.path.name.partition(".")[0]
    if weights.kind == "hub":  # a fetched file lies in a cache
        name = (
            str(weights.source).rpartition("/")[2] if is_on_hub(weights.source) else weights.path.resolve().parent.name
        )
    return vit.eval(), EncoderCard(spec, mean, std, task, name, note=" ".join(notes), license=weights.license)


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


def describe_assumptions(shape: Architecture) -> str:
    """Describe in a sentence what was inferred from the weights, and what was assumed."""
    heads = "are assumed, because weights do not show them" if shape.assumed else f"are those in its {HUB_CONFIG}"
    return f"The architecture was inferred from the weights ({shape}); {shape.heads} attention heads {heads}."


def _no_model(weights: Weights, shape: Architecture | None) -> str:
    path = weights.path
    if weights.hub is not None:
        return f"{path} is not a plain ViT that timm can build: its names or sizes differ"
    if (unlike := weights.unlike_plain) is not None:
        return (
            f"{path} holds weights alone, with {unlike.sign}: give its name in timm by --model, such as "
            f"{listing(unlike.models)}"
        )
    if shape is None:
        return (
            f"{path} holds weights alone, and the number of attention heads does not follow from their sizes: give its "
            "name in timm, such as --model vit_small_patch16_224"
        )
    tags = timm.list_pretrained(shape.model)
    listed = f", such as {listing(tags[-2:])}" if tags else ""
    return (
        f"{path} holds weights alone, of the size of {shape.model} ({shape}), and does not say how images are "
        f"normalised: give its name in timm, --model {shape.model}, with the tag of these weights{listed}"
    )


def _refuse_parts(weights: Weights, called: str, done: LoadedWeights, named: bool) -> None:
    """Raise an error for an encoder that is partly random, or lacks a part of the trained one."""
    path = weights.path
    deeper = [name for name in done.unexpected if re.search(r"(^|\.)blocks\.", name)]
    own = _blocks(done.matched)
    more = any((found := _BLOCK.search(name)) and found[0] not in own for name in done.lost)
    if done.lost and not more:  # another depth has another remedy
        raise PatchloomError(
            f"{path} cannot be evaluated as a plain ViT: {done.why_not()}, so it would not be the encoder that was "
            "trained. Use it with pretrain --init instead"
        )
    if not done.missing and not deeper:
        return
    what = f"lacks {done.missing[0]}" if done.missing else f"also has {deeper[0]}"
    count, known = len(done.matched), weights.program is not None and weights.architecture is not None
    raise PatchloomError(
        f"{path} is not {called}: {count} of the {count + len(done.missing)} weights match, and it {what}, so "
        + ("leave out --model, because its sizes are known" if named and known else "give another --model")
    )


def statistics_in_words(mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    """Format mean and deviation per channel."""
    first, second = (", ".join(f"{value:g}" for value in values) for values in (mean, std))
    return f"mean {first}; standard deviation {second}"


def timm_statistics(model: str) -> str | None:
    """Format mean and deviation that normalise the images of a timm model; None for other models."""
    found = _timm_statistics(model)
    return None if found is None else statistics_in_words(*found)


def _timm_statistics(model: str) -> MeanStd | None:
    """Return the statistics of a timm model; without a tag, those that all weights of that name share."""
    name, _, tag = model.partition(".")
    if not timm.is_model(name):
        return None
    tags = [model] if tag else timm.list_pretrained(f"{name}.*") or [name]
    configs = [timm.models.get_pretrained_cfg(one) for one in tags]
    found = {(tuple(one.mean), tuple(one.std)) for one in configs if one is not None}
    return found.pop() if len(found) == 1 else None


def public_shape(weights: Weights, model: str | None = None) -> dict[str, Any] | None:
    """Return the model of weights without fetching them; ``model`` is a name that the user gave."""
    if weights.path is None:
        return _stock_shape(str(weights.source).removeprefix("timm:"))
    if weights.says_itself:
        spec = read_encoder_card(weights.path).own_spec
        sizes = {"patch_size": spec.patch_size, "positions": spec.positions}
        sizes |= {"img_size": spec.img_size, "channels": spec.channels}
        return {"name": spec.model, "options": spec.options, **sizes}
    named = None if model == "auto" else model
    if named is not None and not timm.is_model(named.split(".")[0]):
        return None
    foreign, shape = weights.foreign, weights.architecture
    if named is None and weights.unlike_plain is not None:
        raise PatchloomError(_no_model(weights, None))
    if named is not None:
        fixed = foreign is not None and positions_of(foreign.encoder("student"), foreign.program) == "sincos"
        return _stock_shape(named) | ({"positions": "sincos", "read_off": ("positions",)} if fixed else {})
    if weights.hub is not None and (built := weights.hub.spec) is not None:
        # pre-training norms all tokens
        options = {name: value for name, value in built.options.items() if name not in ("fc_norm", "final_norm")}
        found = {"name": built.model, "patch_size": built.patch_size, "options": options}
        return found | {"positions": built.positions, "read_off": ("patch_size", "positions")}
    if shape is None:
        return None
    found = {"name": shape.model, "patch_size": shape.patch_size, "options": shape.options}
    if shape.positions != "none":  # without positions the task chooses
        found["positions"] = shape.positions
    return found | {"read_off": tuple(found)}


def _stock_shape(name: str) -> dict[str, Any]:
    stock = stock_encoder(name)
    positions = "learned" if POSITIONS_KEY in stock.state_dict() else "rotary" if has_rotations(stock) else "none"
    patch = compact(patch_embedding(stock).patch_size)
    return {"name": name.split(".")[0], "patch_size": patch, "positions": positions, "options": {}}
