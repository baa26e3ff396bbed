"""Choice among recipes: the best on held-out images, and test images that are read once, at the end."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusing import refusal

from patchloom.data.sources.open import open_data
from patchloom.evaluate.classification import plan_for
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.select import Candidate, Plan, train_candidates
from patchloom.evaluate.settings import DryRun, EvalSettings, Parts
from patchloom.nets.checkpoints.format import load_encoder_file
from patchloom.nets.finetune import with_variant

SETTINGS = EvalSettings(device="cpu", cache=False)
QUICK = {"epochs": 1, "warmup_epochs": 0, "batch": 16}


class Made:
    """Candidate on a small encoder and its plan, with records of trainings and saved files."""

    def __init__(self, encoder: Path, **changes: Any) -> None:
        vit, card = load_encoder_file(encoder)
        digits = open_data("digits")
        parts = Parts(digits.train.subset(range(60)), digits.test.subset(range(20)), "")
        plan: Plan = plan_for("small", QUICK | changes, vit, parts, SETTINGS, "float32")
        self.trained, self.saved = [], []

        def begin(model: Any, card: Any, recipe: Any, train: Any, held: Any) -> Any:
            self.trained.append((recipe.blr, len(train)))
            return plan.begin(model, card, recipe, train, held)

        def build(recipe: Any) -> Classifier:
            return Classifier(with_variant(vit, card), 10, "mean")

        self.plan = replace(plan, begin=begin)
        self.candidate = Candidate(
            "one", card, build, {"positions": "keep"}, lambda model, settings: self.saved.append(settings)
        )


@pytest.fixture
def rates(tiny_encoder: Path) -> Iterator[Made]:
    yield Made(tiny_encoder, blr=[0.4, 0.1, 0.2, 0.3])


def test_the_best_rate_is_chosen_and_the_lowest_of_equals(rates: Made) -> None:
    scores = iter((0.3, 0.7, 0.7, 0.1))
    plan = replace(rates.plan, score=lambda model, card, images: next(scores))
    (fitted,) = train_candidates([rates.candidate], plan)
    assert rates.trained == [(0.1, 54), (0.2, 54), (0.3, 54), (0.4, 54), (0.2, 60)]
    assert fitted.settings.items() >= {"blr": 0.2, "held_out_accuracy": 0.7, "held_out": 6, "positions": "keep"}.items()
    assert rates.saved == [fitted.settings]


def test_test_images_are_read_after_every_training(tiny_encoder: Path, record_reads: Callable[..., list[str]]) -> None:
    record = record_reads(60, 20)
    options = {"epochs": 1, "batch_size": 16, "blr": [0.01, 0.1], "validation": 0.2}
    evaluate("finetune", tiny_encoder, "digits", device="cpu", **options)
    first = record.index("test")
    assert set(record[:first]) == {"train"} and record[first:] == ["test"] * 40  # of the encoder and its control


def test_a_dry_run_trains_and_reads_nothing(rates: Made) -> None:
    plan = replace(rates.plan, settings=replace(SETTINGS, dry_run=True))
    with pytest.raises(DryRun) as ended:
        train_candidates([rates.candidate], plan)
    assert "one would be trained on 60 images" in ended.value.sentences[0]
    assert "blr 0.1 or 0.2 or 0.3 or 0.4" in ended.value.sentences[0] and not rates.trained


def test_too_little_memory_is_a_sentence(rates: Made) -> None:
    def begin(*given: Any) -> Any:
        raise MemoryError

    said = refusal(train_candidates, [rates.candidate], replace(rates.plan, begin=begin))
    assert "16 images at once" in said and "raise --accumulate" in said and "--size" not in said
