"""UPerNet: the resolution of what it gives, a batch of one image, and what it is made of."""

import pytest
import torch
from timm.layers import LayerNorm2d
from torch import nn

from patchloom.dense.segmenter import AuxiliaryHead, UPerNet

WIDTHS = (8, 6, 8, 10)


def levels(grids, b=1):
    return [torch.randn(b, width, *grid) for width, grid in zip(WIDTHS, grids, strict=True)]


@pytest.mark.parametrize("grids", [((16, 24), (8, 12), (4, 6), (2, 3)), ((18, 10), (9, 5), (5, 3), (3, 2))])
def test_logits_at_the_finest_level_of_a_batch_of_one(grids) -> None:
    net = UPerNet(WIDTHS, grids, 5, width=12)
    logits = net(levels(grids))
    assert logits.shape == (1, 5, *grids[0])
    logits.square().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in net.parameters())


def test_maps_of_a_single_place_train_in_a_batch_of_one() -> None:
    grids = ((8, 8), (4, 4), (2, 2), (1, 1))  # a crop of 32 pixels
    net = UPerNet(WIDTHS, grids, 3, width=12)
    assert isinstance(net.pooled[0][1], LayerNorm2d) and isinstance(net.context[1], LayerNorm2d)
    assert all(isinstance(one[1], nn.BatchNorm2d) for one in (*net.pooled[1:], *net.lateral, *net.smooth, net.fuse))
    assert net(levels(grids)).isfinite().all()
    assert AuxiliaryHead(8, (1, 1), 3)(torch.randn(1, 8, 1, 1)).shape == (1, 3, 1, 1)


def test_every_level_reaches_the_logits_and_the_coarsest_reaches_them_everywhere() -> None:
    grids = ((16, 16), (8, 8), (4, 4), (2, 2))
    net = UPerNet(WIDTHS, grids, 3, width=12).eval()
    given = levels(grids)
    with torch.no_grad():
        before = net(given)
        for i in range(4):
            changed = [one.clone() for one in given]
            changed[i][:, :, 0, 0] += 3
            apart = (net(changed) - before).abs().sum(1)[0] > 0
            assert apart[0, 0] and apart.all() == (i == 3)


def test_parameters_of_the_papers_head() -> None:
    # mmseg's UPerHead of four maps of 768 with 512 channels and 150 classes, biases and norms written out by hand
    net = UPerNet((768,) * 4, ((128, 128), (64, 64), (32, 32), (16, 16)), 150, 512)
    norm = 2 * 512
    pooled = 4 * (768 * 512 + norm)
    context = (768 + 4 * 512) * 512 * 9 + norm
    lateral, smooth = 3 * (768 * 512 + norm), 3 * (512 * 512 * 9 + norm)
    assert sum(one.numel() for one in net.parameters()) == (
        pooled + context + lateral + smooth + 4 * 512 * 512 * 9 + norm + 150 * 513
    )
