"""Training steps of others' models: Hugging Face's and lightly's MAE, DropPos' own program, a plain ViT classifier."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchloom.nets.build import PRESETS
from patchloom.nets.performance import fuse_attention
from patchloom.patches.positions import smoothed_positions

# by name: its package, and the form of its attention
PEERS = {
    "hf mae (sdpa)": ("transformers", "torch's scaled_dot_product_attention"),
    "hf mae (eager)": ("transformers", "explicit softmax"),
    "lightly mae": ("lightly", "timm's, fused"),
}
# the authors' DropPos: its models, with the optimiser of its program or a fused one
DROPPOS = ("authors' droppos", "authors' droppos, fused AdamW")
PROGRAM = "DROPPOS_PROGRAM"  # environment variable with the folder of a checkout of Haochen-Wang409/DropPos
SIDE, PATCHES = 224, 196
SMALL, DEPTH = "vit_small_patch16_224", 8

Parts = tuple[nn.Module, Callable[[], Tensor]]


def installed(kind: str) -> bool:
    """Return whether the package of a peer is installed."""
    return find_spec(PEERS[kind][0]) is not None


class Peer:
    """Step of another library's model on random images of 224 px: forward, backward, fused AdamW.

    Args:
        kind: name in `PEERS` or `DROPPOS`, or "plain vit".
        dtype: type of the products: float32, bfloat16 or float16 (timed without scaling of the loss).
        device: device of the step.
        batch: images per step.
        model: timm's name of the encoder with that shape, or one of ours.
        depth: blocks of an MAE's decoder.
    """

    def __init__(self, kind: str, dtype: str, device: str, batch: int, model: str = SMALL, depth: int = DEPTH):
        torch.manual_seed(0)
        self.dtype, self.device = dtype, device
        images = torch.randn(batch, 3, SIDE, SIDE, device=device)
        own = {"plain vit": plain_vit, "lightly mae": lightly_mae, **dict.fromkeys(DROPPOS, authors_droppos)}
        make = own.get(kind, hugging_face)
        name, sizes = PRESETS.get(model, (model, {}))
        self.net, self.loss = make(images, kind, timm.create_model(name, num_classes=0, **sizes), depth)
        if kind == "plain vit":
            fuse_attention(self.net, fused=not (device == "cpu" and dtype == "bfloat16"))
        self.net.to(device).train()
        weights = [weight for weight in self.net.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=None if kind == DROPPOS[0] else True)

    def __call__(self) -> None:
        with torch.autocast(self.device, getattr(torch, self.dtype), enabled=self.dtype != "float32"):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def plain_vit(images: Tensor, kind: str, vit: nn.Module, depth: int) -> Parts:
    """Make a classifier over all patches."""
    net = nn.Sequential(vit, nn.Linear(vit.embed_dim, 1000))
    target = torch.arange(len(images), device=images.device)
    return net, lambda: nn.functional.cross_entropy(net(images), target)


def hugging_face(images: Tensor, kind: str, vit: nn.Module, depth: int) -> Parts:
    """Make ``ViTMAEForPreTraining`` with one of its forms of attention, named in brackets."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    form = kind.partition("(")[2].rstrip(")")
    block = vit.blocks[0]
    sizes = {"hidden_size": vit.embed_dim, "num_hidden_layers": len(vit.blocks)}
    sizes |= {"num_attention_heads": block.attn.num_heads, "intermediate_size": block.mlp.fc1.out_features}
    sizes |= {"decoder_num_hidden_layers": depth}
    net = ViTMAEForPreTraining(ViTMAEConfig(norm_pix_loss=True, attn_implementation=form, **sizes))
    return net, lambda: net(images).loss


def lightly_mae(images: Tensor, kind: str, vit: nn.Module, depth: int) -> Parts:
    """Make MAE from lightly's modules as in its documentation, with normalised pixels."""
    from lightly.models import utils
    from lightly.models.modules import MAEDecoderTIMM, MaskedVisionTransformerTIMM

    net = nn.ModuleDict()
    net["encoder"] = MaskedVisionTransformerTIMM(vit=vit)
    net["decoder"] = MAEDecoderTIMM(PATCHES, 16, embed_dim=vit.embed_dim, decoder_depth=depth)

    def loss() -> Tensor:
        encoder, decoder = net["encoder"], net["decoder"]
        keep, mask = utils.random_token_mask(size=(len(images), PATCHES + 1), mask_ratio=0.75, device=images.device)
        tokens = decoder.embed(encoder.encode(images=images, idx_keep=keep))
        full = utils.repeat_token(decoder.mask_token, (len(images), PATCHES + 1))
        full = utils.set_at_index(full, keep, tokens.type_as(full))
        answers = decoder.predict(utils.get_at_index(decoder.decode(full), mask))
        target = utils.get_at_index(utils.patchify(images, 16), mask - 1)
        target = utils.normalize_mean_var(target, dim=-1)
        return nn.functional.mse_loss(answers, target)

    return net, loss


def authors_droppos(images: Tensor, kind: str, vit: nn.Module, depth: int) -> Parts:
    """Make the model of DropPos' program as its scripts do: guided, 3/4 masked, 3/4 without position, σ 1."""
    sys.path.insert(0, os.environ[PROGRAM])
    sys.modules.setdefault("einops", ModuleType("einops")).__dict__.setdefault("rearrange", None)  # it does not use it
    np.float = float  # type: ignore[attr-defined]  # it was written for NumPy below 1.20, and timm below 0.4
    program = import_module("models_DropPos_mae")
    program.Block = lambda *sizes, qk_scale=None, **more: timm.models.vision_transformer.Block(*sizes, **more)
    size = {384: "small", 768: "base", 1024: "large"}[vit.embed_dim]
    net = getattr(program, f"DropPos_mae_vit_{size}_patch16_dec512d2b")(attn_guide=True)
    labels = smoothed_positions((SIDE // 16, SIDE // 16), 1.0)
    return net, lambda: net(images, 0.75, 0.75, labels)[1]


def operations_of(kind: str, model: str = SMALL, depth: int = DEPTH) -> float:
    """Return the floating-point operations per image of a peer's matrix products, forward and backward."""
    if kind == "hf mae (sdpa)":
        kind = "hf mae (eager)"  # torch counts no fused attention on CPUs
    step = Peer(kind, "float32", "cpu", 2, model, depth)
    fuse_attention(step.net, False)
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / 2
