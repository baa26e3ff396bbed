"""Jigsaw: the loss against a plain computation, what enters the encoder, its measure, pictures and refusals."""

from copy import deepcopy

import pytest
import torch
from small import same_loss_and_gradients, seeded, small

from patchloom.errors import PatchloomError
from patchloom.patches.tokens import gather_tokens, patchify, unpatchify
from patchloom.tasks.jigsaw import Jigsaw

N = 64


def make(class_token=False, **options):
    return small(Jigsaw, positions="none", encoder={"class_token": class_token}, **options).eval()


def plain_logits(task, images, visible):
    """Compute logits [b k n] of patches ``visible`` [b k] by timm's modules, tokens chosen after the embedding."""
    vit, (first, _, second, _, third) = task.encoder, task.questions["positions"].decoder
    tokens = torch.stack([one[which] for one, which in zip(vit.patch_embed(images), visible, strict=True)])
    if vit.cls_token is not None:
        tokens = torch.cat([vit.cls_token.expand(len(images), 1, -1), tokens], dim=1)
    for block in vit.blocks:
        tokens = block(tokens)
    x = vit.norm(tokens)[:, vit.num_prefix_tokens :]
    for layer in (first, second):
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    return x @ third.weight.T + third.bias


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.75])
def test_loss_and_gradients_are_those_of_a_plain_computation(ratio, class_token):
    task, images = make(class_token, mask_ratio=ratio), torch.randn(3, 3, 32, 32)
    other = deepcopy(task)
    given = task.given(images, seeded())
    assert given.visible.shape == (3, round(N * (1 - ratio))) and given.dropped.all() and given.context is None
    logits = plain_logits(other, images, given.visible)
    own = logits.gather(2, given.visible[..., None])[..., 0]
    by_hand = (logits.exp().sum(-1).log() - own).mean()
    same_loss_and_gradients(task, task(images, given=given).loss, other, by_hand)

    right = (logits.argmax(-1) == given.visible).float().mean(1)
    found = task.measure(images, seeded())
    torch.testing.assert_close(found.values, right)
    assert found.baselines["chance"].tolist() == pytest.approx([1 / N] * 3) and found.to_beat == "chance"


def test_patches_move_and_predictions_with_them():
    """Nothing but content enters: a puzzle of the patches has the same predictions, patch by patch."""
    task, images, order = make(mask_ratio=0.0), torch.randn(2, 3, 32, 32), torch.randperm(N, generator=seeded())
    puzzle = unpatchify(patchify(images, (4, 4))[:, order], (4, 4), (8, 8))
    everything = torch.arange(N).expand(2, N)
    answers = {}
    for name, shown in {"image": images, "puzzle": puzzle}.items():
        given = task.given(shown, seeded())
        logits = task.questions["positions"].predict(task.encode(shown, given)).logits
        answers[name] = gather_tokens(logits, given.visible.argsort(1))  # by place in the picture
        assert torch.equal(given.visible.sort(1).values, everything)
    torch.testing.assert_close(answers["puzzle"], answers["image"][:, order], rtol=1e-4, atol=1e-5)


def test_removed_patches_have_no_effect_and_all_others_are_keys_and_values():
    task, images = make(mask_ratio=0.5), torch.randn(2, 3, 32, 32)
    given = task.given(images, seeded())
    predict = task.questions["positions"].predict

    def logits(which):
        changed = patchify(images, (4, 4)).scatter(1, which[..., None].expand(-1, -1, 48), 3.0)
        shown = unpatchify(changed, (4, 4), (8, 8))
        return predict(task.encode(shown, task.given(shown, seeded()))).logits

    before = predict(task.encode(images, given)).logits
    assert torch.equal(logits(given.masked), before)
    assert (logits(given.visible[:, :1]) != before).any(-1).all()


def test_pictures_are_those_of_figure_3_and_every_place_is_withheld(monkeypatch):
    task, images = make(), torch.randn(2, 3, 32, 32)
    trained, marked, ratios = task.draw(images, seeded())
    assert [trained.name, marked.name, ratios.name] == ["rebuilt", "positions", "ratios"]
    assert "32 of 32" in trained.caption and "32 of 64 patches are removed" in trained.caption
    assert "64 of 64" in marked.caption
    assert list(ratios.columns) == ["original", "given", "γ = 0.0", "γ = 0.25", "γ = 0.5", "γ = 0.75"]
    first = torch.zeros(N).index_fill(0, torch.tensor([0]), 1.0)
    monkeypatch.setattr(
        task.questions["positions"].decoder, "forward", lambda tokens: first.expand(2, tokens.shape[1], N)
    )
    everything = patchify(task.draw(images, seeded())[2].columns["γ = 0.0"], (4, 4))
    # all patches want one place, and each gets one of its own
    assert torch.equal(everything.flatten(1).sort(1).values, patchify(images, (4, 4)).flatten(1).sort(1).values)


def test_encoders_with_positions_and_single_patches_are_refused():
    with pytest.raises(PatchloomError, match="jigsaw withholds every position.* use --positions none$"):
        small(Jigsaw, positions="sincos")
    with pytest.raises(PatchloomError, match="leaves 1 of 64 patches"):
        make(mask_ratio=0.98)
    assert Jigsaw.encoder_defaults({"mask_ratio": 0.5})["positions"][0] == "none"
