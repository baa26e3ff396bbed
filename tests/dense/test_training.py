"""Training of maps: it learns, and one that was stopped ends as one that was not."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from scenes import Squares

from patchloom.dense.recipes import SEGMENT, SegmentRecipe
from patchloom.dense.segment import SegmentTraining, pixel_loss
from patchloom.dense.segmenter import Segmenter
from patchloom.display import TimeLeft
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import keep_until_done
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import at_size

SPEC = EncoderSpec("nano", (16, 16), 4, options={"depth": 4, "embed_dim": 32, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.4,) * 3, (0.2,) * 3, "mae", "tiny")
SETTINGS = EvalSettings(device="cpu", workers=0)
RECIPE = replace(SEGMENT["small"], steps=6, batch=4, size=16, head_width=16, color=False, validation=0.2)


def recipe(**changes: object) -> SegmentRecipe:
    return replace(RECIPE, **changes).settled(20, "cpu", 0, 16, 4, 32)


def begun(values: SegmentRecipe, head: str = "upernet") -> SegmentTraining:
    torch.manual_seed(0)
    size = (values.size, values.size)
    model = Segmenter(at_size(build_encoder(SPEC), CARD, size), 3, head=head, head_width=16)
    held = Squares(4, (size[0], size[1] + 8), seed=1) if values.validation else None
    return SegmentTraining(
        model, Squares(20, (size[0], size[1] + 8)), held, values, CARD, SETTINGS, half=False, kernels="torch"
    )


@pytest.mark.parametrize(("head", "steps"), [("upernet", 50), ("linear", 30)])
def test_it_learns(head: str, steps: int) -> None:
    values = recipe(steps=steps, size=32, lr=5e-3, layer_decay=1.0, scale=(1.0, 1.0))
    training = begun(values, head)
    before = training.score(training.held)
    training.model.train()
    done = training.run("tiny", TimeLeft(steps))
    assert done.chosen["validation_score"] > max(before, 0.25) + 0.1  # a quarter is what the ground alone gives
    assert training.score(training.held) == done.chosen["validation_score"]  # the best weights are tested


@pytest.mark.parametrize("stopped_at", [1, 4])
def test_one_that_was_stopped_ends_as_one_that_was_not(stopped_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = begun(recipe())
    whole.run("tiny", TimeLeft(6))
    step = SegmentTraining.update

    def interrupted(self: SegmentTraining, number: int, batch: object) -> torch.Tensor:
        if number == stopped_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number, batch)

    with keep_until_done():
        monkeypatch.setattr(SegmentTraining, "update", interrupted)
        with pytest.raises(Stopped, match=f"stopped at step {stopped_at + 1} of 6 of tiny: run the same command"):
            begun(recipe()).run("tiny", TimeLeft(6))
        monkeypatch.setattr(SegmentTraining, "update", step)
        again = begun(recipe())
        again.run("tiny", TimeLeft(6))
    assert again.best.score == whole.best.score
    for name, value in whole.tested.state_dict().items():
        assert torch.equal(value, again.tested.state_dict()[name]), name


def test_other_recipes_or_labels_are_another_training() -> None:
    first = begun(recipe()).about
    assert begun(recipe()).about == first
    assert begun(recipe(lr=2e-3)).about != first
    other = begun(recipe())
    moved = SegmentTraining(
        other.model, Squares(20, seed=3), None, recipe(), CARD, SETTINGS, half=False, kernels="torch"
    )
    assert moved.about != first


def test_pixels_that_do_not_count_have_no_say() -> None:
    logits, truth = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 8, 8))
    truth[0, :5] = -1
    whole = torch.nn.functional.interpolate(logits, (8, 8), mode="bilinear")
    counted = truth != -1
    expected = -whole.log_softmax(1).gather(1, truth.clamp_min(0)[:, None])[:, 0][counted].mean()
    assert torch.allclose(pixel_loss(logits, truth), expected)
    assert pixel_loss(logits, torch.full((2, 8, 8), -1)) == 0


def test_rates_of_the_schedules() -> None:
    training = begun(recipe(steps=100, warmup_steps=10, lr=1e-3, layer_decay=0.5))
    head = max(training.optimizer.param_groups, key=lambda group: group["lr_scale"])
    lowest = min(training.optimizer.param_groups, key=lambda group: group["lr_scale"])
    rates = []
    for step in range(100):
        training.schedule.step_update(step + 1)
        rates.append(head["lr"])
        assert lowest["lr"] == pytest.approx(rates[-1] * 0.5**5)
    assert rates[9] == pytest.approx(1e-3) == max(rates) and min(rates[10:]) == rates[-1] > 0
    assert rates[54] == pytest.approx(rates[9] - (rates[9] - rates[99]) / 2, rel=0.02)  # a straight line
    drops = begun(recipe(steps=120, warmup_steps=0, lr=1e-3, decay="steps"))
    found = []
    for step in range(120):
        drops.schedule.step_update(step + 1)
        found.append(drops.optimizer.param_groups[-1]["lr"])
    assert [found[i] for i in (70, 100, 119)] == pytest.approx([1e-3, 1e-4, 1e-5])


def test_a_loss_that_is_not_finite_says_what_to_do() -> None:
    training = begun(recipe(lr=1e30, clip=0.0, steps=30, validation=0.0))
    with pytest.raises(PatchloomError, match=r"the loss is not finite after \d+ steps: lower --lr \(now 1e\+30\)"):
        training.run("tiny", TimeLeft(30))
