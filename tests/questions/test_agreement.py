"""Agreement: the losses written out, the teacher's schedule, and the measure."""

from statistics import NormalDist

import numpy as np
import pytest
import torch
from answering import noise
from sweep import build, views_of

from patchloom.nets.teacher import use_half_without_grad
from patchloom.questions.agreement import (
    AgreementLoss,
    agreement_with_others,
    byol_loss,
    cosine,
    gaussian_agreement,
    info_nce,
    nearest_by_cosine,
    sigreg,
    visreg,
)
from patchloom.questions.identity import same_image_found
from patchloom.withhold.encoder_input import all_patches


def cos(one, two):
    return (one @ two / (one.norm() * two.norm())).item()


def test_agreement_is_computed_in_float32():
    """bfloat16 has few cosines near 1, and equal ones count as not found."""
    common, own = noise(1, 64), 0.05 * noise(40, 64)
    one, two = common + own, common + own + 0.02 * torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    half, loss = two.bfloat16(), AgreementLoss("sigreg", directions=5)

    def found():
        gaussian = gaussian_agreement(half[None], half[None], loss, torch.Generator().manual_seed(0)).loss
        losses = byol_loss(half, half.roll(1, 0)), info_nce(half[None], half, 0.2), gaussian
        return same_image_found(one, two), agreement_with_others(one, two), *losses

    exact = found()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found()[:2] + found()[4:], exact[:2] + exact[4:], rtol=0, atol=1e-6)
        assert cosine(half, half).dtype == torch.float32
    assert exact[0].mean() > 0.9 and {one.dtype for one in exact} == {torch.float32}


def epps_pulley(y):
    """Return LeJEPA's statistic of numbers y [b], with NumPy's complex numbers and its trapezoidal rule."""
    t = np.linspace(-3, 3, 33)  # both sides: 17 knots on [0, 3] doubled are the same
    off = np.abs(np.exp(1j * np.outer(t, y)).mean(1) - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)
    return len(y) * np.trapezoid(off, t)


def test_sigreg_is_the_equation_of_lejepa():
    views, axes = noise(3, 20, 6), noise(6, 5)
    axes /= axes.norm(dim=0)
    projected = (views.double() @ axes.double()).numpy()
    expected = np.mean([epps_pulley(projected[v, :, m]) for v in range(3) for m in range(5)])
    assert sigreg(views, axes).item() == pytest.approx(expected, rel=1e-5)


def test_visreg_is_the_equation_of_its_paper():
    views, axes = noise(3, 20, 6) * 2 + 1, noise(6, 5)
    axes /= axes.norm(dim=0)
    quantiles = np.array([NormalDist().inv_cdf(i / 21) for i in range(1, 21)])
    expected = 0.0
    for view in views.double().numpy():
        mean = view.mean(0)
        deviation = np.sqrt(((view - mean) ** 2).mean(0)) + 1e-6
        along = np.sort((view - mean) / deviation @ axes.double().numpy(), axis=0)
        expected += ((mean**2).mean() + ((deviation - 1) ** 2).mean() + ((along - quantiles[:, None]) ** 2).mean()) / 3
    assert visreg(views, axes).item() == pytest.approx(expected, rel=1e-5)
    collapsed = (1e-3 * noise(1, 64, 4)).requires_grad_()  # whose outputs it still separates, unlike sigreg
    pulls = [torch.autograd.grad(one(collapsed, torch.eye(4)), collapsed)[0].norm() for one in (visreg, sigreg)]
    assert pulls[0] > 0.1 and pulls[0] > 10 * pulls[1]


@pytest.mark.parametrize(("name", "statistic"), [("sigreg", sigreg), ("visreg", visreg)])
def test_gaussian_agreement_written_out(name, statistic):
    parts, whole = noise(3, 8, 6), noise(2, 8, 6)
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
    rank = (shares.sum() ** 2 / (shares**2).sum()).item()
    assert outcome.metrics["output_rank"].item() == pytest.approx(rank, rel=1e-4)
    deviation = outputs.square().mean(0).sqrt().mean().item()
    assert outcome.metrics["output_std"].item() == pytest.approx(deviation, rel=1e-5)


@pytest.mark.parametrize(("task", "loss"), [("extrema", "sigreg"), ("lut", "visreg")])
def test_without_a_teacher_the_encoder_agrees_with_itself(task, loss):
    made = build(task, asked={"loss": loss, "directions": 8})
    question, views = made.questions["agreement"], views_of(made)
    assert question.teacher is None and question.prediction is None and question.teacher_modules() == {}
    made.after_step(0.5)
    one, same, two = (made(*views, generator=torch.Generator().manual_seed(seed)).loss for seed in (0, 0, 1))
    assert one == same != two  # other masks and directions
    names = {sheet.name: sheet for sheet in made.eval().draw(views[0], torch.Generator().manual_seed(0))}
    assert "encoder, 1." in names["neighbours"].columns and "teacher" not in names["neighbours"].caption
    measure = made.measure(views[0], torch.Generator().manual_seed(0))
    assert measure.name == "agreement with the whole image" and measure.outputs is not None


def test_agreement_with_others_excludes_the_same_image():
    student, teacher = noise(4, 8), noise(5, 8)[:4]
    found = agreement_with_others(student, teacher)
    for i in range(4):
        expected = sum(cos(student[i], teacher[j]) for j in range(4) if j != i) / 3
        assert found[i].item() == pytest.approx(expected, abs=1e-6)
    constant = torch.ones(4, 8)
    # a collapsed pair agrees on everything
    torch.testing.assert_close(agreement_with_others(constant, constant), torch.ones(4))
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
    assert nearest_by_cosine(gallery[:1], gallery, torch.tensor([0]), 9)[0].shape == (1, 4)  # all others
