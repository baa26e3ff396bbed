"""The moving average starts as the student and follows exactly; passes without gradient have their own precision."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from sweep import build, views_of
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.teacher import Teacher, use_half_without_grad
from patchloom.train.loop import pretrain


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def changed(student):
    """Return the student after a change of its weights, running statistics, and number of batches."""
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(torch.randn_like(weight))
        for _ in range(5):
            student.train()(torch.randn(8, 3) * 3 + 1)
    return student


def tensors(module):
    return {key: tensor.clone() for key, tensor in module.state_dict().items()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("applied", [0.0, 1.0])
def test_it_stays_if_the_update_was_skipped(applied):
    student = net()
    teacher, usual = Teacher(net=student), Teacher(net=student)
    before, _ = tensors(teacher.net), changed(student)
    teacher.follow(0.9, torch.tensor(applied), net=student)
    usual.follow(0.9, net=student)
    assert same(tensors(teacher.net), tensors(usual.net) if applied else before)


def test_tensors_of_today_are_followed():
    task = nn.Module()
    task.student = net()
    task.teacher = Teacher(net=task.student)
    task.teacher.follow(0.5, net=task.student)
    twin = deepcopy(task)
    task.to(torch.float64)  # which replaces buffers
    for one in (task, twin):
        changed(one.student.float()), one.teacher.float()
        one.teacher.follow(0.0, net=one.student)
        assert same(tensors(one.teacher.net), tensors(one.student))
    other = changed(net())
    task.teacher.follow(0.0, net=other)
    assert same(tensors(task.teacher.net), tensors(other))


def test_it_stays_in_eval_mode():
    task = nn.Module()
    task.student = net()
    task.teacher = Teacher(net=task.student)
    assert not any(module.training for module in task.teacher.modules())
    for mode in (True, False):
        task.train(mode)
        assert task.student.training == mode and not any(module.training for module in task.teacher.modules())
    images, before = torch.randn(8, 3) * 3 + 1, tensors(task.teacher.train())
    assert torch.equal(task.teacher.net(images), task.teacher.net(images))  # no dropout
    assert same(tensors(task.teacher), before)  # and a forward pass changes nothing


def test_other_parts_are_rejected():
    student, head = net(), nn.Linear(2, 2)
    teacher = Teacher(net=student, head=head)
    before, both = tensors(teacher), {"head": head, "net": student}  # the order of names is irrelevant
    for wrong in ({"net": student}, both | {"neck": head}, {}, both | {"head": nn.Linear(2, 2, bias=False)}):
        with pytest.raises(ValueError, match="the teacher has net, head, not|the student has no bias"):
            teacher.follow(0.5, **wrong)
    assert same(tensors(teacher), before)
    teacher.follow(0.5, **both)


WITHOUT_GRADIENT = {
    "droppos": ("encoder", {"mask_ratio": 0.5, "temperature": 0.1}),
    "extrema": ("teacher", {}),
    "lut": ("teacher", {}),
    "distill": ("teacher", {}),
    "loca": ("teacher", {}),
    "mixture": ("teacher", {"withhold": {"mask": 0.5}, "ask": {"agreement": 1.0}, "teacher": "second"}),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_passes_without_gradient_may_be_in_bfloat16_and_the_rest_in_float32(name):
    guide, asked = WITHOUT_GRADIENT[name]
    task = build(name, asked=asked).train()
    views, seen = views_of(task), []

    def note(owner, module, given, made):
        seen.append((owner, torch.is_grad_enabled(), made.dtype))

    for owner, block in task.named_modules():
        if owner.endswith("blocks.0"):
            block.mlp.register_forward_hook(partial(note, owner))

    def step():
        seen.clear()
        task.zero_grad()
        loss = task(*views, progress=0.5, generator=torch.Generator().manual_seed(3)).loss
        loss.backward()
        return loss.item(), task.encoder.blocks[0].mlp.fc1.weight.grad.clone()

    loss, gradient = step()
    assert {kind for _, _, kind in seen} == {torch.float32}
    assert use_half_without_grad(task)
    near, close = step()
    halves = [(owner, learning) for owner, learning, kind in seen if kind == torch.bfloat16]
    assert halves and all(guide in owner and not learning for owner, learning in halves)
    assert {kind for _, learning, kind in seen if learning} == {torch.float32}
    assert loss != near and abs(loss - near) < 0.01 * loss and (gradient - close).norm() < 0.1 * gradient.norm()


def test_a_task_without_passes_without_gradient_rejects_a_precision_for_them(tmp_path):
    assert not use_half_without_grad(build("mae"))
    with pytest.raises(PatchloomError, match="--teacher_precision needs a teacher or a guide, and mae has none"):
        pretrain("shapes:40", "mae", out=tmp_path / "run", teacher_precision="bfloat16", epochs=1)
