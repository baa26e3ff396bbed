"""timm blocks in which only some tokens ask, or only some answer: what the others would cost is never computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from patchloom.nets import native


def run_blocks(
    blocks: Iterable[Block], tokens: Tensor, *, serving: Tensor | None = None, checkpointing: bool = False
) -> Tensor:
    """Tokens [b t d] through all blocks.

    Args:
        blocks: timm's.
        tokens: [b t d].
        serving: [b m] indices of those that alone are keys and values; None: all are.
        checkpointing: keep no activations inside the blocks, and compute them again on the way back.
    """
    blocks = list(blocks)
    if blocks and all(_native(block, tokens) for block in blocks):
        return _run_native(blocks, tokens, serving, checkpointing)
    for block in blocks:
        step = block if serving is None else partial(as_compiled(block, context_block), block, serving=serving)
        tokens = checkpoint(step, tokens, use_reentrant=False) if checkpointing else step(tokens)
    return tokens


def as_compiled(block: Block, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function``, compiled if ``block`` is: calling a part of a module goes past what `Module.compile` made."""
    return function if block._compiled_call_impl is None else _compiled(function)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


def context_block(block: Block, tokens: Tensor, serving: Tensor) -> Tensor:
    """A block over tokens [b t d] in which those at the indices ``serving`` [b m] alone are keys and values (MP3)."""
    normed = block.norm1(tokens)
    return _rest(block, tokens, _attention(block.attn, normed, _served(normed, serving)))


def asking_block(block: Block, tokens: Tensor, first: int) -> Tensor:
    """What a block makes of ``tokens[:, first:]`` [b t-first d], with all of tokens [b t d] as keys and values.

    For a last block, of which the other tokens are not read.
    """
    if _native(block, tokens):
        return _added(*_native_block(block, tokens, first=first))
    normed = block.norm1(tokens)
    return _rest(block, tokens[:, first:], _attention(block.attn, normed[:, first:], normed))


def _served(normed: Tensor, serving: Tensor) -> Tensor:
    return normed[torch.arange(len(serving), device=serving.device)[:, None], serving]


def _rest(block: Block, tokens: Tensor, attended: Tensor) -> Tensor:
    """The block from its attention on."""
    tokens = tokens + block.drop_path1(block.ls1(attended))
    return tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))


def _attention(attn: Attention, asking: Tensor, serving: Tensor) -> Tensor:
    """timm's attention with queries from ``asking`` [b t d], keys and values from ``serving`` [b m d]."""
    q, kv = _heads(attn, asking, serving)
    q, (k, v) = q.transpose(1, 2), kv.permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if attn.fused_attn:
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=attn.attn_drop.p if attn.training else 0.0)
    else:  # in bfloat16 on CPUs the fused kernel is the slower one
        mixed = attn.attn_drop((q * attn.scale @ k.mT).softmax(-1)) @ v
    mixed = attn.norm(mixed.transpose(1, 2).flatten(2))
    return attn.proj_drop(attn.proj(mixed))


def _heads(attn: Attention, asking: Tensor, serving: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [b t h d] and keys and values [b m 2 h d]."""
    heads, side = attn.num_heads, attn.head_dim
    parts = [heads * side, 2 * heads * side]
    weights = attn.qkv.weight.split(parts)
    biases = (None, None) if attn.qkv.bias is None else attn.qkv.bias.split(parts)
    q = F.linear(asking, weights[0], biases[0]).unflatten(-1, (heads, side))
    return q, F.linear(serving, weights[1], biases[1]).unflatten(-1, (2, heads, side))


def use_native(net: nn.Module, wanted: bool = True) -> None:
    """Have the blocks inside ``net`` run on our own kernels (`patchloom.nets.native`) wherever a CPU computes them in
    bfloat16; blocks with more to them than the kernels know stay on torch's."""
    for module in net.modules():
        if isinstance(module, Block):
            module.native = wanted and _plain(module)


def _plain(block: Block) -> bool:
    """Whether a block has only what the kernels know."""
    attn, mlp = block.attn, block.mlp
    nothing = attn.q_norm, attn.k_norm, attn.norm, mlp.norm, block.ls1, block.ls2, block.drop_path1, block.drop_path2
    shifted = block.norm1, block.norm2, attn.proj, mlp.fc1, mlp.fc2
    widths = attn.head_dim, attn.qkv.in_features, mlp.fc1.out_features
    return (
        all(isinstance(part, nn.Identity) for part in nothing)
        and not any(drop.p for drop in (attn.attn_drop, attn.proj_drop, mlp.drop1, mlp.drop2))
        and all(isinstance(norm, nn.LayerNorm) for norm in shifted[:2])
        and all(getattr(part, "bias", None) is not None for part in shifted)
        and isinstance(mlp.act, nn.GELU)
        and mlp.act.approximate == "none"
        and not any(width % native.LANES for width in widths)
    )


def _native(block: Block, tokens: Tensor) -> bool:
    """Whether a block runs on our kernels now: they are for float32 tokens of which a CPU makes bfloat16 ones."""
    return (
        getattr(block, "native", False)
        and tokens.device.type == "cpu"
        and tokens.dtype == block.norm1.weight.dtype == torch.float32
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )


def _run_native(blocks: list[Block], tokens: Tensor, serving: Tensor | None, checkpointing: bool) -> Tensor:
    more, shift = None, None
    for block in blocks:
        step = partial(as_compiled(block, _native_block), block, serving=serving)
        given = tokens, more, shift
        tokens, more, shift = checkpoint(step, *given, use_reentrant=False) if checkpointing else step(*given)
    return _added(tokens, more, shift)


def _added(tokens: Tensor, more: Tensor, shift: Tensor) -> Tensor:
    return tokens + (more + shift)


def _native_block(
    block: Block,
    tokens: Tensor,
    more: Tensor | None = None,
    shift: Tensor | None = None,
    serving: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block on our kernels. Sums are made where they are normed, so what comes in and goes out are their parts.

    Args:
        block: timm's.
        tokens: [b t d] float32.
        more: [b t d] bfloat16, to be added to them, with
        shift: [d]; both None: nothing is.
        serving: as in `context_block`.
        first: as in `asking_block`.

    Returns:
        Such parts of [b t-first d].
    """
    attn, mlp = block.attn, block.mlp
    tokens, normed = native.add_norm(tokens, more, shift, block.norm1)
    if serving is None and not first:
        mixed = native.attention(attn.qkv(normed).unflatten(-1, (3, attn.num_heads, attn.head_dim)))
    else:
        served = normed if serving is None else _served(normed, serving)
        mixed = native.attention(*_heads(attn, normed[:, first:], served))
    attended = F.linear(mixed.flatten(2), attn.proj.weight)
    tokens, normed = native.add_norm(tokens[:, first:], attended, attn.proj.bias, block.norm2)
    hidden = native.gelu(F.linear(normed, mlp.fc1.weight), mlp.fc1.bias)
    return tokens, F.linear(hidden, mlp.fc2.weight), mlp.fc2.bias
