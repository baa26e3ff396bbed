"""PART: the loss against plain equations, patches off the grid, the floor of a constant, consistency, pictures."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from small import same_loss_and_gradients, seeded, small
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.patches.tokens import patchify
from patchloom.tasks.part import PART, cut_crops, place_crops

SIZE, P, N = (24, 32), 4, 48  # rows and columns differ, so that mixed axes are noticed


def make(**options):
    return small(PART, size=SIZE, p=P, positions="none", **options).eval()


def crops_by_loop(images, corners):
    """Cut [b n c p p] one by one."""
    pairs = zip(images, corners.tolist(), strict=True)
    return torch.stack([torch.stack([one[:, y : y + P, x : x + P] for y, x in at]) for one, at in pairs])


def plain_tokens(task, images, corners):
    """Encode each crop by timm's modules, without positions."""
    vit, crops = task.encoder, crops_by_loop(images, corners)
    tokens = torch.einsum("bncyx,dcyx->bnd", crops, vit.patch_embed.proj.weight) + vit.patch_embed.proj.bias
    if vit.cls_token is not None:
        tokens = torch.cat([vit.cls_token.expand(len(images), 1, -1), tokens], dim=1)
    for block in vit.blocks:
        tokens = block(tokens)
    return vit.norm(tokens)[:, vit.num_prefix_tokens :]


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
    d = plain_translations(other.questions["translations"].head, plain_tokens(other, images, corners), pairs[0])
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
    assert set(given.targets["pairs"][0].flatten().tolist()) == set(range(N))


def test_corners_are_uniform_and_a_constant_has_the_papers_floor():
    """Var Δx = (M² - 1) / (6 P²) for M places; of all pairs, one in n is a patch with itself."""
    task = make(pairs=N**2)
    given = task.given(torch.zeros(4000, 1, 1, 1).expand(-1, 3, *SIZE), seeded())
    corners = given.targets["corners"].numpy()
    for axis, places in enumerate((21, 29)):
        share = np.bincount(corners[..., axis].ravel(), minlength=places) / corners[..., axis].size
        assert abs(share - 1 / places).max() < 5 * (1 / places / corners[..., axis].size) ** 0.5
        apart = (corners[:, 1:, axis] - corners[:, :-1, axis]) / P
        floor = (places**2 - 1) / (6 * P**2)
        assert abs(apart.var() - floor) < 0.02 * floor
    floor = (1 - 1 / N) * (21**2 - 1 + 29**2 - 1) / 2 / (6 * P**2)
    images = torch.randn(400, 3, *SIZE)
    means = [task.measure(part, seeded(i)).baselines["no translation"] for i, part in enumerate(images.split(100))]
    values = torch.cat(means)
    assert abs(values.mean() - floor) < 4 * values.std() / len(values) ** 0.5


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
    rows = np.zeros((N * N, N))
    for i in range(N):
        for j in range(N):
            rows[i * N + j, j] += 1
            rows[i * N + j, i] -= 1
    fit = np.linalg.lstsq(rows, d[0].reshape(N * N, 2).double().numpy(), rcond=None)[0]  # least norm: centred
    centre = (encoded.given.targets["corners"][0].double().mean(0) / P).numpy()
    np.testing.assert_allclose(found[0].numpy(), fit + centre, atol=1e-4)


def test_pictures_show_the_image_where_patches_are_placed_right(monkeypatch):
    task, images = make(), torch.randn(2, 3, *SIZE)
    given = task.given(images, seeded())
    places = given.targets["corners"] / P
    monkeypatch.setattr(
        task.questions["translations"].head,
        "forward",
        lambda patches, pairs: places[:, pairs[:, 1]] - places[:, pairs[:, 0]],
    )
    (sheet,) = task.draw(images, seeded())
    assert list(sheet.columns) == ["image", "given", "true places", "predicted places"]
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


def test_context_and_all_pairs():
    task = make(context_mask_ratio=0.75, pairs=N**2)
    given = task.given(torch.randn(2, 3, *SIZE), seeded())
    assert given.context.shape == (2, N // 4) and len(given.targets["pairs"][0].unique(dim=0)) == N**2
    assert isinstance(task.questions["translations"].head.attention, nn.MultiheadAttention)
    assert make().given(torch.randn(2, 3, *SIZE), seeded()).context is None


@pytest.mark.parametrize(
    ("size", "pairs"),
    [((224, 224), 4802), ((32, 32), 2048), ((8, 8), 16)],  # ImageNet with patches of 16; CIFAR; four patches
)
def test_auto_pairs(size, pairs):
    assert small(PART, size=size, p=16 if size[0] == 224 else 4, positions="none").pairs == pairs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pairs": 0}, "pairs must be 1 to 2304"),
        ({"pairs": 2305}, "pairs must be 1 to 2304"),
        ({"head": "mlp"}, "head"),
        ({"context_mask_ratio": 1.0}, "leaves no patch as context"),
        ({"context_mask_ratio": -0.5}, "leaves no patch as context"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_encoders_with_positions_and_single_patches_are_refused():
    with pytest.raises(PatchloomError, match="part withholds every position"):
        small(PART, positions="sincos")
    with pytest.raises(PatchloomError, match="one patch has no pairs"):
        small(PART, size=(4, 4), positions="none")
