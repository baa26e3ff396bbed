"""Training the last blocks of an encoder alone, so that a large one can be adapted on a small machine.

What comes before them stays as it was read: patch embedding, class and register tokens, positions and the first blocks.
Autograd begins at the first weight that is trained, so that nothing before it is kept for the way back, and no gradient
is computed there. The exception is a token of the task that stands for patches before the first block (SimMIM's mask
token, DropPos' position token): it is trained, so its gradient passes through all blocks, though into no weight of
those that stay.
"""

from __future__ import annotations

from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.hierarchical import Encoder, is_hierarchical


def block_count(vit: Encoder) -> int:
    """Blocks of an encoder; of a Swin, those of all its stages."""
    return len(_blocks(vit))


def train_last_blocks(vit: Encoder, count: int) -> None:
    """Let only the last ``count`` blocks of an encoder be trained, and its last norm.

    Raises:
        PatchloomError: as `kept_names`.
    """
    for name in kept_names(vit, count):
        vit.get_parameter(name).requires_grad_(False)


def kept_names(vit: Encoder, count: int) -> list[str]:
    """Names of the parameters that stay as they are if only the last ``count`` blocks are trained, and the last norm.

    Those that are never trained, such as fixed positions, are not among them.

    Raises:
        PatchloomError: the encoder has fewer blocks.
    """
    blocks = _blocks(vit)
    if count > len(blocks):
        raise PatchloomError(
            f"--train_blocks {count} is more than the {len(blocks)} blocks of the encoder: give fewer, or leave it out "
            "to train all of the encoder"
        )
    last = [part for parts in blocks[len(blocks) - count :] for part in parts]
    trained = {id(weight) for part in (*last, vit.norm) for weight in part.parameters()}
    return [name for name, weight in vit.named_parameters() if weight.requires_grad and id(weight) not in trained]


def _blocks(vit: Encoder) -> list[tuple[nn.Module, ...]]:
    """An encoder's blocks, first to last. A Swin's stage begins by merging patches, which its first block brings."""
    if not is_hierarchical(vit):
        return [(block,) for block in vit.blocks]
    return [
        (stage.downsample, block) if i == 0 else (block,)
        for stage in vit.layers
        for i, block in enumerate(stage.blocks)
    ]
