"""The task of a run begins from the random weights that were asked for."""

from dataclasses import replace

import pytest
import torch
from resolved import resolved_settings

from patchloom.data.stats import Stats
from patchloom.runs.task import prepare_task

STATS = Stats((0.5,) * 3, (0.2,) * 3, 16, 16, 10, [])


@pytest.mark.parametrize("task", ["mae", "lut", "extrema"])
def test_normal_weights_are_those_of_the_whole_task(task: str) -> None:
    """Deviation 0.02 in encoder, decoder, heads and teachers, as in DeiT's and SimMIM's; the default is MAE's."""
    settings = replace(resolved_settings(), task={"name": task}, model={"name": "nano"})
    found = {}
    for how in ("xavier", "normal"):
        torch.manual_seed(0)
        net = prepare_task(replace(settings, initialization=how), STATS)
        modules = [one for one in net.modules() if isinstance(one, torch.nn.Linear | torch.nn.Conv2d)]
        found[how] = [one.weight.std().item() for one in modules if one.weight.numel() > 4096]
    assert found["normal"] == pytest.approx([0.02] * len(found["normal"]), rel=0.05)
    assert not any(0.019 < one < 0.021 for one in found["xavier"]) and len(found["xavier"]) > 20
