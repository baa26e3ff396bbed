"""Threads of tests."""

from collections.abc import Iterator

import torch


def one_thread() -> Iterator[None]:
    """Use one thread: small computations with several waiting threads are many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
