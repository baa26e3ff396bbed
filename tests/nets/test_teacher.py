"""The moving average: it starts as the student, follows exactly, and learns nothing by itself."""

import pytest
import torch
from torch import nn

from patchloom.nets.teacher import Teacher


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def changed(student):
    """The student after something happened to its weights, its running statistics, and its count of batches."""
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
    assert torch.equal(task.teacher.net(images), task.teacher.net(images))  # drops nothing
    assert same(tensors(task.teacher), before)  # and what it looks at leaves no trace
    assert task.teacher.train() is task.teacher


def test_other_parts_are_refused():
    student, head = net(), nn.Linear(2, 2)
    teacher = Teacher(net=student, head=head)
    before = tensors(teacher)
    for wrong in ({"net": student}, {"net": student, "neck": head}, {"net": student, "head": head, "neck": head}, {}):
        with pytest.raises(ValueError, match="the teacher has net, head, and was told to follow"):
            teacher.follow(0.5, **wrong)
    with pytest.raises(ValueError, match="shorter"):
        teacher.follow(0.5, net=student, head=nn.Linear(2, 2, bias=False))
    assert same(tensors(teacher), before)
    teacher.follow(0.5, head=head, net=student)  # their order means nothing
