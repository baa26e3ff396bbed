"""The check of a custom task names every fault that a run would meet on a GPU or with several processes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from patchloom.errors import PatchloomError
from patchloom.nets.decoders import PatchHead
from patchloom.nets.teacher import Teacher
from patchloom.patches.partition import random_dropped
from patchloom.questions.positions import Positions
from patchloom.questions.question import Outcome
from patchloom.system.distributed import draw
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


class Weighs(Half):  # what is withheld depends on a buffer
    def __init__(self, encoder):
        super().__init__(encoder)
        self.register_buffer("brightness", torch.ones(1))

    def given(self, images, generator=None):
        return super().given(images * self.brightness, generator)


class DrawsAlike(Half):  # each of several processes gets the same numbers
    def given(self, images, generator=None):
        at = images.device if generator is None else generator.device
        order = torch.rand(len(images), self.geometry.n, generator=generator, device=at).argsort(1)
        return drop_positions(all_patches(images, self.geometry.n), order[:, :8].to(images.device, non_blocking=True))


class DrawsGlobally(Half):
    def given(self, images, generator=None):
        return super().given(images)


class DrawsOnTheImages(Half):  # whatever the generator is for; right in training only
    def given(self, images, generator=None):
        order = draw(torch.rand, (len(images), self.geometry.n), generator, images.device)
        if generator is not None and images.device != generator.device:
            order = torch.rand(len(images), self.geometry.n, generator=generator, device=images.device)
        return drop_positions(all_patches(images, self.geometry.n), order.argsort(1)[:, :8])


class Idle(Half):
    def __init__(self, encoder):
        super().__init__(encoder)
        self.unused = nn.Parameter(torch.zeros(3))


class Follows(Half):  # also if the update was skipped
    def __init__(self, encoder):
        super().__init__(encoder)
        self.teacher = Teacher(encoder=encoder)

    def after_step(self, progress, applied=1.0):
        self.teacher.follow(0.9, encoder=self.encoder)


class Waiting(Half):
    def forward(self, *views, **about):
        found = super().forward(*views, **about)
        return found if found.loss.item() > -1 else Outcome(found.loss, {})


def changed(method, change):
    """Return a task whose ``method`` has its result changed."""

    def call(self, *args, **named):
        return change(getattr(Half, method)(self, *args, **named))

    return type(f"Changed_{method}", (Half,), {method: call, "__module__": __name__})


stepping, measuring, drawing = (partial(changed, name) for name in ("forward", "measure", "draw"))
FAULTS = [
    (DrawsAlike, "draws other dropped by two processes"),
    (DrawsGlobally, "measured differently with one generator"),
    (DrawsOnTheImages, "on a GPU with a generator of the CPU"),
    (Waiting, "waits for a GPU"),
    (Follows, r"changes teacher.encoder.* after an update that was skipped"),
    (Idle, "without a gradient .unused"),
    (stepping(lambda found: found.loss), "returns Tensor"),
    (stepping(lambda found: Outcome(found.loss[None], {})), "has the loss"),
    (stepping(lambda found: Outcome(found.loss.double(), {})), "has the loss"),
    (stepping(lambda found: Outcome(found.loss * torch.inf, {})), "has the loss inf"),
    (stepping(lambda found: Outcome(found.loss, {"again": found.loss})), "the metric again"),
    (stepping(lambda found: Outcome(found.loss, {"again": 3.0})), "the metric again"),
    (stepping(lambda found: Outcome(found.loss + torch.rand(()), {})), "losses of .* with one generator"),
    (measuring(lambda found: found.values), "is measured by Tensor"),
    (measuring(lambda found: replace(found, values=found.values[:2])), "another shape"),
    (measuring(lambda found: replace(found, values=found.values * torch.nan)), "has the measures"),
    (measuring(lambda found: replace(found, to_beat="luck")), "no baseline luck"),
    (drawing(lambda found: []), "draws no sheets"),
    (drawing(lambda found: [found[0]._replace(caption="")]), "draws the sheet rebuilt"),
    (drawing(lambda found: [found[0]._replace(columns={"one": torch.zeros(1, 3, 32, 32)})]), "draws the sheet rebuilt"),
]


def test_a_sound_task_passes_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    check_task(Half)
    assert torch.equal(torch.get_rng_state(), before)
    check_task({"name": "mae", "mask_ratio": 0.5})
    check_task(Weighs)


@pytest.mark.parametrize(("task", "words"), FAULTS)
def test_each_fault_is_named(task, words):
    with pytest.raises(PatchloomError, match=f"{task.__name__}.*{words}"):
        check_task(task)
