"""The moving average starts as the student and follows exactly; passes without gradient have their own precision."""

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


def test_it_starts_as_the_student_and_is_a_copy():
    student = changed(net())
    teacher = Teacher(net=student, head=nn.Identity())
    assert same(tensors(teacher.net), tensors(student))
    before = tensors(teacher)
    changed(student)
    assert same(tensors(teacher), before) and not same(tensors(teacher.net), tensors(student))


def test_following_is_exact():
    student = nn.Linear(2, 1)
    with torch.no_grad():
        student.weight.copy_(torch.tensor([[1.0, -2.0]]))
        student.bias.fill_(0.0)
    teacher = Teacher(net=student)
    with torch.no_grad():
        student.weight.copy_(torch.tensor([[3.0, 2.0]]))
        student.bias.fill_(8.0)
    teacher.follow(0.75, net=student)
    assert teacher.net.weight.tolist() == [[1.5, -1.0]] and teacher.net.bias.tolist() == [2.0]
    teacher.follow(0.5, net=student)
    assert teacher.net.weight.tolist() == [[2.25, 0.5]] and teacher.net.bias.tolist() == [5.0]
    assert student.weight.tolist() == [[3.0, 2.0]]


def test_buffers_follow_and_the_count_of_batches_is_copied():
    student = net()
    teacher = Teacher(net=student)
    before, after = tensors(teacher.net), tensors(changed(student))
    teacher.follow(0.9, net=student)
    found = tensors(teacher.net)
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} < found.keys()
    for key, tensor in found.items():
        if key == "1.num_batches_tracked":
            assert tensor.dtype == torch.int64 and tensor == 5
        else:
            torch.testing.assert_close(tensor, 0.9 * before[key] + 0.1 * after[key])
            assert not torch.equal(tensor, before[key])


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_momentum_1_stays_and_momentum_0_copies(momentum):
    student = net()
    teacher = Teacher(net=student)
    before, after = tensors(teacher.net), tensors(changed(student))
    teacher.follow(momentum, net=student)
    expected = {**before, "1.num_batches_tracked": after["1.num_batches_tracked"]} if momentum else after
    assert same(tensors(teacher.net), expected)


def test_no_gradient_reaches_it_and_none_comes_from_following():
    student = net()
    teacher = Teacher(net=student)
    images = torch.randn(8, 3, requires_grad=True)
    (student(images).sum() + teacher.net(images).square().sum()).backward()
    teacher.follow(0.5, net=student)
    for weight in teacher.parameters():
        assert not weight.requires_grad and weight.grad is None and weight.grad_fn is None
    assert all(weight.requires_grad and weight.grad is not None for weight in student.parameters())


def test_it_stays_in_eval_mode():
    task = nn.Module()
    task.student = net()
    task.teacher = Teacher(net=task.student)
    assert not any(module.training for module in task.teacher.modules())
    images = torch.randn(8, 3) * 3 + 1
    for mode in (True, False, True):
        task.train(mode)
        assert task.student.training == mode
        assert not any(module.training for module in task.teacher.modules())
    before = tensors(task.teacher)
    assert torch.equal(task.teacher.net(images), task.teacher.net(images))  # no dropout
    assert same(tensors(task.teacher), before)  # and a forward pass changes nothing
    assert task.teacher.train() is task.teacher


def test_other_parts_are_rejected():
    student, head = net(), nn.Linear(2, 2)
    teacher = Teacher(net=student, head=head)
    before = tensors(teacher)
    for wrong in ({"net": student}, {"net": student, "neck": head}, {"net": student, "head": head, "neck": head}, {}):
        with pytest.raises(ValueError, match="the teacher has net, head, not"):
            teacher.follow(0.5, **wrong)
    with pytest.raises(ValueError, match="the student has no bias"):
        teacher.follow(0.5, net=student, head=nn.Linear(2, 2, bias=False))
    assert same(tensors(teacher), before)
    teacher.follow(0.5, head=head, net=student)  # the order of names is irrelevant


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
    for owner, block in task.named_modules():
        if owner.endswith("blocks.0"):
            note = partial(lambda of, module, made: seen.append((of, torch.is_grad_enabled(), made.dtype)), owner)
            block.mlp.register_forward_hook(lambda module, given, made, note=note: note(module, made))

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
    halves = [(of, learning) for of, learning, kind in seen if kind == torch.bfloat16]
    assert halves and all(guide in of and not learning for of, learning in halves)
    assert {kind for _, learning, kind in seen if learning} == {torch.float32}
    assert loss != near and abs(loss - near) < 0.01 * loss
    assert (gradient - close).norm() < 0.1 * gradient.norm()


def test_a_task_without_passes_without_gradient_rejects_a_precision_for_them(tmp_path):
    assert not use_half_without_grad(build("mae"))
    with pytest.raises(PatchloomError, match="--teacher_precision needs a teacher or a guide, and mae has none"):
        pretrain("shapes:40", "mae", out=tmp_path / "run", teacher_precision="bfloat16", epochs=1)
