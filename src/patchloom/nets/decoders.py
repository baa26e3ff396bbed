"""Decoders: light transformers that turn encoder tokens into predictions, and are discarded after pre-training."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from patchloom.nets.build import initialize
from patchloom.nets.compiling import compilable
from patchloom.nets.sparse_attention import attention_of, query_block, run_blocks
from patchloom.patches.tokens import gather_tokens, scatter_tokens


class Decoder(nn.Module):
    """Decoder: linear to a smaller width, transformer blocks, norm, linear to the predictions, for every token.

    It has no position embedding, so it knows only the positions that the encoder encodes (DropPos section 3.2).

    Args:
        in_width: width of the encoder's tokens.
        answers: number of outputs per token.
        width: width of the decoder.
        depth: number of transformer blocks.
        heads: number of attention heads.
        prefix: number of class and register tokens in front, which are read but get no output.
    """

    def __init__(self, in_width: int, answers: int, width: int = 512, depth: int = 2, heads: int = 16, prefix: int = 1):
        super().__init__()
        self.prefix, self.grad_checkpointing = prefix, False
        self.embed = nn.Linear(in_width, width)
        self.blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.answer = nn.Linear(width, answers)
        initialize(self)

    @property
    def heads(self) -> int:
        """Number of attention heads of its blocks; 0 without blocks."""
        return attention_of(cast(Block, self.blocks[0])).num_heads if len(self.blocks) else 0

    @compilable
    def forward(self, tokens: Tensor) -> Tensor:
        """Return predictions [b k answers] for the k patch tokens of ``tokens`` [b prefix+k d]."""
        return self.answer(self.norm(self.run(self.project_in(tokens), self.prefix)))

    def project_in(self, tokens: Tensor) -> Tensor:
        """Project the encoder's tokens to the decoder's width; full precision, because the blocks add to it."""
        return self.embed(tokens).to(self.embed.weight.dtype)

    def run(self, tokens: Tensor, first: int) -> Tensor:
        """Return ``tokens[:, first:]`` of [b t width] after all blocks.

        If more than the prefix is left out, the last block does not compute it.
        """
        blocks = cast(list[Block], list(self.blocks))
        last = blocks.pop() if first > self.prefix and blocks else None
        tokens = run_blocks(blocks, tokens, checkpointing=self.grad_checkpointing)
        return tokens[:, first:] if last is None else query_block(last, tokens, first)


class MAEDecoder(Decoder):
    """MAE's decoder: predicts patches from mask tokens and the encoder's tokens, all with fixed positions.

    The tokens are not sorted into grid order: attention ignores their order, and the predicted ones stay together.

    Args:
        in_width, answers, width, depth, heads, prefix: as in `Decoder`.
        positions: [n width] fixed position embedding of every patch of the grid.
        has_masked: False if no patch is ever masked; there is no mask token then.
        visible_asked: number of visible patches, the last ones, that are also predicted (if the image is degraded, or
            they are blank).
    """

    positions: Tensor

    def __init__(
        self,
        in_width: int,
        answers: int,
        positions: Tensor,
        depth: int = 8,
        heads: int = 16,
        prefix: int = 1,
        has_masked: bool = True,
        visible_asked: int = 0,
    ):
        super().__init__(in_width, answers, positions.shape[1], depth, heads, prefix)
        self.visible_asked = visible_asked
        self.register_buffer("positions", positions, persistent=False)
        self.mask_token = nn.Parameter(torch.empty(positions.shape[1]).normal_(std=0.02)) if has_masked else None
        self.register_load_state_dict_pre_hook(_positions_in)

    def keep_positions(self) -> None:
        """Save the positions in the ``state_dict``, because they will differ from those given at construction."""
        self.register_buffer("positions", self.positions, persistent=True)

    @compilable
    def forward(  # type: ignore[override]  # other arguments than Decoder's: no caller uses both
        self, tokens: Tensor, visible: Tensor, masked: Tensor
    ) -> Tensor:
        """Return predictions for the masked patches, and for the last ``visible_asked`` of the visible ones.

        Args:
            tokens: [b prefix+k d] from the encoder.
            visible: [b k] indices of the visible patches.
            masked: [b m] indices of the predicted patches, disjoint from ``visible``.

        Returns:
            [b visible_asked+m answers].
        """
        known = self.project_in(tokens)
        prefix, known = known[:, : self.prefix], known[:, self.prefix :] + self.positions[visible]
        parts = [prefix, known]
        if self.mask_token is not None:
            parts.append(self.mask_token + self.positions[masked])
        tokens = torch.cat(parts, dim=1)
        return self.answer(self.norm(self.run(tokens, tokens.shape[1] - masked.shape[1] - self.visible_asked)))


def _positions_in(decoder: MAEDecoder, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Use the positions of a state dict that has them."""
    if f"{prefix}positions" in state:
        decoder.keep_positions()


class CrossBlock(nn.Module):
    """Decoder block with cross-attention to the encoder's tokens and an MLP, without self-attention (CrossMAE).

    Args:
        width, heads: width and number of attention heads of the block.
        in_width: width of the encoder's tokens.
    """

    def __init__(self, width: int, heads: int, in_width: int):
        super().__init__()
        self.heads, self.fused_attn = heads, True
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.q, self.kv = nn.Linear(width, width), nn.Linear(in_width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, queries: Tensor, context: Tensor) -> Tensor:
        """Return the queries [b m width] after attending to ``context`` [b t in_width]."""
        q = self.q(self.norm1(queries)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v
        queries = queries + self.proj(mixed.transpose(1, 2).flatten(2))
        return queries + self.mlp(self.norm2(queries))


class CrossDecoder(nn.Module):
    """CrossMAE's decoder: every masked patch reads the encoder's tokens by cross-attention, and no other masked patch.

    So the prediction of a patch does not depend on which others are predicted.

    Args:
        in_width: width of the encoder's tokens.
        answers: number of outputs per patch.
        positions: [n width] fixed position embedding of every patch of the grid.
        depth: number of blocks.
        heads: number of attention heads.
        maps: number of feature maps of the encoder; of several, each block reads its own weighted and normalised sum
            (inter-block attention).
    """

    positions: Tensor
    visible_asked = 0

    def __init__(self, in_width: int, answers: int, positions: Tensor, depth: int, heads: int, maps: int = 1):
        super().__init__()
        width, self.grad_checkpointing = positions.shape[1], False
        self.register_buffer("positions", positions, persistent=False)
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=0.02))
        self.blocks = nn.ModuleList(CrossBlock(width, heads, in_width) for _ in range(depth))
        self.mix = nn.Linear(maps, depth, bias=False) if maps > 1 else None
        self.mixed_norms = nn.ModuleList(nn.LayerNorm(in_width, eps=1e-6) for _ in range(depth if maps > 1 else 0))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.answer = nn.Linear(width, answers)
        initialize(self)

    @compilable
    def forward(self, tokens: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Return predictions [b m answers] for the patches ``masked`` [b m]; those ``visible`` are not used.

        Args:
            tokens: [b prefix+k d] from the encoder, or [maps b prefix+k d].
            visible: [b k] indices of the visible patches.
            masked: [b m] indices of the predicted patches.
        """
        queries, contexts = self.mask_token + self.positions[masked], [tokens] * len(self.blocks)
        if self.mix is not None:
            mixed = (self.mix.weight @ tokens.flatten(1)).unflatten(1, tokens.shape[1:])
            contexts = [norm(one) for norm, one in zip(self.mixed_norms, mixed, strict=True)]
        for block, context in zip(self.blocks, contexts, strict=True):
            step = (queries, context)
            queries = checkpoint(block, *step, use_reentrant=False) if self.grad_checkpointing else block(*step)
        return self.answer(self.norm(queries))


class ConvDecoder(nn.Module):
    """data2vec 2.0's decoder: convolutions over the grid of the encoder's tokens and of mask tokens.

    Args:
        in_width: width of the encoder's tokens.
        answers: number of outputs per patch.
        grid: rows and columns of patches.
        width: number of channels.
        depth: number of convolutions of 3x3 patches, in up to 16 groups of channels.
        prefix: number of class and register tokens in front, which are not used.
    """

    def __init__(self, in_width: int, answers: int, grid: tuple[int, int], width: int, depth: int, prefix: int):
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.mask_token = nn.Parameter(torch.empty(in_width).normal_(std=0.02))
        widths = [in_width, *[width] * (depth - 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(enters, width, 3, padding=1, groups=math.gcd(16, enters, width)) for enters in widths
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in widths)
        self.answer = nn.Linear(width, answers)
        initialize(self)

    @compilable
    def forward(self, tokens: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Return predictions [b m answers] for the patches ``masked`` [b m].

        Args:
            tokens: [b prefix+k d] from the encoder.
            visible: [b k] indices of the visible patches.
            masked: [b m] indices of the predicted patches.
        """
        empty = self.mask_token.expand(len(tokens), math.prod(self.grid), -1)
        x = scatter_tokens(tokens[:, self.prefix :], visible, empty)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            mixed = conv(x.mT.unflatten(2, self.grid)).flatten(2).mT
            mixed = F.gelu(norm(mixed))
            x = x + mixed if x.shape == mixed.shape else mixed
        return self.answer(gather_tokens(x, masked))


class PatchHead(nn.Linear):
    """Linear layer from a patch's token to its prediction (SimMIM section 3.3, MP3 section 3).

    Args:
        in_width: width of the encoder's tokens.
        answers: number of outputs per token.
        prefix: number of class and register tokens in front, which get no output.
        visible_asked: number of patch tokens, the last ones, that get an output; None: all.
    """

    def __init__(self, in_width: int, answers: int, prefix: int, visible_asked: int | None = None):
        super().__init__(in_width, answers)
        self.prefix, self.visible_asked = prefix, visible_asked
        initialize(self)

    def forward(self, tokens: Tensor, visible: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """Return predictions [b j answers] for patch tokens of ``tokens`` [b prefix+k d]; indices are ignored."""
        first = self.prefix if self.visible_asked is None else tokens.shape[1] - self.visible_asked
        return super().forward(tokens[:, first:])
