"""Every option of every task with a value other than its default, in one sweep."""

import inspect

import pytest
import torch
from options_swept import OPTION_SETS, left_out
from sweep import build, views_of

from patchloom.errors import PatchloomError
from patchloom.tasks import TASKS, task_class
from patchloom.train.step import pretraining_optimizer

CASES = [pytest.param(name, asked, id=f"{name} {asked}") for name, sets in OPTION_SETS.items() for asked in sets]
# every set with each of its decoders without blocks, beside which a pixel decoder might learn alone
SHALLOW = [
    (name, {**asked, option: 0})
    for name, sets in OPTION_SETS.items()
    for asked in sets
    for option in inspect.signature(task_class(name)).parameters
    if option.endswith("depth")
]


def test_every_option_of_every_task_is_swept():
    assert OPTION_SETS.keys() == TASKS.keys() and not [one for name in TASKS for one in left_out(name)]


def unmoved(name, asked):
    """Return the trainable weights that one step does not change; frozen ones must not change."""
    task = build(name, asked=asked, depth=2 if asked.keys() & {"layers", "encoder_maps"} else 1).train()
    optimizer = pretraining_optimizer(task, 0.0, "cpu")  # weight decay would change weights without gradient
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    task(*views_of(task), progress=0.5, generator=torch.Generator().manual_seed(0)).loss.backward()
    found = []
    before = {key: weight.detach().clone() for key, weight in task.named_parameters()}
    optimizer.step()
    for key, weight in task.named_parameters():
        assert weight.requires_grad or (weight.grad is None and torch.equal(weight, before[key])), key
        if weight.requires_grad and (weight.grad is None or not weight.grad.any() or torch.equal(weight, before[key])):
            found.append(key)
    return found


@pytest.mark.parametrize(("name", "asked"), CASES)
def test_one_step_moves_every_weight(name, asked):
    assert not unmoved(name, asked)


def test_decoders_without_blocks_are_rejected_unless_the_encoder_learns_from_them():
    """No gradient would reach the encoder from masked patches alone, in every set of options."""
    refused, accepted = set(), set()
    for name, asked in SHALLOW:
        try:
            assert not unmoved(name, asked), (name, asked)
            accepted.add(name)
        except PatchloomError as error:
            if "has no effect here" not in str(error):
                assert "the encoder learns nothing from them: give --task." in str(error)
                refused.add(name)
    assert refused == {"mae", "crossmae", "droppos", "restore", "lut", "latent", "mixture"}
    assert accepted == {"droppos", "restore", "mixture"}
