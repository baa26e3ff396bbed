"""Forms of attention on this CPU by number of tokens, width of a head and precision, forward and backward.

    python benchmarks/attention.py

Each row is a ratio of medians of rounds in turns: time of the fused form over that of an explicit softmax. The rules of
`patchloom.nets.performance` follow this table.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.estimate import seconds_of
from patchloom.system.device import keep_freed_memory

_HEADS, _ROUNDS = 6, 3
_TOKENS, _SIDES = (17, 37, 65, 101, 145, 197, 257, 401, 577, 785, 1025), (16, 32, 64)
_VALUES = 4_000_000  # per batch, of at most 64 images


def explicit(packed: Tensor) -> Tensor:
    """Attend by a softmax whose weights are kept, from queries, keys and values [b n 3 h d] to [b n h d]."""
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return ((q * packed.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v).transpose(1, 2)


def fused(packed: Tensor) -> Tensor:
    """Attend by torch's fused kernel; shapes as in `explicit`."""
    return F.scaled_dot_product_attention(*packed.permute(2, 0, 3, 1, 4).unbind(0)).transpose(1, 2)


def there_and_back(attend: Callable[[Tensor], Tensor], packed: Tensor) -> None:
    """Compute attention and its gradient."""
    attend(packed).flatten(2).sum().backward()
    packed.grad = None


def main() -> None:
    """Print the table."""
    keep_freed_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {_HEADS} heads")
    print("precision  channels of a head  tokens  images  fused / explicit")
    for dtype in (torch.bfloat16, torch.float32):
        forms = {"fused": fused, "explicit": explicit}
        for side in _SIDES:
            for n in _TOKENS:
                images = max(1, min(64, _VALUES // (_HEADS * n * max(side, n))))
                packed = torch.randn(images, n, 3, _HEADS, side).to(dtype).requires_grad_()
                ways = {name: partial(there_and_back, form, packed) for name, form in forms.items()}
                taken = {name: statistics.median(each) for name, each in seconds_of(ways, rounds=_ROUNDS).items()}
                ratio = f"{taken['fused'] / taken['explicit']:.2f}"
                print(str(dtype).removeprefix("torch."), side, n, images, ratio, sep="  ", flush=True)


if __name__ == "__main__":
    main()
