"""Both pyramids: strides, shapes and layers for every size of patch."""

import pytest
import torch
from dense_nets import KINDS, encoder, without_gradient
from torch import nn

from patchloom.dense.backbone import FeatureMaps, MultiLevel, SimpleFeaturePyramid, four_levels
from patchloom.nets.encode import input_size

# of patches of p pixels: strides, and rows of levels for 5 rows of patches
LEVELS = {
    4: ((4, 8, 16, 32), (5, 3, 2, 1)),
    8: ((4, 8, 16, 32), (10, 5, 3, 2)),
    14: ((3.5, 7, 14, 28), (20, 10, 5, 3)),
    16: ((4, 8, 16, 32), (20, 10, 5, 3)),
    32: ((4, 8, 16, 32), (40, 20, 10, 5)),
}
PLAIN = [kind for kind in KINDS if kind != "swin"]


def made(kind: str, simple: bool, grid=(5, 4)):
    vit, _ = encoder(kind, grid=grid)
    maps = FeatureMaps(vit, None if simple and kind != "swin" else four_levels(vit)).train()
    pyramid = SimpleFeaturePyramid(maps, 24) if simple else MultiLevel(maps)
    return maps, pyramid, pyramid(maps(torch.randn(2, 3, *input_size(vit))))


@pytest.mark.parametrize("simple", [True, False])
@pytest.mark.parametrize("kind", PLAIN)
def test_strides_and_shapes(kind: str, simple: bool) -> None:
    maps, pyramid, levels = made(kind, simple)
    strides, rows = LEVELS[KINDS[kind][0]]
    assert pyramid.strides == strides and pyramid.widths == ((24,) if simple else (16,)) * 4
    assert tuple(one.shape[2] for one in levels) == rows
    assert [one.shape for one in levels] == [
        (2, width, *grid) for width, grid in zip(pyramid.widths, pyramid.grids, strict=True)
    ]
    sum((one * torch.randn_like(one)).sum() for one in levels).backward()
    assert not without_gradient(maps) and not without_gradient(pyramid)


@pytest.mark.parametrize("simple", [True, False])
def test_stages_of_a_swin_serve_as_they_are(simple: bool) -> None:
    maps, pyramid, levels = made("swin", simple, (3, 2))
    assert pyramid.strides == (4, 8, 16, 32) and pyramid.grids == ((12, 8), (6, 4), (3, 2), (2, 1))
    assert [one.shape for one in levels] == [
        (2, width, *grid) for width, grid in zip(pyramid.widths, pyramid.grids, strict=True)
    ]
    kinds = [type(one) for level in pyramid.levels for one in level if not isinstance(one, nn.Conv2d | nn.LayerNorm)]
    assert kinds == [nn.MaxPool2d]  # of the stride that it has no stage for
    sum((one * torch.randn_like(one)).sum() for one in levels).backward()
    assert not without_gradient(maps) and not without_gradient(pyramid)


def test_the_layers_of_the_papers() -> None:
    names = [[type(one).__name__ for one in level] for level in made("p16 no class token", True)[1].levels]
    tail = ["Conv2d", "LayerNorm2d", "Conv2d", "LayerNorm2d"]
    doubling = ["ConvTranspose2d", "LayerNorm2d", "GELU", "ConvTranspose2d"]
    assert names == [doubling + tail, ["ConvTranspose2d", *tail], tail, ["MaxPool2d", *tail]]
    names = [[type(one).__name__ for one in level] for level in made("p16 no class token", False)[1].levels]
    assert names == [
        ["ConvTranspose2d", "BatchNorm2d", "GELU", "ConvTranspose2d"],
        ["ConvTranspose2d"],
        [],
        ["MaxPool2d"],
    ]


def test_a_level_lies_where_its_map_lies() -> None:
    maps, pyramid, _ = made("p8 learned", True, (4, 4))
    given = torch.zeros(1, 16, 4, 4)
    there = given.clone()
    there[:, :, 3, 0] = torch.randn(16)
    with torch.no_grad():
        for stride, one, other in zip(pyramid.strides, pyramid([given]), pyramid([there]), strict=True):
            rows, columns = (one != other).any(1)[0].nonzero().unbind(1)
            cell = 24 / stride, 0  # where the patch begins, in cells; a 3x3 convolution reaches one cell further
            assert rows.min() >= cell[0] // 1 - 1 and columns.max() <= 8 / stride + 1


def test_two_maps_make_no_pyramid() -> None:
    with pytest.raises(ValueError, match="one map or of 4"):
        MultiLevel(FeatureMaps(encoder()[0], (1, 2)))
