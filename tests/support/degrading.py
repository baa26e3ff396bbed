"""Shared helpers for tests of degradations: image sizes and a comparison."""

import torch

SIZES, SIDES = [(9, 12), (14, 5), (20, 17)], [1, 3, 7]


def assert_close(given: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> None:
    assert given.shape == expected.shape and given.dtype == expected.dtype
    difference = (given.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)
    assert difference <= relative
