"""Heads for agreement: MLPs and batch norm over all processes, thrown away afterwards.

Two kinds of modules are saved beside their encoder, since an evaluation can use them: the class attention of CaiT, and
the first layer of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from timm.models.cait import LayerScaleBlockClassAttn
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.build import initialize
from patchloom.nets.encode import (
    encode,
    final_norm,
    has_class_token,
    input_channels,
    input_size,
    layer_patterns,
    patch_count,
    pooled_norm,
    prefix_count,
)
from patchloom.nets.swin import Encoder
from patchloom.system.distributed import SharedBatchNorm
from patchloom.withhold.encoder_input import all_patches

# what a module beside an encoder is good for: to pool its tokens, or to stand under a classifier's linear layer
Use = Literal["pooling", "stem"]


def mlp(sizes: Sequence[int], norm: Literal["layer", "batch"]) -> nn.Sequential:
    """Linear layers from ``sizes[0]`` to ``sizes[-1]`` with a norm and an activation after each but the last.

    layer: biases, LayerNorm and GELU, as ExtreMA's heads. batch: no biases, BatchNorm and ReLU, as LUT's.
    """
    layers: list[nn.Module] = []
    for width, out in zip(sizes, sizes[1:], strict=False):
        layers.append(nn.Linear(width, out, bias=norm == "layer"))
        if len(layers) < 3 * (len(sizes) - 2):
            layers += [nn.LayerNorm(out), nn.GELU()] if norm == "layer" else [SharedBatchNorm(out), nn.ReLU()]
    net = nn.Sequential(*layers)
    initialize(net)
    return net


class InstanceHead(nn.Module):
    """ExtreMA's instance representation: a class token that asks the patch tokens and never answers them.

    In each block the class token alone is the query, keys and values are class and patch tokens, and the patch tokens
    stay as they are (CaiT, Touvron et al. 2021; ExtreMA section 3). What comes out still wants the encoder's last
    norm.

    Args:
        width: of the tokens.
        heads: attention heads.
        depth: blocks.
        layer_scale: initial value of LayerScale.

    Attributes:
        sizes: the arguments that build it again, for weights that are loaded.
        use: what it is good for beside an encoder.
    """

    use: ClassVar[Use] = "pooling"

    def __init__(self, width: int, heads: int, depth: int = 2, layer_scale: float = 0.1):
        super().__init__()
        self.sizes = {"width": width, "heads": heads, "depth": depth}
        self.token = nn.Parameter(torch.empty(1, 1, width).normal_(std=0.02))
        norm: Any = partial(nn.LayerNorm, eps=1e-6)  # timm asks for a class, and only calls it
        self.layers = nn.ModuleList(
            LayerScaleBlockClassAttn(width, heads, qkv_bias=True, norm_layer=norm, init_values=layer_scale)
            for _ in range(depth)
        )
        initialize(self)

    def forward(self, patches: Tensor) -> Tensor:
        """The class token [b d] after asking ``patches`` [b k d], which are not normed yet."""
        token = self.token.expand(len(patches), -1, -1)
        for block in self.layers:
            token = block(patches, token)
        return token[:, 0]


class Stem(nn.Sequential):
    """The first layer of a projection with its norm and activation: a classifier's linear layer may stand on it.

    Args:
        layers: linear [width -> hidden], norm, activation; they are shared with the projection, not copied.
        pooling: of which representation [b width] of an image the projection is.

    Attributes:
        use: what it is good for beside an encoder.
    """

    use: ClassVar[Use] = "stem"

    def __init__(self, layers: Iterable[nn.Module], pooling: Literal["class", "mean", "instance"]):
        super().__init__(*layers)
        self.pooling = pooling

    @classmethod
    def fresh(cls, width: int, hidden: int, pooling: Literal["class", "mean", "instance"]) -> Stem:
        """One with weights of its own, as `mlp` begins with them."""
        return cls(mlp((width, hidden, 1), "layer")[:3], pooling)

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments with which `fresh` builds it again, for weights that are loaded."""
        return {"width": self[0].in_features, "hidden": self[0].out_features, "pooling": self.pooling}


# how modules that were saved beside an encoder are built again from their ``sizes``, by the name of their class
EXTRA_MODULES: dict[str, Callable[..., nn.Module]] = {"InstanceHead": InstanceHead, "Stem": Stem.fresh}


def represent(vit: Encoder, head: InstanceHead, tokens: Tensor) -> Tensor:
    """Instance representation [b d] from an encoder's tokens [b prefix+k d], which are not normed yet."""
    return final_norm(vit, head(tokens[:, prefix_count(vit) :]))


# Nets on an encoder: what they are given, and a learning rate for each layer of it.


class OnEncoder(nn.Module):
    """A net on an encoder, which is its submodule ``encoder_at``."""

    encoder_at = "encoder"

    def _encoder(self) -> Encoder:
        return cast(Encoder, self.get_submodule(self.encoder_at))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return input_size(self._encoder())

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return input_channels(self._encoder())

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser, with layer-wise learning rate decay (``lr_scale``).

        As in facebookresearch/mae (util/lr_decay.py): patch embedding, tokens and positions are the lowest layer, each
        block is a layer, and everything else, the encoder's last norm included, is the top one, whose scale is 1. A
        layer's scale is ``layer_decay`` to the power of its distance from the top.
        """
        own = self._encoder().no_weight_decay()
        free = {f"{self.encoder_at}.{name}" for name in own} | {*_vectors(self)}
        return param_groups_layer_decay(self, weight_decay, free, layer_decay=layer_decay)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of parameter names by layer, for timm; names that match none are in the top layer."""
        stem, blocks = layer_patterns(self._encoder())
        begin = rf"^{self.encoder_at}\."
        return {"stem": f"{begin}{stem}", "blocks": [(f"{begin}{one}", order) for one, order in blocks]}


def _vectors(net: nn.Module) -> list[str]:
    """Names of parameters without weight decay: vectors such as tokens, and tables of relative position biases."""
    return [
        name
        for name, weight in net.named_parameters()
        if weight.numel() == weight.shape[-1] or name.endswith("relative_position_bias_table")
    ]


# What stands for a whole image: the class token, a mean of tokens, or an instance head's answer.


POOLED = {  # in words
    "class": "the class token",
    "prefix": "the mean of class token and registers",
    "mean": "the mean of the patch tokens",
    "both": "the class token and the mean of the patch tokens",
    "instance": "the instance representation",
}


def tokens_of(vit: Encoder, head: InstanceHead | None) -> tuple[str, ...]:
    """Names of what `pooled_tokens` returns."""
    names = ("class",) * has_class_token(vit) + ("mean",)
    names += ("prefix",) * (prefix_count(vit) > has_class_token(vit))  # without registers it would be the class token
    return names + ("instance",) * (head is not None)


def summaries(vit: Encoder, tokens: Tensor) -> dict[str, Tensor]:
    """What an encoder's tokens [b prefix+n d], of any layer, have of `tokens_of`, without a head: [b d] by name.

    These are the class token, the mean of the patch tokens, and as ``prefix`` the mean of class token and registers,
    which Pixio trains as class tokens and takes for the whole image (Yang et al. 2025, program: evaluation by kNN).
    """
    prefix = prefix_count(vit)
    found = {"class": tokens[:, 0], "mean": tokens[:, prefix:].mean(1), "prefix": tokens[:, :prefix].mean(1)}
    return {name: found[name] for name in tokens_of(vit, None)}


def pooled_tokens(vit: Encoder, images: Tensor, head: InstanceHead | None = None) -> dict[str, Tensor]:
    """Features [b d] of whole images [b c h w] by the names of `tokens_of`, after the encoder's last norm."""
    return pool(vit, encode(vit, all_patches(images, patch_count(vit)), norm=False), head)


def pool(vit: Encoder, unnormed: Tensor, head: InstanceHead | None = None) -> dict[str, Tensor]:
    """`pooled_tokens` of an encoder's tokens [b prefix+n d], which are not normed yet."""
    tokens = final_norm(vit, unnormed).float()
    found = {name: pooled_norm(vit, pooled) for name, pooled in summaries(vit, tokens).items()}
    if head is not None:
        found["instance"] = represent(vit, head, unnormed)
    return {name: found[name] for name in tokens_of(vit, head)}


def select_pooling(pooling: str, tokens: Mapping[str, Tensor]) -> Tensor:
    """Of tokens [n d] by name, those of a pooling; [n 2d] for "both", which concatenates class token and mean."""
    check_pooling(pooling, tokens)
    return torch.cat([tokens["class"], tokens["mean"]], dim=1) if pooling == "both" else tokens[pooling]


def poolings_of(tokens: Collection[str]) -> tuple[str, ...]:
    """Poolings of tokens of these names."""
    return (*tokens, "both") if {"class", "mean"} <= set(tokens) else tuple(tokens)


def check_pooling(pooling: str, tokens: Collection[str]) -> None:
    """Refuse a pooling that needs a token which is not among these."""
    if pooling not in poolings_of(tokens):
        lacks = {"instance": "module beside it", "prefix": "register tokens"}.get(pooling, "class token")
        raise PatchloomError(f"this encoder has no {lacks} to give {pooling} features: use --pooling mean")
