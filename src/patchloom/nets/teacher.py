"""Teachers without gradient: a moving average of the student, or a frozen encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.checkpoints.format import checksum
from patchloom.nets.checkpoints.resize import resize_input
from patchloom.nets.encode import encode, grid_size, patch_count, patch_size, pooled_norm
from patchloom.nets.lora import effective_parameters, plain_buffers
from patchloom.nets.swin import PlainViT
from patchloom.withhold.encoder_input import all_patches


@contextmanager
def no_grad_autocast(module: nn.Module, images: Tensor) -> Iterator[None]:
    """Disable gradients; use bfloat16 if `use_half_without_grad` was applied to ``module``."""
    half = torch.autocast(images.device.type, torch.bfloat16) if module.half_no_grad else nullcontext()
    with torch.no_grad(), half:
        yield


def use_half_without_grad(net: nn.Module) -> bool:
    """Compute everything under `no_grad_autocast` inside ``net`` in bfloat16, even if the rest is in float32.

    Returns:
        Whether ``net`` has such passes.
    """
    found: list[Any] = [module for module in net.modules() if hasattr(module, "half_no_grad")]
    for module in found:
        module.half_no_grad = True
    return bool(found)


class Teacher(nn.Module):
    """Moving averages of the student's parts, with their low-rank updates merged.

    The copies are always in eval mode: batch norms use running statistics, which are averaged like weights, and there
    is no dropout.

    Args:
        parts: modules to copy, by the name of the copy; each starts equal to the student's.
    """

    encoder: PlainViT  # if it is a part, as in `Agreement`
    projection: nn.Sequential

    def __init__(self, **parts: nn.Module):
        super().__init__()
        self.half_no_grad = False
        for name, part in parts.items():
            self.add_module(name, deepcopy(part).requires_grad_(False))
        self.eval()

    def train(self, mode: bool = True) -> Teacher:
        """Do nothing: a teacher stays in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def follow(self, momentum: float, **parts: nn.Module) -> None:
        """Update each copy: teacher = momentum · teacher + (1 - momentum) · student, buffers included."""
        own = dict(self.named_children())
        if own.keys() != parts.keys():
            raise ValueError(f"the teacher has {', '.join(own)}, not {', '.join(parts)}")
        for name, part in parts.items():
            # separately, because under FSDP parameters are sharded and buffers are not
            for mine, theirs in (
                (dict(own[name].named_parameters()), dict(effective_parameters(part))),
                (dict(own[name].named_buffers()), dict(plain_buffers(part))),
            ):
                # by name, because low-rank updates change the order
                if missing := mine.keys() - theirs.keys():
                    raise ValueError(f"the student has no {min(missing)}")
                _follow(list(mine.values()), [theirs[at].detach() for at in mine], momentum)


def _follow(mine: list[torch.Tensor], theirs: list[torch.Tensor], momentum: float) -> None:
    copies: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for copy, source in zip(mine, theirs, strict=True):
        if copy.is_floating_point():
            copies.append(copy)
            sources.append(source)
        else:  # number of batches
            copy.copy_(source)
    if copies:
        torch._foreach_lerp_(copies, sources, 1 - momentum)


class FrozenTeacher(nn.Module):
    """Frozen encoder, for its features of whole images.

    Its weights are not in the ``state_dict``, because they are read again when the task is built; a digest is, so that
    a checkpoint trained with another teacher is rejected.

    Args:
        vit: the encoder; it is resized to the input size with ``grid`` patches.
        mean, std: statistics per channel that normalise its images, in [0, 1] units.
        grid: rows and columns of patches of the features.
    """

    mean: Tensor
    std: Tensor
    digest: Tensor

    def __init__(self, vit: PlainViT, mean: Sequence[float], std: Sequence[float], grid: tuple[int, int]):
        super().__init__()
        self.half_no_grad = False
        (rows, columns), (p, q) = grid, patch_size(vit)
        self.size = rows * p, columns * q
        if grid_size(vit) != grid:
            resize_input(vit, self.size)
        self.encoder = vit.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        text = checksum(vit.state_dict(), f"{tuple(mean)} {tuple(std)}")
        self.register_buffer("digest", torch.tensor(list(bytes.fromhex(text)[:16]), dtype=torch.uint8))
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_keep)
        self.eval()

    def train(self, mode: bool = True) -> FrozenTeacher:
        """Do nothing: a teacher stays in eval mode."""
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        """Return features [b n d] of the patches of images [b c h w] in [0, 1], each with mean 0 and deviation 1."""
        with no_grad_autocast(self, images):
            if images.shape[2:] != self.size:
                images = F.interpolate(images, self.size, mode="bilinear", antialias=True, align_corners=False)
            given = all_patches((images - self.mean) / self.std, patch_count(self.encoder))
            features = encode(self.encoder, given)[:, self.encoder.num_prefix_tokens :]
            if isinstance(self.encoder.norm, nn.Identity):  # its only norm is that of pooled features
                features = pooled_norm(self.encoder, features)
            features = features.float()
            return F.layer_norm(features, features.shape[-1:])


def _leave_out(teacher: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}encoder.")]:
        del state[name]


def _keep(teacher: FrozenTeacher, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Restore the weights that `_leave_out` removed."""
    digest = state.get(f"{prefix}digest")
    if digest is not None and not torch.equal(digest.cpu(), teacher.digest.cpu()):
        raise ValueError("the teacher of features has changed since the run began: restore the original one")
    state.update({f"{prefix}encoder.{name}": value for name, value in teacher.encoder.state_dict().items()})
