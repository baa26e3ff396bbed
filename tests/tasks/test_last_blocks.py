"""Every task with only the last block in training: everything before it stays bit-identical."""

import pytest
import torch
from sweep import asked_of, spec_of, views_of
from swins import spec_of as swin_spec

from patchloom.nets.build import build_encoder
from patchloom.nets.finetune import freeze_for, frozen_names
from patchloom.nets.performance import checkpoint_gradients
from patchloom.tasks import TASKS, build_task
from patchloom.train.step import pretraining_optimizer

CASES = {name: (name, {}) for name in TASKS}
CASES |= {
    "droppos, learned token": ("droppos", {"mask_ratio": 0.0, "placeholder": "learned"}),
    "droppos, zeros": ("droppos", {"placeholder": "zeros"}),
    "extrema, class token": ("extrema", {"class_token": "vit"}),
    "lut on simmim": ("lut", {"base": "simmim"}),
    **{f"{name}, swin": (name, {}) for name in ("mae", "simmim", "droppos")},
}


@pytest.mark.parametrize("case", CASES)
def test_frozen_weights_stay_bit_identical(case):
    name, asked = CASES[case]
    spec = swin_spec() if case.endswith("swin") else spec_of(name, {"class_token": True}, asked)
    torch.manual_seed(0)
    vit = build_encoder(spec)
    kept = frozen_names(vit, "blocks", 1)
    freeze_for(vit, "blocks", 1)
    task = build_task(asked_of(name, asked), vit).train()
    checkpoint_gradients(task, case in ("mae", "simmim", "mp3"))
    optimizer, views = pretraining_optimizer(task, 0.5, "cpu"), views_of(task)
    before = {key: value.detach().clone() for key, value in task.state_dict().items()}
    for step in range(2):
        optimizer.zero_grad(set_to_none=True)
        task(*views, progress=step / 2, generator=torch.Generator().manual_seed(step)).loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
        task.after_step((step + 1) / 2)
    after = task.state_dict()
    stays = [f"encoder.{name}" for name in kept]
    # as does a teacher's copy of frozen weights
    stays += [key for key in after for name in kept if "teacher." in key and key.endswith(f".encoder.{name}")]
    assert stays and all(torch.equal(after[name], before[name]) for name in stays)
    weights = dict(task.named_parameters())
    assert all(weights[name].grad is None for name in stays)
    moves = [name for name, weight in weights.items() if weight.requires_grad]
    assert any("encoder." in name for name in moves) and not set(moves) & set(stays)
    assert [name for name in moves if torch.equal(after[name], before[name])] == []
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(moves) == len(optimizer.state)
