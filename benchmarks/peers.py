"""Training steps of other libraries' models: Hugging Face's and lightly's MAE, and a plain ViT classifier."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchloom.nets.build import PRESETS
from patchloom.nets.performance import fuse_attention

# by name: its package, and the form of its attention
PEERS = {
    "hf mae (sdpa)": ("transformers", "torch's scaled_dot_product_attention"),
    "hf mae (eager)": ("transformers", "explicit softmax"),
    "lightly mae": ("lightly", "timm's, fused"),
}
SIDE, PATCHES = 224, 196
SMALL, DEPTH = "vit_small_patch16_224", 8

Parts = tuple[nn.Module, Callable[[], Tensor]]


def installed(kind: str) -> bool:
    """Return whether the package of a peer is installed."""
    return find_spec(PEERS[kind][0]) is not None


class Peer:
    """Step of another library's model on random images of 224 px: forward, backward, fused AdamW.

    Args:
        kind: name in `PEERS`, or "plain vit".
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
        make = {"plain vit": plain_vit, "lightly mae": lightly_mae}.get(kind, hugging_face)
        name, sizes = PRESETS.get(model, (model, {}))
        self.net, self.loss = make(images, kind, timm.create_model(name, num_classes=0, **sizes), depth)
        if kind == "plain vit":
            fuse_attention(self.net, fused=not (device == "cpu" and dtype == "bfloat16"))
        self.net.to(device).train()
        weights = [weight for weight in self.net.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)

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


def operations_of(kind: str, model: str = SMALL, depth: int = DEPTH) -> float:
    """Return the floating-point operations per image of a peer's matrix products, forward and backward."""
    if kind == "hf mae (sdpa)":
        kind = "hf mae (eager)"  # torch counts no fused attention on CPUs
    step = Peer(kind, "float32", "cpu", 2, model, depth)
    fuse_attention(step.net, False)
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / 2
