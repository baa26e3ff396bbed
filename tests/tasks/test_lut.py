"""LUT: the loss written out on both bases, and disjoint parts of the two views."""

import pytest
import torch
from golden import close
from small import pixel_targets, seeded, small
from torch.nn import functional as F

from patchloom.patches.partition import complement
from patchloom.patches.tokens import gather_tokens
from patchloom.tasks.lut import LUT


def make(**options):
    task = small(LUT, **options)
    stir(task)
    return task


def stir(module):
    """Change all weights and running statistics, so that the teacher differs from the student and no bias is zero."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point() and "pos_embed" not in name:
                noise = torch.randn_like(value) * 0.05
                value.add_(noise.abs() if "running_var" in name else noise)


def both_given(task, one, two):
    """Return the input of two views, one after the other, and the visible patches of each."""
    parts = task.random_parts(len(one), seeded(), one.device)
    return task.given_parts(torch.cat([one, two]), torch.cat(parts)), parts


@pytest.mark.parametrize("how", [{}, {"encoder": {"class_token": False}, "pixel_weight": 3.0, "context_weight": 0.5}])
def test_the_loss_on_simmim_written_out(how):
    """Each view's unmasked tokens agree with the teacher's output for the other; pixels are those of the first."""
    task = make(base="simmim", size=(24, 40), mask_ratio=0.75, **how)
    question, pixels, prefix = task.agreement, task.questions["pixels"], task.geometry.prefix
    views = torch.randn(2, 16, 3, 24, 40)
    given, parts = both_given(task, *views)
    found = task(*views, given=given)
    assert [head[1].num_batches_tracked.item() for head in (question.projection, question.prediction)] == [2, 2]
    assert question.teacher.projection[1].num_batches_tracked == 0
    guesses, targets, teacher = [], [], question.teacher
    tokens = task.encode(torch.cat([*views]), given).tokens.chunk(2)
    for view, own, visible in zip(views, tokens, parts, strict=True):
        seen = gather_tokens(own[:, prefix:], visible)
        guesses.append(question.prediction(question.projection(seen.mean(1))))
        targets.append(teacher.projection(teacher.encoder.forward_features(view)[:, prefix:].mean(1)))
    cosines = [F.cosine_similarity(one, two, dim=-1) for one, two in zip(guesses, reversed(targets), strict=True)]
    agreement = (2 - 2 * torch.cat(cosines)).mean()
    close(found.metrics["agreement_loss"], agreement.detach())
    hidden = complement(parts[0], task.geometry.n)
    target, head = gather_tokens(pixel_targets(views[0], 4, False), hidden), pixels.decoder
    answers = F.linear(gather_tokens(tokens[0][:, prefix:], hidden), head.weight, head.bias)
    error = (answers - target).abs().mean()
    close(found.metrics["pixels_loss"], error.detach())
    weights = how.get("pixel_weight", 1.0), how.get("context_weight", 0.25)
    close(found.loss, (weights[0] * error + weights[1] * agreement).detach())


@pytest.mark.parametrize(
    ("base", "ratio", "visible"),
    [("mae", "auto", 16), ("mae", 0.5, 32), ("simmim", "auto", 24), ("simmim", 0.75, 16), ("simmim", 0.5, 32)],
)
def test_the_two_views_show_different_patches(base, ratio, visible):
    task = make(base=base, mask_ratio=ratio)
    given, (one, two) = both_given(task, *torch.randn(2, 30, 3, 32, 32))
    assert one.shape == two.shape == (30, visible)
    for mine, other in zip(one.tolist(), two.tolist(), strict=True):
        assert len(set(mine)) == len(set(other)) == visible and set(mine).isdisjoint(other)
    assert len(one.sort(dim=1).values.unique(dim=0)) > 25
    shown = zip(given.visible.chunk(2), given.has_content().chunk(2), (one, two), strict=True)
    for entering, content, visible in shown:
        assert torch.equal(entering[content].view(30, -1).sort(dim=1).values, visible.sort(dim=1).values)
    if base == "simmim":  # whole units
        units = one // 8 // 2 * 4 + one % 8 // 2
        assert all((units[i].bincount(minlength=16) % 4 == 0).all() for i in range(30))


def test_a_single_image_has_no_batch_statistics():
    with pytest.raises(ValueError, match="2 or more images"):
        make()(*torch.randn(2, 1, 3, 32, 32))


def test_the_input_covers_both_views():
    task, (one, two) = make(), torch.randn(2, 4, 3, 32, 32)
    with pytest.raises(ValueError, match="4 rows for 8 images in two views"):
        task(one, two, given=task.given(one, seeded()))
