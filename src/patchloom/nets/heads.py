"""Heads for agreement: MLPs and batch norm over all processes, thrown away afterwards.

Two kinds of modules are saved beside their encoder, since an evaluation can use them: the class attention of CaiT, and
the first layer of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from timm.models.cait import LayerScaleBlockClassAttn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.build import initialize
from patchloom.nets.encode import final_norm
from patchloom.processes import averaged, world

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
            layers += [nn.LayerNorm(out), nn.GELU()] if norm == "layer" else [BatchNorm(out), nn.ReLU()]
    net = nn.Sequential(*layers)
    initialize(net)
    return net


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm whose training statistics are those of all processes' batches, on CPUs too.

    torch's ``SyncBatchNorm`` is for GPUs only. Every process must have a batch of the same size.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [b d]; in float32, whatever autocast says.

        Raises:
            ValueError: training on a single image, which has no variance.
        """
        x = x.float()
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        n = len(x) * world()
        if n < 2:
            raise ValueError("batch norm needs 2 or more images in a batch")
        mean = averaged(x.mean(0))
        variance = averaged((x - mean).square().mean(0))
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * n / (n - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


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
        norm = partial(nn.LayerNorm, eps=1e-6)
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


def represent(vit: VisionTransformer, head: InstanceHead, tokens: Tensor) -> Tensor:
    """Instance representation [b d] from an encoder's tokens [b prefix+k d], which are not normed yet."""
    return final_norm(vit, head(tokens[:, vit.num_prefix_tokens :]))
