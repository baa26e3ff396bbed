"""Heads for agreement: MLPs and batch norm over all processes, discarded after pre-training.

Two kinds of modules are saved beside their encoder, because evaluations can use them: the class attention of CaiT, and
the first layer of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, cast

import torch
from timm.models.cait import LayerScaleBlockClassAttn
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.build import initialize
from patchloom.nets.encode import (
    encode,
    final_norm,
    has_class_token,
    input_channels,
    input_size,
    patch_count,
    pooled_norm,
    prefix_count,
)
from patchloom.nets.optimizer import is_free, layer_groups
from patchloom.nets.swin import Encoder
from patchloom.system.distributed import SharedBatchNorm
from patchloom.withhold.encoder_input import all_patches

# use of a module beside an encoder: to pool its tokens, or below a classifier's linear layer
Use = Literal["pooling", "stem"]


def mlp(sizes: Sequence[int], norm: Literal["layer", "batch"]) -> nn.Sequential:
    """Build an MLP from ``sizes[0]`` to ``sizes[-1]`` with a norm and an activation after each layer but the last.

    layer: biases, LayerNorm and GELU, as in ExtreMA. batch: no biases, BatchNorm and ReLU, as in LUT.
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
    """ExtreMA's instance representation: a class token that attends to the patch tokens, not vice versa.

    In each block the class token is the only query, keys and values are class and patch tokens, and the patch tokens
    do not change (CaiT, Touvron et al. 2021; ExtreMA section 3). The encoder's final norm must follow.

    Args:
        width: width of the tokens.
        heads: number of attention heads.
        depth: number of blocks.
        layer_scale: initial value of LayerScale.

    Attributes:
        sizes: arguments that rebuild the module, for loading weights.
        use: use of the module beside an encoder.
    """

    use: ClassVar[Use] = "pooling"

    def __init__(self, width: int, heads: int, depth: int = 2, layer_scale: float = 0.1):
        super().__init__()
        self.sizes = {"width": width, "heads": heads, "depth": depth}
        self.token = nn.Parameter(torch.empty(1, 1, width).normal_(std=0.02))
        norm: Any = partial(nn.LayerNorm, eps=1e-6)  # declared as a class in timm, but only called
        self.layers = nn.ModuleList(
            LayerScaleBlockClassAttn(width, heads, qkv_bias=True, norm_layer=norm, init_values=layer_scale)
            for _ in range(depth)
        )
        initialize(self)

    def forward(self, patches: Tensor) -> Tensor:
        """Return the class token [b d] after attending to ``patches`` [b k d], which have no final norm yet."""
        token = self.token.expand(len(patches), -1, -1)
        for block in self.layers:
            token = block(patches, token)
        return token[:, 0]


class Stem(nn.Sequential):
    """First layer of a projection with its norm and activation, to put below a classifier's linear layer.

    Args:
        layers: linear [width -> hidden], norm, activation; shared with the projection, not copied.
        pooling: image representation [b width] that the projection takes.

    Attributes:
        use: use of the module beside an encoder.
    """

    use: ClassVar[Use] = "stem"

    def __init__(self, layers: Iterable[nn.Module], pooling: Literal["class", "mean", "instance"]):
        super().__init__(*layers)
        self.pooling = pooling

    @classmethod
    def fresh(cls, width: int, hidden: int, pooling: Literal["class", "mean", "instance"]) -> Stem:
        """Build a stem with new weights, initialised as in `mlp`."""
        return cls(mlp((width, hidden, 1), "layer")[:3], pooling)

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of `fresh` that rebuild the module, for loading weights."""
        return {"width": self[0].in_features, "hidden": self[0].out_features, "pooling": self.pooling}


# builders of modules that were saved beside an encoder, called with their ``sizes``, by class name
EXTRA_MODULES: dict[str, Callable[..., nn.Module]] = {"InstanceHead": InstanceHead, "Stem": Stem.fresh}


def represent(vit: Encoder, head: InstanceHead, tokens: Tensor) -> Tensor:
    """Return the instance representation [b d] from tokens [b prefix+k d] before the final norm."""
    return final_norm(vit, head(tokens[:, prefix_count(vit) :]))


# Networks on an encoder: input sizes, and learning rates per layer.


class OnEncoder(nn.Module):
    """Network on an encoder, which is its submodule ``encoder_at``; the ``frozen`` parts stay in eval mode."""

    encoder_at = "encoder"
    frozen: tuple[nn.Module, ...] = ()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self.frozen:
            part.eval()
        return self

    def inner_encoder(self) -> Encoder:
        """Return the encoder."""
        return cast(Encoder, self.get_submodule(self.encoder_at))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return input_size(self.inner_encoder())

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return input_channels(self.inner_encoder())

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups for an optimiser, with layer-wise learning-rate decay, as in `layer_groups`."""
        free = {name for name, weight in self.named_parameters() if is_free(name, weight)}
        return layer_groups(self, self.encoder_at, free, weight_decay, layer_decay)


# Image representations: the class token, a mean of tokens, or the output of an instance head.


POOLED = {  # descriptions
    "class": "the class token",
    "prefix": "the mean of class token and registers",
    "mean": "the mean of the patch tokens",
    "both": "the class token and the mean of the patch tokens",
    "instance": "the instance representation",
}


def tokens_of(vit: Encoder, head: InstanceHead | None) -> tuple[str, ...]:
    """Return the names of the items of `pooled_tokens`."""
    names = ("class",) * has_class_token(vit) + ("mean",)
    names += ("prefix",) * (prefix_count(vit) > has_class_token(vit))  # without registers it would be the class token
    return names + ("instance",) * (head is not None)


def summaries(vit: Encoder, tokens: Tensor) -> dict[str, Tensor]:
    """Pool an encoder's tokens [b prefix+n d] of any layer, without a head: [b d] by name, see `tokens_of`.

    These are the class token, the mean of the patch tokens, and as ``prefix`` the mean of class token and registers,
    which Pixio trains as class tokens and uses as the image representation (Yang et al. 2025, program: kNN evaluation).
    """
    prefix = prefix_count(vit)
    found = {"class": tokens[:, 0], "mean": tokens[:, prefix:].mean(1), "prefix": tokens[:, :prefix].mean(1)}
    return {name: found[name] for name in tokens_of(vit, None)}


def pooled_tokens(
    vit: Encoder, images: Tensor, head: InstanceHead | None = None, patch_map: Tensor | None = None
) -> dict[str, Tensor]:
    """Return features [b d] of whole images [b c h w] by the names of `tokens_of`, after the encoder's final norm.

    ``patch_map`` [d d] is applied to the patch tokens before they are pooled.
    """
    return pool(vit, encode(vit, all_patches(images, patch_count(vit)), norm=False), head, patch_map)


def pool(
    vit: Encoder, unnormed: Tensor, head: InstanceHead | None = None, patch_map: Tensor | None = None
) -> dict[str, Tensor]:
    """Return `pooled_tokens` of an encoder's tokens [b prefix+n d] before the final norm."""
    tokens = final_norm(vit, unnormed).float()
    if patch_map is not None:
        prefix = prefix_count(vit)
        tokens = torch.cat([tokens[:, :prefix], tokens[:, prefix:] @ patch_map.T], dim=1)
    found = {name: pooled_norm(vit, pooled) for name, pooled in summaries(vit, tokens).items()}
    if head is not None:
        found["instance"] = represent(vit, head, unnormed)
    return {name: found[name] for name in tokens_of(vit, head)}


def select_pooling(pooling: str, tokens: Mapping[str, Tensor]) -> Tensor:
    """Return the tokens [n d] of a pooling; [n 2d] for "both", which concatenates class token and mean."""
    check_pooling(pooling, tokens)
    return torch.cat([tokens["class"], tokens["mean"]], dim=1) if pooling == "both" else tokens[pooling]


def poolings_of(tokens: Collection[str]) -> tuple[str, ...]:
    """Return the poolings that tokens of these names allow."""
    return (*tokens, "both") if {"class", "mean"} <= set(tokens) else tuple(tokens)


def check_pooling(pooling: str, tokens: Collection[str]) -> None:
    """Raise an error if a pooling needs a token that is missing."""
    if pooling not in poolings_of(tokens):
        lacks = {"instance": "module beside it", "prefix": "register tokens"}.get(pooling, "class token")
        raise PatchloomError(f"this encoder has no {lacks} for {pooling} features: use --pooling mean")
