"""Mask ratios and mask units: resolution of ``auto``, validation, and random draws."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.geometry import Geometry
from patchloom.options.tasks import Size
from patchloom.patches.partition import random_unit_partition, share_of, uniform_partition
from patchloom.sizes import in_pixels
from patchloom.tasks.task import Task

UNIFORM = 0.75  # fraction that uniform masking removes


def visible_of(geometry: Geometry, mask_ratio: float, least: int = 1) -> int:
    """Return the number of patches that a mask ratio leaves visible."""
    visible = share_of(geometry.n, 1 - min(max(mask_ratio, 0), 1))
    if not 0 <= mask_ratio < 1 or visible < least:
        if geometry.n < least:
            raise PatchloomError(
                f"images of {geometry.n} patch{'es'[: 2 * (geometry.n > 1)]} leave nothing to predict: use smaller "
                "patches or larger images"
            )
        raise PatchloomError(
            f"a mask ratio of {mask_ratio} leaves {max(visible, 0)} of {geometry.n} patches visible, and {least} are "
            "needed: lower --task.mask_ratio, or use smaller patches or larger images"
        )
    return visible


def check_uniform(geometry: Geometry, mask_ratio: float, unit: int = 1) -> None:
    """Raise an error if patches of a Swin are not removed by uniform masking, one of each 2x2 left (UM-MAE, Li 2022).

    ``unit`` is the number of patches along a mask unit.
    """
    if not geometry.hierarchical or mask_ratio == 0:
        return
    (rows, columns), p = geometry.grid, geometry.p[0]
    if unit != 1:
        raise PatchloomError(
            f"mask units of {unit * p} pixels do not fit a Swin, whose uniform masks leave one of each 2x2 units of "
            f"{p} pixels: leave out --task.mask_unit"
        )
    if mask_ratio != UNIFORM:
        raise PatchloomError(
            f"a mask ratio of {mask_ratio} does not fit a Swin, whose uniform masks leave one of each 2x2 units: give "
            f"--task.mask_ratio {UNIFORM}, or leave it out"
        )
    if rows % 2 or columns % 2:
        near = "x".join(str(max(1, round(side / 2)) * 2 * p) for side in (rows, columns))
        raise PatchloomError(
            f"a Swin is masked in cells of 2x2 units of {p} pixels (uniform masking), and {rows}x{columns} units have "
            f"an odd side: give --img_size {near}"
        )


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


def masked_units(geometry: Geometry, unit: int, mask_ratio: float) -> tuple[int, int]:
    """Return how many units of ``unit`` x ``unit`` patches a mask ratio leaves visible and masks; both 1 or more."""
    visible_of(geometry, mask_ratio)
    units = geometry.n // unit**2
    visible = share_of(units, 1 - mask_ratio)
    if visible == 0:
        raise PatchloomError(
            f"a mask ratio of {mask_ratio} leaves none of {units} mask units visible: lower --task.mask_ratio or "
            "--task.mask_unit"
        )
    if visible == units:
        raise PatchloomError(f"a mask ratio of {mask_ratio} masks nothing: raise --task.mask_ratio")
    return visible, units - visible


def patches_of_unit(task: Task, mask_unit: Size, usual: int = 2) -> int:
    """Return the number of patches along a mask unit of ``mask_unit`` pixels (SimMIM section 3.2).

    ``auto`` becomes ``usual``: 1 for MAE, 2 for SimMIM; 2 becomes 1 if the grid has an odd side.
    """
    g, p = task.geometry, task.geometry.p[0]
    if g.p != (p, p):
        if mask_unit != "auto":
            raise PatchloomError(
                f"mask units are square, and patches of {in_pixels(g.p)} pixels are not: leave out --task.mask_unit "
                "to mask single patches"
            )
        return 1
    why = "one patch" if usual == 1 else "two patches, like 32 pixels for patches of 16"
    if usual == 2 and any(side % 2 for side in g.grid):
        usual, why = 1, "one patch, because the grid has odd sides"
    if g.hierarchical:
        usual, why = 1, f"one token of the last stage, which covers {p} pixels"
    unit = task.resolve_auto("mask_unit", mask_unit, usual * p, why)
    side = unit // p
    if side < 1 or unit % p or any(along % side for along in g.grid):
        raise PatchloomError(
            f"mask units of {unit} pixels do not fit {g.grid[0]}x{g.grid[1]} patches of {p} pixels: give "
            f"--task.mask_unit a multiple of {p} that divides the image"
        )
    return side
