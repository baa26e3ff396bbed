"""MP3's inputs and questions: positions, keys and values; the place of every patch."""

from dataclasses import replace

import pytest
import torch
from small import indices_of
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.encode import encode
from patchloom.patches.partition import complement, random_partition
from patchloom.patches.pictures import put_together
from patchloom.patches.tokens import grid_of, patchify, scatter_tokens, unpatchify
from patchloom.questions.positions import PositionPrediction
from patchloom.tasks import mp3
from patchloom.tasks.mp3 import MP3
from patchloom.withhold.encoder_input import all_patches

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
P, N = (4, 4), 16


def make(size=(16, 16), p=4, positions="none", class_token=False, reg_tokens=0, **options):
    torch.manual_seed(0)
    tokens = {"class_token": class_token, "reg_tokens": reg_tokens}
    task = MP3(build_encoder(EncoderSpec("nano", size, p, positions=positions, options=SIZES | tokens)), **options)
    with torch.no_grad():  # zero biases would hide errors
        for weight in task.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return task.eval()


def drawn(task, images, seed=0, **ratios):
    return task.given(images, torch.Generator().manual_seed(seed), **ratios)


def answer(task, images, given):
    """Return the logits [b n n] for images with the same parts withheld as in ``given``."""
    return task.questions["positions"].predict(task.encode(images, replace(given, images=images))).logits


def barred(given):
    """Return the patches [b n-m] that are neither keys nor values."""
    return complement(given.context, N)


def repainted(images, patches, value):
    """Paint over the given patches [b m] of images."""
    cut = patchify(images, P)
    paint = torch.full((*patches.shape, cut.shape[-1]), float(value))
    return unpatchify(scatter_tokens(paint, patches, cut), P, grid_of(images, P))


@pytest.mark.parametrize("class_token", [False, True])
def test_without_barred_patches_attention_is_full(class_token):
    task, images = make(context_mask_ratio=0.0, class_token=class_token), torch.randn(2, 3, 16, 16)
    given = drawn(task, images)
    assert given.context is None and torch.equal(given.visible, torch.arange(N).expand(2, -1))
    head = task.questions["positions"].decoder
    tokens = encode(task.encoder, all_patches(images, N))[:, int(class_token) :]
    full = F.linear(tokens, head.weight, head.bias)
    torch.testing.assert_close(answer(task, images, given), full)
    loss = F.cross_entropy(full.flatten(0, 1), torch.arange(N).repeat(2))
    torch.testing.assert_close(task(images, given=given).loss, loss)


@pytest.mark.parametrize("value", [3.0, float("nan")])
@pytest.mark.parametrize("tokens", [{}, {"class_token": True}, {"class_token": True, "reg_tokens": 2}])
def test_a_barred_patch_changes_only_its_own_prediction(tokens, value):
    """Even nan stays in a barred patch; with computed and masked keys and values it would spread."""
    task, images = make(context_mask_ratio=0.75, **tokens), torch.randn(2, 3, 16, 16)
    given = drawn(task, images)
    some = barred(given)[:, :2]
    before, after = (answer(task, x, given) for x in (images, repainted(images, some, value)))
    changed = (before != after).any(-1)
    expected = torch.zeros(2, N, dtype=torch.bool).scatter(1, some, True)
    assert torch.equal(changed, expected)
    seen = answer(task, repainted(images, given.context[:, :1], value), given)
    assert (before != seen).any(-1).all()  # while all patches attend to the context


@pytest.mark.parametrize("tokens", [{}, {"class_token": True, "reg_tokens": 1}])
def test_keys_and_values_of_barred_patches_are_never_computed(tokens, monkeypatch):
    task, images, rows = make(context_mask_ratio=0.75, **tokens), torch.randn(3, 3, 16, 16), {}
    real, d = F.linear, 32

    def counted(x, weight, bias=None):
        rows.setdefault(tuple(weight.shape), []).append(x.shape[:-1].numel())
        return real(x, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    answer(task, images, drawn(task, images))
    prefix = task.geometry.prefix
    assert rows[2 * d, d] == [3 * (prefix + 4)] * 2  # keys and values: once a block, of prefix and context
    assert rows[d, d].count(3 * (prefix + N)) == 4  # queries and outputs: all patches
    assert (3 * d, d) not in rows


@pytest.mark.parametrize("ratio", [0.0, 0.75])
def test_moving_the_patches_moves_the_predictions(ratio):
    """Without positions an encoder sees a set."""
    task, images = make(context_mask_ratio=ratio), torch.randn(2, 3, 16, 16)
    order = torch.randperm(N)
    moved = unpatchify(patchify(images, P)[:, order], P, (4, 4))
    given = drawn(task, images)
    same = replace(given, context=order.argsort()[given.context]) if ratio else given
    before = answer(task, images, given)[:, order]
    torch.testing.assert_close(answer(task, moved, same), before, rtol=1e-4, atol=1e-5)
    if ratio:  # checks the test: another context gives other predictions
        assert not torch.allclose(answer(task, moved, given), before, atol=1e-3)


def test_known_positions_are_kept_and_not_predicted():
    task = make(positions="sincos", known_positions=0.25, context_mask_ratio=0.5)
    images = torch.randn(2, 3, 16, 16)
    given = drawn(task, images)
    assert task.known == 4 and given.dropped.sum(1).tolist() == [12, 12] and given.visible.shape == (2, N)
    assert len(given.dropped.unique(dim=0)) == 2  # drawn for each image

    logits = answer(task, images, given)
    each = [F.cross_entropy(logits[i, j][None], j[None]) for i in range(2) for j in indices_of(given.dropped)[i]]
    torch.testing.assert_close(task(images, given=given).loss, torch.stack(each).mean())
    right = (logits.argmax(-1) == torch.arange(N)).float()
    measured = task.measure(images, torch.Generator().manual_seed(0))
    torch.testing.assert_close(measured.values, right.gather(1, indices_of(given.dropped)).mean(1))
    assert measured.baselines["chance"].tolist() == pytest.approx([1 / 12] * 2)


def test_patches_without_position_can_swap_places_and_known_ones_cannot():
    task = make(positions="sincos", known_positions=0.25, context_mask_ratio=0.0)
    images = torch.randn(1, 3, 16, 16)
    given = drawn(task, images)
    before = answer(task, images, given)
    for those, exchanged in ((given.dropped, True), (~given.dropped, False)):
        pair, order = indices_of(those)[0, :2], torch.arange(N)
        order[pair] = pair.flip(0)
        after = answer(task, unpatchify(patchify(images, P)[:, order], P, (4, 4)), given)
        assert torch.allclose(after, before[:, order], rtol=1e-4, atol=1e-5) == exchanged


@pytest.mark.parametrize("known", [0.0, 0.25])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_accuracies_against_a_loop(known, ratio):
    task = make(positions="sincos" if known else "none", known_positions=known, context_mask_ratio=ratio)
    images = torch.randn(5, 3, 16, 16)
    given = drawn(task, images)
    truth = F.one_hot(torch.arange(N), N).float()
    logits = torch.randn(5, N, N, generator=torch.Generator().manual_seed(1)) + 2 * truth
    found = accuracies(task, logits, given)
    kinds = {"context": given.context, "other": barred(given)} if ratio else {"context": given.visible}
    assert found.keys() == {f"{kind}_{top}" for kind in kinds for top in ("top1", "top5")}
    for kind, those in kinds.items():
        for k in (1, 5):
            for i in range(5):
                asked = set(those[i].tolist()) & set(indices_of(given.dropped)[i].tolist())
                hits = [j in logits[i, j].argsort(descending=True)[:k].tolist() for j in asked]
                assert found[f"{kind}_top{k}"][i].item() == pytest.approx(sum(hits) / len(hits)), (kind, k)
    metrics = task(images, given=given).metrics
    assert metrics.keys() == {f"{name}_accuracy" for name in found}


def accuracies(task, logits, given):
    """Return the accuracies of given ``logits`` [b n n]."""
    return task.questions["positions"].accuracies(PositionPrediction(given.visible, given.dropped, logits), given)


def test_small_grids_have_fewer_than_five_to_choose_from():
    task = make(size=(8, 8), context_mask_ratio=0.5)
    given = drawn(task, torch.randn(2, 3, 8, 8))
    assert accuracies(task, torch.randn(2, 4, 4), given)["context_top5"].tolist() == [1, 1]


def test_two_images_are_mixed_and_each_set_is_rebuilt_separately():
    """Each patch of a set stands where it is placed with only that set's context (Figs. 14-15)."""
    task, images = make(context_mask_ratio=0.5), torch.randn(2, 3, 16, 16)
    columns = task.draw(images, torch.Generator().manual_seed(0))[2].columns
    assert list(columns) == ["image", "another", "first set", "first rebuilt", "second set", "second rebuilt"]
    assert torch.equal(columns["another"], images.flip(0))
    generator, everywhere = torch.Generator().manual_seed(0), torch.arange(N).expand(2, N)
    task.given(images, generator)
    random_partition(2, N, (N,), generator)  # from the puzzle on the first sheet
    for _ in mp3.RATIOS_DRAWN:
        task.given(images, generator)
    random_partition(2, N, (N,), generator)  # from the puzzle on the second
    random_partition(2, 2 * N, (N, N), generator)  # from the two sets
    for name in ("first", "second"):
        mixed = columns[f"{name} set"]
        given = task.given(mixed, generator)
        assert given.context.shape == (2, N // 2)
        placed = PositionPrediction(given.visible, given.dropped, answer(task, mixed, given)).assigned()
        rebuilt = put_together(mixed, P, everywhere, placed)
        torch.testing.assert_close(columns[f"{name} rebuilt"], rebuilt, equal_nan=True)


def test_pictures_put_patches_where_they_were_placed_and_leave_known_ones(monkeypatch):
    task, images = make(positions="sincos", known_positions=0.25), torch.randn(2, 3, 16, 16)
    everywhere_first = torch.zeros(2, N, N).index_fill(2, torch.tensor([0]), 1.0)
    monkeypatch.setattr(task.questions["positions"].decoder, "forward", lambda tokens: everywhere_first)
    _, sheet = task.draw(images, torch.Generator().manual_seed(0))  # with known positions, no images are mixed
    assert list(sheet.columns) == ["original", "given", "η = 0.0", "η = 0.25", "η = 0.5", "η = 0.75"]
    for name, column in sheet.columns.items():
        if name.startswith("η"):
            shown = patchify(column, P)
            assert ((shown == patchify(images, P)).all(-1).sum(1) >= 4).all()  # those whose place is known
            assert torch.equal(shown.flatten(1).sort(1).values, patchify(images, P).flatten(1).sort(1).values)
    assert [sheet.name for sheet in make().draw(images, torch.Generator())] == ["rebuilt", "ratios", "mixed"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"positions": "sincos"}, "mp3 withholds every position, so the encoder must have none"),
        ({"positions": "learned", "known_positions": 0.01}, "mp3 withholds every position"),  # a fraction of no patches
        ({"known_positions": 0.25}, "known positions need an encoder that has them: use --positions sincos"),
        ({"context_mask_ratio": 1.0}, "context_mask_ratio 1.0 leaves no patch as context"),
        ({"context_mask_ratio": 0.95}, "context_mask_ratio 0.95 leaves no patch as context"),
        ({"context_mask_ratio": -0.1}, "leaves no patch as context"),
        ({"positions": "sincos", "known_positions": 1.0}, "known_positions must lie in .0, 1., not 1.0"),
        ({"size": (4, 4)}, "an image of one patch has no position to predict"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


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
    assert task.context_mask_ratio == ratio
    ((value, why),) = task.chosen.values()
    assert value == ratio and ("Tiny ImageNet" in why) == (ratio == 0.8) and ("CIFAR-100" in why) == (ratio == 0.5)


def test_encoder_defaults():
    large = make(size=(40, 40))
    assert drawn(large, torch.randn(2, 3, 40, 40)).context.shape == (2, 25)
    assert MP3.encoder_defaults({"known_positions": 0.0}).keys() == {"positions", "class_token"}
    assert MP3.encoder_defaults({"known_positions": 0.05}).keys() == {"class_token"}
