"""Stand-ins for encoder outputs and decoders in tests of questions."""

import torch
from torch import Tensor, nn

from patchloom.nets.geometry import Geometry
from patchloom.questions.question import Encoded
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


def noise(*shape: int) -> Tensor:
    """Draw normal numbers, the same for each shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Answers(nn.Module):
    """Decoder with fixed answers; ``visible_asked`` is as in real decoders."""

    def __init__(self, answers: Tensor | None = None, visible_asked: int = 0):
        super().__init__()
        self.answers, self.visible_asked = answers, visible_asked

    def forward(self, tokens: Tensor, visible: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
        return self.answers


def geometry_of(images: Tensor, p: int) -> Geometry:
    """Return the geometry of an encoder of images [b c h w] with a class token."""
    return Geometry((images.shape[2] // p, images.shape[3] // p), (p, p), images.shape[1], 1, 8, True)


def masking(images: Tensor, p: int, visible: Tensor, masked: Tensor) -> EncoderInput:
    """Return encoder input with only the patches ``visible`` [b k] of images [b c h w]."""
    return mask_patches(all_patches(images, geometry_of(images, p).n), visible, masked)


def encoded_of(images: Tensor, given: EncoderInput) -> Encoded:
    """Return a batch with mean 0, deviation 1 and meaningless tokens."""
    tokens = torch.zeros(len(images), 1 + given.visible.shape[1], 8)
    return Encoded(images, given, tokens, None, images, torch.zeros(1), torch.ones(1))
