"""LUT on SimMIM beside a plain program of the same method; disjoint parts, weights and teacher on both bases."""

import math
from copy import deepcopy

import pytest
import torch
from golden import close
from torch import nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.tasks.lut import LUT

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def make(size=(32, 32), p=4, channels=3, encoder=None, **options):
    torch.manual_seed(0)
    task = LUT(build_encoder(EncoderSpec("nano", size, p, channels, options=SIZES | (encoder or {}))), **options)
    stir(task)
    return task


def stir(module):
    """Change all weights and running statistics, so that the teacher differs from the student and no bias is zero."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point() and "pos_embed" not in name:
                noise = torch.randn_like(value) * 0.05
                value.add_(noise.abs() if "running_var" in name else noise)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def plain_head(ours):
    """Build the same head from torch's modules."""
    d, hidden = ours[0].in_features, ours[0].out_features
    net = nn.Sequential(nn.Linear(d, hidden, False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, d, False))
    net.load_state_dict(ours.state_dict(), strict=True)
    return net


class PlainLUT(nn.Module):
    """LUT on SimMIM, written without patchloom's functions."""

    def __init__(self, task):
        super().__init__()
        asked = task.agreement
        self.encoder, self.mask_token = deepcopy(task.encoder), deepcopy(task.mask_token)
        self.pixels = nn.Linear(task.geometry.width, task.geometry.patch_dim)
        self.pixels.load_state_dict(task.questions["pixels"].decoder.state_dict(), strict=True)
        self.head, self.predictor = plain_head(asked.projection), plain_head(asked.prediction)
        self.teacher = deepcopy(asked.teacher.encoder).eval()
        self.teacher_head = plain_head(asked.teacher.projection).eval()

    def student(self, images, masked):
        """Return the tokens of all patches, and the prediction from the mean of the unmasked ones."""
        vit = self.encoder
        x = vit.patch_embed(images)
        w = masked[..., None].float()
        x = x * (1 - w) + self.mask_token * w
        if vit.cls_token is not None:
            x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = vit.norm(vit.blocks(x + vit.pos_embed))[:, vit.num_prefix_tokens :]
        mean = (x * (1 - w)).sum(1) / (1 - w).sum(1)
        return x, self.predictor(self.head(mean))

    def forward(self, one, two, masked_one, masked_two):
        (tokens, student_one), (_, student_two) = self.student(one, masked_one), self.student(two, masked_two)
        with torch.no_grad():
            skip = self.teacher.num_prefix_tokens
            targets = [self.teacher_head(self.teacher.forward_features(x)[:, skip:].mean(1)) for x in (one, two)]
        distances = [
            2 - 2 * (F.normalize(student, dim=-1) * F.normalize(target, dim=-1)).sum(-1)
            for student, target in ((student_one, targets[1]), (student_two, targets[0]))
        ]
        context = torch.cat(distances).mean()
        p, grid = self.encoder.patch_embed.patch_size[0], self.encoder.patch_embed.grid_size
        picture = F.pixel_shuffle(self.pixels(tokens).transpose(1, 2).unflatten(2, grid), p)
        wide = masked_one.unflatten(1, grid).repeat_interleave(p, 1).repeat_interleave(p, 2)[:, None].float()
        pixels = ((one - picture).abs() * wide).sum() / wide.sum() / one.shape[1]
        return pixels, context


def both_given(task, one, two):
    """Return the input of two views, one after the other, and the visible patches of each."""
    parts = task.random_parts(len(one), generator(), one.device)
    return task.given_parts(torch.cat([one, two]), torch.cat(parts)), parts


def without(visible, n):
    return torch.ones(len(visible), n, dtype=torch.bool).scatter(1, visible, False)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"encoder": {"class_token": False}, "pixel_weight": 3.0, "context_weight": 0.5},
        {"size": (24, 40), "channels": 1, "mask_ratio": 0.75},
    ],
)
def test_loss_and_gradients_on_simmim_are_those_of_a_plain_program(how):
    task = make(base="simmim", **how)
    other = PlainLUT(task)
    one, two = torch.randn(2, 16, task.geometry.channels, *task.augment.size)
    given, parts = both_given(task, one, two)
    ours = task(one, two, given=given)
    pixels, context = other(one, two, *(without(part, task.geometry.n) for part in parts))
    theirs = how.get("pixel_weight", 1.0) * pixels + how.get("context_weight", 0.25) * context
    close(ours.metrics["pixels_loss"], pixels.detach())
    close(ours.metrics["agreement_loss"], context.detach())
    close(ours.loss, theirs.detach())
    ours.loss.backward()
    theirs.backward()
    names = {
        "questions.pixels.decoder": "pixels",
        "questions.agreement.projection": "head",
        "questions.agreement.prediction": "predictor",
    }
    mine = {name: weight for name, weight in task.named_parameters() if weight.requires_grad}
    its = {
        name: weight for name, weight in other.named_parameters() if weight.requires_grad and weight.grad is not None
    }
    for name, weight in mine.items():
        for mine_is, its_is in names.items():
            name = name.replace(mine_is, its_is)
        close(weight.grad, its.pop(name).grad)
    assert not its
    heads = {"projection": other.head, "prediction": other.predictor}
    for name, head in heads.items():  # both views passed the batch norms, one after the other
        ours, theirs = getattr(task.agreement, name)[1], head[1]
        close(ours.running_mean, theirs.running_mean)
        close(ours.running_var, theirs.running_var)
        assert ours.num_batches_tracked == theirs.num_batches_tracked == 2
    assert task.agreement.teacher.projection[1].num_batches_tracked == 0


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


@pytest.mark.parametrize("base", ["mae", "simmim"])
def test_each_direction_compares_across_views(base):
    """If the student predicts the teacher's output for the other view, the output for the same view is irrelevant."""
    task = make(base=base, mask_ratio=0.5, pixel_weight=0.0)
    one, two = torch.randn(2, 4, 3, 32, 32)
    given, _ = both_given(task, one, two)
    students = task.guesses(task.encode(torch.cat([one, two]), given))
    task.agreement.target = lambda encoder, images: torch.cat([students[1], students[0]]).detach()
    assert task(one, two, given=given).loss.abs() < 1e-6
    task.agreement.target = lambda encoder, images: torch.cat(students).detach()
    assert task(one, two, given=given).loss > 1e-3


@pytest.mark.parametrize("base", ["mae", "simmim"])
def test_agreement_alone_has_no_decoder(base):
    task = make(base=base, pixel_weight=0.0)
    assert task.questions.keys() == {"agreement"} and not any("decoder" in name for name in task.state_dict())
    outcome = task(*torch.randn(2, 4, 3, 32, 32), generator=generator())
    outcome.loss.backward()
    assert outcome.metrics == {}
    trained = [weight for weight in task.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in trained)


@pytest.mark.parametrize("base", ["mae", "simmim"])
@pytest.mark.parametrize(("progress", "expected"), [(0.0, 0.9), (0.5, 0.95), (1.0, 1.0)])
def test_the_teacher_follows_with_the_cosine_momentum(base, progress, expected):
    task = make(base=base, momentum=0.9)
    teacher, parts = task.agreement.teacher, {"encoder": task.encoder, "projection": task.agreement.projection}
    before = deepcopy(teacher.state_dict())
    task.after_step(progress)
    assert math.isclose(1 - 0.1 * (1 + math.cos(math.pi * progress)) / 2, expected)
    moved = 0
    for home, part in parts.items():
        for name, source in part.state_dict().items():
            old, new = before[f"{home}.{name}"], teacher.state_dict()[f"{home}.{name}"]
            if source.is_floating_point():
                torch.testing.assert_close(new, expected * old + (1 - expected) * source, rtol=1e-5, atol=1e-6)
                moved += not torch.equal(old, new)
    assert (moved > 0) == (progress < 1)
    assert not any(weight.requires_grad for weight in teacher.parameters())


def test_the_teacher_sees_whole_views():
    task = make().eval()
    images = torch.randn(2, 3, 32, 32)
    teacher = task.agreement.teacher
    vit = teacher.encoder
    expected = teacher.projection(vit.forward_features(images)[:, vit.num_prefix_tokens :].mean(1))
    torch.testing.assert_close(task.agreement.target(task.encoder, images), expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_ratio": 0.4}, "leaves 38 of 64 mask units visible.*: raise --task.mask"),
        ({"base": "simmim", "mask_ratio": 0.4}, "leaves 9 of 16 mask units visible"),
        ({"mask_ratio": 0.0}, "leaves 64 of 64 mask units visible"),
        ({"base": "simmim", "mask_ratio": 0.97}, "leaves 0 of 16 mask units visible.*lower --task.mask_ratio"),
        ({"mask_ratio": 1.0}, "mask ratio of 1.0 leaves 0 of 64 patches visible"),
        ({"context_weight": 0.0}, "lut needs agreement: give --task.context_weight above 0"),
        ({"pixel_weight": -1.0}, "no negative weight"),
        ({"momentum": 1.1}, "momentum must lie in"),
        ({"base": "beit"}, "--task.base cannot be beit: it takes mae or simmim"),
        ({"base": "simmim", "mask_unit": 6}, "mask units of 6 pixels do not fit"),
        ({"p": 1, "size": (8, 8), "channels": 1}, "patches of one pixel"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(PatchloomError, match=said):
        make(**options)


def test_a_single_image_has_no_batch_statistics():
    with pytest.raises(ValueError, match="2 or more images"):
        make()(*torch.randn(2, 1, 3, 32, 32))


def test_the_input_covers_both_views():
    task, (one, two) = make(), torch.randn(2, 4, 3, 32, 32)
    with pytest.raises(ValueError, match="4 rows for 8 images in two views"):
        task(one, two, given=task.given(one, generator()))
