"""Mask units, and random draws of masks."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.nets.geometry import Geometry
from patchloom.options.refusals import unit_of
from patchloom.options.tasks import Size
from patchloom.patches.partition import random_unit_partition, uniform_partition
from patchloom.tasks.task import Task


def partition(
    geometry: Geometry,
    b: int,
    visible: int,
    generator: torch.Generator | None,
    device: torch.device | str,
    unit: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw visible and masked patches of b images: [b k] and [b n-k]."""
    units = geometry.n // unit**2
    if geometry.hierarchical and visible < units:
        return uniform_partition(b, geometry.grid, generator, device)
    seen, masked = random_unit_partition(b, geometry.grid, unit, (visible, units - visible), generator, device)
    return seen, masked


def patches_of_unit(task: Task, mask_unit: Size, usual: int = 2) -> int:
    """Return the number of patches along a mask unit of ``mask_unit`` pixels; see `unit_of`."""
    p = task.geometry.p
    side, why = unit_of(task.geometry, mask_unit, usual)
    if p[0] == p[1]:
        task.resolve_auto("mask_unit", mask_unit, side * p[0], why)
    return side
