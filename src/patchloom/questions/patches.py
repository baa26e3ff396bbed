"""Asking something of every patch whose content was withheld: the part that pixels and features share."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.nets.decode import MAEDecoder, PatchHead
from patchloom.nets.geometry import Geometry
from patchloom.patches.tokens import gather_tokens
from patchloom.questions.question import Encoded, Question
from patchloom.withhold.encoder_input import EncoderInput


class PatchQuestion(Question):
    """A question that is answered patch by patch: for the masked, the blank, and the degraded ones.

    Args:
        geometry: of the encoder.
        decoder: gives the answers; its ``visible_asked`` says how many visible patches answer beside the masked ones:
            the blank ones, or all of them where the picture was degraded.
        blank: visible patches that are blank, in every image.
    """

    def __init__(self, geometry: Geometry, decoder: MAEDecoder | PatchHead, blank: int = 0):
        super().__init__(geometry)
        self.decoder, self.blank = decoder, blank

    def answer(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Which patches are asked [b j], and the answers [b j f] for them, in float32.

        Raises:
            ValueError: the input does not say which patches are masked.
        """
        given, tokens, prefix = encoded.given, encoded.tokens, self.geometry.prefix
        visible, masked = given.visible, given.masked
        if masked is None:
            raise ValueError("what is asked of patches needs an input that says which of them are masked")
        k = visible.shape[1]
        visible_asked = k if self.decoder.visible_asked is None else self.decoder.visible_asked
        if 0 < visible_asked < k:  # the decoder answers for the last ones
            order = _content_first(given)
            visible = gather_tokens(visible, order)
            tokens = torch.cat([tokens[:, :prefix], gather_tokens(tokens[:, prefix:], order)], dim=1)
        answers = self.decoder(tokens, visible, masked).float()
        return torch.cat([visible[:, k - visible_asked :], masked], dim=1), answers

    def with_content(self, given: EncoderInput) -> Tensor:
        """[b j] the patches whose content the encoder saw; as many for every image."""
        if not self.blank:
            return given.visible
        return gather_tokens(given.visible, _content_first(given))[:, : given.visible.shape[1] - self.blank]


def _content_first(given: EncoderInput) -> Tensor:
    """[b k] places among the visible patches: those with content, then the blank ones."""
    return given.has_content().byte().argsort(dim=1, descending=True, stable=True)
