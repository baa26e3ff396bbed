"""Small tasks for tests of their computations."""

import sys

import torch
from golden import close
from torch import nn

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.tasks import custom
from patchloom.tasks.task import Task

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def small(task_class: type[Task], size=(32, 32), p=4, channels=3, positions="sincos", encoder=None, **options) -> Task:
    """Build a task with ``options`` around a small encoder with options ``encoder``, with perturbed weights."""
    torch.manual_seed(0)
    spec = EncoderSpec("nano", size, p, channels, positions=positions, options=SIZES | (encoder or {}))
    task = task_class(build_encoder(spec), **options)
    with torch.no_grad():  # zero biases would hide mistakes
        for weight in task.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    return task


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_loss_and_gradients(task: nn.Module, ours: torch.Tensor, other: nn.Module, theirs: torch.Tensor) -> None:
    """Check that losses and non-zero gradients of ``task`` and its copy ``other`` are equal."""
    close(ours, theirs.detach())
    ours.backward()
    theirs.backward()
    for (name, mine), its in zip(task.named_parameters(), other.parameters(), strict=True):
        if mine.requires_grad:
            assert its.grad.abs().max() > 0, name
            close(mine.grad, its.grad)


def indices_of(flags: torch.Tensor) -> torch.Tensor:
    """Return the indices [b m] of the flagged patches [b n], equally many per image."""
    return flags.nonzero()[:, 1].view(len(flags), -1)


def pixel_targets(images: torch.Tensor, p: int, normalized: bool = True) -> torch.Tensor:
    """Return the pixels [b n c*p*p] of patches by torch's unfold, perhaps normalised within each patch."""
    pixels = nn.functional.unfold(images, p, stride=p).mT  # (channel, row, column) in a patch
    if normalized:
        pixels = (pixels - pixels.mean(-1, keepdim=True)) / (pixels.var(-1, keepdim=True) + 1e-6).sqrt()
    return pixels


def plain_tokens(vit: nn.Module, embedded: torch.Tensor, visible: torch.Tensor | None = None, positions: bool = True):
    """Return tokens [b prefix+k d] of patches by timm's modules, before the final norm.

    Args:
        vit: the encoder.
        embedded: [b n d] embedded patches.
        visible: [b k] patches that enter; None: all.
        positions: whether the patches have their position embeddings.
    """
    first = [token for token in (vit.cls_token, vit.reg_token) if token is not None]
    prefix, table = vit.num_prefix_tokens, vit.pos_embed
    tokens = embedded if table is None or not positions else embedded + table[:, prefix:]
    if visible is not None:
        tokens = torch.stack([one[which] for one, which in zip(tokens, visible, strict=True)])
    if prefix:
        first = torch.cat(first, dim=1) + (0 if table is None else table[:, :prefix])
        tokens = torch.cat([first.expand(len(tokens), -1, -1), tokens], dim=1)
    for block in vit.blocks:
        tokens = block(tokens)
    return tokens


def forget() -> None:
    """Return to the state of a process that has not loaded any class of a custom task."""
    custom._HERE.clear()
    custom._TYPED.clear()
    for name in [name for name in sys.modules if name.startswith("patchloom_")]:
        del sys.modules[name]
