"""The check of a custom task names every fault that a run would meet on a GPU or with several processes."""

import pytest
import torch
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.decoders import PatchHead
from patchloom.patches.partition import random_dropped
from patchloom.questions.positions import Positions
from patchloom.questions.question import Outcome
from patchloom.system.distributed import draw
from patchloom.system.fake_cuda import CUDA, Waits, fake_cuda_with_copies
from patchloom.tasks.check import check_task
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import all_patches, drop_positions


class Half(Task):
    """Find half of the positions."""

    def __init__(self, encoder):
        super().__init__(encoder)
        g = self.geometry
        self.questions["positions"] = Positions(g, PatchHead(g.width, g.n, g.prefix), {})

    def given(self, images, generator=None):
        n = self.geometry.n
        return drop_positions(all_patches(images, n), random_dropped(len(images), n, 0.5, generator, images.device))

    def placeholders(self, given, generator=None):
        return {"position_token": given.images.new_zeros(())}


class DrawsAlike(Half):
    """Draws with torch: each of several processes gets the same numbers."""

    def given(self, images, generator=None):
        at = images.device if generator is None else generator.device
        order = torch.rand(len(images), self.geometry.n, generator=generator, device=at).argsort(1)
        return drop_positions(all_patches(images, self.geometry.n), order[:, :8].to(images.device, non_blocking=True))


class DrawsGlobally(Half):
    """Draws from torch's global generator."""

    def given(self, images, generator=None):
        return super().given(images)


class DrawsOnTheImages(Half):
    """Draws where the images are, whatever the generator is for; right in training only."""

    def given(self, images, generator=None):
        order = draw(torch.rand, (len(images), self.geometry.n), generator, images.device)
        if generator is not None and images.device != generator.device:
            order = torch.rand(len(images), self.geometry.n, generator=generator, device=images.device)
        return drop_positions(all_patches(images, self.geometry.n), order.argsort(1)[:, :8])


class Waiting(Half):
    """Reads a number from the GPU."""

    def forward(self, *views, **about):
        found = super().forward(*views, **about)
        return found if found.loss.item() > -1 else Outcome(found.loss, {})


class Idle(Half):
    """Has a parameter without an effect."""

    def __init__(self, encoder):
        super().__init__(encoder)
        self.unused = nn.Parameter(torch.zeros(3))


class Attached(Half):
    """Returns a metric with its gradient."""

    def forward(self, *views, **about):
        found = super().forward(*views, **about)
        return Outcome(found.loss, {"again": found.loss})


class Blind(Half):
    """Draws no picture."""

    def draw(self, images, generator):
        return []


def test_a_sound_task_passes_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    check_task(Half)
    assert torch.equal(torch.get_rng_state(), before)
    check_task({"name": "mae", "mask_ratio": 0.5})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (DrawsAlike, "draws other dropped by two processes than by one: draw with patchloom.system.distributed.draw"),
        (DrawsGlobally, "measured differently with one generator"),
        (DrawsOnTheImages, "cannot be measured on a GPU with a generator of the CPU"),
        (Waiting, "waits for a GPU"),
        (Idle, "without a gradient .unused"),
        (Attached, "the metric again"),
        (Blind, "draws no sheets"),
    ],
)
def test_each_fault_is_named(task, words):
    with pytest.raises(PatchloomError, match=f"{task.__name__}.*{words}"):
        check_task(task)


def test_a_generator_of_another_device_is_refused_as_on_a_gpu():
    with fake_cuda_with_copies():
        torch.rand(3, generator=torch.Generator()).to(CUDA)
        with pytest.raises(Waits):
            torch.randint(4, (3,), generator=torch.Generator(), device=CUDA)
