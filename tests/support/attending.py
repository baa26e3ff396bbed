"""Encoders with known attention, and random ones."""

from collections.abc import Callable

import torch
from perturbing import perturbed
from timm.models.vision_transformer import VisionTransformer

from patchloom.nets.build import EncoderSpec, build_encoder

# image size, patch size and channels of a 2-D grid, and of a spectrogram with patches as columns
GRIDS = {"3x4": ((24, 32), 8, 3), "1x6": ((12, 6), (12, 1), 1)}
PREFIXES = {"class token": {}, "registers": {"reg_tokens": 2}, "no class token": {"class_token": False}}


def random_vit(size=(24, 32), p=8, channels=3, positions="sincos", **options) -> VisionTransformer:
    torch.manual_seed(0)
    options = {"embed_dim": 32, "depth": 3, "num_heads": 2, **options}
    vit = build_encoder(EncoderSpec("vit_tiny_patch16_224", size, p, channels, positions, options))
    return perturbed(vit, 0.2).eval()


@torch.no_grad()
def attending_vit(targets: list[Callable[[int], int]], size, p, channels, **options) -> VisionTransformer:
    """Return an encoder of one block in which patch i attends only to ``target(i)``, with a head per target.

    Its tokens are one-hot codes of their positions.
    """
    n = (size[0] // (p if isinstance(p, int) else p[0])) * (size[1] // (p if isinstance(p, int) else p[1]))
    heads = len(targets)
    vit = random_vit(size, p, channels, "learned", embed_dim=2 * n * heads, depth=1, num_heads=heads, **options)
    for weight in vit.patch_embed.parameters():
        weight.zero_()
    vit.norm_pre = torch.nn.Identity()
    vit.pos_embed.zero_()
    vit.pos_embed[0, -n:, :n] = torch.eye(n)
    for token in (vit.cls_token, vit.reg_token):
        if token is not None:
            token.zero_()
    (block,) = vit.blocks
    block.norm1.weight.fill_(1)
    block.norm1.bias.zero_()
    qkv = block.attn.qkv
    qkv.weight.zero_()
    qkv.bias.zero_()
    q, k, _ = qkv.weight.unflatten(0, (3, heads, 2 * n)).unbind(0)
    for h, target in enumerate(targets):
        for i in range(n):
            q[h, target(i), i] = 50
            k[h, i, i] = 1
    return vit
