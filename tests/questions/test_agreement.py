"""Agreement: the losses written out, the teacher's schedule, and the measure."""

import math

import pytest
import torch
from sweep import build

from patchloom.nets.teacher import use_half_without_grad
from patchloom.questions.agreement import (
    agreement_with_others,
    byol_loss,
    cosine,
    info_nce,
    momentum_at,
    nearest_by_cosine,
)
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
    full = question.teacher_output(images)
    assert use_half_without_grad(task)
    assert question.target(images).dtype == torch.bfloat16 and torch.equal(question.teacher_output(images), full)
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
