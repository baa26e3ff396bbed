"""The encoder is a guest from timm: this file, what is beneath it, and `build` beside it alone know its insides.

A stock ``VisionTransformer`` comes in, is fed a `View`, and goes home unchanged: no weight is ever renamed. Letters as
in `patchloom.views`; d is the width of the encoder and ``prefix`` the number of class and register tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timm.layers import Attention
from timm.models.cait import ClassAttn
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.partial import run_blocks
from patchloom.views.tokens import patchify
from patchloom.views.view import View


def grid_size(vit: VisionTransformer) -> tuple[int, int]:
    """Rows and columns of patches."""
    return tuple(vit.patch_embed.grid_size)


def patch_side(vit: VisionTransformer) -> int:
    """Side p of a patch in pixels."""
    return vit.patch_embed.patch_size[0]


def attention_heads(vit: VisionTransformer) -> int:
    """Attention heads of its blocks."""
    return vit.blocks[0].attn.num_heads


def attention_shape(vit: VisionTransformer) -> tuple[int, int, int]:
    """Heads, tokens of a whole image, and width of a head."""
    attn = vit.blocks[0].attn
    return attn.num_heads, vit.num_prefix_tokens + vit.patch_embed.num_patches, attn.head_dim


def weights_bytes(vit: VisionTransformer, images: int) -> int:
    """Of the bfloat16 attention weights that all blocks keep for the way back, where no fused kernel does without."""
    heads, tokens, _ = attention_shape(vit)
    return 2 * images * len(vit.blocks) * heads * tokens**2


def patch_positions(vit: VisionTransformer) -> Tensor | None:
    """The position embeddings [n d] of the patches alone, or None if the model has none."""
    return None if vit.pos_embed is None else vit.pos_embed[0, -vit.patch_embed.num_patches :]


def _prefix_tokens(vit: VisionTransformer) -> list[Tensor]:
    """Class and register tokens [1 prefix d] with what position embedding they have."""
    tokens = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
    if not tokens:
        return []
    prefix = torch.cat(tokens, dim=1)
    own = vit.pos_embed is not None and not vit.no_embed_class
    return [prefix + vit.pos_embed[:, : vit.num_prefix_tokens] if own else prefix]


def embed(
    vit: VisionTransformer, view: View, *, mask_token: Tensor | None = None, position_token: Tensor | None = None
) -> Tensor:
    """Tokens [b prefix+k d] of a view: only the patches that enter are embedded.

    Args:
        vit: the encoder.
        view: what it may know.
        mask_token: stands for blank content; broadcast to [b k d]. Needed if ``view.blank`` is given.
        position_token: stands for dropped positions; broadcast to [b k d]. Needed if ``view.dropped`` is given.
    """
    project = vit.patch_embed.proj
    patches = patchify(view.images, patch_side(vit), view.visible)
    tokens = vit.patch_embed.norm(F.linear(patches, project.weight.flatten(1), project.bias))
    tokens = tokens.to(project.weight.dtype)  # autocast or not, what the blocks add to is kept in full
    if view.blank is not None:
        tokens = torch.where(view.blank[..., None], mask_token, tokens)
    table = patch_positions(vit)
    if table is not None:
        positions = table[view.visible]
        if view.dropped is not None:
            positions = torch.where(view.dropped[..., None], position_token, positions)
        tokens = tokens + positions
    prefix = [token.expand(len(tokens), -1, -1) for token in _prefix_tokens(vit)]
    return vit.norm_pre(vit.pos_drop(torch.cat([*prefix, tokens], dim=1)))


def attend(vit: VisionTransformer, tokens: Tensor, context: Tensor | None = None, norm: bool = True) -> Tensor:
    """Run the blocks and the final norm over tokens [b prefix+k d].

    Args:
        vit: the encoder.
        tokens: what `embed` gave.
        context: [b m] indices of the patches that serve as keys and values beside the prefix tokens (MP3 section 3);
            keys and values of the others are never computed. None: all serve.
        norm: False leaves the final norm to the caller (`final_norm`).
    """
    serving = None
    if context is not None:
        prefix = torch.arange(vit.num_prefix_tokens, device=context.device).expand(len(context), -1)
        serving = torch.cat([prefix, context + vit.num_prefix_tokens], dim=1)
    tokens = run_blocks(vit.blocks, tokens, serving=serving, checkpointing=vit.grad_checkpointing)
    return vit.norm(tokens) if norm else tokens


def final_norm(vit: VisionTransformer, tokens: Tensor) -> Tensor:
    """The encoder's last norm, for what was made from tokens [... d] that `attend` left without it."""
    return vit.norm(tokens)


def attend_each(vit: VisionTransformer, tokens: Tensor) -> Iterator[Tensor]:
    """What `attend` makes of tokens [b prefix+k d] on its way: as they came, after each block, after the final norm.

    `layer_names` tells what they are called.
    """
    yield tokens
    for block in vit.blocks:
        tokens = block(tokens)
        yield tokens
    yield vit.norm(tokens)


def layer_names(vit: VisionTransformer) -> tuple[str, ...]:
    """A name for each of what `attend_each` gives."""
    return ("embedding", *(f"block {i}" for i in range(1, len(vit.blocks) + 1)), "norm")


def encode(
    vit: VisionTransformer,
    view: View,
    *,
    mask_token: Tensor | None = None,
    position_token: Tensor | None = None,
    norm: bool = True,
) -> Tensor:
    """Features [b prefix+k d] of what a view lets the encoder know; of `whole` images, timm's ``forward_features``.

    The arguments are those of `embed` and `attend`.
    """
    tokens = embed(vit, view, mask_token=mask_token, position_token=position_token)
    return attend(vit, tokens, view.context, norm)


def fuse_attention(net: nn.Module, fused: bool) -> None:
    """Choose the form of every timm attention inside ``net``: fused, or an explicit softmax (same mathematics).

    `patchloom.machine.fused_gain` measures which one is faster.
    """
    for module in net.modules():
        if isinstance(module, Attention | ClassAttn):
            module.fused_attn = fused


def checkpoint_gradients(net: nn.Module, enabled: bool) -> None:
    """Have every encoder and decoder inside ``net`` compute its activations again on the way back, and keep none."""
    for module in net.modules():
        if hasattr(module, "grad_checkpointing"):
            module.grad_checkpointing = enabled


def compile_blocks(net: nn.Module, enabled: bool = True) -> None:
    """Have torch.compile write kernels for the transformer blocks inside ``net``, one for each shape that they meet.

    The blocks are where the time goes. What is drawn, and what depends on the progress of a run, stays outside, so that
    no later step compiles anything again.
    """
    # shapes of training, teacher, decoder and measures: more than the 8 after which torch would give up
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for module in net.modules():
        if not isinstance(module, Block):
            continue
        if enabled:
            module.compile(dynamic=False)
        else:
            module._compiled_call_impl = None
