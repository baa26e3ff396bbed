"""Agreement: the losses written out, the teacher's schedule, and measures that tell a collapse."""

import math

import pytest
import torch
from patchloom.objectives.agreement import (
    byol_loss,
    cosine,
    effective_rank,
    info_nce,
    momentum,
    others,
    output_spread,
)


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
    assert momentum(0.0, 0.996) == pytest.approx(0.996, abs=1e-12)
    assert momentum(0.5, 0.996) == pytest.approx(0.998, abs=1e-12)
    assert momentum(1.0, 0.996) == 1.0
    course = [momentum(step / 100, 0.9) for step in range(101)]
    assert all(a < b for a, b in zip(course, course[1:], strict=False))
    assert momentum(0.3, 1.0) == 1.0


def test_spread_is_0_for_one_direction_and_1_for_all():
    direction = seeded(8)
    one_direction = direction * torch.rand(50, 1).add(0.1)
    assert output_spread(one_direction) == pytest.approx(0, abs=1e-3)
    assert output_spread(seeded(4000, 16)) == pytest.approx(1, abs=1e-3)
    assert output_spread(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])) == 1
    outputs = seeded(30, 8) + 2
    unit = outputs / outputs.norm(dim=1, keepdim=True)
    apart = (unit - unit.mean(0)).square().sum(1).mean().sqrt().item()
    assert output_spread(outputs) == pytest.approx(apart, rel=1e-4) and 0.2 < apart < 0.8


def test_effective_rank_is_1_on_a_line_and_d_in_all_directions():
    assert effective_rank(seeded(1, 8) * seeded(20, 1)) == pytest.approx(1, abs=1e-4)
    basis = torch.linalg.qr(seeded(12, 12))[0]
    for d in (2, 5, 12):
        assert effective_rank(3 * basis[:d]) == pytest.approx(d, rel=1e-6)
    assert effective_rank(torch.zeros(4, 8)) == pytest.approx(1)


def test_effective_rank_by_its_formula():
    outputs = seeded(20, 6)
    squares = torch.linalg.eigvalsh(outputs.double().T @ outputs.double())  # of the singular values
    share = squares.sqrt() / squares.sqrt().sum()
    expected = math.exp(-sum(p * math.log(p) for p in share.tolist()))
    assert effective_rank(outputs) == pytest.approx(expected, rel=1e-6) and 1 < expected < 6
    assert effective_rank(outputs.bfloat16()) == pytest.approx(expected, rel=1e-2)


def test_agreement_with_others_leaves_out_ones_own():
    student, teacher = seeded(4, 8), seeded(5, 8)[:4]
    found = others(student, teacher)
    for i in range(4):
        expected = sum(cos(student[i], teacher[j]) for j in range(4) if j != i) / 3
        assert found[i].item() == pytest.approx(expected, abs=1e-6)
    constant = torch.ones(4, 8)
    torch.testing.assert_close(others(constant, constant), torch.ones(4))  # a collapsed pair agrees on everything
    torch.testing.assert_close(others(student[:1], teacher[:1]), cosine(student[:1], teacher[:1]))
