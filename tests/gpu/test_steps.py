"""Tests of every task's step on a GPU: no synchronisation, and agreement with the CPU, also in bfloat16."""

import numpy as np
import pytest
import torch
from small import seeded
from sweep import build, views_of

from patchloom.data.loader import training_batches
from patchloom.tasks import TASKS
from patchloom.train.estimate import RandomImages
from patchloom.train.step import pretraining_optimizer, clip_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]
GPU = "cuda"


@pytest.fixture(params=TASKS)
def name(request):
    return request.param


def loss_and_gradients(name, device, half=False):
    """Return the loss and gradients of a task on a device, with the same draws on every device."""
    task = build(name).to(device).train()
    views = [view.to(device) for view in views_of(task)]
    with torch.autocast(device, torch.bfloat16, enabled=half):
        loss = task(*views, progress=0.5, generator=seeded()).loss
    loss.backward()
    assert loss.dtype == torch.float32
    return loss.item(), {key: weight.grad.cpu() for key, weight in task.named_parameters() if weight.grad is not None}


def distance(one, two):
    """Return the difference of gradients relative to the norm of the first."""
    one, two = (torch.cat([part.flatten() for part in of.values()]) for of in (one, two))
    return ((one - two).norm() / one.norm()).item()


def test_a_step_never_waits_for_the_gpu(name):
    task = build(name).to(GPU).train()
    optimizer = pretraining_optimizer(task, 0.05, GPU)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    views, generator = [view.to(GPU) for view in views_of(task)], seeded()

    def step():
        with torch.autocast(GPU, torch.bfloat16):
            loss = task(*views, progress=0.5, generator=generator).loss
        loss.backward()
        norm = clip_gradients(optimizer, 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        task.after_step(0.5)
        return loss, norm

    step()  # the first one loads libraries and makes the moments
    before = [weight.detach().clone() for weight in task.parameters() if weight.requires_grad]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, norm = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite() and norm.isfinite() and norm > 0
    after = [weight for weight in task.parameters() if weight.requires_grad]
    assert all(weight.isfinite().all() for weight in after)
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_float32_gives_the_loss_and_gradients_of_the_cpu(name):
    (wanted, true), (near, close) = loss_and_gradients(name, "cpu"), loss_and_gradients(name, GPU)
    assert true.keys() == close.keys()
    assert near == pytest.approx(wanted, rel=1e-4) and distance(true, close) < 2e-3


def test_bfloat16_is_as_near_to_float32_as_on_the_cpu(name):
    """Gradients that nearly cancel, as jigsaw's at its start, lose more digits than others, on any device."""
    rounding = distance(loss_and_gradients(name, "cpu")[1], loss_and_gradients(name, "cpu", half=True)[1])
    (wanted, true), (near, close) = loss_and_gradients(name, GPU), loss_and_gradients(name, GPU, half=True)
    assert near == pytest.approx(wanted, rel=0.01) and distance(true, close) < 2 * rounding + 0.02


def test_measures_and_pictures_are_those_of_the_cpu(name):
    found = []
    for device in ("cpu", GPU):
        task = build(name).to(device).eval()
        images = torch.randn(16, 3, *task.augment.size, generator=seeded(1)).to(device)
        with torch.inference_mode():
            found.append((task.measure(images, seeded(2)), task.draw(images, seeded(2))))
    (one, sheets), (two, others) = found
    assert two.value == pytest.approx(one.value, rel=1e-3, abs=0.02)  # where positions are counted, one may tip over
    assert one.baselines.keys() == two.baselines.keys() and len(sheets) == len(others) > 0


def test_colours_change_on_the_gpu_as_on_the_cpu():
    task = build("extrema")
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (16, 3, 48, 40), dtype=np.uint8))
    batch = next(training_batches(RandomImages(images), task.augment, 16, 0, 0, 1))
    assert batch.colors is not None
    for here, there in zip(batch.on("cpu").views, batch.on(GPU).views, strict=True):
        assert there.device.type == GPU
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-4)
