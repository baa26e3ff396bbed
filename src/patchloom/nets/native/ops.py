"""The kernels as torch operators, with gradients and support for torch.compile.

Letters as in `patchloom.patches.tokens`; h heads of width d. All tensors are on the CPU, in bfloat16 or float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from patchloom.nets.native.compiler import library

LANES = 16  # widths must be multiples of this


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class BlockWeights(NamedTuple):
    """Weights of a block in float32, as torch's layers keep them; ``qkv_bias`` may be None."""

    norm1: Tensor
    norm1_bias: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    proj: Tensor
    proj_bias: Tensor
    norm2: Tensor
    norm2_bias: Tensor
    fc1: Tensor
    fc1_bias: Tensor
    fc2: Tensor
    fc2_bias: Tensor


_LONGS = ("images", "tokens", "queries", "keys", "heads", "side", "width", "hidden")


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in _LONGS),
        *((name, ctypes.c_void_p) for name in ("query_places", "key_places", *BlockWeights._fields)),
        ("eps1", ctypes.c_float),
        ("eps2", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


def block(
    x: Tensor, keys_values: Tensor | None, first: int, heads: int, eps: tuple[float, float], weights: BlockWeights
) -> Tensor:
    """Compute a transformer block: ``y = x + attention(norm(x))``, then ``y + MLP(norm(y))``.

    Args:
        x: [b t d] float32.
        keys_values: [b m] indices of the tokens that are keys and values; None: all.
        first: index of the first token of the output.
        heads: number of attention heads.
        eps: of the two norms.
        weights: those of the block, in float32.

    Returns:
        [b t-first d] float32.
    """
    for one in (x, *weights):  # the kernels do not check their inputs and would misread anything else
        if one is not None and (one.dtype != torch.float32 or one.shape[-1] % LANES):
            kind = f"{one.dtype} of width {one.shape[-1]}"
            raise ValueError(f"the kernel needs torch.float32 of a width divisible by {LANES}, not {kind}")
    keep = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, *weights))
    each = (one if one is None else one.contiguous() for one in weights)
    run = _operator if torch.compiler.is_compiling() else _Function.apply  # the operator costs 0.1 ms more
    return run(x, keys_values, first, list(eps), heads, keep, *each)[0]


def _at_block(
    x: Tensor, keys_values: Tensor | None, first: int, eps: list[float], heads: int, weights: BlockWeights
) -> tuple[_Block, tuple[Tensor | None, ...]]:
    """Describe a block to the kernels; the tensors must live as long as the description is used."""
    b, t, width = x.shape
    starts = torch.arange(0, b * t, t)[:, None] if first or keys_values is not None else torch.empty(0)
    places = (
        starts + torch.arange(first, t) if first else None,
        None if keys_values is None else starts + keys_values.contiguous(),
    )
    keys = t if keys_values is None else keys_values.shape[1]
    sizes = b, t, t - first, keys, heads, weights.proj.shape[1] // heads, width, len(weights.fc1)
    return _Block(*sizes, *map(_at, (*places, *weights)), *eps, torch.get_num_threads()), places


def _room_for_block(
    x: Tensor, keys_values: Tensor | None, first: int, eps: list[float], heads: int, keep: bool, *weights: Any
) -> tuple[Tensor, ...]:
    """Allocate the output, and what backward needs: heads, mixed heads, attention weights, their sum with x, GELU's
    values and slopes.
    """
    b, t, width = x.shape
    n, side, hidden = t - first, weights[4].shape[1] // heads, len(weights[8])
    halves = partial(x.new_empty, dtype=torch.bfloat16)
    keys = t if keys_values is None else keys_values.shape[1]
    if first or keys_values is not None:
        q, kv = halves(b, n, heads, side), halves(b, keys, 2, heads, side)
    else:
        q, kv = halves(b, t, 3, heads, side), halves(0)
    mixed = halves(b, n, heads, side)
    shares = halves((b, heads, n, -(-keys // LANES) * LANES) if keep else (0,))  # rows of whole lanes
    kept = (b, n) if keep else (0, 0)
    inside = [halves(*kept, hidden) for _ in range(2)]
    return x.new_empty(b, n, width), q, kv, mixed, shares, x.new_empty(*kept, width), *inside


def _forward(
    x: Tensor, keys_values: Tensor | None, first: int, eps: list[float], heads: int, keep: bool, *weights: Any
) -> tuple[Tensor, ...]:
    x = x.contiguous()
    given = x, keys_values, first, eps, heads
    at, _places = _at_block(*given, BlockWeights(*weights))
    out, *kept = _room_for_block(*given, keep, *weights)
    library().block(ctypes.byref(at), *(_at(one if one.numel() else None) for one in (x, *kept, out)))
    return out, *kept


_ARGUMENTS = "Tensor x, Tensor? keys_values, int first, float[] eps, int heads"
_WEIGHTS = ", ".join(f"Tensor{'?' * (name == 'qkv_bias')} {name}" for name in BlockWeights._fields)

_operator = custom_op(
    "patchloom::block",
    _forward,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool keep, {_WEIGHTS}) -> ({', '.join(['Tensor'] * 8)})",
)
_operator.register_fake(_room_for_block)


def _room_for_slopes_of_block(
    grad: Tensor,
    x: Tensor,
    keys_values: Tensor | None,
    first: int,
    eps: list[float],
    heads: int,
    wanted: list[bool],
    *saved: Any,
) -> tuple[Tensor, ...]:
    """Allocate the gradients: of x, of the four tables of weights as far as wanted, of the rest in two vectors."""
    w = BlockWeights(*saved[7:])
    (hidden, width), tables = w.fc1.shape, zip((w.qkv, w.proj, w.fc1, w.fc2), wanted, strict=True)
    slopes = [weight.new_empty(weight.shape if asked else (0,)) for weight, asked in tables]
    return x.new_empty(x.shape), *slopes, x.new_zeros(2 * width + len(w.qkv)), x.new_zeros(4 * width + hidden)


def _space_for(at: _Block) -> int:
    """Return the numbers of workspace that the backward pass of a block needs."""
    count = library().space_for
    count.restype = ctypes.c_long  # ctypes would cut it to 32 bits
    return int(count(ctypes.byref(at)))


def _backward(
    grad: Tensor,
    x: Tensor,
    keys_values: Tensor | None,
    first: int,
    eps: list[float],
    heads: int,
    wanted: list[bool],
    *saved: Any,
) -> tuple[Tensor, ...]:
    grad, x = grad.contiguous(), x.contiguous()
    given = x, keys_values, first, eps, heads
    at, _places = _at_block(*given, BlockWeights(*saved[7:]))
    slopes = _room_for_slopes_of_block(grad, *given, wanted, *saved)
    space = x.new_empty(_space_for(at), dtype=torch.bfloat16)
    tables: tuple[Tensor, ...] = grad, x, *saved[:7], space, *slopes
    library().block_backward(ctypes.byref(at), *(_at(one if one.numel() else None) for one in tables))
    return slopes


_backward_operator = custom_op(
    "patchloom::block_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}, bool[] wanted, Tensor q, Tensor kv, Tensor mixed, Tensor shares,"
    f" Tensor middle, Tensor active, Tensor tilt, {_WEIGHTS}) -> ({', '.join(['Tensor'] * 7)})",
)
_backward_operator.register_fake(_room_for_slopes_of_block)


def _keep_block(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    x, keys_values, ctx.first, ctx.eps, ctx.heads, _, *weights = inputs
    ctx.save_for_backward(x, keys_values, *output[1:], *weights)


def _through_block(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, grad: Tensor, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, keys_values, *saved = ctx.saved_tensors
    needed = BlockWeights(*ctx.needs_input_grad[6:])
    wanted = [needed.qkv, needed.proj, needed.fc1, needed.fc2]
    slopes = backward(grad, x, keys_values, ctx.first, ctx.eps, ctx.heads, wanted, *saved)
    dx, qkv, proj, fc1, fc2, before, after = slopes
    hidden, width = saved[15].shape
    norm1, norm1_bias, qkv_bias = before.split([width, width, len(before) - 2 * width])
    norm2, norm2_bias, proj_bias, fc2_bias, fc1_bias = after.split([*[width] * 4, hidden])
    found = BlockWeights(
        norm1, norm1_bias, qkv, qkv_bias, proj, proj_bias, norm2, norm2_bias, fc1, fc1_bias, fc2, fc2_bias
    )
    return dx, *[None] * 5, *(slope if asked else None for slope, asked in zip(found, needed, strict=True))


_operator.register_autograd(partial(_through_block, _backward_operator), setup_context=_keep_block)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        _keep_block(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _through_block(_backward, ctx, *grads)
