"""A step on a GPU waits once, when an update is decided, and never inside a task. Tested on fake CUDA tensors."""

import pytest
import torch
from options_swept import OPTION_SETS
from sweep import build, views_of
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from patchloom.nets.performance import checkpoint_gradients, fuse_attention
from patchloom.nets.teacher import use_half_without_grad
from patchloom.system.fake_cuda import CUDA, Waits, fake_cuda, on_fake_cuda


def forms_of(asked):
    """Return what a set of options has off its default: words with their values, the others by name and type."""
    kinds = {(option, value if isinstance(value, str | bool) else type(value)) for option, value in asked.items()}
    return kinds | {(option, key) for option, value in asked.items() if isinstance(value, dict) for key in value}


def covering(sets):
    """Return the first set and some others that together have all forms of all, and the rest."""
    chosen, rest, missing = [sets[0]], sets[1:], set().union(*map(forms_of, sets))
    while missing:
        best = max(rest, key=lambda one: len(forms_of(one) & missing))
        missing -= forms_of(best)
        chosen.append(best)
        rest = [one for one in rest if one is not best]
    return chosen, rest


COVERING = {name: covering(sets) for name, sets in OPTION_SETS.items()}


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


def check(name, asked):
    # one block, unless the options are about several
    outcome = step(build(name, asked=asked, depth=2 if asked.keys() & {"layers", "encoder_maps"} else 1))
    assert outcome.loss.device == CUDA and outcome.loss.dtype == torch.float32 and outcome.loss.requires_grad
    assert all(value.device == CUDA and value.ndim == 0 for value in outcome.metrics.values())


CASES = [pytest.param(name, one, id=f"{name} {one}") for name, (sets, _) in COVERING.items() for one in sets]


@pytest.mark.parametrize(("name", "asked"), CASES)
def test_no_task_waits_for_a_gpu(name, asked):
    check(name, asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, rest) in COVERING.items() if rest])
def test_no_other_options_wait_for_a_gpu(name):
    for asked in COVERING[name][1]:
        check(name, asked)


@pytest.mark.parametrize("name", OPTION_SETS)
def test_no_task_waits_in_another_form(name):
    for form in ({"checkpointing": True}, {"fused": False}):
        task = build(name, class_token=True, reg_tokens=2, drop_path_rate=0.1, init_values=0.1, depth=1)
        use_half_without_grad(task)
        step(task, **form)


FAULTS = {
    "picks": lambda x: x[x > 0],
    "reads": lambda x: x.sum().item(),
    "decides": lambda x: x + 1 if x.any() else x,
    "moves": lambda x: x + torch.arange(4).to(x.device, non_blocking=True),
    "makes": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "mixes": lambda x: x[torch.arange(2)],
    "scales": lambda x: x * torch.tensor(2.0),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_waits_are_detected(fault):
    with fake_cuda():
        given = torch.empty(4, 4, device=CUDA)
        with pytest.raises((Waits, DataDependentOutputException, DynamicOutputShapeException)):
            fault(given)
