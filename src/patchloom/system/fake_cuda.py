"""Fake CUDA tensors without a GPU: shapes, dtypes and devices are tracked, and synchronisation is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CUDA = torch.device("cuda", 0)


class Waits(AssertionError):
    """Operation that would synchronise with the GPU."""


class _NoCopies(TorchFunctionMode):
    """Mode that refuses tensors made from Python numbers on the GPU; they must be made on the CPU first."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy) and made.device == CUDA:
            raise Waits(f"{func.__name__} copies numbers to the GPU: {args}")
        return made


class _OwnGenerator(TorchFunctionMode):
    """Mode that refuses draws on another device than the generator's, as torch does on a real GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        if isinstance(generator, torch.Generator) and isinstance(made, Tensor) and made.device != generator.device:
            raise Waits(f"{func.__name__} draws on {made.device} with a generator of {generator.device}")
        return made


class _OneDevice(TorchDispatchMode):
    """Mode that refuses operations across devices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        devices = {one.device for one in tree_iter((args, kwargs, made)) if isinstance(one, Tensor)}
        if CUDA in devices and len(devices) > 1:
            raise Waits(f"{func} has tensors on {', '.join(map(str, devices))}")
        return made


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Allow fake CUDA tensors inside this block, with the autocast behaviour of a GPU.

    Raises:
        Waits: if a tensor is copied between devices, or used with one on another device.
        torch._subclasses.fake_tensor.UnsupportedFakeTensorException, or a similar error: if the shape of a result or a
            Python number depends on the contents of a tensor.
    """
    # shapes of results of cuDNN's own operations are unknown
    with _autocasting(), torch.backends.cudnn.flags(enabled=False), FakeTensorMode(), _OneDevice(), _NoCopies():
        yield


@contextmanager
def fake_cuda_with_copies() -> Iterator[None]:
    """Allow fake CUDA tensors inside this block as `fake_cuda` does, and copies between devices, as in a measure.

    Raises:
        Waits: if random numbers are drawn on another device than that of their generator.
    """
    with _autocasting(), torch.backends.cudnn.flags(enabled=False), FakeTensorMode(), _OwnGenerator():
        yield


@contextmanager
def _autocasting() -> Iterator[None]:
    with (
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
    ):
        yield


def on_fake_cuda(net: nn.Module) -> nn.Module:
    """Return ``net`` with fake CUDA parameters and buffers of the same sizes; call it inside `fake_cuda`.

    Other tensors stay where they are and are refused when used, because `nn.Module.to` would not move them either.
    """
    for module in net.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                fake = torch.empty(weight.shape, dtype=weight.dtype, device=CUDA)
                module._parameters[name] = nn.Parameter(fake, weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)
    return net
