"""The kernels as torch operators, with gradients and support for torch.compile.

Letters as in `patchloom.patches.tokens`; h heads of width d. All tensors are on the CPU, in bfloat16 or float32.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

from patchloom.nets.native.compiler import library

LANES = 16  # widths must be multiples of this


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("image", "token", "head")]


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("images", "heads", "n_queries", "n_keys", "side")]


def _strides(heads: Tensor) -> _Strides:
    """Return the strides of [b n h d], contiguous in the last dimension."""
    return _Strides(*heads.stride()[:3])


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _rows(x: Tensor) -> tuple[ctypes.c_long, ctypes.c_long]:
    """Return number and width of the rows of [... d]."""
    return ctypes.c_long(x.numel() // x.shape[-1]), ctypes.c_long(x.shape[-1])


def _threads() -> ctypes.c_int:
    return ctypes.c_int(torch.get_num_threads())


def attention(q: Tensor, kv: Tensor | None = None) -> Tensor:
    """Compute multi-head attention: softmax(q kᵀ / √d) v.

    Args:
        q: [b n h d] queries in bfloat16; or [b n 3 h d], queries, keys and values of the same tokens.
        kv: [b m 2 h d] keys and values, unless ``q`` has them.

    Returns:
        [b n h d].
    """
    parts = _parts(q, kv)
    if any(part.stride(-1) != 1 or any(step % 2 for step in part.stride()[:-1]) for part in parts):
        raise ValueError("a head must be contiguous, and all other strides even")
    _check(torch.bfloat16, *parts)
    keep = torch.is_grad_enabled() and (q.requires_grad or (kv is not None and kv.requires_grad))
    return _attention(q, kv, keep)[0]


def _check(dtype: torch.dtype, *tensors: Tensor) -> None:
    # the kernels do not check their inputs and would misread anything else
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.shape[-1] % LANES:
            kind = f"{tensor.dtype} of width {tensor.shape[-1]}"
            raise ValueError(f"the kernel needs {dtype} of a width divisible by {LANES}, not {kind}")


def _parts(q: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if kv is None:
        q, k, v = q.unbind(2)
    else:
        k, v = kv.unbind(2)
    return q, k, v


def _sizes(q: Tensor, k: Tensor) -> _Sizes:
    return _Sizes(q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3])


def _room_for_mixed(q: Tensor, kv: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Allocate the output [b n h d], and the weights [b h n m], m rounded up, if they are to be kept."""
    q, k, _ = _parts(q, kv)
    b, n, h, _ = q.shape
    rows = -(-k.shape[1] // LANES) * LANES
    return q.new_empty(q.shape), q.new_empty((b, h, n, rows) if keep else (0,))


@custom_op("patchloom::attention", mutates_args=(), schema="(Tensor q, Tensor? kv, bool keep) -> (Tensor, Tensor)")
def _attention(q: Tensor, kv: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    mixed, weights = _room_for_mixed(q, kv, keep)
    q, k, v = _parts(q, kv)
    at = _at(q), _strides(q), _at(k), _at(v), _strides(k)
    scale = ctypes.c_float(q.shape[-1] ** -0.5)
    library().attention(*at, _at(mixed), _at(weights if keep else None), _sizes(q, k), scale, _threads())
    return mixed, weights


_attention.register_fake(_room_for_mixed)


@custom_op(
    "patchloom::attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor weights, Tensor q, Tensor? kv) -> (Tensor, Tensor)",
)
def _attention_backward(grad: Tensor, weights: Tensor, q: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor]:
    dq, dkv = _room_for_slopes(grad, weights, q, kv)
    grad = grad.contiguous()
    (q, k, v), (to_q, to_k, to_v) = _parts(q, kv), _parts(dq, None if kv is None else dkv)
    given = _at(q), _strides(q), _at(k), _at(v), _strides(k)
    to = _at(to_q), _strides(to_q), _at(to_k), _at(to_v), _strides(to_k)
    scale = ctypes.c_float(q.shape[-1] ** -0.5)
    library().attention_backward(_at(grad), _at(weights), *given, *to, _sizes(q, k), scale, _threads())
    return dq, dkv


@_attention_backward.register_fake
def _room_for_slopes(grad: Tensor, weights: Tensor, q: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((0,) if kv is None else kv.shape)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the weights' gradient is never needed, and would be a table of zeros
    q, kv, _ = inputs
    ctx.save_for_backward(output[1], q, kv)


def _through_attention(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    weights, q, kv = ctx.saved_tensors
    dq, dkv = _attention_backward(grad, weights, q, kv)
    return dq, None if kv is None else dkv, None


_attention.register_autograd(_through_attention, setup_context=_keep_attention)


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU of bfloat16 ``x`` [... d] plus float32 ``bias`` [d], within 3e-7 in the normal distribution."""
    _check(torch.bfloat16, x)
    _check(torch.float32, bias)
    return _gelu(x, bias)


@custom_op("patchloom::gelu", mutates_args=(), schema="(Tensor x, Tensor bias) -> Tensor")
def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    library().gelu(_at(x), _at(bias), _at(out), *_rows(x), _threads())
    return out


@custom_op(
    "patchloom::gelu_backward", mutates_args=(), schema="(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)"
)
def _gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    grad, x, threads = grad.contiguous(), x.contiguous(), _threads()
    dx, sums = torch.empty_like(x), bias.new_zeros(threads.value, len(bias))
    library().gelu_backward(_at(grad), _at(x), _at(bias), _at(dx), _at(sums), *_rows(x), threads)
    return dx, sums.sum(0)


_gelu.register_fake(lambda x, bias: x.new_empty(x.shape))
_gelu_backward.register_fake(lambda grad, x, bias: (x.new_empty(x.shape), bias.new_empty(bias.shape)))
_gelu.register_autograd(
    lambda ctx, grad: _gelu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def add_norm(x: Tensor, more: Tensor | None, shift: Tensor | None, layer: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return ``x + more + shift`` and its norm by ``layer`` in bfloat16.

    Args:
        x: [... d] float32.
        more: [... d] bfloat16; None: the sum is ``x`` itself.
        shift: [d] float32; None with ``more``.
        layer: norm with weight and bias.
    """
    _check(torch.float32, x, layer.weight, layer.bias)
    for one, dtype in ((more, torch.bfloat16), (shift, torch.float32)):
        if one is not None:
            _check(dtype, one)
    added, normed, _ = _norm(x, more, shift, layer.weight, layer.bias, layer.eps)
    return x if more is None else added, normed


def _room_for_normed(
    x: Tensor, more: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the sum, if there is one, the output, and the mean and deviation of each row."""
    added = x.new_empty((0,) if more is None else x.shape)
    rows = x.numel() // x.shape[-1]
    return added, x.new_empty(x.shape, dtype=torch.bfloat16), x.new_empty(rows, 2)


@custom_op(
    "patchloom::norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? more, Tensor? shift, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
)
def _norm(
    x: Tensor, more: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    added, normed, stats = _room_for_normed(x, more, shift, weight, bias, eps)
    x, more = x.contiguous(), None if more is None else more.contiguous()
    read, written = (x, more, shift, weight, bias), (added, normed, stats)
    library().norm(*map(_at, read), *map(_at, written), *_rows(x), ctypes.c_float(eps), _threads())
    return added, normed, stats


_norm.register_fake(_room_for_normed)


@custom_op(
    "patchloom::norm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? beyond, Tensor x, Tensor stats, Tensor weight, bool more)"
    " -> (Tensor, Tensor, Tensor)",
)
def _norm_backward(
    grad: Tensor, beyond: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor, more: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dmore, slopes = _room_for_norm_slopes(grad, beyond, x, stats, weight, more)
    grad, x, threads = grad.contiguous(), x.contiguous(), _threads()
    beyond = None if beyond is None else beyond.contiguous()
    sums = x.new_zeros(threads.value, *slopes.shape)
    read, written = (grad, beyond, x, stats, weight), (dx, dmore if more else None, sums)
    library().norm_backward(*map(_at, read), *map(_at, written), *_rows(x), threads)
    return dx, dmore, sums.sum(0)


@_norm_backward.register_fake
def _room_for_norm_slopes(
    grad: Tensor, beyond: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor, more: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dmore = x.new_empty(x.shape if more else (0,), dtype=torch.bfloat16)
    return x.new_empty(x.shape), dmore, x.new_empty(3, x.shape[-1])


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    x, more, _, weight, _, _ = inputs
    added, _, stats = output
    ctx.more = more is not None
    ctx.save_for_backward(added if ctx.more else x, stats, weight)


def _through_norm(ctx: Any, beyond: Tensor | None, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    beyond = beyond if ctx.more else None
    if grad is None:  # the norm is not used
        assert beyond is not None  # else nothing has a gradient
        grad = torch.zeros_like(beyond, dtype=torch.bfloat16)
    dx, dmore, (dweight, dbias, dshift) = _norm_backward(grad, beyond, *ctx.saved_tensors, ctx.more)
    return dx, dmore if ctx.more else None, dshift if ctx.more else None, dweight, dbias, None


_norm.register_autograd(_through_norm, setup_context=_keep_norm)
