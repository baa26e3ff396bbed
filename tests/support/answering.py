"""Questions without an encoder: what it would have been given and made, and a decoder that answers as it is told."""

import torch
from torch import Tensor, nn

from patchloom.nets.geometry import Geometry
from patchloom.questions.question import Encoded
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


class Answers(nn.Module):
    """Answers what it is told to, whatever it is given; ``visible_asked`` as for a decoder of ours."""

    def __init__(self, answers: Tensor | None = None, visible_asked: int = 0):
        super().__init__()
        self.answers, self.visible_asked = answers, visible_asked

    def forward(self, tokens: Tensor, visible: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        return self.answers


def geometry_of(images: Tensor, p: int) -> Geometry:
    """That of an encoder of images [b c h w], with a class token."""
    return Geometry((images.shape[2] // p, images.shape[3] // p), (p, p), images.shape[1], 1, 8, True)


def masking(images: Tensor, p: int, visible: Tensor, masked: Tensor) -> EncoderInput:
    """Images [b c h w] of which only the patches ``visible`` [b k] enter."""
    return mask_patches(all_patches(images, geometry_of(images, p).n), visible, masked)


def encoded_of(images: Tensor, given: EncoderInput) -> Encoded:
    """A batch in [0, 1], or of any numbers: its mean is 0 and its deviation 1. Its tokens mean nothing."""
    tokens = torch.zeros(len(images), 1 + given.visible.shape[1], 8)
    return Encoded(images, given, tokens, None, images, torch.zeros(1), torch.ones(1))
