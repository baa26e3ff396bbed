"""Segmenters on every kind of encoder."""

import copy

import pytest
import torch
from dense_nets import KINDS, encoder, without_gradient
from torch.nn import functional as F

from patchloom.dense.backbone import FeatureMaps
from patchloom.dense.segmenter import PixelSegmenter, Segmenter
from patchloom.nets.encode import input_size, patch_side
from patchloom.nets.finetune import at_size


def loss_of(net, images: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    main, auxiliary = net(images)
    total = F.cross_entropy(F.interpolate(main, truth.shape[1:], mode="bilinear"), truth)
    if auxiliary is not None:
        total = total + 0.4 * F.cross_entropy(F.interpolate(auxiliary, truth.shape[1:], mode="bilinear"), truth)
    return total


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
    beginning = "maps.encoder."
    assert {name.removeprefix(beginning) for name in net.state_dict() if name.startswith(beginning)} == {
        *vit.state_dict()
    }


def test_without_an_auxiliary_head() -> None:
    net = Segmenter(encoder()[0], 3, head="upernet", head_width=16, auxiliary=False).train()
    main, auxiliary = net(torch.randn(2, 3, 64, 64))
    main.square().sum().backward()
    assert auxiliary is None and not without_gradient(net)


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
        normed = (last - net.head[0].running_mean[:, None, None]) / (net.head[0].running_var + 1e-5).sqrt()[
            :, None, None
        ]
        logits = torch.einsum("bdhw,kd->bkhw", normed, net.head[1].weight[:, :, 0, 0]) + net.head[1].bias[:, None, None]
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
        loss = loss_of(net, images, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses
    assert (net(images).main.argmax(1) == truth[:, ::4, ::4]).float().mean() > 0.9


def test_rates_by_layer() -> None:
    vit, _ = encoder("p8 learned")
    net = Segmenter(vit, 3, head="upernet", head_width=16)
    scale = {
        id(one): (group["lr_scale"], group["weight_decay"])
        for group in net.groups(0.05, 0.5)
        for one in group["params"]
    }
    found = {name: scale[id(one)] for name, one in net.named_parameters() if one.requires_grad}
    assert found["maps.encoder.pos_embed"] == found["maps.encoder.cls_token"] == (0.5**5, 0.0)
    assert found["maps.encoder.patch_embed.proj.weight"] == (0.5**5, 0.05)
    for i in range(4):
        assert found[f"maps.encoder.blocks.{i}.mlp.fc1.weight"] == (0.5 ** (4 - i), 0.05)
        assert found[f"maps.encoder.blocks.{i}.norm1.weight"] == (0.5 ** (4 - i), 0.0)
    heads = {name: one for name, one in found.items() if not name.startswith("maps.encoder.")}
    assert {one for one, _ in heads.values()} == {1.0}
    assert heads["head.fuse.0.weight"] == (1.0, 0.05) and heads["head.fuse.1.weight"] == (1.0, 0.0)


def test_bfloat16() -> None:
    for kind in ("p8 learned", "swin"):
        net = Segmenter(encoder(kind)[0], 3, head="upernet", head_width=16).train()
        with torch.autocast("cpu", torch.bfloat16):
            main, auxiliary = net(torch.randn(2, 3, *net.size))
        assert main.dtype == auxiliary.dtype == torch.float32
        (main.sum() + auxiliary.sum()).backward()
        assert not without_gradient(net)
