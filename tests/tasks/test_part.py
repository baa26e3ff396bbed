"""PART: the loss against plain equations, patches off the grid, the floor of a constant, consistency, pictures."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from small import plain_tokens, same_loss_and_gradients, seeded, small

from patchloom.patches.tokens import patchify
from patchloom.tasks.part import PART, cut_crops, place_crops

SIZE, P, N = (24, 32), 4, 48  # rows and columns differ, so that mixed axes are noticed


def make(**options):
    return small(PART, size=SIZE, p=P, positions="none", **options).eval()


def crops_by_loop(images, corners):
    """Cut [b n c p p] one by one."""
    pairs = zip(images, corners.tolist(), strict=True)
    return torch.stack([torch.stack([one[:, y : y + P, x : x + P] for y, x in at]) for one, at in pairs])


def tokens_of_crops(task, images, corners):
    """Encode each crop by timm's modules, without positions."""
    vit, crops = task.encoder, crops_by_loop(images, corners)
    tokens = torch.einsum("bncyx,dcyx->bnd", crops, vit.patch_embed.proj.weight) + vit.patch_embed.proj.bias
    return vit.norm(plain_tokens(vit, tokens))[:, vit.num_prefix_tokens :]


def plain_translations(head, z, pairs):
    """Compute q = Linear([z_r; z_t]), torch's attention with k = v = z, and a linear layer, pair by pair."""
    q = head.query(torch.cat([z[:, pairs[:, 0]], z[:, pairs[:, 1]]], dim=-1))
    return q if head.attention is None else head.answer(head.attention(q, z, z)[0])


@pytest.mark.parametrize("head", ["attention", "linear"])
def test_loss_and_gradients_are_those_of_plain_equations(head):
    task, images = make(head=head, pairs=70), torch.randn(3, 3, *SIZE)
    other = deepcopy(task)
    given = task.given(images, seeded())
    corners, pairs = given.targets["corners"], given.targets["pairs"]
    assert torch.equal(pairs[0], pairs[2]) and pairs.shape == (3, 70, 2)
    d = plain_translations(other.questions["translations"].head, tokens_of_crops(other, images, corners), pairs[0])
    truth = torch.tensor([[((at[t] - at[r]) / P).tolist() for r, t in pairs[0].tolist()] for at in corners])
    same_loss_and_gradients(task, task(images, given=given).loss, other, (d - truth).square().mean())

    found = task.measure(images, seeded())
    torch.testing.assert_close(found.values, (d - truth).square().mean((1, 2)))
    torch.testing.assert_close(found.baselines["no translation"], truth.square().mean((1, 2)))
    metric = task(images, given=given).metrics["translation_r2"].item()
    assert metric == pytest.approx(1 - ((d - truth).square().sum() / truth.square().sum()).item(), abs=1e-5)


def test_patches_are_cut_anywhere_and_packed_in_the_order_of_their_corners():
    task, images = make(), torch.randn(5, 3, *SIZE)
    given = task.given(images, seeded())
    corners = given.targets["corners"]
    assert torch.equal(patchify(given.images, (P, P)), crops_by_loop(images, corners).flatten(2))
    assert torch.equal(cut_crops(images, corners, (P, P)), crops_by_loop(images, corners).flatten(2))
    assert corners.amin((0, 1)).tolist() == [0, 0] and corners.amax((0, 1)).tolist() == [20, 28]
    assert (corners % P != 0).any() and given.dropped.all()
    assert len(given.targets["pairs"][0].unique(dim=0)) == task.pairs == 2048
    assert set(given.targets["pairs"][0].flatten().tolist()) == set(range(N)) and given.context is None
    few = make(context_mask_ratio=0.75, pairs=N**2).given(images, seeded())
    assert few.context.shape == (5, N // 4) and len(few.targets["pairs"][0].unique(dim=0)) == N**2
    # four patches; ImageNet with patches of 16
    assert small(PART, (8, 8), 4, positions="none").pairs == 16
    assert small(PART, (224, 224), 16, positions="none").pairs == 4802


def test_corners_are_uniform_and_a_constant_has_the_papers_floor():
    """Var Δx = (M² - 1) / (6 P²) for M places."""
    task = make(pairs=N**2)
    given = task.given(torch.zeros(4000, 1, 1, 1).expand(-1, 3, *SIZE), seeded())
    corners = given.targets["corners"].numpy()
    for axis, places in enumerate((21, 29)):
        share = np.bincount(corners[..., axis].ravel(), minlength=places) / corners[..., axis].size
        assert abs(share - 1 / places).max() < 5 * (1 / places / corners[..., axis].size) ** 0.5
        apart = (corners[:, 1:, axis] - corners[:, :-1, axis]) / P
        floor = (places**2 - 1) / (6 * P**2)
        assert abs(apart.var() - floor) < 0.02 * floor


def test_the_checks_are_zero_for_answers_of_one_arrangement_and_known_otherwise(monkeypatch):
    task, images = make(), torch.randn(2, 3, *SIZE)
    question, places = task.questions["translations"], torch.randn(2, N, 2, generator=seeded(3))

    def perfect(patches, pairs):
        return places[:, pairs[:, 1]] - places[:, pairs[:, 0]]

    monkeypatch.setattr(question.head, "forward", perfect)
    found = task.measure(images, seeded())
    assert all(values.abs().max() < 1e-10 for values in found.details.values())
    monkeypatch.setattr(question.head, "forward", lambda patches, pairs: perfect(patches, pairs) + 0.5)
    found = {name: values.tolist() for name, values in task.measure(images, seeded()).details.items()}
    assert found["self"] == pytest.approx([0.25] * 2, rel=1e-4)
    assert found["antisymmetry"] == pytest.approx([1] * 2, rel=1e-4)
    assert found["additivity"] == pytest.approx([0.25] * 2, rel=1e-4)


def test_the_arrangement_is_the_least_squares_fit_of_all_pairs(monkeypatch):
    task, images = make(), torch.randn(1, 3, *SIZE)
    question = task.questions["translations"]
    d = torch.randn(1, N, N, 2, generator=seeded(1))
    monkeypatch.setattr(question.head, "forward", lambda patches, pairs: d[:, pairs[:, 0], pairs[:, 1]])
    encoded = task.encode(images, task.given(images, seeded()))
    found = question.arrangement(encoded)
    rows = np.tile(np.eye(N), (N, 1)) - np.repeat(np.eye(N), N, axis=0)
    fit = np.linalg.lstsq(rows, d[0].reshape(N * N, 2).double().numpy(), rcond=None)[0]  # least norm: centred
    centre = (encoded.given.targets["corners"][0].double().mean(0) / P).numpy()
    np.testing.assert_allclose(found[0].numpy(), fit + centre, atol=1e-4)


def test_pictures_show_the_image_where_patches_are_placed_right(monkeypatch):
    task, images = make(), torch.randn(2, 3, *SIZE)
    given = task.given(images, seeded())
    places = given.targets["corners"] / P
    head = task.questions["translations"].head
    monkeypatch.setattr(head, "forward", lambda _, pairs: places[:, pairs[:, 1]] - places[:, pairs[:, 0]])
    (sheet,) = task.draw(images, seeded())
    assert "is 0.00 patch sides" in sheet.caption
    for name in ("true places", "predicted places"):
        shown = sheet.columns[name]
        seen = ~shown.isnan()
        covered = torch.zeros(2, *SIZE, dtype=torch.bool)
        for image, corners in enumerate(given.targets["corners"].tolist()):
            for y, x in corners:
                covered[image, y : y + P, x : x + P] = True
        assert torch.equal(seen, covered[:, None].expand(-1, 3, -1, -1)) and not covered.all()
        torch.testing.assert_close(shown[seen], images[seen])
    overlapping = torch.tensor([[[0, 0], [0, 1]]])
    painted = place_crops(torch.tensor([[[1.0] * 4, [3.0] * 4]]), overlapping, (2, 2), (2, 3))
    assert painted[0, 0].tolist() == [[1, 2, 3], [1, 2, 3]]
