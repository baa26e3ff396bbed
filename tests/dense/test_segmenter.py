"""Segmenters on every kind of encoder, and UPerNet by itself."""

import copy

import pytest
import timm
import torch
from dense_nets import KINDS, encoder, without_gradient
from packaging.version import Version
from refusing import refusal
from timm.layers import LayerNorm2d, resample_abs_pos_embed
from torch import nn
from torch.nn import functional as F
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from patchloom.dense.annotations.base import Objects
from patchloom.dense.backbone import (
    FeatureMaps,
    MultiLevel,
    SimpleFeaturePyramid,
    Windows,
    even_blocks,
    four_levels,
    window_for,
    window_of,
)
from patchloom.dense.detector import FULL_HEADS, Anchors, Detections, Detector, anchor_times, paste_masks
from patchloom.dense.segmenter import AuxiliaryHead, PixelSegmenter, Segmenter, UPerNet
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import encode, grid_size, input_size, patch_count, patch_positions, patch_side, prefix_count
from patchloom.nets.finetune import RelativeAttention, at_size
from patchloom.patches.positions import sincos_2d
from patchloom.withhold.encoder_input import all_patches


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


def test_maps_of_a_single_place_train_in_a_batch_of_one() -> None:
    grids = ((8, 8), (4, 4), (2, 2), (1, 1))  # a crop of 32 pixels
    net = UPerNet(WIDTHS, grids, 3, width=12)
    assert isinstance(net.pooled[0][1], LayerNorm2d) and isinstance(net.context[1], LayerNorm2d)
    assert all(isinstance(one[1], nn.BatchNorm2d) for one in (*net.pooled[1:], *net.lateral, *net.smooth, net.fuse))
    assert net(levels(grids)).isfinite().all()
    assert AuxiliaryHead(8, (1, 1), 3)(torch.randn(1, 8, 1, 1)).shape == (1, 3, 1, 1)


def test_every_level_reaches_the_logits_and_the_coarsest_reaches_them_everywhere() -> None:
    grids = ((18, 10), (9, 5), (5, 3), (3, 2))
    net = UPerNet(WIDTHS, grids, 3, width=12).eval()
    given = levels(grids)
    with torch.no_grad():
        before = net(given)
        assert before.shape == (1, 3, 18, 10)
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


def objects(boxes: list, labels: list, size: tuple[int, int], crowd: bool = False, masks: bool = True) -> Objects:
    boxes = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    drawn = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (x0, y0, x1, y1) in zip(drawn, boxes.int().tolist(), strict=True):
        mask[y0:y1, x0:x1] = True
    numbers = torch.tensor(labels, dtype=torch.int64)
    return Objects(boxes, numbers, drawn if masks else None, torch.full((len(boxes),), crowd))


def made(kind="p8 learned", grid=(4, 4), **options) -> Detector:
    vit, card = encoder(kind, grid=(2, 2))
    p = patch_side(vit)
    options = {"masks": True, "width": 16, "light": True} | options
    return Detector(at_size(vit, card, (grid[0] * p, grid[1] * p)), 3, **options)


def losses_of(net: Detector, targets: list[Objects], **options) -> dict[str, torch.Tensor]:
    """Return the losses of noise with these objects, whose gradients reach every weight."""
    images = torch.randn(len(targets), 3, *net.size)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.get("half", False)):
        losses = net.train()(images, options.get("sizes", [net.size] * len(targets)), targets)
    assert all(one.isfinite() and one.dtype == torch.float32 for one in losses.values())
    sum(losses.values()).backward()
    assert not without_gradient(net)
    assert all(one.grad.isfinite().all() for one in net.parameters() if one.requires_grad)
    return losses


@pytest.mark.parametrize(
    ("kind", "light"), [*((kind, True) for kind in KINDS), ("p16 registers", False), ("swin", False)]
)
def test_losses_gradients_and_a_round_trip(kind: str, light: bool) -> None:
    torch.manual_seed(0)
    grid = (2, 4) if "32" in kind else (4, 6)
    net = made(kind, grid, light=light)
    h, w = net.size
    sizes = [(h, w), (h - 8, w - 5)]
    some = [objects([[2, 2, 12, 14], [1, 1, w, h]], [2, 0], (h, w)), objects([[0, 3, 9, 13]], [1], (h, w))]
    losses = losses_of(net, some, sizes=sizes)
    assert set(losses) == {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask"}
    images = torch.randn(2, 3, h, w)
    found = net.eval()(images, sizes)
    again = made(kind, grid, light=light).eval()
    again.load_state_dict(net.state_dict(), strict=True)
    for one, same, size in zip(found, again(images, sizes), sizes, strict=True):
        assert isinstance(one, Detections) and torch.equal(one.boxes, same.boxes)
        assert one.masks.shape == (len(one.boxes), 28, 28) and torch.equal(one.masks, same.masks)
        assert (one.boxes >= 0).all() and (one.boxes[:, 2:] <= torch.tensor([size[1], size[0]])).all()


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("kind", ["p16 registers", "swin"])
def test_a_batch_without_any_object_trains(kind: str, masks: bool) -> None:
    net = made(kind, masks=masks)
    losses = losses_of(net, [objects([], [], net.size, masks=masks)] * 2)
    assert losses["loss_box_reg"] == losses["loss_rpn_box_reg"] == losses.get("loss_mask", 0) == 0
    assert losses["loss_classifier"] > 0
    crowd = losses_of(net, [objects([[2, 2, 20, 20]], [1], net.size, crowd=True, masks=masks)])  # is left out
    assert crowd["loss_box_reg"] == crowd.get("loss_mask", 0) == 0


@pytest.mark.parametrize("kind", ["p8 learned", "swin"])
def test_bfloat16(kind: str) -> None:
    net = made(kind)
    losses_of(net, [objects([[2, 2, 12, 14]], [2], net.size)], half=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        (found,) = net.eval()(torch.randn(1, 3, *net.size), [net.size])
    assert found.boxes.dtype == found.masks.dtype == torch.float32


def test_windows_are_those_asked_for() -> None:
    net = made("p16 no class token", (4, 4), window=2)
    assert net.maps.windows.sizes == [(4, 4)]
    losses_of(net, [objects([[2, 2, 22, 24]], [2], (64, 64))])


def test_targets_belong_to_training() -> None:
    net, images = made(), torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match="targets in training, and only there"):
        net.eval()(images, [(32, 32)], [objects([], [], (32, 32))])
    with pytest.raises(ValueError, match="targets in training, and only there"):
        net.train()(images, [(32, 32)])
    with pytest.raises(ValueError, match="learns masks"):
        net(images, [(32, 32)], [objects([], [], (32, 32), masks=False)])


def test_objects_of_a_single_image_are_learnt() -> None:
    torch.manual_seed(0)
    net = made("p8 learned", (8, 8)).train()
    images, truth = torch.randn(1, 3, 64, 64) * 0.1, [[6, 8, 28, 34], [36, 20, 60, 58]]
    images[0, 0, 8:34, 6:28] += 2
    images[0, 1, 20:58, 36:60] += 2
    target = objects(truth, [2, 0], (64, 64))
    optimizer = torch.optim.AdamW(net.groups(0.01, 0.9), lr=2e-3)
    steps, totals = 100, []
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)  # else the last step is one of chance
    for _ in range(steps):
        loss = sum(net(images, [(64, 64)], [target]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        totals.append(loss.item())
    assert totals[-1] < 0.4 * totals[0], totals
    (found,) = net.eval()(images, [(64, 64)])
    assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
    whole = paste_masks(found.masks, found.boxes, (64, 64))
    for box, label, mask in zip(target.boxes, target.labels, target.masks, strict=True):
        best = found.labels.eq(label).nonzero()[0, 0]
        assert box_iou(box[None], found.boxes[best][None]) > 0.6
        assert (whole[best] & mask).sum() > 0.6 * (whole[best] | mask).sum()


def test_heads_and_anchors_of_the_papers() -> None:
    net = made(light=False)
    assert len(net.rpn.head.conv) == 2 and (net.rpn._pre_nms_top_n["training"], net.rpn._post_nms_top_n["testing"]) == (
        2000,
        1000,
    )
    sampler = net.roi_heads.fg_bg_sampler
    assert (sampler.batch_size_per_image, sampler.positive_fraction) == (512, 0.25)
    assert (net.rpn.nms_thresh, net.roi_heads.nms_thresh, net.roi_heads.detections_per_img) == (0.7, 0.5, 100)
    assert FULL_HEADS.box_layers == (1024,) and len(net.roi_heads.mask_head) == 4
    usual = Anchors((4, 8, 16, 32, 64), (1024, 1024))
    assert [one for (one,) in usual.sizes] == [32, 64, 128, 256, 512] and anchor_times((4, 64), (512, 640)) == 8
    small = Anchors((4, 8, 16, 32, 64), (256, 320))
    assert [one for (one,) in small.sizes] == [16, 32, 64, 128, 256]


def test_anchors_lie_at_the_levels_cells_and_boxes_go_to_the_level_of_their_size() -> None:
    net = made("p14", (5, 3))
    assert net.pyramid.strides == (3.5, 7, 14, 28)
    maps = [torch.zeros(1, 1, *grid, dtype=torch.bfloat16) for grid in (*net.pyramid.grids, (2, 1))]
    (anchors,) = net.rpn.anchor_generator(ImageList(torch.zeros(1, 3, 70, 42), [(70, 42)]), maps)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert anchors.dtype == torch.float32
    assert torch.allclose(centres[::3][:12, 0], torch.arange(12) * 3.5)
    assert centres[: 20 * 12 * 3, 1].max() == 19 * 3.5 and centres[-1].tolist() == [0, 56]
    levels = made("p16 no class token", (16, 16)).roi_heads.box_roi_pool.map_levels
    sides = torch.tensor([10.0, 55, 57, 111, 113, 255])  # at a canvas of 256 half of FPN's 112, 224 and 448
    boxes = torch.stack([torch.zeros(6), torch.zeros(6), sides, sides], dim=1)
    assert levels([boxes]).tolist() == [0, 0, 1, 1, 2, 3]


def test_rois_are_read_where_they_lie_but_for_torchvisions_half_a_cell() -> None:
    net = made("p14", (5, 5))
    level = torch.arange(70 / 3.5).expand(1, 1, 20, 20) * 3.5 + 1.75  # the column of each cell's middle in pixels
    coarse = [torch.zeros(1, 1, *grid) for grid in net.pyramid.grids[1:]]
    levels = {str(i): one for i, one in enumerate([level, *coarse])}
    # of an image that fills a part of its canvas
    read = net.roi_heads.box_roi_pool(levels, [torch.tensor([[7.0, 7.0, 14.0, 14.0]])], [(20, 20)])
    assert torch.allclose(read[0, 0, 0], 7 + 7 / 7 * (torch.arange(7) + 0.5) + 1.75, atol=0.3)


def test_masks_are_pasted_into_their_boxes() -> None:
    masks = torch.zeros(2, 28, 28)
    masks[0] = 0.9
    masks[1, :, :14] = 0.9
    whole = paste_masks(masks, torch.tensor([[2.0, 4.0, 12.0, 9.0], [20.0, 0.0, 40.0, 10.0]]), (30, 32))
    assert whole.shape == (2, 30, 32) and whole.dtype == torch.bool
    rows, columns = whole[0].nonzero().unbind(1)
    assert abs(rows.min() - 4) <= 1 and abs(rows.max() - 8) <= 1 and abs(columns.min() - 2) <= 1
    assert whole[1, 5, 22:28].all() and not whole[1, 5, 31] and not whole[1, :, :18].any()
    assert paste_masks(masks[:0], torch.zeros(0, 4), (5, 6)).shape == (0, 5, 6)


# Encoders at other sizes, the maps of their features, attention in windows, and pyramids.


def image(net: nn.Module, b: int = 2) -> torch.Tensor:
    return torch.randn(b, 3, *input_size(net), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_at_another_size(kind: str) -> None:
    vit, card = encoder(kind)
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    p = patch_side(vit)
    copy = at_size(vit, card, (6 * p, 8 * p), drop_path=0.1)
    assert (grid_size(copy), input_size(copy)) == ((6, 8), (6 * p, 8 * p))
    assert grid_size(vit) == (4, 4)
    assert {one for one in map(id, copy.parameters())}.isdisjoint(map(id, vit.parameters()))
    for name, value in vit.state_dict().items():
        assert torch.equal(value, before[name])
        if name != "pos_embed":
            assert torch.equal(copy.state_dict()[name], value), name
    table = patch_positions(vit)
    if table is not None and kind != "swin":
        resampled = resample_abs_pos_embed(table[None], [6, 8], [4, 4], num_prefix_tokens=0)[0]
        assert torch.allclose(patch_positions(copy), resampled)
        own = copy.get_parameter("pos_embed")
        assert own.requires_grad == vit.get_parameter("pos_embed").requires_grad
        prefix = len(own[0]) - patch_count(copy)
        assert torch.equal(own[0, :prefix], vit.get_parameter("pos_embed")[0, :prefix])
    same, given = at_size(vit, card, input_size(vit)).eval(), all_patches(image(vit), patch_count(vit))
    assert torch.equal(encode(same, given), encode(vit, given))
    drops = [any(getattr(one, "drop_prob", 0) for one in net.modules()) for net in (copy, same)]
    assert drops == [True, False]


def test_positions_are_those_of_the_new_grid() -> None:
    vit, card = encoder("p4", grid=(4, 8))
    turned = resample_abs_pos_embed(patch_positions(vit)[None], [8, 4], [4, 8], 0)[0]  # as many patches
    assert torch.allclose(patch_positions(at_size(vit, card, (32, 16))), turned)
    vit, card = encoder("p8 learned", grid=(4, 4))
    fixed = at_size(vit, card, (64, 48), "fixed")
    assert torch.equal(patch_positions(fixed), sincos_2d(16, (8, 6)))
    assert not fixed.get_parameter("pos_embed").requires_grad
    assert patch_positions(at_size(vit, card, (64, 48), "none")) is None
    relative = at_size(vit, card, (64, 48), "relative")
    tables = [one.rel_pos for one in relative.modules() if isinstance(one, RelativeAttention)]
    assert len(tables) == 4 and {one.window_size for one in tables} == {(8, 6)}
    bare, its = encoder("p32 no positions")
    learned = patch_positions(at_size(bare, its, (320, 320), "learned"))
    assert 0.015 < learned.std() < 0.025  # drawn for this grid: resampled noise would be flatter


def test_an_encoder_that_timm_names() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2).eval()
    card = EncoderCard(None, (0.5,) * 3, (0.5,) * 3, "timm:vit_tiny_patch16_224", "tiny")
    with pytest.raises(RuntimeError):  # a name says nothing of fewer blocks
        at_size(vit, card, (64, 96))
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0).eval()
    assert grid_size(at_size(vit, card, (64, 96))) == (4, 6)


def test_a_swin_keeps_its_windows() -> None:
    swin, card = encoder("swin", grid=(2, 2))
    copy = at_size(swin, card, (96, 64)).eval()
    windows = [block.window_size for stage in copy.layers for block in stage.blocks]
    assert windows == [block.window_size for stage in swin.layers for block in stage.blocks]
    maps = FeatureMaps(copy)
    whole = encode(copy, all_patches(image(copy), patch_count(copy)))
    assert torch.allclose(maps(image(copy))[0].flatten(2).mT, whole, atol=1e-5)


def test_sizes_that_patches_do_not_divide_are_rejected() -> None:
    vit, card = encoder("p16 registers")
    assert "360x480: choose 352x480 or 368x480" in refusal(at_size, vit, card, (360, 480))
    assert refusal(at_size, vit, card, (10, 32)).endswith("choose 16x32")
    assert "units of 16 pixels do not divide images of 40x32" in refusal(at_size, *encoder("swin"), (40, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_map_is_what_the_encoder_gives(kind: str) -> None:
    vit, _ = encoder(kind, grid=(2, 4))
    maps = FeatureMaps(vit)
    (last,) = maps(image(vit))
    tokens = encode(vit, all_patches(image(vit), patch_count(vit)))[:, prefix_count(vit) :]
    assert torch.allclose(last, tokens.mT.unflatten(2, (2, 4)), atol=1e-5)
    assert maps.strides == (float(patch_side(vit)),) and maps.widths == (last.shape[1],) and maps.grids == ((2, 4),)
    assert set(maps.state_dict()) == {f"encoder.{name}" for name in vit.state_dict()}


@pytest.mark.parametrize("kind", KINDS)
def test_four_levels(kind: str) -> None:
    vit, _ = encoder(kind)
    numbers = four_levels(vit)
    maps = FeatureMaps(vit, numbers)
    found = maps(image(vit))
    assert [one.shape[1:] for one in found] == [(d, *grid) for d, grid in zip(maps.widths, maps.grids, strict=True)]
    if kind == "swin":
        assert numbers == (1, 2, 3, 3) and maps.strides == (4, 8, 16, 16) and maps.widths == (8, 16, 32, 32)
        return
    assert numbers == ((1, 1, 2, 2) if "two" in kind else (1, 2, 3, 4))
    if kind == "p32 no positions" and Version(timm.__version__) < Version("1.0.31"):
        pytest.skip("timm's own intermediates lack a token there")
    blocks = [number - 1 for number in sorted(set(numbers))]
    stock = dict(zip(blocks, vit.forward_intermediates(image(vit), blocks, intermediates_only=True), strict=True))
    assert all(torch.allclose(one, stock[number - 1], atol=1e-5) for number, one in zip(numbers, found, strict=True))


def test_stages_of_a_swin_of_other_strides() -> None:
    fine = encoder("swin", depths=[1, 1], num_heads=[1, 2])[0]
    assert four_levels(fine) == (1, 2, 2, 2)
    deep = encoder("swin", depths=[1, 1, 1, 1, 1], num_heads=[1, 1, 1, 1, 1], grid=(2, 2))
    # whose fifth stage would be of stride 64
    assert four_levels(deep[0]) == (1, 2, 3, 4)
    maps = FeatureMaps(deep[0], four_levels(deep[0]))
    sum(one.square().sum() for one in maps(image(deep[0]))).backward()
    assert not without_gradient(maps) and any(name.startswith("layers.4.") for name in maps.unused)


@pytest.mark.parametrize("blocks", [None, (1, 3), (2,)])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_weights_get_a_gradient_and_others_are_frozen(kind: str, blocks: tuple | None) -> None:
    if blocks and "two" in kind:
        blocks = (1,)
    vit, _ = encoder(kind, grid=(2, 2))
    fixed = {name for name, one in vit.named_parameters() if not one.requires_grad}
    maps = FeatureMaps(vit, blocks).train()
    sum((one * torch.randn_like(one)).sum() for one in maps(image(vit))).backward()
    assert not without_gradient(maps)
    frozen = {name for name, one in vit.named_parameters() if not one.requires_grad} - fixed
    assert frozen == set(maps.unused)
    assert ("norm.weight" in frozen) == (blocks is not None)


def test_a_norm_after_pooling_is_the_final_one() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0, global_pool="avg").eval()
    maps = FeatureMaps(vit)
    sum((one * torch.randn_like(one)).sum() for one in maps(image(vit))).backward()
    assert not without_gradient(maps) and maps.unused == ()
    assert torch.allclose(maps(image(vit))[0].mean(1), torch.zeros(()), atol=1e-5)  # normed over channels


def test_checkpointing_changes_nothing() -> None:
    for kind in ("p16 registers", "swin"):
        vit, _ = encoder(kind, grid=(2, 2))
        maps = FeatureMaps(vit, four_levels(vit)).train()
        plain = maps(image(vit))
        vit.set_grad_checkpointing()
        again = maps(image(vit))
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
        sum(one.square().sum() for one in again).backward()
        assert not without_gradient(maps)


def test_numbers_that_no_block_has_and_encoders_without_windows() -> None:
    for blocks in ((0,), (5,), ()):
        with pytest.raises(ValueError, match="blocks are 1 to 4"):
            FeatureMaps(encoder()[0], blocks)
    with pytest.raises(ValueError, match="one map or of 4"):
        MultiLevel(FeatureMaps(encoder()[0], (1, 2)))
    vit, card = encoder("p16 no class token")
    large = at_size(vit, card, (128, 128))
    assert window_of(large, (4, 4)) == 4 and window_of(vit, (4, 4)) is None
    assert window_of(encoder("swin", grid=(8, 8))[0], (2, 2)) is None
    relative = at_size(vit, card, (128, 128), "relative")
    assert window_of(relative, (4, 4)) is None
    assert "--positions keep" in refusal(FeatureMaps, relative, window=4)
    assert "fixed attention windows" in refusal(FeatureMaps, encoder("swin")[0], window=4)


def test_sides_of_windows_and_the_last_block_of_each_quarter() -> None:
    assert window_for((64, 64), (14, 14)) == 16  # ViTDet's own image and pre-training
    assert window_for((32, 32), (14, 14)) == 16
    assert window_for((48, 64), (14, 14)) == 16
    assert window_for((21, 21), (14, 14)) is None and window_for((14, 14), (14, 14)) is None
    assert window_for((37, 37), (16, 16)) == 16  # which nothing divides
    assert window_for((36, 24), (8, 18)) == 12
    known = {12: (3, 6, 9, 12), 24: (6, 12, 18, 24), 6: (2, 3, 5, 6), 2: (1, 1, 2, 2), 1: (1, 1, 1, 1)}
    assert {depth: even_blocks(depth) for depth in known} == known


@pytest.mark.parametrize(
    ("grid", "side", "sizes"), [((4, 6), 2, [(6, 4)]), ((4, 6), 6, [(1, 24)]), ((5, 7), 3, None), ((5, 4), 2, None)]
)
def test_patches_attend_to_those_of_their_window_alone(grid: tuple, side: int, sizes: list | None) -> None:
    vit, _ = encoder("p16 registers", grid=grid)
    prefix = vit.num_prefix_tokens
    windows = Windows(grid, side, prefix)
    assert sizes is None or windows.sizes == sizes
    tokens = torch.randn(2, prefix + grid[0] * grid[1], 16)
    made = windows(vit.blocks[0], tokens)
    # written out: rows and columns are cut in parts whose lengths differ by one at most
    place, fronts = torch.arange(grid[0] * grid[1]).view(grid), []
    for rows in place.tensor_split(round(grid[0] / side)):
        for members in rows.tensor_split(round(grid[1] / side), dim=1):
            chosen = prefix + members.flatten()
            out = vit.blocks[0](torch.cat([tokens[:, :prefix], tokens[:, chosen]], dim=1))
            assert torch.allclose(out[:, prefix:], made[:, chosen], atol=1e-6)
            fronts.append(out[:, :prefix])
    assert torch.allclose(torch.stack(fronts).mean(0), made[:, :prefix], atol=1e-6)


def test_only_blocks_that_are_not_the_last_of_a_quarter_are_windowed() -> None:
    vit, _ = encoder("p16 no class token", grid=(4, 4), depth=8)
    calls = []
    for number, block in enumerate(vit.blocks, 1):
        block.register_forward_pre_hook(lambda _, given, number=number: calls.append((number, given[0].shape[:2])))
    maps = FeatureMaps(vit, window=2)
    maps(torch.randn(3, 3, 64, 64))
    assert calls == [(n, (3, 16)) if n % 2 == 0 else (n, (12, 4)) for n in range(1, 9)]


# of patches of p pixels: strides, and rows of levels for 5 rows of patches
LEVELS = {
    4: ((4, 8, 16, 32), (5, 3, 2, 1)),
    8: ((4, 8, 16, 32), (10, 5, 3, 2)),
    14: ((3.5, 7, 14, 28), (20, 10, 5, 3)),
    16: ((4, 8, 16, 32), (20, 10, 5, 3)),
    32: ((4, 8, 16, 32), (40, 20, 10, 5)),
}


def pyramid_of(kind: str, simple: bool, grid=(5, 4)):
    vit, _ = encoder(kind, grid=grid)
    maps = FeatureMaps(vit, None if simple and kind != "swin" else four_levels(vit)).train()
    pyramid = SimpleFeaturePyramid(maps, 24) if simple else MultiLevel(maps)
    return maps, pyramid, pyramid(maps(torch.randn(2, 3, *input_size(vit))))


@pytest.mark.parametrize("simple", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_strides_and_shapes(kind: str, simple: bool) -> None:
    maps, pyramid, levels = pyramid_of(kind, simple)
    if kind == "swin":  # whose stages serve as they are
        assert pyramid.strides == (4, 8, 16, 32) and pyramid.grids == ((20, 16), (10, 8), (5, 4), (3, 2))
        layers = [type(one) for level in pyramid.levels for one in level]
        assert [one for one in layers if one not in (nn.Conv2d, LayerNorm2d)] == [nn.MaxPool2d]
    else:
        strides, rows = LEVELS[KINDS[kind][0]]
        assert pyramid.strides == strides and pyramid.widths == ((24,) if simple else (16,)) * 4
        assert tuple(one.shape[2] for one in levels) == rows
    assert [one.shape[1:] for one in levels] == [
        (d, *grid) for d, grid in zip(pyramid.widths, pyramid.grids, strict=True)
    ]
    sum((one * torch.randn_like(one)).sum() for one in levels).backward()
    assert not without_gradient(maps) and not without_gradient(pyramid)


def test_the_layers_of_the_papers() -> None:
    def layers(simple: bool) -> list[list[str]]:
        levels = pyramid_of("p16 no class token", simple)[1].levels
        return [[type(one).__name__ for one in level] for level in levels]

    tail = ["Conv2d", "LayerNorm2d", "Conv2d", "LayerNorm2d"]
    doubling = ["ConvTranspose2d", "LayerNorm2d", "GELU", "ConvTranspose2d"]
    assert layers(True) == [doubling + tail, ["ConvTranspose2d", *tail], tail, ["MaxPool2d", *tail]]
    doubling[1] = "BatchNorm2d"
    assert layers(False) == [doubling, ["ConvTranspose2d"], [], ["MaxPool2d"]]


def test_a_level_lies_where_its_map_lies() -> None:
    maps, pyramid, _ = pyramid_of("p8 learned", True, (4, 4))
    given = torch.zeros(1, 16, 4, 4)
    there = given.clone()
    there[:, :, 3, 0] = torch.randn(16)
    with torch.no_grad():
        for stride, one, other in zip(pyramid.strides, pyramid([given]), pyramid([there]), strict=True):
            rows, columns = (one != other).any(1)[0].nonzero().unbind(1)
            cell = 24 / stride, 0  # where the patch begins, in cells; a 3x3 convolution reaches one cell further
            assert rows.min() >= cell[0] // 1 - 1 and columns.max() <= 8 / stride + 1
