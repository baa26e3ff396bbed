"""A step on a GPU waits once, when an update is decided, and never inside a task. Tested on fake CUDA tensors."""

import pytest
import torch
from options_swept import OPTION_SETS
from sweep import build, views_of
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from patchloom.nets.performance import checkpoint_gradients, fuse_attention
from patchloom.nets.teacher import use_half_without_grad
from patchloom.system.fake_cuda import CUDA, Waits, fake_cuda, on_fake_cuda

CASES = [(name, asked) for name, sets in OPTION_SETS.items() for asked in sets]


def step(task, checkpointing=False, fused=True):
    """Run the task's part of a training step on a GPU; backward is torch's."""
    task.train()
    checkpoint_gradients(task, checkpointing)
    fuse_attention(task, fused)
    shapes = [view.shape for view in views_of(task)]
    with fake_cuda():
        on_fake_cuda(task)
        views = [torch.empty(shape, device=CUDA) for shape in shapes]
        with torch.autocast("cuda", torch.bfloat16):
            outcome = task(*views, progress=0.5)
        task.after_step(0.5)
    return outcome


@pytest.mark.parametrize(("name", "asked"), CASES, ids=[f"{name} {asked}" for name, asked in CASES])
def test_no_task_waits_for_a_gpu(name, asked):
    outcome = step(build(name, asked=asked))
    assert outcome.loss.device == CUDA and outcome.loss.dtype == torch.float32 and outcome.loss.requires_grad
    assert all(value.device == CUDA and value.ndim == 0 for value in outcome.metrics.values())


@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("form", [{"checkpointing": True}, {"fused": False}], ids=["checkpointing", "explicit"])
def test_no_task_waits_in_another_form(name, form):
    task = build(name, class_token=True, reg_tokens=2, drop_path_rate=0.1, init_values=0.1)
    use_half_without_grad(task)
    step(task, **form)


def picks(x):
    return x[x > 0]


def reads(x):
    return x.sum().item()


def decides(x):
    return x + 1 if x.any() else x


def moves(x):
    return x + torch.arange(4).to(x.device, non_blocking=True)


def makes(x):
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def mixes(x):
    return x[torch.arange(2)]


def scales(x):
    return x * torch.tensor(2.0)


@pytest.mark.parametrize("fault", [picks, reads, decides, moves, makes, mixes, scales])
def test_waits_are_detected(fault):
    with fake_cuda():
        given = torch.empty(4, 4, device=CUDA)
        with pytest.raises((Waits, DataDependentOutputException, DynamicOutputShapeException)):
            fault(given)
