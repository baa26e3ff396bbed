"""Pseudo CUDA tensors: their device is cuda:0, and they compute on the CPU.

Whole updates, and whole runs, work with them where no GPU is. What a GPU would refuse raises `Refused`: operations
across devices, a generator of another device, and ``.numpy()``. What would let the program wait for the GPU is counted
by its place in the code. Unlike the fake tensors of `patchloom.system.fake_cuda` these have numbers, so that branches
on them are taken as on a GPU.
"""

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map

import patchloom
from patchloom.system.distributed import Shared

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
_SOURCE = str(Path(patchloom.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_aten: Any = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}  # may have tensors of two devices
# indices may be on the CPU; they are copied, and waited for
_PICKS = {
    *(_aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default),
    *(_aten.index_put_.default, _aten._index_put_impl_.default),
}
# the host needs a number, or the size of the result
_READS = {
    *(_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default),
    *(_aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default, _aten.bincount.default),
    *(_aten.repeat_interleave.Tensor, _aten.is_nonzero.default),
}
_MAKES = {torch.tensor, torch.as_tensor, torch.asarray}  # from numbers, which are copied

Waits = Counter[str]  # number of waits by place: "operation file:line"
_waits = Waits()
_queued = 0  # operations that the GPU was asked for


class Refused(RuntimeError):
    """Operation that a GPU would refuse."""


class PseudoTensor(Tensor):
    """Tensor on cuda:0 whose numbers are those of ``inner``, on the CPU.

    Its device is cuda:0 for Python only. Torch's backward pass takes it for a tensor of the CPU: where no GPU is, it
    has no thread and no stream for one.
    """

    inner: Tensor
    device = CUDA  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> "PseudoTensor":
        about = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.size(), device=CPU, requires_grad=False, **about)
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Copy to the CPU, which operators believe to be the place of this tensor, or change the dtype."""
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == "cuda":
            return self if dtype in (None, self.dtype) and not kwargs.get("copy") else super().to(dtype or self.dtype)
        if not non_blocking:
            _waited("copy")
        return self.inner.detach().to(dtype or self.dtype, copy=True)

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to(CPU)

    def tolist(self) -> Any:
        _waited("tolist")
        return self.inner.tolist()

    def __format__(self, spec: str) -> str:
        _waited("format")
        return format(self.inner, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PseudoTensor({self.inner!r})"

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise Refused(f"numpy() of a tensor on {CUDA} at {_place()}")

    __array__ = numpy


class _Mode(TorchDispatchMode):
    """Mode in which ``device="cuda"`` makes pseudo tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Devices(TorchFunctionMode):
    """Mode that makes tensors of numbers, and refuses draws with a generator of another device.

    Operators see neither: the generator is another object there, and ``torch.tensor`` copies below them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if func in _MAKES and _is_cuda(given.get("device")):
            _waited(func.__name__)
            return PseudoTensor(func(*args, **given | {"device": CPU}))
        if func is Tensor.to and isinstance(args[1:] and args[1], Tensor):  # another tensor, with its device
            args = (args[0], args[1].device, args[1].dtype, *args[2:])
        # an index, because CUDA itself would be asked for the current one
        if func is not torch.device and _mentions_cuda(args, given):
            args, given = tree_map(_with_index, (args, given))
        made = func(*args, **given)
        generator = given.get("generator")
        if isinstance(generator, torch.Generator) and isinstance(made, Tensor) and made.device != generator.device:
            raise Refused(f"{func} draws on {made.device} with a generator of {generator.device} at {_place()}")
        return made


_group = torch._C._group_tensors_by_device_and_dtype


def _grouped(lists: list[list[Tensor | None]], *more: Any) -> Any:
    """Group tensors as torch does for optimisers, by the device that Python sees."""
    groups: Any = _group(lists, *more)
    return {(_device_of(values[0]), dtype): (values, places) for (_, dtype), (values, places) in groups.items()}


def _device_of(tensors: list[Tensor | None]) -> torch.device:
    return next(one.device for one in tensors if one is not None)


class _Autocast(torch.autocast):
    """`torch.autocast` that takes the CPU for the GPU: operators see the device of the numbers."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


class _Stream:
    """Stream or device of one queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        _waited("synchronize")


class _Event:
    """Event of the queue: waiting for one lets the GPU idle only if nothing is queued behind it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0

    def record(self, *_: Any) -> None:
        self.at = _queued

    def synchronize(self) -> None:
        if self.at == _queued:
            _waited("event")


def _place() -> str:
    """Return file and line of patchloom's code that is running, else of the test."""
    frames = [one for one in traceback.extract_stack() if not one.filename.startswith((__file__, _TORCH))]
    ours = [one for one in frames if one.filename.startswith(_SOURCE)]
    here = (ours or frames)[-1]
    return f"{here.filename.removeprefix(_SOURCE).lstrip('/')}:{here.lineno}"


def _waited(what: str) -> None:
    if threading.current_thread() is threading.main_thread():  # a thread that writes holds up nobody
        _waits[f"{what} {_place()}"] += 1


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda")


def _mentions_cuda(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(one, str | torch.device) and _is_cuda(one) for one in (*args, *kwargs.values()))


def _with_index(value: Any) -> Any:
    return CUDA if isinstance(value, str | torch.device) and _is_cuda(value) else value


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, PseudoTensor) else value


def _outer(value: Any) -> Any:
    return PseudoTensor(value) if isinstance(value, Tensor) and not isinstance(value, PseudoTensor) else value


def _check(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], to_cuda: bool) -> None:
    """Refuse and count as `pseudo_cuda` says."""
    ours = [one for one in tensors if isinstance(one, PseudoTensor)]
    plain = [one for one in tensors if not isinstance(one, PseudoTensor) and one.ndim]  # a GPU takes CPU scalars
    backward = torch._C._current_graph_task_id() >= 0  # which makes zeros where it believes the gradients to be
    if ours and plain and func not in _COPIES and not backward:
        if func not in _PICKS or not isinstance(args[0], PseudoTensor):
            raise Refused(f"{func} has tensors of {CUDA} and of the CPU at {_place()}")
        _waited("index")
    if backward:
        return
    if ours and func in _READS or func in _PICKS and ours and _has_mask(args[1]):
        _waited(str(func))
    elif func is _aten._to_copy.default and bool(ours) != to_cuda and not kwargs.get("non_blocking"):
        _waited("copy")
    elif func is _aten.copy_.default and ours and len(ours) < len(tensors) and not (args[2:] and args[2]):
        _waited("copy")


def _has_mask(indices: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers of its tensors, with the checks of a GPU."""
    global _queued
    tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
    ours = any(isinstance(one, PseudoTensor) for one in tensors)
    device = kwargs.get("device")
    to_cuda = _is_cuda(device) if device is not None else ours
    _check(func, args, kwargs, tensors, to_cuda)
    _queued += ours or to_cuda
    if func is _aten.copy_.default:
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    within: dict[str, Any] = tree_map(_inner, kwargs)
    if device is not None:
        within["device"] = CPU if _is_cuda(device) else device
    if ours and torch._C._current_graph_task_id() >= 0:  # a cast back, on what it believes to be the CPU
        to_cuda = True
    if func is _aten._to_copy.default:
        within.pop("non_blocking", None)
    within.pop("pin_memory", None)
    made = func(*tree_map(_inner, args), **within)
    if not to_cuda:
        return made
    made = tree_map(_outer, made)
    return return_and_correct_aliasing(func, args, kwargs, made) if ours else made


def _enter_inference(self: Any) -> None:
    """Begin `torch.no_grad` in place of ``inference_mode``, whose tensors no subclass can wrap."""
    self.instead = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)


def _leave_inference(self: Any, *_: Any) -> None:
    self.instead.__exit__(*_)


_FOREACH = [Tensor, nn.Parameter, PseudoTensor]  # types for which optimisers take torch's foreach functions
_CUDA: dict[str, Callable[..., Any]] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda *_: None,
    "get_device_name": lambda *_: "pseudo",
    "get_device_capability": lambda *_: (9, 0),
    "is_bf16_supported": lambda *_, **__: True,
    "amp.common.amp_definitely_not_available": lambda: False,
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda *_: nullcontext(),
    "current_stream": lambda *_: _Stream(),
    "synchronize": lambda *_: _waited("synchronize"),
    "mem_get_info": lambda *_: (70 * 2**30, 80 * 2**30),
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda *_: None,
    "max_memory_allocated": lambda *_: 0,
    "get_rng_state": lambda *_: None,  # the CPU's generator draws
    "set_rng_state": lambda *_: None,
    "memory_allocated": lambda *_: 0,
    "manual_seed_all": lambda *_: None,
}


@contextmanager
def pseudo_cuda() -> Iterator[Waits]:
    """Let ``device="cuda"`` mean pseudo tensors inside this block, and count waits for the GPU.

    ``module.to("cuda")`` works, and `patchloom.system.distributed.Shared` generators may be of the GPU; they draw as on
    the CPU.

    Yields:
        Number of waits by place, which the caller may clear.

    Raises:
        Refused: if an operation has tensors of two devices, draws with a generator of another device, or if
            ``.numpy()`` is called on a pseudo tensor.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    _waits.clear()
    with ExitStack() as patched:
        for name, instead in _CUDA.items():
            patched.enter_context(patch(f"torch.cuda.{name}", instead))
        patched.enter_context(patch("torch.autocast", _Autocast))
        patched.enter_context(patch("torch._C._group_tensors_by_device_and_dtype", _grouped))
        patched.enter_context(patch("torch.accelerator.current_stream", _Stream))
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            patched.enter_context(patch(f"{module}._foreach_supported_types", _FOREACH))
        patched.enter_context(patch.object(torch.inference_mode, "__enter__", _enter_inference))
        patched.enter_context(patch.object(torch.inference_mode, "__exit__", _leave_inference))
        patched.enter_context(patch.object(Tensor, "record_stream", lambda *_: None))
        patched.enter_context(patch.object(Tensor, "pin_memory", lambda self, *_: self))
        patched.enter_context(patch.object(Shared, "__new__", _shared))
        patched.enter_context(patch.object(Shared, "device", property(lambda self: self.at), create=True))
        patched.enter_context(torch.backends.cudnn.flags(enabled=False))
        torch.__future__.set_swap_module_params_on_conversion(True)
        patched.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        patched.enter_context(_Mode())
        patched.enter_context(_Devices())
        yield _waits


def _shared(cls: type[Shared], device: torch.device | str = "cpu") -> Shared:
    made = torch.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
    made.at = CUDA if torch.device(device).type == "cuda" else torch.device(device)
    return made
