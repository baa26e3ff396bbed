"""Training of maps: it learns, and one that was stopped ends as one that was not."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from scenes import Squares

from patchloom.data.decode import Unreadable
from patchloom.dense import answers
from patchloom.dense.annotations.segmentation import image_class_pixels
from patchloom.dense.answers import Pictures, mask_padding, predict_images
from patchloom.dense.metrics import foreground_iou
from patchloom.dense.rare import for_rare_classes
from patchloom.dense.recipes import SEGMENT, SegmentRecipe
from patchloom.dense.segment import begin_segmenter, joined, pixel_loss, predict_overlaps, segment_score
from patchloom.dense.segmenter import Segmenter
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import Trainer, keep_until_done
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import at_size
from patchloom.pace import Pace

SPEC = EncoderSpec("nano", (16, 16), 4, options={"depth": 2, "embed_dim": 32, "num_heads": 2})
CARD = EncoderCard(SPEC, (0.4,) * 3, (0.2,) * 3, "mae", "tiny")
SETTINGS = EvalSettings(device="cpu", workers=0)
RECIPE = replace(SEGMENT["small"], steps=6, batch=4, size=16, head_width=16, color=False, validation=0.2)


def recipe(**changes: object) -> SegmentRecipe:
    return replace(RECIPE, **changes).settled(20, "cpu", 0, 16, 4, 32)


def held_images(values: SegmentRecipe) -> Squares:
    return Squares(4, (values.size, values.size + 8), seed=1)


def begun(values: SegmentRecipe, head: str = "upernet", seed: int = 0, train: Squares | None = None) -> Trainer:
    torch.manual_seed(0)
    size, shape = (values.size, values.size), (values.size, values.size + 8)
    train = train or Squares(20, shape, seed=seed)
    model = Segmenter(at_size(build_encoder(SPEC), CARD, size), len(train.classes), head=head, head_width=16)
    held = held_images(values) if values.validation else None
    return begin_segmenter(model, CARD, values, train, held, settings=SETTINGS)


@pytest.mark.parametrize(("head", "steps"), [("upernet", 50), ("linear", 30)])
def test_it_learns(head: str, steps: int) -> None:
    values = recipe(steps=steps, size=32, lr=5e-3, layer_decay=1.0, scale=(1.0, 1.0))
    training = begun(values, head)

    def score() -> float:
        return segment_score(training.tested, CARD, held_images(values), recipe=values, settings=SETTINGS, half=False)

    before = score()
    training.model.train()
    done = training.fit("tiny", Pace(steps))
    assert done.chosen["validation_score"] > max(before, 0.25) + 0.1  # a quarter is what the ground alone gives
    assert score() == done.chosen["validation_score"]  # the best weights are tested


@pytest.mark.parametrize("stopped_at", [1, 4])
def test_one_that_was_stopped_ends_as_one_that_was_not(stopped_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = begun(recipe())
    whole.fit("tiny", Pace(6))
    step = Trainer.update

    def interrupted(self: Trainer, batch: object) -> torch.Tensor:
        if self.step == stopped_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch)

    with keep_until_done():
        with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"stopped at step {stopped_at + 1} of 6"):
            patch.setattr(Trainer, "update", interrupted)
            begun(recipe()).fit("tiny", Pace(6))
        again = begun(recipe())
        again.fit("tiny", Pace(6))
    assert again.best.score == whole.best.score
    for name, value in whole.tested.state_dict().items():
        assert torch.equal(value, again.tested.state_dict()[name]), name


def test_other_recipes_or_labels_are_another_training() -> None:
    first = begun(recipe()).about
    assert begun(recipe()).about == first
    assert begun(recipe(lr=2e-3)).about != first != begun(recipe(), seed=3).about


def test_ties_of_validation_scores_go_to_the_last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchloom.dense.segment.segment_score", lambda *_, **__: 0.25)
    done = begun(recipe()).fit("tiny", Pace(6))
    assert done.chosen == {"best_step": 6, "validation_score": 0.25, "validation_images": 4}


def test_ignored_pixels_have_no_loss() -> None:
    logits, truth = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 8, 8))
    truth[0, :5] = -1
    whole = torch.nn.functional.interpolate(logits, (8, 8), mode="bilinear")
    counted = truth != -1
    expected = -whole.log_softmax(1).gather(1, truth.clamp_min(0)[:, None])[:, 0][counted].mean()
    assert torch.allclose(pixel_loss(logits, truth), expected)
    assert pixel_loss(logits, torch.full((2, 8, 8), -1)) == 0


def test_padding_becomes_zero() -> None:
    images = mask_padding(torch.ones(2, 3, 4, 5), [(4, 2), (1, 5)])
    assert images[0, 0].tolist() == [[1, 1, 0, 0, 0]] * 4 and images[1, 0].tolist() == [[1] * 5, *[[0] * 5] * 3]
    assert (images == images[:, :1]).all()


def test_rates_of_the_schedules() -> None:
    course = recipe(steps=100, warmup_steps=10, lr=1e-3).course(20)
    rates = [course.rate(step) for step in range(100)]
    assert rates[9] == pytest.approx(1e-3) == max(rates) and min(rates[10:]) == rates[-1] > 0
    assert rates[54] == pytest.approx(rates[9] - (rates[9] - rates[99]) / 2, rel=0.02)  # a straight line
    drops = recipe(steps=120, warmup_steps=0, lr=1e-3, decay="steps").course(20)
    assert [drops.rate(i) for i in (70, 100, 119)] == pytest.approx([1e-3, 1e-4, 1e-5])


def test_a_loss_that_is_not_finite_names_the_remedy() -> None:
    training = begun(recipe(lr=1e30, clip=0.0, steps=30, validation=0.0))
    with pytest.raises(PatchloomError, match=r"not finite after \d+ steps: lower --lr \(now 1e\+30\)"):
        training.fit("tiny", Pace(30))


class Holed:
    """Images of a number and annotations; image 3 cannot be read, nor can annotation 5; images from 8 are floats."""

    @staticmethod
    def read_as(i: int, channels: int) -> torch.Tensor:
        if i == 3:
            raise Unreadable("3 is broken")
        image = torch.full((channels, 2 + i, 3), i, dtype=torch.uint8)
        return image / 255 if i >= 8 else image

    @staticmethod
    def truth(i: int) -> torch.Tensor:
        if i == 5:
            raise PatchloomError("annotation 5 is broken")
        return torch.tensor(i)


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_are_read_ahead_and_answered_in_groups(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def answer(images: list[torch.Tensor]) -> list[torch.Tensor]:
        groups.append(len(images))
        return [one[0, 0, 0] for one in images]

    def found(truth: object, numbers: range) -> list[tuple[int, object]]:
        groups.clear()
        pictures = Pictures(Holed.read_as, 1, numbers, truth)
        each = list(answers.answered(pictures, answer, torch.device("cpu"), workers))
        assert all(one.image.shape == (1, 2 + one.number, 3) for one, _ in each)
        assert all(round(255 * float(value)) == 8 if one.number == 8 else value == one.number for one, value in each)
        return [(one.number, one.truth) for one, _ in each]

    assert found(None, range(9)) == [(i, None) for i in (0, 1, 2, 4, 5, 6, 7, 8)] and groups == [1] * 8
    assert found(None, range(1, 1)) == [], "one of several processes may have none"
    assert found(Holed.truth, range(0, 5, 2)) == [(i, i) for i in (0, 2, 4)]
    with pytest.raises(PatchloomError, match="annotation 5 is broken"):
        found(Holed.truth, range(9))
    whole = answers._groups
    monkeypatch.setattr(answers, "_groups", lambda pictures, most: whole(pictures, 4))
    assert len(found(None, range(9))) == 8 and groups == [4, 3, 1], "of one dtype"


def test_several_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "rank", lambda: 1)
    monkeypatch.setattr(answers, "world", lambda: 3)
    model = begun(recipe()).model
    found = predict_images(
        model, Squares(6), SETTINGS, lambda some, *_: [len(some)], lambda picture, answer: (picture.number, answer)
    )
    assert found == [None, (1, 1), None, None, (4, 1), None]


class Defects(Squares):
    """Images of noise, every fourth with a bright square of 1 % of the pixels."""

    classes = ("ground", "defect")

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, (40, 40), seed)
        self.images.scene = self.scene

    def scene(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng((self.images.seed, i, 1))
        image, labels = rng.integers(90, 120, (3, 40, 40)).astype(np.uint8), np.zeros((40, 40), np.int16)
        if i % 4 == 0:
            top, left = rng.integers(36, size=2)
            image[:, top : top + 4, left : left + 4], labels[top : top + 4, left : left + 4] = 220, 1
        return torch.from_numpy(image), torch.from_numpy(labels)


def test_a_rare_defect_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Without care for rare classes, the answer is ground everywhere, which is said; by auto, the defect is found."""

    def trained(**changes: object) -> float:
        values = {"steps": 60, "side": "native", "validation": 0.0, "layer_decay": 1.0, "lr": 5e-3}
        asked, data = replace(RECIPE, **values, **changes), Defects(24)
        pixels = image_class_pixels(data).sum(0)
        settled, _ = for_rare_classes(asked, asked.settled(24, "cpu", 0, 16, 4, 32), pixels, data.classes)
        done = begun(settled, train=data).fit("tiny", Pace(60)).model
        found = predict_overlaps(done, Defects(16, 1), CARD, SETTINGS, None, precision="float32")
        return foreground_iou(joined(found, 2).sum(0)).item()

    lost, found = trained(class_weights=False, rare_crops=0.0), trained()
    before, after = capsys.readouterr().out.splitlines()
    assert lost == 0 and "nothing but ground found in training" in before
    assert found > 0.1 and "nothing but" not in after
