"""LOCA: the loss against plain equations, crops and their places, the measure and pictures."""

from copy import deepcopy

import pytest
import torch
from perturbing import perturbed
from small import plain_tokens, same_loss_and_gradients, seeded, small
from torch import nn
from torch.nn import functional as F

from patchloom.patches.tokens import gather_tokens, patchify
from patchloom.tasks.loca import LOCA, cut_boxes, places_in, random_boxes

SIZE, P, GRID, N = (24, 32), 4, (6, 8), 48  # rows and columns differ, so that mixed axes are noticed


def make(**options):
    return small(LOCA, size=SIZE, p=P, **options).eval()


def canvases(task, b=3):
    return torch.randn(b, 3, *task.augment.size)


def encoded(vit, images, visible=None, positions=True):
    return vit.norm(plain_tokens(vit, vit.patch_embed(images), visible, positions))[:, vit.num_prefix_tokens :]


def plain_logits(question, query, reference):
    """Compute a block of cross-attention by torch's attention, a norm and a linear layer."""
    head, d = question.head, query.shape[-1]
    attention = nn.MultiheadAttention(d, head.attn.num_heads, batch_first=True)
    names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias"}
    names |= {"out_proj.weight": "proj.weight", "out_proj.bias": "proj.bias"}
    weights = {theirs: head.attn.get_parameter(ours) for theirs, ours in names.items()}
    keys = head.norm_reference(reference)
    x = query + torch.func.functional_call(attention, weights, (head.norm1(query), keys, keys))[0]
    x = x + head.mlp.fc2(F.gelu(head.mlp.fc1(head.norm2(x))))
    return head.answer(head.norm(x))


@pytest.mark.parametrize("encoder", [{"class_token": False}, {"class_token": True}])
def test_loss_and_gradients_are_those_of_plain_equations(encoder):
    task = make(encoder=encoder, momentum=0.5)
    perturbed(task.questions["location"].teacher)  # a teacher unlike the student
    images, other = canvases(task), deepcopy(task)
    given, question = task.given(images, seeded()), other.questions["location"]
    t = given.targets
    with torch.no_grad():
        reference = encoded(question.teacher.encoder, t["reference"])
    query = encoded(other.encoder, given.images, given.visible, positions=False)
    logits = plain_logits(question, query, gather_tokens(reference, t["seen"]))
    asked = [(i, j) for i in range(3) for j in range(given.visible.shape[1]) if t["inside"][i, j]]
    by_hand = torch.stack([-logits[i, j].log_softmax(0)[t["places"][i, j]] for i, j in asked]).mean()
    assert 0 < len(asked) < t["inside"].numel(), "some are ignored"
    same_loss_and_gradients(task, task(images, given=given).loss, other, by_hand)

    found = task.measure(images, seeded())
    right = (logits.argmax(-1) == t["places"]) & t["inside"]
    torch.testing.assert_close(found.values, right.sum(1) / t["inside"].sum(1))
    assert found.baselines["chance"].tolist() == pytest.approx([1 / N] * 3)


@pytest.mark.parametrize("mirrored", [False, True])
def test_places_are_those_where_the_same_pixels_are(mirrored):
    """Pixels of these images are their coordinates, so each query patch tells what its true place is."""
    h, w = 48, 64
    rows, columns = (torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w
    images = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(200, 2, h, w)
    reference, query = (random_boxes(torch.rand(200, 4, generator=seeded(i))) for i in (0, 1))
    flags = torch.full((200,), mirrored)
    shown, seen = cut_boxes(images, query, SIZE, flags), cut_boxes(images, reference, SIZE)
    places, inside = places_in(query, reference, GRID, flags)
    centres = patchify(shown, (P, P)).unflatten(2, (2, -1)).mean(-1)  # coordinates of the middle of each patch
    cells = patchify(seen, (P, P)).unflatten(2, (2, -1)).mean(-1)
    half = reference[:, None, 2:] / torch.tensor(GRID) / 2
    middle = cells.gather(1, places[..., None].expand(-1, -1, 2))
    # bilinear interpolation is exact on coordinates but at the border, where it repeats a pixel of up to 1/48
    apart, slack = (centres - middle).abs(), 0.012
    assert (apart[inside] <= (half.expand_as(apart)[inside] + slack)).all()
    beyond = ((centres[:, :, None] - cells[:, None]).abs() > half[:, :, None] + slack).any(-1).all(-1)
    assert not inside[beyond].any() and (~inside).any()
    near = ((centres[:, :, None] - cells[:, None]).abs() < half[:, :, None] - slack).all(-1)
    assert torch.equal(near.any(-1) & ~inside, torch.zeros_like(inside))
    assert (near.float().argmax(-1)[near.any(-1)] == places[near.any(-1)]).all()


def test_boxes_have_the_papers_areas_and_crops_are_not_rounded_under_autocast():
    boxes = random_boxes(torch.rand(5000, 4, generator=seeded()))
    top, left, height, width = boxes.unbind(1)
    assert (boxes >= 0).all() and (top + height <= 1 + 1e-6).all() and (left + width <= 1 + 1e-6).all()
    assert 0.31 < (height * width).min() and (height * width).max() > 0.95
    assert 0.7 < (width / height).min() and (width / height).max() < 1.4
    images = torch.randn(8, 3, 96, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cut_boxes(images, boxes[:8], SIZE)
    assert torch.equal(found, cut_boxes(images, boxes[:8], SIZE))


def test_the_input_has_no_positions_few_patches_and_a_fifth_of_the_reference():
    task = make()
    images = canvases(task, 40)
    given = task.given(images, seeded())
    assert given.visible.shape == (40, 17) and given.dropped.all()  # 36 % of 48
    seen = given.targets["seen"]
    assert seen.shape == (40, 9) and (seen.diff(dim=1) == 1).all() and seen.min() >= 0 and seen.max() < N
    assert len(seen[:, 0].unique()) > 20
    assert torch.equal(task.given(images, seeded()).images, given.images)
    task.augment.flip = False
    same = [torch.equal(a, b) for a, b in zip(task.given(images, seeded()).images, given.images, strict=True)]
    assert 5 < sum(same) < 35, "about half were mirrored"


def test_baselines_are_the_best_single_answer_and_the_nearest_pixels(monkeypatch):
    task = make(mask_ratio=0.0)
    images = canvases(task, 6)
    given = task.given(images, seeded())
    places, inside = given.targets["places"], given.targets["inside"]
    found = task.measure(images, seeded())
    shares = torch.stack([((places == one) & inside).sum() for one in range(N)])
    best = ((places == shares.argmax()) & inside).sum(1) / inside.sum(1)
    torch.testing.assert_close(found.baselines["most frequent place"], best)
    query, reference = patchify(given.images, (P, P)), patchify(given.targets["reference"], (P, P))
    near = [[((reference[i] - q) ** 2).sum(-1).argmin() for q in query[i]] for i in range(6)]
    near = gather_tokens(torch.tensor(near), given.visible)
    torch.testing.assert_close(found.baselines["raw pixels"], ((near == places) & inside).sum(1) / inside.sum(1))
    assert found.to_beat == ("chance", "most frequent place")
    assert LOCA.training_defaults({}, 10**6)["task.momentum"][0] == 0.996


def test_pictures_put_patches_at_their_places(monkeypatch):
    task = make()
    images = canvases(task, 2)
    given = task.given(images, seeded())
    places, inside = given.targets["places"], given.targets["inside"]
    monkeypatch.setattr(task.questions["location"].head, "forward", lambda *_: F.one_hot(places, N).float())
    (sheet,) = task.draw(images, seeded())
    true, found = (patchify(sheet.columns[name], (P, P)) for name in ("true places", "predicted places"))
    torch.testing.assert_close(true, found, equal_nan=True)
    filled = torch.zeros(2, N + 1, dtype=torch.bool).scatter(1, torch.where(inside, places, N), True)[:, :N]
    assert torch.equal(~true.isnan().any(-1), filled)
    shown = patchify(sheet.columns["seen by the head"], (P, P))
    assert torch.equal((~shown.isnan().any(-1)).nonzero()[:, 1].view(2, -1), given.targets["seen"])
