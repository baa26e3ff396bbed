import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from patchloom.system.device import float32_products
from patchloom.train.step import Stepper

# cuBLAS reads this once in a process, when it is first used: here it is set before any test. Without it, products may
# add up in another order from call to call, and no run equals another to the bit.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def exact() -> Iterator[None]:
    """Disable TF32 for products and convolutions."""
    with float32_products():
        yield


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the steps of a run use deterministic kernels alone; an operation that has none raises an error.

    With ``warn_only``, fused attention would keep a backward pass whose sums differ from call to call.
    """
    for name in ("forward", "update"):
        plain = getattr(Stepper, name)

        def strict(*args: Any, plain: Any = plain, **named: Any) -> Any:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)
            try:
                return plain(*args, **named)
            finally:
                torch.use_deterministic_algorithms(before)

        monkeypatch.setattr(Stepper, name, strict)
