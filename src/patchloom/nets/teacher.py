"""Teachers without gradient: a moving average of the student, or a frozen encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.checkpoints.read import checksum
from patchloom.nets.checkpoints.resize import resize_input
from patchloom.nets.encode import encode, grid_size, patch_count, patch_size, pooled_norm
from patchloom.nets.lora import effective_parameters, has_adapters, plain_buffers
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
        self._students: dict[str, nn.Module] | None = None
        self._pairs: list[tuple[_Places, _Places]] = []
        self.eval()

    def train(self, mode: bool = True) -> Teacher:
        """Do nothing: a teacher stays in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def follow(self, momentum: float, applied: float | Tensor = 1.0, **parts: nn.Module) -> None:
        """Update each copy: teacher = momentum · teacher + (1 - momentum) · student, buffers included.

        Args:
            momentum: share of the teacher that stays.
            applied: 1; or 0 if the student's update was skipped, after which the copies stay.
            parts: the student's modules, by the names of the copies.
        """
        weight = (1 - momentum) * applied
        if self._students != parts:
            self._pairs = self._paired(parts)
            # low-rank updates are merged anew each time
            self._students = None if any(map(has_adapters, parts.values())) else parts
        for mine, theirs in self._pairs:
            copies: list[Tensor] = []
            sources: list[Tensor] = []
            for (place, key), (their_place, their_key) in zip(mine, theirs, strict=True):
                copy, source = place[key], their_place[their_key]
                assert copy is not None and source is not None  # `_paired` found them
                if copy.is_floating_point():
                    copies.append(copy)
                    sources.append(source)
                else:  # number of batches
                    copy.add_(((source - copy) * applied).to(copy.dtype))
            if copies:
                weights = [weight] * len(copies) if isinstance(weight, Tensor) else weight
                torch._foreach_lerp_(copies, sources, weights)

    def _paired(self, parts: dict[str, nn.Module]) -> list[tuple[_Places, _Places]]:
        """Return the places of the copies' tensors, and of the student's; to search in each update takes milliseconds.

        Parameters and buffers are apart, because under FSDP parameters are sharded and buffers are not.
        """
        own = dict(self.named_children())
        if own.keys() != parts.keys():
            raise ValueError(f"the teacher has {', '.join(own)}, not {', '.join(parts)}")
        found: list[tuple[_Places, _Places]] = []
        for name, part in parts.items():
            copy, merged = own[name], effective_parameters(part) if has_adapters(part) else None
            for kind, mine, theirs in (
                ("_parameters", copy.named_parameters(), merged or dict(part.named_parameters())),
                ("_buffers", copy.named_buffers(), dict(plain_buffers(part))),
            ):
                names = [name for name, _ in mine]
                if missing := set(names).difference(theirs):  # by name, because low-rank updates change the order
                    raise ValueError(f"the student has no {min(missing)}")
                computed = kind == "_parameters" and merged is not None
                places: _Places = [(theirs, key) for key in names] if computed else _places(part, kind, names)
                found.append((_places(copy, kind, names), places))
        return found


# modules' dictionaries of parameters or buffers, in which `Module.to` and FSDP replace tensors, with keys
_Places = list[tuple[Mapping[str, Tensor | None], str]]


def _places(net: nn.Module, kind: str, names: Iterable[str]) -> _Places:
    """Return the places of the ``_parameters`` or ``_buffers`` of a net."""
    paths = [name.rpartition(".") for name in names]
    return [(getattr(net.get_submodule(path), kind), key) for path, _, key in paths]


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
