"""The epoch that is tested is the best one on training images that were held out, and a training ends when it may."""

import torch
from torch import nn

from patchloom.data.sources.open import open_data
from patchloom.display import TimeLeft
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import BestEpoch, EpochScore, score_of
from patchloom.evaluate.training import Training


def _told(best: BestEpoch, scores: list[tuple[float, float]], model: nn.Module) -> list[bool]:
    ended = []
    for number, (accuracy, loss) in enumerate(scores, start=1):
        with torch.no_grad():
            model.weight.fill_(number)
        best.compare(number * best.every, EpochScore(accuracy, -loss), model)
        ended.append(best.hopeless(number * best.every))
    return ended


def test_the_most_accurate_epoch_is_chosen_and_of_equals_the_one_with_the_lower_loss() -> None:
    best, model = BestEpoch(20, steps=30, per_epoch=3, patience=1.0), nn.Linear(1, 1)
    assert not any(_told(best, [(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.7, 0.85), (0.6, 0.1)], model))
    assert best.choose(model) == {"best_epoch": 3, "validation_accuracy": 0.7, "validation_images": 20}
    assert model.weight.item() == 3
    assert BestEpoch(0, 30, 3, 0.3).choose(model) == {} and model.weight.item() == 3


def test_it_ends_when_the_accuracy_has_not_risen_for_long() -> None:
    best, model = BestEpoch(20, steps=30, per_epoch=3, patience=0.3), nn.Linear(1, 1)
    # the loss falls on and on: that alone keeps nothing going
    assert _told(best, [(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.7, 0.7), (0.7, 0.6)], model) == [False] * 4 + [True]
    assert best.choose(model)["best_epoch"] == 5
    assert not BestEpoch(0, 30, 3, 0.3).hopeless(30)


def test_it_does_not_end_before_its_warm_up_and_the_patience_are_over() -> None:
    """Epoch 1 was the best of 10: without a warm-up of 4 epochs the training would end after epoch 4."""
    model, scores = nn.Linear(1, 1), [(0.7, 1.0)] + [(0.6, 1.0)] * 8
    ended = {
        warmup: _told(BestEpoch(20, steps=30, per_epoch=3, patience=0.3, warmup=warmup), scores, model).index(True) + 1
        for warmup in (0, 3, 12)
    }
    assert ended == {0: 4, 3: 4, 12: 7}


def test_when_it_is_validated() -> None:
    best = BestEpoch(20, steps=300, per_epoch=3, patience=1.0)
    assert [step for step in range(1, 301) if best.due(step)] == [*range(12, 300, 12), 300]
    assert not any(BestEpoch(0, 30, 3, 1.0).due(step) for step in range(31))


def test_a_score_is_accuracy_and_then_loss() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = score_of(logits, torch.tensor([0, 1, 1]))
    assert found.accuracy == 2 / 3
    expected = nn.functional.cross_entropy(logits.double(), torch.tensor([0, 1, 1])).item()
    assert found.negative_loss == -expected


def test_validation_images_are_not_trained_on(tiny_encoder, monkeypatch) -> None:
    from patchloom.evaluate.classifier import Classifier
    from patchloom.nets.checkpoints.format import load_encoder_file

    vit, card = load_encoder_file(tiny_encoder)
    source = open_data("digits").train.subset(range(60))
    recipe = Recipe(epochs=2, warmup_epochs=0, batch=10, randaugment=0, mixup=0, cutmix=0, validation=0.25)
    settings = EvalSettings(device="cpu", cache=False)
    training = Training(Classifier(vit, 10, "mean"), source, recipe, card.mean, card.std, settings)
    validated: list[int] = []
    monkeypatch.setattr(training, "_validated", lambda: validated.append(training.step) or EpochScore(0.5, -1.0))
    trained = training.run("tiny", TimeLeft(training.steps))
    held, rest = set(training.held.indices.tolist()), set(training.source.indices.tolist())
    assert len(held) == 15 and len(rest) == 45 and not held & rest
    assert validated == [4, 8] and trained.chosen["validation_images"] == 15
    # every class is among them, as often as among all
    assert len(set(source.labels[sorted(held)].tolist())) == 10


def test_days_are_told_as_days():
    assert str(TimeLeft(1000, 3600.0)) == "42 days left"
