"""Segmenters on every kind of encoder, and UPerNet by itself."""

import copy

import pytest
import torch
from dense_nets import KINDS, encoder, without_gradient
from timm.layers import LayerNorm2d
from torch import nn
from torch.nn import functional as F

from patchloom.dense.backbone import FeatureMaps
from patchloom.dense.segmenter import AuxiliaryHead, PixelSegmenter, Segmenter, UPerNet
from patchloom.nets.encode import input_size, patch_side
from patchloom.nets.finetune import at_size


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_a_round_trip(kind: str) -> None:
    vit, card = encoder(kind, grid=(3, 2), channels=5)
    p = patch_side(vit)
    net = Segmenter(at_size(vit, card, (4 * p, 2 * p)), 7, head="upernet", head_width=16)
    h, w = net.size
    assert (net.classes, net.channels, (h, w)) == (7, 5, (4 * p, 2 * p))
    images = torch.randn(1, 5, h, w)
    main, auxiliary = net.train()(images)
    stride = 3.5 if p == 14 else 4
    assert main.shape == (1, 7, round(h / stride), round(w / stride)) and auxiliary.shape[:2] == (1, 7)
    (main.square().sum() + auxiliary.square().sum()).backward()
    assert not without_gradient(net)
    assert net.eval()(images).auxiliary is None
    again = Segmenter(at_size(vit, card, (4 * p, 2 * p)), 7, head="upernet", head_width=16).eval()
    again.load_state_dict(net.state_dict(), strict=True)
    assert torch.equal(again(images).main, net(images).main)
    of_encoder = {name for name in net.state_dict() if name.startswith("maps.encoder.")}
    assert of_encoder == {f"maps.encoder.{name}" for name in vit.state_dict()}


@pytest.mark.parametrize("kind", KINDS)
def test_linear_trains_the_head_alone(kind: str) -> None:
    vit, _ = encoder(kind, grid=(2, 4), **({} if kind == "swin" else {"drop_path_rate": 0.5}))
    state = copy.deepcopy(vit.state_dict())
    net = Segmenter(vit, 5, head="linear").train()
    images = torch.randn(2, 3, *input_size(vit))
    optimizer = torch.optim.SGD(net.groups(0.1, 0.5), lr=0.1)
    main, auxiliary = net(images)
    assert main.shape == (2, 5, 2, 4) and auxiliary is None
    main.square().sum().backward()
    optimizer.step()
    trained = {name for name, one in net.named_parameters() if one.requires_grad}
    assert trained == {"head.1.weight", "head.1.bias"} and not without_gradient(net)
    assert not any(module.training for module in net.maps.modules()) and net.head.training
    assert all(torch.equal(value, state[name]) for name, value in vit.state_dict().items())
    assert all(one.grad is None for one in vit.parameters())
    # its logits are linear in the normed tokens
    maps = FeatureMaps(vit)
    with torch.no_grad():
        (last,) = maps(images)
        norm, layer = net.head
        normed = (last.movedim(1, 3) - norm.running_mean) / (norm.running_var + 1e-5).sqrt()
        logits = F.linear(normed, layer.weight[:, :, 0, 0], layer.bias).movedim(3, 1)
        assert torch.allclose(net.eval()(images).main, logits, atol=1e-4)


def test_pixels_are_a_baseline_of_the_same_interface() -> None:
    net = PixelSegmenter(4, (16, 24), 5, 8).train()
    assert (net.classes, net.size, net.channels) == (4, (16, 24), 5)
    images = torch.randn(2, 5, 16, 24)
    main, auxiliary = net(images)
    assert main.shape == (2, 4, 2, 3) and auxiliary is None
    main.square().sum().backward()
    assert not without_gradient(net)
    changed = images.clone()
    changed[:, 3, 15, 0] += 1  # of the patch in the second row and first column
    apart = (net.eval()(changed).main - net(images).main).abs().sum(1)[0] > 0
    assert apart.nonzero().tolist() == [[1, 0]]
    groups = net.groups(0.1, 0.5)
    assert {one["lr_scale"] for one in groups} == {1.0} and [one["weight_decay"] for one in groups] == [0.0, 0.1]
    assert sum(len(one["params"]) for one in groups) == len([*net.parameters()])


@pytest.mark.parametrize("kind", ["p8 learned", "swin"])
def test_a_single_image_is_learnt(kind: str) -> None:
    torch.manual_seed(0)
    vit, card = encoder(kind, grid=(2, 2))
    net = Segmenter(at_size(vit, card, (32, 32)), 3, head="upernet", head_width=16).train()
    images, truth = torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.int64)
    truth[:, :16], truth[:, 20:, 8:] = 1, 2
    optimizer = torch.optim.AdamW(net.groups(0.01, 0.9), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = sum(F.cross_entropy(F.interpolate(one, (32, 32), mode="bilinear"), truth) for one in net(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses
    assert (net(images).main.argmax(1) == truth[:, ::4, ::4]).float().mean() > 0.9


def test_rates_by_layer() -> None:
    vit, _ = encoder("p8 learned")
    net = Segmenter(vit, 3, head="upernet", head_width=16)
    groups = net.groups(0.05, 0.5)
    scale = {id(one): (group["lr_scale"], group["weight_decay"]) for group in groups for one in group["params"]}
    found = {name: scale[id(one)] for name, one in net.named_parameters() if one.requires_grad}
    assert found["maps.encoder.pos_embed"] == found["maps.encoder.cls_token"] == (0.5**5, 0.0)
    assert found["maps.encoder.patch_embed.proj.weight"] == (0.5**5, 0.05)
    for i in range(4):
        assert found[f"maps.encoder.blocks.{i}.mlp.fc1.weight"] == (0.5 ** (4 - i), 0.05)
        assert found[f"maps.encoder.blocks.{i}.norm1.weight"] == (0.5 ** (4 - i), 0.0)
    heads = {name: one for name, one in found.items() if not name.startswith("maps.encoder.")}
    assert {one for one, _ in heads.values()} == {1.0}
    assert heads["head.fuse.0.weight"] == (1.0, 0.05) and heads["head.fuse.1.weight"] == (1.0, 0.0)


def test_bfloat16_with_and_without_an_auxiliary_head() -> None:
    for kind, second in (("p8 learned", True), ("swin", True), ("p8 learned", False)):
        net = Segmenter(encoder(kind)[0], 3, head="upernet", head_width=16, auxiliary=second).train()
        with torch.autocast("cpu", torch.bfloat16):
            answers = [one for one in net(torch.randn(2, 3, *net.size)) if one is not None]
        assert [one.dtype for one in answers] == [torch.float32] * (1 + second)
        sum(one.square().sum() for one in answers).backward()
        assert not without_gradient(net)


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
