"""Construction of stock timm encoders: ViT, Swin, and Eva, a ViT whose queries and keys are rotated (RoPE)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any, Literal, TypeGuard

import timm
import torch
from timm.layers import (
    Attention,
    AttentionRope,
    PatchEmbed,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
)
from timm.models.eva import Eva, EvaAttention, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchloom.errors import PatchloomError, check_range, check_type, closest_word, listing, normalize_word, suggestion
from patchloom.nets.encode import grid_size, has_class_token, has_rotations, input_size, patch_positions
from patchloom.nets.swin import (
    Encoder,
    check_hierarchical,
    is_hierarchical,
    patch_embedding,
    patches_along_unit,
)
from patchloom.options.pretrain import PositionKind
from patchloom.patches.positions import sincos_2d
from patchloom.sizes import PatchSize, compact, in_pixels, to_pair

# Models of timm that `encode` supports, and suggestions for others.


_ALIKE = 20  # number of similar names to try


def check_servable(vit: nn.Module, name: str) -> Encoder:
    """Raise an error, with an alternative, for a model whose forward pass `encode` would not reproduce."""
    if not _is_plain(vit):
        other = served_like(name)
        raise PatchloomError(
            f"{name} is timm's {type(vit).__name__}, and patchloom supports plain VisionTransformer, Eva and "
            f"SwinTransformer only{f': the nearest of these is {other}' if other else ''}"
        )
    if is_hierarchical(vit):
        check_hierarchical(vit, name)
        return vit
    block_types: tuple[type, ...] = (EvaBlock,) if isinstance(vit, Eva) else (Block,)
    attention_types = (EvaAttention, AttentionRope) if isinstance(vit, Eva) else (Attention,)
    unknown = [type(block).__name__ for block in vit.blocks if type(block) not in block_types]
    attentions = [getattr(block, "attn", None) for block in vit.blocks]
    unknown += [type(attn).__name__ for attn in attentions if type(attn) not in attention_types]
    unknown += ["gated attention" for attn in attentions if getattr(attn, "gate", None)]
    if type(vit.patch_embed) is not PatchEmbed:
        unknown.append(type(vit.patch_embed).__name__)
    if vit.patch_drop is not None and not isinstance(vit.patch_drop, nn.Identity):
        unknown.append("patch_drop_rate")
    if isinstance(vit, Eva):
        unknown += ["grouped-query attention" for attn in attentions if getattr(attn, "num_kv_groups", 1) != 1]
        unknown += [type(vit.rope).__name__] * (type(vit.rope) not in _ROTATIONS)
        unknown += ["random rotations in training"] * bool(getattr(vit.rope, "aug_active", False))
    if unknown:
        raise PatchloomError(f"{name} has {unknown[0]} inside, which patchloom does not support: choose a plain ViT")
    return vit


def _is_plain(vit: nn.Module) -> TypeGuard[Encoder]:
    return is_hierarchical(vit) or type(vit) is VisionTransformer or type(vit) is Eva


_ROTATIONS = (RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed, type(None))
_FAMILIES = ["vit_*", "swin_*", "eva*"]  # patterns of timm's names


def served_like(name: str) -> str:
    """Return the supported model with the name most similar to ``name``; "" if there is none.

    If the name has the tag of its weights, the result has a tag with published weights, too.
    """
    model, tag, _ = name.partition(".")
    tagged = {one.partition(".")[0]: one for one in reversed(timm.list_models(_FAMILIES, pretrained=True))}
    alike = get_close_matches(model, tagged, n=_ALIKE)
    alike.sort(key=lambda one: -len(_words(one) & _words(model)))  # a dinov3 is nearer to dinov2 than to radio_v3
    return next((tagged[one] if tag else one for one in alike if _servable(one)), "")


def _words(model: str) -> set[str]:
    """Split a name into words without numbers."""
    return set(re.sub(r"\d", "", model).split("_"))


def models_like(word: str, pretrained: bool = False, own: Iterable[str] = ()) -> list[str]:
    """Return up to three supported models whose names contain ``word``, small ones first, or else a similar one."""
    names = timm.list_models(_FAMILIES, pretrained=pretrained)
    if (typed := normalize_word(word.removeprefix("timm:"))) in ("", "vit"):
        return []
    holding = sorted((name for name in names if typed in normalize_word(name)), key=_size)
    found = list(islice(filter(_servable, holding), 3))
    near = closest_word(word.removeprefix("timm:"), [*own, *names])
    return found or ([near] if near else [])


def _size(name: str) -> tuple[int, int]:
    sizes = ("tiny", "small", "base", "large")
    return next((i for i, size in enumerate(sizes) if size in name), len(sizes)), len(name)


def _servable(name: str) -> bool:
    try:
        with on_meta():
            vit = timm.create_model(name.partition(".")[0], num_classes=0)
        return _is_plain(vit) and check_servable(vit, name) is vit
    except Exception:  # timm's constructors raise many kinds of errors
        return False


# patchloom's presets are small, for images of 8 to 64 pixels: stock timm models with other sizes, loadable by timm.
_SMALL = "vit_tiny_patch16_224"
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "nano": (_SMALL, {"embed_dim": 128, "depth": 6, "num_heads": 4}),
    "micro": (_SMALL, {"embed_dim": 192, "depth": 6, "num_heads": 3}),
    "mini": (_SMALL, {"embed_dim": 256, "depth": 8, "num_heads": 4}),
    "swin-nano": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 32, "depths": [2, 2, 4], "num_heads": [1, 2, 4], "window_size": 4},
    ),
}


# set by the other fields, or adding weights that no pretext task trains
_NOT_OPTIONS = (
    "img_size",
    "patch_size",
    "in_chans",
    "num_classes",
    "global_pool",
    "dynamic_img_size",
    "strict_img_size",
    "always_partition",
    "patch_drop_rate",
    "use_abs_pos_emb",
    "use_rot_pos_emb",
)
# names of the same options in timm's Eva
_OF_EVA = {
    "reg_tokens": "num_reg_tokens",
    "pre_norm": "use_pre_transformer_norm",
    "final_norm": "use_post_transformer_norm",
    "fc_norm": "use_fc_norm",
}

_SIDE, _RATE = 2**16, 0.99
# The only options of a model: sizes, rates and switches, with their type and range. A name may come from an untrusted
# card: nothing else reaches timm, which also takes paths to load from, addresses to fetch from, and code to call.
OPTIONS: dict[str, tuple[Any, float, float]] = {
    **dict.fromkeys(("embed_dim", "head_dim"), (int, 1, _SIDE)),
    "depth": (int, 1, 1000),
    "depths": (list[int], 1, 1000),
    "num_heads": (int | list[int], 1, _SIDE),
    "window_size": (int | list[int], 1, _SIDE),
    "mlp_ratio": (float, 1e-3, 1000),
    "reg_tokens": (int, 0, _SIDE),
    "init_values": (float, 0, 1000),
    **dict.fromkeys(
        ("drop_rate", "drop_path_rate", "pos_drop_rate", "attn_drop_rate", "proj_drop_rate"), (float, 0, _RATE)
    ),
    **dict.fromkeys(
        (
            *("class_token", "no_embed_class", "pre_norm", "final_norm", "fc_norm", "pool_include_prefix"),
            *("qkv_bias", "qk_norm", "scale_attn_norm", "scale_mlp_norm", "proj_bias"),
        ),
        (bool, 0, 1),
    ),
}
# name of a model, perhaps with the tag of its weights: no path, no address
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)?")


@dataclass(frozen=True)
class EncoderSpec:
    """Everything needed to rebuild an encoder, here or with timm alone.

    Attributes:
        model: name of a timm model, or of a preset: nano, micro, mini, swin-nano.
        img_size: height and width in pixels.
        patch_size: side of a patch in pixels; rows and columns if it is not square.
        channels: number of channels of the images.
        positions: fixed 2-d sine-cosine embeddings, learned ones that start from these (DropPos Table S1) or at random,
            fixed random ones, or none (MP3, and every Swin). An Eva's patches are rotated, too; rotary: only that.
        options: further keyword arguments of timm's model, such as ``depth`` or ``reg_tokens`` of a ViT.
    """

    model: str
    img_size: tuple[int, int]
    patch_size: PatchSize
    channels: int = 3
    positions: PositionKind = "sincos"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (h, w), p = self.img_size, to_pair(self.patch_size)
        return h // p[0], w // p[1]

    def timm_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which ``timm.create_model`` builds this encoder."""
        base, sizes = PRESETS.get(self.model, (self.model, {}))
        options, stock = {**sizes, **self.options}, _stock(self.model)
        common = {
            "model_name": base,
            "img_size": tuple(self.img_size),
            "patch_size": self.patch_size if isinstance(self.patch_size, int) else tuple(self.patch_size),
            "in_chans": self.channels,
            "num_classes": 0,
        }
        if is_hierarchical(stock):
            return {**common, "drop_path_rate": 0.0, **options}  # timm's default rate is for supervised training
        # pooling with parameters, or a norm after pooling, would be weights that no pretext task trains
        class_token = options.get("class_token", has_class_token(stock))
        common["global_pool"] = "token" if class_token else ""
        if isinstance(stock, Eva):
            renamed = {_OF_EVA.get(name, name): value for name, value in options.items()}
            return {**common, "use_abs_pos_emb": self.positions not in ("rotary", "none"), **renamed}
        if self.positions == "none":
            common["pos_embed"] = "none"
        return {**common, **options}


# in-place changes of numbers, but not of shape or type: methods of tensors, and functions of torch.nn.init
_NUMBERS = {"add_", "clamp_", "copy_", "erfinv_", "fill_", "mul_", "normal_", "uniform_", "zero_"}
_NUMBERS |= {"constant_", "kaiming_uniform_"}


class _WithoutNumbers(TorchFunctionMode):
    """Mode that leaves out the numbers of meta tensors, which have none: initialising them takes most of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor itself instead of changing its numbers."""
        named = kwargs or {}
        if getattr(func, "__name__", "") in _NUMBERS:
            changed = args[0] if args else named.get("tensor")
            if isinstance(changed, Tensor) and changed.is_meta:
                return changed
        return func(*args, **named)


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on the meta device, for their sizes only."""
    with torch.device("meta"), _WithoutNumbers():
        yield


@cache
def _stock(model: str) -> Encoder:
    """Build timm's model of a name, or behind a preset, on the meta device."""
    with on_meta():
        stock = _create(PRESETS.get(model, (model, {}))[0], num_classes=0)
    return check_servable(stock, model)


def stock_encoder(name: str) -> Encoder:
    """Return timm's model of a name, with or without the tag of its weights, on the meta device."""
    model = name.partition(".")[0]
    if not (is_model_name(name) and timm.is_model(model)):
        meant = models_like(name, pretrained=True)
        hint = f"; did you mean {listing(f'timm:{one}' for one in meant)}?" if meant else "."
        raise PatchloomError(f"timm has no model called {name}{hint} https://huggingface.co/timm lists them.")
    try:
        timm.models.get_pretrained_cfg(name)
    except RuntimeError as problem:
        there = ", ".join(timm.list_pretrained(model)[:4]) or "none of that model"
        raise PatchloomError(f"timm has no weights called {name}: it has {there}") from problem
    with on_meta():
        vit = _create(name, num_classes=0)
    return check_servable(vit, name)


def rotates(model: str) -> PositionKind | None:
    """Return the usual positions of a model that rotates queries and keys by place; None for other models."""
    if model == "auto" or not has_rotations(stock := _stock(model)):
        return None
    return "rotary" if patch_positions(stock) is None else "sincos"


def own_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of timm's Eva by the names of other ViTs' options."""
    ours = {theirs: name for name, theirs in _OF_EVA.items()}
    return {ours.get(name, name): value for name, value in arguments.items()}


def swin_sizes(model: str, options: Mapping[str, Any]) -> tuple[int | None, int] | None:
    """Return the side of a Swin's patch, if its name implies it, and patches along a unit; None for other models."""
    if model == "auto" or not is_hierarchical(stock := _stock(model)):
        return None
    depths = {**PRESETS.get(model, ("", {}))[1], **options}.get("depths")
    along = patches_along_unit(stock) if depths is None else 2 ** max(0, len(depths) - 1)
    return None if model in PRESETS else patch_embedding(stock).patch_size[0], along


def _create(model_name: str, **arguments: Any) -> nn.Module:
    if not (is_model_name(model_name) and timm.is_model(model_name)):
        meant = models_like(model_name, own=PRESETS)
        hint = f"; did you mean {listing(meant)}?" if meant else "."
        raise PatchloomError(
            f"no model is called {model_name}{hint} Choose {', '.join(PRESETS)}, or a ViT, Eva or Swin that timm lists."
        )
    try:
        return timm.create_model(model_name, **arguments)
    except (TypeError, AssertionError, IndexError, ValueError, RuntimeError) as problem:
        raise PatchloomError(f"timm cannot build {model_name} with these options: {problem}") from problem


def build_encoder(spec: EncoderSpec) -> Encoder:
    """Build an encoder: a stock ViT, Eva or Swin of timm without a head, with weights of `initialize`."""
    _check_sizes(spec)
    vit = check_servable(_create(**spec.timm_arguments()), spec.model)
    initialize(vit)
    if is_hierarchical(vit):
        if spec.positions != "none":
            raise PatchloomError(
                f"a Swin such as {spec.model} has relative positions and no position embeddings: leave out --positions "
                f"{spec.positions}"
            )
        return vit
    d = vit.embed_dim
    with torch.no_grad():
        for token in (vit.cls_token, vit.reg_token):
            if token is not None:
                nn.init.normal_(token, std=0.02)
        if vit.pos_embed is not None:
            if spec.positions.startswith("sincos"):
                if d % 4:
                    raise PatchloomError(
                        f"sine-cosine positions need a width divisible by 4, not {d}: use --positions learned"
                    )
                vit.pos_embed.zero_()
                vit.pos_embed[0, -grid_size(vit)[0] * grid_size(vit)[1] :] = sincos_2d(d, grid_size(vit))
            else:
                nn.init.normal_(vit.pos_embed, std=0.02)
            vit.pos_embed.requires_grad_(spec.positions.endswith("learned"))
    return vit


def is_model_name(name: Any) -> bool:
    """Return whether a name is that of an architecture, perhaps with a tag, and not an address or path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_model_options(options: Mapping[str, Any]) -> None:
    """Raise an error for options of a model that are not sizes, rates or switches of timm's."""
    for name, value in options.items():
        if name in _NOT_OPTIONS:
            raise PatchloomError(f"the option {name} of the model is set by patchloom: leave it out")
        if name not in OPTIONS:
            raise PatchloomError(
                f"the model has no option {str(name)[:60]}{suggestion(str(name), OPTIONS)} It takes sizes, rates and "
                f"switches only: {', '.join(OPTIONS)}."
            )
        if value is None:
            continue
        hint, low, high = OPTIONS[name]
        check_type(f"model.{name}", value, hint)
        try:
            check_range(f"--model.{name}", value, low, high)
        except ValueError as problem:
            raise PatchloomError(str(problem)) from problem


def _check_sizes(spec: EncoderSpec) -> None:
    """Raise an error for options that do not fit the model, or patches that do not divide the images."""
    check_model_options(spec.options)
    if spec.options.keys() & {"num_heads", "depths"} and is_hierarchical(stock := _stock(spec.model)):
        # timm would only report an index error
        _, sizes = PRESETS.get(spec.model, ("", {}))
        heads, own = spec.options.get("num_heads"), {**sizes, **spec.options}
        stages, problem = len(own.get("depths") or stock.layers), ""
        usual = len(sizes.get("num_heads", stock.layers))
        if heads is None and usual < stages:
            problem = f"--model.num_heads, which are {usual} in {spec.model}, do not fit {stages} stages"
        elif heads is not None and (not isinstance(heads, list | tuple) or len(heads) != stages):
            problem = f"--model.num_heads {heads} does not fit a Swin of {stages} stages"
        if problem:
            each = [2**i for i in range(stages)]
            raise PatchloomError(f"{problem}: give one number per stage, such as '{each}'")
    if spec.positions == "rotary" and rotates(spec.model) is None:
        raise PatchloomError(f"{spec.model} does not rotate queries and keys: use --positions sincos")
    if spec.positions == "none" and rotates(spec.model) is not None:
        raise PatchloomError(
            f"{spec.model} rotates queries and keys by the places of patches: use --positions rotary, without position "
            "embeddings"
        )
    h, w = spec.img_size
    (rows, columns), p = to_pair(spec.patch_size), in_pixels(spec.patch_size)
    if h % rows or w % columns:
        near = [max(1, round(side / along)) * along for side, along in ((h, rows), (w, columns))]
        raise PatchloomError(
            f"patches of {p} pixels do not divide images of {h}x{w}: choose an image size that is a multiple of {p}, "
            f"such as {near[0] if rows == columns else in_pixels(near)}"
        )


def spec_of_stock(vit: Encoder, model: str) -> EncoderSpec:
    """Return the spec of an encoder that timm built from a name alone, perhaps with the tag of its weights."""
    positions: PositionKind = "learned" if getattr(vit, "pos_embed", None) is not None else "none"
    options: dict[str, Any] = {}
    if isinstance(vit, Eva):
        positions = "rotary" if positions == "none" and has_rotations(vit) else positions
        # which norms an Eva has depends on the pooling that its name implies
        options = {
            "final_norm": not isinstance(vit.norm, nn.Identity),
            "fc_norm": not isinstance(vit.fc_norm, nn.Identity),
        }
    patch, channels = compact(patch_embedding(vit).patch_size), patch_embedding(vit).proj.in_channels
    return EncoderSpec(model.partition(".")[0], input_size(vit), patch, channels, positions, options)


def options_in_weights(weights: Mapping[str, Tensor], heads: int, layer_scale: float = 1e-5) -> dict[str, Any]:
    """Return the options of a ViT that its weights show; they show neither heads nor the first value of LayerScale."""
    width = len(weights["patch_embed.proj.weight"])
    options: dict[str, Any] = {"embed_dim": width, "depth": depth_of(weights), "num_heads": heads}
    for name, dim in (("blocks.0.mlp.fc1.weight", 0), ("blocks.0.mlp.fc2.weight", 1)):  # of gates, fc1 is twice as wide
        if name in weights and weights[name].ndim == 2:
            options["mlp_ratio"] = weights[name].shape[dim] / width
    if "cls_token" not in weights:
        options["class_token"] = False
    if "reg_token" in weights:
        options["reg_tokens"] = weights["reg_token"].shape[1]
    if "blocks.0.ls1.gamma" in weights:
        options["init_values"] = layer_scale
    biases = "blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"  # of a plain ViT, and of an Eva
    if "blocks.0.attn.qkv.weight" in weights and weights.keys().isdisjoint(biases):
        options["qkv_bias"] = False
    return options


def depth_of(names: Iterable[str]) -> int:
    """Return the number of blocks, or layers, in names of weights."""
    return len({found[1] for name in names if (found := re.match(r"(?:blocks|layers)\.(\d+)\.", name))})


def outline(spec: EncoderSpec) -> Encoder:
    """Build an encoder on the meta device, for its modules and sizes; fixed positions are not trainable."""
    _check_sizes(spec)
    with on_meta():
        vit = check_servable(_create(**spec.timm_arguments()), spec.model)
    if not is_hierarchical(vit) and vit.pos_embed is not None:
        vit.pos_embed.requires_grad_(spec.positions.endswith("learned"))
    return vit


Initialization = Literal["xavier", "normal"]
_INITIALIZATION: ContextVar[Initialization] = ContextVar("initialization", default="xavier")


@contextmanager
def initialized_as(how: Initialization) -> Iterator[None]:
    """Set the form of `initialize` inside this context: encoders, decoders and heads are built in many places."""
    before = _INITIALIZATION.set(how)
    try:
        yield
    finally:
        _INITIALIZATION.reset(before)


def initialize(net: nn.Module) -> None:
    """Initialise linears and patch projection as in MAE, xavier-uniform; biases are zero, norms one and zero.

    Inside ``initialized_as("normal")`` weights are normal with deviation 0.02, cut at 2, as in timm, DeiT and SimMIM.
    """
    normal = _INITIALIZATION.get() == "normal"
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            if normal:
                nn.init.trunc_normal_(module.weight, std=0.02)
            else:
                nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
