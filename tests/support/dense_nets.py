"""Small encoders of every kind for tests of dense heads, and shared checks."""

import torch
from torch import nn

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard

SMALL = {"embed_dim": 16, "depth": 4, "num_heads": 2}
SWIN = {"embed_dim": 8, "depths": [1, 2, 1], "num_heads": [1, 2, 2], "window_size": 4}

# by name: side of a patch, positions, options of the model
KINDS = {
    "p4": (4, "sincos", {}),
    "p8 learned": (8, "sincos-learned", {}),
    "p14": (14, "sincos", {}),
    "p16 registers": (16, "learned", {"reg_tokens": 2}),
    "p16 no class token": (16, "sincos", {"class_token": False}),
    "p16 two blocks": (16, "sincos", {"depth": 2}),
    "p32 no positions": (32, "none", {}),
    "dinov3": (16, "rotary", {"init_values": 0.1}),
    "mixed rotations": (16, "rotary", {}),
    "swin": (4, "none", SWIN),
}
MODELS = {
    "swin": "swin-nano",
    "dinov3": "vit_small_patch16_dinov3",
    "mixed rotations": "vit_small_patch16_rope_mixed_224",
}


def card_of(spec: EncoderSpec) -> EncoderCard:
    return EncoderCard(spec, (0.5,) * spec.channels, (0.25,) * spec.channels, "mae", "small")


def encoder(kind: str = "p16 registers", grid: tuple[int, int] = (4, 4), channels: int = 3, **options):
    """Return an encoder with perturbed weights and its card; ``grid`` is that of its last feature map."""
    torch.manual_seed(0)
    p, positions, own = KINDS[kind]
    sizes = ({} if kind == "swin" else SMALL) | own | options
    side = p * 2 ** (len(sizes["depths"]) - 1) if kind == "swin" else p
    model, size = MODELS.get(kind, "nano"), (grid[0] * side, grid[1] * side)
    spec = EncoderSpec(model, size, p, channels, positions=positions, options=sizes)
    vit = build_encoder(spec)
    with torch.no_grad():  # zero biases would hide mistakes
        for weight in vit.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    return vit.eval(), card_of(spec)


def without_gradient(net: nn.Module) -> list[str]:
    """Names of what would be trained and got no gradient: several processes would wait for it for ever."""
    return [name for name, one in net.named_parameters() if one.requires_grad and one.grad is None]
