"""torch.compile for the parts of a training step that read and write much memory: stacks of blocks, and losses.

A part is a function marked with `compilable`. Random draws, everything that depends on the progress of a run, and
collectives stay outside of the parts, so no later step recompiles. Measures and pictures run uncompiled: their batches
have other sizes, and each would need a compilation of a minute for a few passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from patchloom.options.pretrain import Compile

_P = ParamSpec("_P")
_R = TypeVar("_R")


_LIMIT = 64  # graphs of one part: students, teachers and crops have more shapes than torch's limit of 8
_chosen: Compile = False


def compilable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a function of tensors and modules as a part: inside `compiling` it runs as one compiled graph.

    A part that another part calls belongs to the graph of that one.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _chosen or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        part: Callable[_P, _R] = compiled(function, _chosen == "graphs")
        return part(*args, **kwargs)

    return run


@contextmanager
def compiling(chosen: Compile = True) -> Iterator[None]:
    """Run all parts in the forward pass of a step compiled: False does nothing, "graphs" replays CUDA graphs.

    The outputs and gradients of CUDA graphs are overwritten in the next such block: a step must have used them by then.
    """
    global _chosen
    before, _chosen = _chosen, chosen
    if chosen == "graphs":
        torch.compiler.cudagraph_mark_step_begin()
    try:
        yield
    finally:
        _chosen = before


@cache
def compiled(function: Callable[..., Any], graphs: bool = False) -> Callable[..., Any]:
    """Return a part compiled by torch.compile, once for each shape of its input; with ``graphs`` as CUDA graphs."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(_LIMIT, config.recompile_limit)
    return torch.compile(function, dynamic=False, mode="reduce-overhead" if graphs else None)
