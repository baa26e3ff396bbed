"""MP3's inputs and questions: positions, keys and values; the place of every patch."""

from dataclasses import replace

import pytest
import torch
from small import indices_of, seeded, small
from torch.nn import functional as F

from patchloom.patches.partition import complement, random_partition
from patchloom.patches.pictures import put_together
from patchloom.patches.tokens import grid_of, patchify, scatter_tokens, unpatchify
from patchloom.questions.positions import PositionPrediction
from patchloom.tasks import mp3
from patchloom.tasks.mp3 import MP3

P, N = (4, 4), 16


def make(size=(16, 16), p=4, positions="none", class_token=False, reg_tokens=0, **options):
    encoder = {"class_token": class_token, "reg_tokens": reg_tokens}
    return small(MP3, size, p, positions=positions, encoder=encoder, **options).eval()


def answer(task, images, given):
    """Return the logits [b n n] for images with the same parts withheld as in ``given``."""
    return task.questions["positions"].predict(task.encode(images, replace(given, images=images))).logits


def barred(given):
    """Return the patches [b n-m] that are neither keys nor values."""
    return complement(given.context, N)


def repainted(images, patches):
    """Paint the given patches [b m] of images with nan."""
    paint = torch.full((*patches.shape, 48), torch.nan)
    return unpatchify(scatter_tokens(paint, patches, patchify(images, P)), P, grid_of(images, P))


@pytest.mark.parametrize("class_token", [False, True])
def test_without_barred_patches_attention_is_full(class_token):
    task, images = make(context_mask_ratio=0.0, class_token=class_token), torch.randn(2, 3, 16, 16)
    given, head = task.given(images, seeded()), task.questions["positions"].decoder
    assert given.context is None
    full = F.linear(task.encoder.forward_features(images)[:, int(class_token) :], head.weight, head.bias)
    torch.testing.assert_close(answer(task, images, given), full)
    loss = F.cross_entropy(full.flatten(0, 1), torch.arange(N).repeat(2))
    torch.testing.assert_close(task(images, given=given).loss, loss)


@pytest.mark.parametrize("tokens", [{}, {"class_token": True}, {"class_token": True, "reg_tokens": 2}])
def test_a_barred_patch_changes_only_its_own_prediction(tokens):
    """Even nan stays in a barred patch; with computed and masked keys and values it would spread."""
    task, images = make(context_mask_ratio=0.75, **tokens), torch.randn(2, 3, 16, 16)
    given = task.given(images, seeded())
    some = barred(given)[:, :2]
    before, after = (answer(task, x, given) for x in (images, repainted(images, some)))
    changed = (before != after).any(-1)
    expected = torch.zeros(2, N, dtype=torch.bool).scatter(1, some, True)
    assert torch.equal(changed, expected)
    seen = answer(task, repainted(images, given.context[:, :1]), given)
    assert (before != seen).any(-1).all()  # while all patches attend to the context


def test_known_positions_are_kept_and_not_predicted():
    task = make(positions="sincos", known_positions=0.25, context_mask_ratio=0.5)
    images = torch.randn(2, 3, 16, 16)
    given = task.given(images, seeded())
    assert task.known == 4 and given.dropped.sum(1).tolist() == [12, 12] and given.visible.shape == (2, N)
    assert len(given.dropped.unique(dim=0)) == 2  # drawn for each image

    logits = answer(task, images, given)
    each = [F.cross_entropy(logits[i, j][None], j[None]) for i in range(2) for j in indices_of(given.dropped)[i]]
    torch.testing.assert_close(task(images, given=given).loss, torch.stack(each).mean())
    right = (logits.argmax(-1) == torch.arange(N)).float()
    measured = task.measure(images, seeded())
    torch.testing.assert_close(measured.values, right.gather(1, indices_of(given.dropped)).mean(1))
    assert measured.baselines["chance"].tolist() == pytest.approx([1 / 12] * 2)


@pytest.mark.parametrize("known", [0.0, 0.25])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_accuracies_against_a_loop(known, ratio):
    task = make(positions="sincos" if known else "none", known_positions=known, context_mask_ratio=ratio)
    images = torch.randn(5, 3, 16, 16)
    given = task.given(images, seeded())
    truth = F.one_hot(torch.arange(N), N).float()
    logits = torch.randn(5, N, N, generator=seeded(1)) + 2 * truth
    question = task.questions["positions"]
    found = question.accuracies(PositionPrediction(given.visible, given.dropped, logits), given)
    kinds = {"context": given.context, "other": barred(given)} if ratio else {"context": given.visible}
    assert found.keys() == {f"{kind}_{top}" for kind in kinds for top in ("top1", "top5")}
    for kind, those in kinds.items():
        for k in (1, 5):
            for i in range(5):
                asked = set(those[i].tolist()) & set(indices_of(given.dropped)[i].tolist())
                hits = [j in logits[i, j].argsort(descending=True)[:k].tolist() for j in asked]
                assert found[f"{kind}_top{k}"][i].item() == pytest.approx(sum(hits) / len(hits)), (kind, k)
    assert task(images, given=given).metrics.keys() == {f"{name}_accuracy" for name in found}
    few = make(size=(8, 8), context_mask_ratio=0.5)  # fewer than five to choose from
    assert few(images[..., :8, :8], generator=seeded()).metrics["context_top5_accuracy"] == 1


def test_two_images_are_mixed_and_each_set_is_rebuilt_with_its_own_context():
    """Each patch of a set stands where it is placed with only that set's context (Figs. 14-15)."""
    task, images, generator = make(context_mask_ratio=0.5), torch.randn(2, 3, 16, 16), seeded()
    columns = task.draw(images, seeded())[2].columns
    assert torch.equal(columns["another"], images.flip(0))
    for _ in range(1 + len(mp3.RATIOS_DRAWN)):  # draws of the first two sheets, each with a puzzle
        task.given(images, generator)
    for sizes in ((N,), (N,), (N, N)):
        random_partition(2, sum(sizes), sizes, generator)
    for name in ("first", "second"):
        mixed = columns[f"{name} set"]
        given = task.given(mixed, generator)
        placed = PositionPrediction(given.visible, given.dropped, answer(task, mixed, given)).assigned()
        rebuilt = put_together(mixed, P, torch.arange(N).expand(2, N), placed)
        torch.testing.assert_close(columns[f"{name} rebuilt"], rebuilt, equal_nan=True)


def test_pictures_put_patches_where_they_were_placed_and_leave_known_ones(monkeypatch):
    task, images = make(positions="sincos", known_positions=0.25), torch.randn(2, 3, 16, 16)
    everywhere_first = torch.zeros(2, N, N).index_fill(2, torch.tensor([0]), 1.0)
    monkeypatch.setattr(task.questions["positions"].decoder, "forward", lambda tokens: everywhere_first)
    _, sheet = task.draw(images, seeded())  # with known positions, no images are mixed
    assert list(sheet.columns) == ["original", "given", "η = 0.0", "η = 0.25", "η = 0.5", "η = 0.75"]
    for column in list(sheet.columns.values())[2:]:
        shown = patchify(column, P)
        assert ((shown == patchify(images, P)).all(-1).sum(1) >= 4).all()  # those whose place is known
        assert torch.equal(shown.flatten(1).sort(1).values, patchify(images, P).flatten(1).sort(1).values)


@pytest.mark.parametrize(
    ("size", "p", "ratio"),
    [
        (16, 4, 0.5),
        (32, 4, 0.5),  # CIFAR-100
        (32, 8, 0.5),  # 16 patches; a fifth of them would be no context
        (64, 8, 0.8),  # Tiny ImageNet, with as many patches as CIFAR-100
        (56, 8, 0.5),
        (64, 4, 0.75),
        (96, 8, 0.75),
        (160, 16, 0.75),
    ],
)
def test_auto_is_the_papers_ratio_for_the_grid(size, p, ratio):
    task = make(size=(size, size), p=p)
    assert task.context_mask_ratio == ratio == task.chosen["context_mask_ratio"][0]
    given = task.given(torch.randn(2, 3, size, size), seeded())
    assert given.context.shape == (2, int(task.geometry.n * (1 - ratio) + 1e-6))
    assert MP3.encoder_defaults({"known_positions": 0.0}).keys() == {"positions", "class_token"}
    assert MP3.encoder_defaults({"known_positions": 0.05}).keys() == {"class_token"}
