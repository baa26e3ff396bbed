"""Agreement: the losses written out, the teacher's schedule, and the measure."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from sweep import build, views_of

from patchloom.nets.teacher import use_half_without_grad
from patchloom.questions.agreement import (
    AgreementLoss,
    agreement_with_others,
    byol_loss,
    cosine,
    gaussian_agreement,
    info_nce,
    momentum_at,
    nearest_by_cosine,
    sigreg,
    visreg,
)
from patchloom.questions.identity import same_image_found
from patchloom.withhold.encoder_input import all_patches


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def cos(one, two):
    return (one @ two / (one.norm() * two.norm())).item()


def test_byol_loss_is_the_squared_distance_of_directions():
    student, teacher = seeded(3, 5, 8), seeded(5, 8)  # 3 masks, one teacher
    expected = [2 - 2 * cos(student[v, b], teacher[b]) for v in range(3) for b in range(5)]
    assert byol_loss(student, teacher).item() == pytest.approx(sum(expected) / 15, rel=1e-5)
    unit = student[0] / student[0].norm(dim=1, keepdim=True) - teacher / teacher.norm(dim=1, keepdim=True)
    assert byol_loss(student[0], teacher).item() == pytest.approx(unit.square().sum(1).mean().item(), rel=1e-5)
    assert byol_loss(teacher * 3, teacher).item() == pytest.approx(0, abs=1e-6)
    assert byol_loss(-teacher, teacher).item() == pytest.approx(4)


def test_agreement_is_measured_in_float32():
    student, teacher = seeded(5, 8).bfloat16(), seeded(6, 8)[:5].bfloat16()
    for loss in (byol_loss(student, teacher), info_nce(student[None], teacher, 0.2)):
        assert loss.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert cosine(student, teacher).dtype == torch.float32


def test_features_that_are_alike_are_measured_in_float32():
    """bfloat16 has few cosines near 1, and equal ones count as not found."""
    common, own = seeded(1, 64), 0.05 * seeded(40, 64)
    one, two = common + own, common + own + 0.02 * torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    exact = same_image_found(one, two), agreement_with_others(one, two)
    assert exact[0].mean() > 0.9
    with torch.autocast("cpu", torch.bfloat16):
        for found, expected in zip((same_image_found(one, two), agreement_with_others(one, two)), exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_info_nce_written_out(temperature):
    student, teacher = seeded(3, 5, 8), seeded(5, 8)
    expected = 0.0
    for mask in student:
        for i in range(5):
            alike = [math.exp(cos(mask[i], teacher[j]) / temperature) for j in range(5)]
            expected -= math.log(alike[i] / sum(alike))
    found = info_nce(student, teacher, temperature).item()
    assert found == pytest.approx(2 * temperature * expected / 15, rel=1e-5)


def test_info_nce_knows_its_own_teacher_and_trains_the_student_alone():
    student, teacher = seeded(2, 5, 8).requires_grad_(), seeded(5, 8).requires_grad_()
    info_nce(student, teacher, 0.2).backward()
    assert teacher.grad is None and student.grad.abs().sum() > 0
    right, wrong = (info_nce(one[None], teacher, 0.1) for one in (teacher, teacher.roll(1, 0)))
    assert right < 0.1 < wrong


def epps_pulley(y):
    """Return LeJEPA's statistic of numbers y [b], with NumPy's complex numbers and its trapezoidal rule."""
    t = np.linspace(-3, 3, 33)  # both sides: 17 knots on [0, 3] doubled are the same
    off = np.abs(np.exp(1j * np.outer(t, y)).mean(1) - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)
    return len(y) * np.trapezoid(off, t)


def test_sigreg_is_the_equation_of_lejepa():
    views, axes = seeded(3, 20, 6), seeded(6, 5)
    axes /= axes.norm(dim=0)
    projected = (views.double() @ axes.double()).numpy()
    expected = np.mean([epps_pulley(projected[v, :, m]) for v in range(3) for m in range(5)])
    assert sigreg(views, axes).item() == pytest.approx(expected, rel=1e-5)


def test_visreg_is_the_equation_of_its_paper():
    views, axes = seeded(3, 20, 6) * 2 + 1, seeded(6, 5)
    axes /= axes.norm(dim=0)
    quantiles = np.array([NormalDist().inv_cdf(i / 21) for i in range(1, 21)])
    expected = 0.0
    for view in views.double().numpy():
        mean = view.mean(0)
        deviation = np.sqrt(((view - mean) ** 2).mean(0)) + 1e-6
        along = np.sort((view - mean) / deviation @ axes.double().numpy(), axis=0)
        expected += ((mean**2).mean() + ((deviation - 1) ** 2).mean() + ((along - quantiles[:, None]) ** 2).mean()) / 3
    assert visreg(views, axes).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("statistic", [sigreg, visreg])
def test_tests_for_a_gaussian_prefer_one(statistic):
    gauss, axes = seeded(1, 512, 4), torch.eye(4)
    found = statistic(gauss, axes)
    others = (gauss * 0.5, gauss + 1, torch.zeros_like(gauss), gauss.sign(), gauss[..., :1].expand_as(gauss) * 2)
    assert all(statistic(one, axes) > 2 * found for one in others)


def test_visreg_separates_equal_outputs_faster_than_sigreg():
    """Near a collapse the gradient that separates outputs is proportional to their spread in sigreg, not in visreg."""

    def pull(statistic, spread):
        views = (seeded(1, 64, 4) * spread).requires_grad_()
        (gradient,) = torch.autograd.grad(statistic(views, torch.eye(4)), views)
        return (gradient - gradient.mean(1, keepdim=True)).norm().item()

    assert pull(sigreg, 1e-3) == pytest.approx(pull(sigreg, 1e-2) / 10, rel=0.05)
    assert pull(visreg, 1e-3) >= 0.9 * pull(visreg, 1e-2)


@pytest.mark.parametrize(("name", "statistic"), [("sigreg", sigreg), ("visreg", visreg)])
def test_gaussian_agreement_written_out(name, statistic):
    parts, whole = seeded(3, 8, 6), seeded(2, 8, 6)
    loss = AgreementLoss(name, gaussian_weight=0.3, directions=7)
    outcome = gaussian_agreement(parts, whole, loss, torch.Generator().manual_seed(5))
    axes = torch.randn(6, 7, generator=torch.Generator().manual_seed(5))
    axes /= axes.norm(dim=0)
    views = torch.cat([whole, parts])
    apart = ((views - (whole[0] + whole[1]) / 2) ** 2).mean()
    torch.testing.assert_close(outcome.loss, 0.7 * apart + 0.3 * statistic(views, axes))
    assert outcome.metrics.keys() == {"distance", name, "output_std", "output_rank"}
    outputs = (whole - whole.mean(1, keepdim=True)).flatten(0, 1)
    shares = torch.linalg.eigvalsh(outputs.T @ outputs).clamp_min(0)
    assert outcome.metrics["output_rank"].item() == pytest.approx(
        (shares.sum() ** 2 / (shares**2).sum()).item(), rel=1e-4
    )
    deviation = outputs.square().mean(0).sqrt().mean().item()
    assert outcome.metrics["output_std"].item() == pytest.approx(deviation, rel=1e-5)


def test_gaussian_agreement_is_in_float32_and_reaches_the_whole():
    parts, whole = seeded(2, 8, 6).bfloat16(), seeded(1, 8, 6).bfloat16().requires_grad_()
    loss = AgreementLoss("sigreg", directions=5)
    full = gaussian_agreement(parts.float(), whole.float(), loss, torch.Generator().manual_seed(0)).loss
    with torch.autocast("cpu", torch.bfloat16):
        found = gaussian_agreement(parts, whole, loss, torch.Generator().manual_seed(0)).loss
    assert found.dtype == torch.float32 and torch.equal(found, full)
    found.backward()
    assert whole.grad.any()


@pytest.mark.parametrize("task", ["extrema", "lut"])
@pytest.mark.parametrize("loss", ["sigreg", "visreg"])
def test_without_a_teacher_every_weight_that_learns_is_the_encoders_or_the_projections(task, loss):
    made = build(task, asked={"loss": loss, "directions": 8})
    question = made.questions["agreement"]
    assert question.teacher is None and question.prediction is None
    made.after_step(0.5)
    one, two = (made(*views_of(made), generator=torch.Generator().manual_seed(seed)).loss for seed in (0, 1))
    assert one != two  # other masks and directions
    assert made(*views_of(made), generator=torch.Generator().manual_seed(0)).loss == one
    names = {sheet.name: sheet for sheet in made.eval().draw(views_of(made)[0], torch.Generator().manual_seed(0))}
    assert "encoder, 1." in names["neighbours"].columns and "teacher" not in names["neighbours"].caption
    measure = made.measure(views_of(made)[0], torch.Generator().manual_seed(0))
    assert measure.name == "agreement with the whole image" and measure.outputs is not None


def test_the_teachers_momentum_rises_to_1():
    assert momentum_at(0.0, 0.996) == pytest.approx(0.996, abs=1e-12)
    assert momentum_at(0.5, 0.996) == pytest.approx(0.998, abs=1e-12)
    assert momentum_at(1.0, 0.996) == 1.0
    course = [momentum_at(step / 100, 0.9) for step in range(101)]
    assert all(a < b for a, b in zip(course, course[1:], strict=False))
    assert momentum_at(0.3, 1.0) == 1.0


def test_agreement_with_others_excludes_the_same_image():
    student, teacher = seeded(4, 8), seeded(5, 8)[:4]
    found = agreement_with_others(student, teacher)
    for i in range(4):
        expected = sum(cos(student[i], teacher[j]) for j in range(4) if j != i) / 3
        assert found[i].item() == pytest.approx(expected, abs=1e-6)
    constant = torch.ones(4, 8)
    torch.testing.assert_close(
        agreement_with_others(constant, constant), torch.ones(4)
    )  # a collapsed pair agrees on everything
    torch.testing.assert_close(agreement_with_others(student[:1], teacher[:1]), cosine(student[:1], teacher[:1]))


def test_measures_are_in_full_precision():
    task = build("mixture", asked={"withhold": {"mask": 0.5}, "ask": {"agreement": 1.0}}).eval()
    images = torch.randn(3, 3, *task.geometry.size)
    question = task.questions["agreement"]
    full = question.whole_output(task.encoder, images)
    assert use_half_without_grad(task)
    assert question.target(task.encoder, images).dtype == torch.bfloat16
    assert torch.equal(question.whole_output(task.encoder, images), full)
    encoded = task.encode(images, task.given(images))
    assert torch.equal(question.measure(encoded).outputs, full)


def test_an_instance_head_is_not_skipped():
    task = build("extrema")
    given = all_patches(torch.randn(2, 3, *task.geometry.size), task.geometry.n)
    with pytest.raises(ValueError, match="use represent"):
        task.agreement.summary(torch.zeros(2, task.geometry.n, 32), given)


def test_the_nearest_others_by_hand():
    gallery = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [3.0, 3.0], [-1.0, 0.0]])
    places, cosines = nearest_by_cosine(gallery[[0, 3]], gallery, torch.tensor([0, 3]), 3)
    assert places[0].tolist() == [1, 3, 2] and cosines[0].tolist() == pytest.approx([1, 0.5**0.5, 0], abs=1e-6)
    assert sorted(places[1].tolist()) == [0, 1, 2]  # never itself
    assert nearest_by_cosine(gallery[:1], gallery, torch.tensor([0]), 9)[0].shape == (
        1,
        4,
    )  # as many others as there are
