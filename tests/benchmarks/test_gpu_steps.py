"""Measurements of steps on a GPU, as far as a CPU can test them."""

import warnings
from collections import Counter
from types import SimpleNamespace

import gpu_steps
import pytest
import torch

from patchloom.data.loader import Batch


class Growing:
    """Step that runs out of memory beyond 8 images."""

    def __init__(self):
        self.batch = Batch((torch.zeros(2, 3, 4, 4, dtype=torch.uint8),), torch.arange(2), [])
        self.optimizer = SimpleNamespace(zero_grad=lambda set_to_none: None)

    def __call__(self):
        if len(self.batch.indices) > 8:
            raise torch.OutOfMemoryError("no more")


def test_batches_double_until_memory_ends(monkeypatch):
    step = Growing()
    found, tried = gpu_steps.largest(step, 64, "cpu")
    assert found == 8 == len(step.batch.views[0]) and tried[16] == {"state": "out of memory"}
    assert gpu_steps.largest(Growing(), 4, "cpu")[0] == 4
    assert gpu_steps.as_large(Growing(), 64, "cpu") == 8
    # a step of n images needs 1 + n GiB: 16 of them fit into 19, but 32 would not, which is known before
    monkeypatch.setattr(gpu_steps, "memory", lambda device: (0.0, 19.0))
    step = Growing()
    monkeypatch.setattr(gpu_steps, "peak_memory", lambda work, device: 1.0 + len(work.batch.indices))
    monkeypatch.setattr(Growing, "__call__", lambda self: None)
    found, tried = gpu_steps.largest(step, 4096, "cpu")
    assert found == 16 and list(tried) == [2, 4, 8, 16]


def test_waits_are_counted_by_line():
    places = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    gpu_steps.count_waits(caught, places)
    ((place, count),) = places.items()
    assert place.startswith("benchmarks/test_gpu_steps.py:") and count == 2


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10G", None),
    ],
)
def test_data_sheets_are_found_by_the_whole_name(name, rate):
    assert gpu_steps.data_sheet(name) == (rate and rate * 1e12)
