"""Training of classifiers: the best epoch, parts of a step, several processes, and trainings that stop or die."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from dense_together import evaluate_together
from evaluating import ctrl_c_at, folder_of, numbers, write_encoder
from refusing import refusal
from safetensors.torch import load_file
from spoken import encoder_of_sound, speech_commands
from torch import nn

from patchloom.data.sources.open import open_data
from patchloom.display import time_left
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate import recipes, trainer
from patchloom.evaluate.classification import ClassPredictions, begin_classifier, plan_for
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.protocols import evaluate
from patchloom.evaluate.recipes import Course, Recipe, ResolvedRecipe, check_shares
from patchloom.evaluate.select import Candidate, Plan, train_candidates
from patchloom.evaluate.settings import DryRun, EvalSettings, Parts
from patchloom.evaluate.trainer import BestWeights, Score, Trainer, _Progress
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.checkpoints.format import EncoderCard, load_encoder_file
from patchloom.nets.finetune import with_variant
from patchloom.pace import Pace
from patchloom.results import store
from patchloom.runs import checkpoint
from patchloom.system.files import cache_root

COURSE = Course(steps=30, per_epoch=3, unit="epoch", batch=10, peak=0.1, rate_option="--blr (now 0.1)", every=3)
UNLIKE = {"randaugment": 0.0, "mixup": 0.0, "cutmix": 0.0}  # what a fast training does without


def settled(**values: Any) -> ResolvedRecipe:
    return Recipe(**{"warmup_epochs": 0, "batch": 10, **UNLIKE, **values}).settled(60, "cpu")


def _told(best: BestWeights, scores: list[tuple[float, float]], model: nn.Module) -> list[bool]:
    ended = []
    for number, (accuracy, loss) in enumerate(scores, start=1):
        with torch.no_grad():
            model.weight.fill_(number)
        best.compare(number * 3, Score(accuracy, -loss), model)
        ended.append(best.hopeless(number * 3))
    return ended


def test_the_most_accurate_epoch_is_chosen_and_of_equals_the_one_with_the_lower_loss() -> None:
    best, model = BestWeights(20, COURSE), nn.Linear(1, 1)
    assert not any(_told(best, [(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.7, 0.85), (0.6, 0.1)], model))
    assert best.choose(model) == {"best_epoch": 3, "validation_score": 0.7, "validation_images": 20}
    assert model.weight.item() == 3
    assert BestWeights(0, COURSE).choose(model) == {} and model.weight.item() == 3


def test_it_ends_when_the_accuracy_has_not_risen_for_long_and_its_warm_up_is_over() -> None:
    best, model = BestWeights(20, replace(COURSE, patience=0.3)), nn.Linear(1, 1)
    # the loss falls on and on: that alone keeps nothing going
    assert _told(best, [(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.7, 0.7), (0.7, 0.6)], model) == [False] * 4 + [True]
    assert best.choose(model)["best_epoch"] == 5
    assert not BestWeights(0, replace(COURSE, patience=0.3)).hopeless(30)
    # epoch 1 was the best of 10: without a warm-up of 4 epochs the training would end after epoch 4
    model, scores = nn.Linear(1, 1), [(0.7, 1.0)] + [(0.6, 1.0)] * 8
    ended = {
        warmup: _told(BestWeights(20, replace(COURSE, patience=0.3, warmup=warmup)), scores, model).index(True) + 1
        for warmup in (0, 3, 12)
    }
    assert ended == {0: 4, 3: 4, 12: 7}


def test_it_is_validated_up_to_thirty_times() -> None:
    best = BestWeights(20, settled(epochs=100).course(30))
    assert [step for step in range(1, 301) if best.due(step)] == [*range(12, 300, 12), 300]
    assert not any(BestWeights(0, COURSE).due(step) for step in range(31))


def test_a_score_is_accuracy_and_then_loss() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = ClassPredictions(logits, torch.tensor([0, 1, 1]), []).score()
    assert found.value == (1 + 1 / 2) / 2  # balanced, since always answering 1 would be right for two of three
    expected = nn.functional.cross_entropy(logits.double(), torch.tensor([0, 1, 1])).item()
    assert found.tie == -expected
    assert ClassPredictions(logits[:2], torch.tensor([1, 0]), []).score().value == 0
    assert ClassPredictions(logits[[0, 1, 2, 2]], torch.tensor([0, 1, 1, 0]), []).score().value == 3 / 4


def test_validation_images_are_not_trained_on(tiny_encoder) -> None:
    vit, card = load_encoder_file(tiny_encoder)
    source, settings = open_data("digits").train.subset(range(60)), EvalSettings(device="cpu", cache=False)
    recipe = settled(epochs=2, validation=0.25)
    rest, held = Parts(source, source, "").trained_on(recipe, settings)
    assert len(held) == 15 and len(rest) == 45 and not {*held.indices.tolist()} & {*rest.indices.tolist()}
    assert len(set(held.labels)) == 10  # every class is among them, as often as among all
    training = begin_classifier(Classifier(vit, 10, "mean"), card, recipe, rest, held, settings=settings)
    validated: list[int] = []
    training.validate = lambda model: validated.append(training.step) or Score(0.5, -1.0)
    trained = training.fit("tiny", Pace(training.course.steps))
    assert validated == [4, 8] and trained.chosen["validation_images"] == 15


def test_the_time_left_of_all_trainings_has_their_validations() -> None:
    assert time_left(1000 * 3600.0) == "42 days left"
    pace = Pace(100, before=2.0)
    progress = _Progress("tiny", pace, every=20)
    assert progress.left() == 200 and progress.line().endswith("left · tiny: the first step")
    progress.validation = 3.0
    assert progress.left() == 200 + 5 * 3


SHORT = {"device": "cpu", "epochs": 1, "batch_size": 16, "max_train": 60, "validation": 0.25, "control": False}


def test_another_training_does_not_go_on_with_it(run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(trainer, "_SAVE_EVERY", 0.0)
    with ctrl_c_at(Trainer, 2), pytest.raises(Stopped):
        evaluate("finetune", run, "digits", **SHORT)
    for change in ({"blr": 0.01}, {"seed": 4}, {"max_train": 50}, {"positions": "learned"}):
        evaluate("finetune", run, "digits", **SHORT | change)
    assert "resumes" not in capsys.readouterr().out
    for path in (cache_root() / "trainings").rglob("*.safetensors"):  # damaged, it begins again
        path.write_bytes(path.read_bytes()[:-1])
    evaluate("finetune", run, "digits", **SHORT)
    assert "resumes" not in capsys.readouterr().out


def test_heads_pixels_and_groups_decide_too() -> None:
    def key(heads=2, side=8, film=None):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderSpec("nano", (side, side), 4, 1, "none", {"num_heads": heads}))
        source = open_data("digits").train.subset(range(40))
        source.groups = None if film is None else np.arange(40) // film
        card, settings = EncoderCard(None, (0.5,), (0.2,), "none", "tiny"), EvalSettings(device="cpu")
        recipe = settled(epochs=1, validation=0.25)
        rest, held = Parts(source, source, "").trained_on(recipe, settings)
        training = begin_classifier(Classifier(encoder, 10, "mean"), card, recipe, rest, held, settings=settings)
        return json.dumps(training.about, sort_keys=True)

    assert key() == key()
    assert len({key(), key(heads=4), key(side=16), key(film=4), key(film=5)}) == 5


def test_the_next_checkpoint_is_due_half_a_minute_after_the_last(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])
    with trainer.keep_until_done():
        kept = trainer.TrainingCheckpoints({})
        for _ in range(2):
            assert not kept.due
            now[0] += 31
            assert kept.due and kept.save({"weight": torch.zeros(1)}, {})


def test_no_checkpoint_is_kept_without_a_cache_or_for_ever(run, monkeypatch) -> None:
    monkeypatch.setattr(trainer, "_SAVE_EVERY", 0.0)
    old = cache_root() / "trainings" / "old"
    old.mkdir(parents=True)
    month = time.time() - 31 * 86_400
    os.utime(old, (month, month))
    saved = []
    monkeypatch.setattr(checkpoint.Checkpoints, "save", lambda self, *given: saved.append(given))
    evaluate("finetune", run, "digits", **SHORT | {"cache": False})
    assert not saved and old.exists()
    evaluate("finetune", run, "digits", **SHORT)
    assert len(saved) > 1 and not old.exists()


# Several processes train what one does, within rounding, and killed ones go on where they were.


PLAIN = {"epochs": 2, "batch_size": 16, "max_train": 64, "seed": 3, "precision": "float32"}
# what all processes must have alike: a moving average and the best epoch by shared validation images
KEPT = {"validation": 0.25, "patience": 1.0, "ema": 0.9, "clip": 0.5, "control": "false"}


def _values(run: Path) -> list[float]:
    return [row.value for row in store.load(run)]


def _compared(tmp_path: Path, one: Path, two: Path, protocol: str, data: str, options: dict) -> str:
    """Evaluate by one process in a folder, and by two in another; return what the first of the two printed."""
    found = {}
    for run, world in ((one, 1), (two, 2)):
        codes, out, err = evaluate_together(protocol, run, data, world, tmp_path / f"cache{world}", **options)
        assert codes == [0] * world, err
        found[world] = [torch.load(run / f"{rank}.pt") for rank in range(world)]
    (whole,), parts = found[1], found[2]
    for name, value in whole.items():
        assert torch.equal(parts[0][name], parts[1][name]), name
        assert torch.allclose(value.float(), parts[0][name].float(), atol=2e-5), name
    assert _values(one) == pytest.approx(_values(two), abs=0.02)
    assert not out[1].strip()
    return " ".join(out[0].split())


@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("finetune", KEPT),
        pytest.param("finetune", {"pooling": "class", "accumulate": 2, "control": "false"}, marks=pytest.mark.slow),
        pytest.param("linear", {"recipe": "mae", "blr": 10}, marks=pytest.mark.slow),
        pytest.param("blocks:1", {"control": "false"}, marks=pytest.mark.slow),
    ],
    ids=["finetune", "finetune in parts", "linear", "blocks"],
)
def test_two_processes_train_what_one_does(
    tiny_encoder: Path, tmp_path: Path, protocol: str, options: dict[str, object]
) -> None:
    one, two = (folder_of(tiny_encoder, tmp_path / name) for name in ("one", "two"))
    assert "by 2 processes" in _compared(tmp_path, one, two, protocol, "digits", PLAIN | options)


@pytest.mark.slow
def test_two_processes_spot_keywords_as_one_does(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    words = speech_commands(tmp_path / "words")
    one, two = (encoder_of_sound(tmp_path / name) for name in ("one", "two"))
    options = {"epochs": 2, "batch_size": 4, "words": "yes,no", "precision": "float32", "control": "false"}
    _compared(tmp_path, one, two, "keywords", str(words), options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "world", "options", "dies"),
    [
        ("finetune", 2, KEPT | {"mixup": 0.8, "erasing": 0.5, "drop_path": 0.1}, 7),  # of 10 steps
        ("linear", 1, {"recipe": "mae", "blr": 10}, 10),  # of 14, without validation images
        ("blocks:2", 1, KEPT, 7),
    ],
)
def test_killed_processes_go_on_as_if_they_had_not_been(
    tiny_encoder: Path, tmp_path: Path, protocol: str, world: int, options: dict, dies: int
) -> None:
    whole, killed = (folder_of(tiny_encoder, tmp_path / name) for name in ("whole", "killed"))
    options = PLAIN | options | {"max_train": 120}

    def command(run: Path, dies: int | None = None) -> tuple[list[int], list[str], list[str]]:
        return evaluate_together(protocol, run, "digits", world, tmp_path / "cache", dies=dies, **options)

    codes, _, err = command(whole)
    assert codes == [0] * world, err
    codes, _, err = command(killed, dies)
    assert codes == [75, -signal.SIGKILL][-world:]
    if world > 1:
        assert err[0].count("another process has died") == 1 and err[0].count("\n") == 1, err[0]
    codes, out, err = command(killed)
    assert codes == [0] * world, err
    assert "tiny resumes at epoch 1.4 of 2." in out[0]
    found = [torch.load(run / "0.pt") for run in (whole, killed)]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert numbers(store.load(whole, outcomes=True)) == numbers(store.load(killed, outcomes=True))


@pytest.mark.slow
def test_stopped_all_wait_for_the_first_which_writes_the_checkpoint(run: Path, tmp_path: Path) -> None:
    stop = {"dies": 5, "number": signal.SIGTERM}
    codes, _, err = evaluate_together("finetune", run, "digits", 2, tmp_path / "cache", **PLAIN | stop)
    assert codes == [130, 130] and "resume" in err[0] and not err[1].strip()
    assert [(run / f"{rank}.saw").read_text() for rank in range(2)] == ["saved", "saved"]


@pytest.mark.parametrize(
    ("world", "parts", "options", "unit"),
    [
        (2, 1, {}, 2),
        (2, 3, {}, 6),
        (1, 3, {}, 3),
        (2, 1, {"mixup": 0.5}, 4),
        (2, 2, {"mixup": 0.5, "repeats": 3}, 24),
    ],
)
def test_a_batch_is_shared_by_processes_parts_and_pairs(monkeypatch, world: int, parts: int, options: dict, unit: int):
    monkeypatch.setattr(recipes, "world", lambda: world)

    def check(batch: int) -> None:
        check_shares(Recipe(**{"mixup": 0.0, "cutmix": 0.0, "batch": batch} | options).settled(100, "cpu"), parts)

    check(3 * unit)
    with pytest.raises(PatchloomError, match=rf"cannot be shared .* a multiple of {unit}$"):
        check(3 * unit + unit // 2)


def test_parts_of_a_step_are_the_step(tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = Classifier.forward

    def noted(self: Classifier, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Classifier, "forward", noted)
    found, sizes = [], []
    for parts in (1, 3):
        run = folder_of(tiny_encoder, tmp_path / str(parts))
        options = PLAIN | {"batch_size": 24, "accumulate": parts, "device": "cpu", "workers": 0, "control": False}
        evaluate("finetune", run, "digits", **options)
        found.append(load_file(run / "finetuned" / "digits-small-3.safetensors"))
        sizes.append(seen[:3])
        seen.clear()
    assert sizes == [[24, 24, 24], [8, 8, 8]]
    for name, value in found[0].items():
        assert torch.allclose(value.float(), found[1][name].float(), atol=2e-5), name


# Choice among recipes: the best on held-out images, and test images that are read once, at the end.

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


# Every protocol that trains resumes after Ctrl-C, with the same results to the bit.


def images(folder: Path) -> str:
    write_encoder(folder / "run" / "encoder.safetensors", depth=2)
    return "digits"


def recordings(folder: Path) -> Path:
    pytest.importorskip("soundfile")
    encoder_of_sound(folder / "run")
    return speech_commands(folder / "words")


def evaluated(protocol: str, run: Path, data: str | Path, **options: Any) -> list[tuple]:
    return numbers(evaluate(protocol, run, data, device="cpu", seed=3, **options).results)


class Case(NamedTuple):
    """Command that trains.

    Attributes:
        prepare: function that writes FOLDER/run and data; its result is given to the command.
        command: function from a run and data to results.
        step: update, from 1, that Ctrl-C interrupts.
        position: where the training stops.
    """

    prepare: Callable[[Path], Any]
    command: Callable[[Path, Any], Any]
    step: int
    position: str


# a checkpoint has to hold a moving average, the best weights and random numbers of every kind
RESUMED = {"epochs": 2, "batch_size": 16, "max_train": 80, "validation": 0.25, "patience": 1.0, "ema": 0.9, "clip": 0.5}
RESUMED |= {"mixup": 0.8, "erasing": 0.5}
FEW = {"per_class": 4, "epochs": 2, "batch_size": 8}
LARS = {"recipe": "mae", "epochs": 2, "max_train": 80, "batch_size": 20, "blr": 10.0}
SPEECH = {"recipe": "mp3-speech", "updates": 4, "batch_size": 8, "words": "yes,no,up"}
CASES = {
    "finetune": Case(images, partial(evaluated, "finetune", **RESUMED, drop_path=0.1), 5, "epoch 1.7 of 2"),
    "few-shot": Case(images, partial(evaluated, "few-shot", **FEW), 6, "epoch 1.2 of 2"),
    "blocks": Case(images, partial(evaluated, "blocks:2", **RESUMED), 4, "epoch 1.3 of 2"),
    "linear": Case(images, partial(evaluated, "linear", **LARS), 6, "epoch 1.5 of 2"),
    "keywords": Case(recordings, partial(evaluated, "keywords", **SPEECH), 3, "update 3 of 4"),
}


@pytest.mark.parametrize("name", CASES)
def test_stopped_it_resumes_and_gives_the_same_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    case, found = CASES[name], []
    data = case.prepare(tmp_path)
    for place in ("whole", "stopped"):
        run = Path(shutil.copytree(tmp_path / "run", tmp_path / place))
        if place == "stopped":
            with ctrl_c_at(Trainer, case.step) as begun, pytest.raises(Stopped, match="run the same command to resume"):
                case.command(run, data)
            assert len(begun) == case.step and "resumes at" not in capsys.readouterr().out
        results = case.command(run, data)
        found.append((results, {path.name: path.read_bytes() for path in run.rglob("*.safetensors")}))
    assert f"resumes at {case.position}." in capsys.readouterr().out
    assert found[0] == found[1]
