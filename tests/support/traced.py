"""Parts of a training step (`patchloom.nets.compiling`) as graphs of torch.compile, with the compiler left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch._dynamo.utils import counters

from patchloom.nets.compiling import compiled, compiling


@contextmanager
def traced_parts(backend: str = "eager") -> Iterator[None]:
    """Trace every part inside this block, and run its graph by ``backend``; a graph break is an error."""
    compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True)), compiling():
        yield
    compiled.cache_clear()


def graph_count() -> int:
    """Return the number of graphs that were traced since `traced_parts` began."""
    return counters["stats"]["unique_graphs"]
