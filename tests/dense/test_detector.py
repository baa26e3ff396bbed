"""Detectors on every kind of encoder."""

import pytest
import torch
from dense_nets import KINDS, encoder, without_gradient
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from patchloom.dense.annotations.base import Objects
from patchloom.dense.detector import FULL_HEADS, Anchors, Detections, Detector, anchor_times, paste_masks
from patchloom.nets.encode import patch_side
from patchloom.nets.finetune import at_size


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


def test_a_single_image_is_learnt() -> None:
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


def test_the_heads_of_the_papers() -> None:
    net = made(light=False)
    assert len(net.rpn.head.conv) == 2 and (net.rpn._pre_nms_top_n["training"], net.rpn._post_nms_top_n["testing"]) == (
        2000,
        1000,
    )
    sampler = net.roi_heads.fg_bg_sampler
    assert (sampler.batch_size_per_image, sampler.positive_fraction) == (512, 0.25)
    assert (net.rpn.nms_thresh, net.roi_heads.nms_thresh, net.roi_heads.detections_per_img) == (0.7, 0.5, 100)
    assert FULL_HEADS.box_layers == (1024,) and len(net.roi_heads.mask_head) == 4


def test_anchors_of_the_papers_and_of_small_canvases() -> None:
    usual = Anchors((4, 8, 16, 32, 64), (1024, 1024))
    assert [one for (one,) in usual.sizes] == [32, 64, 128, 256, 512] and anchor_times((4, 64), (512, 640)) == 8
    small = Anchors((4, 8, 16, 32, 64), (256, 320))
    assert [one for (one,) in small.sizes] == [16, 32, 64, 128, 256]


def test_anchors_lie_at_the_levels_cells() -> None:
    net = made("p14", (5, 3))
    assert net.pyramid.strides == (3.5, 7, 14, 28)
    maps = [torch.zeros(1, 1, *grid, dtype=torch.bfloat16) for grid in (*net.pyramid.grids, (2, 1))]
    (anchors,) = net.rpn.anchor_generator(ImageList(torch.zeros(1, 3, 70, 42), [(70, 42)]), maps)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert anchors.dtype == torch.float32
    assert torch.allclose(centres[::3][:12, 0], torch.arange(12) * 3.5)
    assert centres[: 20 * 12 * 3, 1].max() == 19 * 3.5 and centres[-1].tolist() == [0, 56]


def test_rois_are_read_where_they_lie_but_for_torchvisions_half_a_cell() -> None:
    net = made("p14", (5, 5))
    level = torch.arange(70 / 3.5).expand(1, 1, 20, 20) * 3.5 + 1.75  # the column of each cell's middle in pixels
    coarse = [torch.zeros(1, 1, *grid) for grid in net.pyramid.grids[1:]]
    levels = {str(i): one for i, one in enumerate([level, *coarse])}
    # of an image that fills a part of its canvas
    read = net.roi_heads.box_roi_pool(levels, [torch.tensor([[7.0, 7.0, 14.0, 14.0]])], [(20, 20)])
    assert torch.allclose(read[0, 0, 0], 7 + 7 / 7 * (torch.arange(7) + 0.5) + 1.75, atol=0.3)


def test_boxes_go_to_the_level_of_their_size() -> None:
    levels = made("p16 no class token", (16, 16)).roi_heads.box_roi_pool.map_levels
    sides = torch.tensor([10.0, 55, 57, 111, 113, 255])  # at a canvas of 256 half of FPN's 112, 224 and 448
    boxes = torch.stack([torch.zeros(6), torch.zeros(6), sides, sides], dim=1)
    assert levels([boxes]).tolist() == [0, 0, 1, 1, 2, 3]


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
