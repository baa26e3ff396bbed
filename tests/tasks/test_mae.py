"""MAE beside a plain program of the same method: all patches embedded, some kept, mask tokens in order, all decoded."""

from functools import partial

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from small import seeded, small
from torch.nn import functional as F

from patchloom.tasks.mae import MAE

make = partial(small, MAE)


def visible_by_pixio(b, grid, side, ratio, seed):
    """Return the visible patches by Pixio's rule: units of a grid sorted by noise, int(units * (1 - ratio)) stay."""
    numbers = torch.arange(grid[0] * grid[1]).view(1, 1, *grid).float()
    units = F.unfold(numbers, side, stride=side)[0].T.long()  # [units side*side]
    noise = torch.rand(b, len(units), generator=seeded(seed))
    return units[noise.argsort(dim=1)[:, : int(len(units) * (1 - ratio))]].flatten(1)


@settings(max_examples=25)
@drawn(st.integers(1, 4), st.integers(2, 4), st.integers(1, 3), st.sampled_from([0.25, 0.5, 0.75]), st.integers(0, 99))
def test_whole_units_are_masked_as_many_as_by_pixio(rows, columns, side, ratio, seed):
    grid = rows * side, columns * side
    if int(rows * columns * (1 - ratio)) == 0:
        return
    task = make(size=(4 * grid[0], 4 * grid[1]), mask_unit=4 * side, mask_ratio=ratio, encoder={"depth": 1})
    given = task.given(torch.zeros(3, 3, *task.augment.size), seeded(seed))
    theirs = visible_by_pixio(3, grid, side, ratio, seed)
    assert torch.equal(given.visible.sort(dim=1).values, theirs.sort(dim=1).values)
    together = torch.cat([given.visible, given.masked], dim=1).sort(dim=1).values
    assert torch.equal(together, torch.arange(task.geometry.n).expand(3, -1))


@pytest.mark.parametrize("options", [{}, {"mask_unit": 4}], ids=str)
def test_units_of_one_patch_are_drawn_as_patches(options):
    task = make(**options)
    order = torch.rand(5, 64, generator=seeded(3)).argsort(dim=1)
    given = task.given(torch.zeros(5, 3, 32, 32), seeded(3))
    assert task.unit == 1 and torch.equal(torch.cat([given.visible, given.masked], dim=1), order)
    assert make().chosen["mask_unit"] == (4, "one patch")
