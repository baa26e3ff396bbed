"""Decoders: light transformers that turn encoder tokens into answers, and are thrown away afterwards."""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from patchloom.nets.build import initialize
from patchloom.nets.sparse_attention import as_compiled, attention_of, query_block, run_blocks


class Decoder(nn.Module):
    """Linear to a smaller width, transformer blocks, norm, linear to the answers: for every token that it is given.

    It has no position embedding, so it knows of positions only what the encoder tells (DropPos section 3.2).

    Args:
        in_width: width of the encoder's tokens.
        answers: numbers to answer for each token.
        width: width of the decoder.
        depth: transformer blocks.
        heads: attention heads.
        prefix: class and register tokens in front, which are read but get no answer.
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
        """Attention heads of its blocks; 0 without any."""
        return attention_of(cast(Block, self.blocks[0])).num_heads if len(self.blocks) else 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Answers [b k answers] for the k patch tokens of ``tokens`` [b prefix+k d]."""
        return self.answer(self.norm(self.run(self.project_in(tokens), self.prefix)))

    def project_in(self, tokens: Tensor) -> Tensor:
        """The encoder's tokens at the decoder's width; autocast or not, what the blocks add to is kept in full."""
        return self.embed(tokens).to(self.embed.weight.dtype)

    def run(self, tokens: Tensor, first: int) -> Tensor:
        """``tokens[:, first:]`` of [b t width] after all blocks.

        Where more than the prefix is in front, what the last block would make of that is never computed.
        """
        blocks = cast(list[Block], list(self.blocks))
        last = blocks.pop() if first > self.prefix and blocks else None
        tokens = run_blocks(blocks, tokens, checkpointing=self.grad_checkpointing)
        return tokens[:, first:] if last is None else as_compiled(last, query_block)(last, tokens, first)


class MAEDecoder(Decoder):
    """MAE's decoder: mask tokens join the encoder's tokens, all with fixed positions, and are answered for.

    The tokens are not sorted back onto the grid: attention does not mind their order, and the answers stay together.

    Args:
        in_width, answers, width, depth, heads, prefix: as in `Decoder`.
        positions: [n width] position embedding of every patch of the grid; fixed.
        has_masked: False where no patch is ever masked, and a mask token would never be used.
        visible_asked: of the patches that the encoder saw, the last so many are answered for, too (where the picture
            was degraded, or they were blank).
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
        """Have the ``state_dict`` keep the positions, which are to be others than those it was built with."""
        self.register_buffer("positions", self.positions, persistent=True)

    def forward(  # type: ignore[override]  # other arguments than Decoder's: no caller has both
        self, tokens: Tensor, visible: Tensor, masked: Tensor
    ) -> Tensor:
        """Answers for the patches that the encoder did not see, and for the last ``visible_asked`` that it saw.

        Args:
            tokens: [b prefix+k d] from the encoder.
            visible: [b k] which patches they are.
            masked: [b m] the others that are answered for, disjoint from ``visible``.
        """
        known = self.project_in(tokens)
        prefix, known = known[:, : self.prefix], known[:, self.prefix :] + self.positions[visible]
        parts = [prefix, known]
        if self.mask_token is not None:
            parts.append(self.mask_token + self.positions[masked])
        tokens = torch.cat(parts, dim=1)
        return self.answer(self.norm(self.run(tokens, tokens.shape[1] - masked.shape[1] - self.visible_asked)))


def _positions_in(decoder: MAEDecoder, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Take the positions of a state dict that keeps them."""
    if f"{prefix}positions" in state:
        decoder.keep_positions()


class PatchHead(nn.Linear):
    """One linear layer from a patch's token to its answer (SimMIM section 3.3, MP3 section 3).

    Args:
        in_width: width of the encoder's tokens.
        answers: numbers to answer for each token.
        prefix: class and register tokens in front, which get no answer.
        visible_asked: only the last so many patch tokens are answered for; None: all of them.
    """

    def __init__(self, in_width: int, answers: int, prefix: int, visible_asked: int | None = None):
        super().__init__(in_width, answers)
        self.prefix, self.visible_asked = prefix, visible_asked
        initialize(self)

    def forward(self, tokens: Tensor, visible: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        """Answers [b j answers] for patch tokens of ``tokens`` [b prefix+k d]; where they stand is of no use here."""
        first = self.prefix if self.visible_asked is None else tokens.shape[1] - self.visible_asked
        return super().forward(tokens[:, first:])
