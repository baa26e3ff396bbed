"""An update never waits for a GPU, which is at most one update behind the program. Tested on pseudo CUDA tensors."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
from killing import SMALL
from pseudo_cuda import pseudo_cuda
from running import rows, stop_at, weights

from patchloom.data.loader import Prefetcher
from patchloom.errors import Stopped
from patchloom.tasks import task_class
from patchloom.train import loop as training
from patchloom.train.final_evaluation import FinalEvaluation
from patchloom.train.loop import pretrain
from patchloom.train.metrics import MetricsLog
from patchloom.train.plan import Planner
from patchloom.train.step import Stepper

SHORT = SMALL | {"epochs": 4, "device": "cuda"}  # 12 steps
STEPS = 12
# of tasks themselves see `test_never_waits`
CASES = [
    ("extrema", {"precision": "bfloat16"}),
    ("droppos", {"accumulate": 2, "precision": "float16"}),
    ("mae", {"precision": "float32", "clip": 0.0}),
    ("lut", {"precision": "float16", "checkpointing": True}),
]


@pytest.fixture(autouse=True)
def no_ends(monkeypatch):
    """Leave out what is before and after training, and checkpoints that depend on the time."""
    monkeypatch.setattr(training, "_SAVE_FIRST", 600.0)
    monkeypatch.setattr(training, "_SAVE_EVERY", 600.0)
    monkeypatch.setattr(FinalEvaluation, "run", lambda *_: "")
    monkeypatch.setattr(Planner, "forecast", lambda *_, **__: SimpleNamespace(sentences=list))


@pytest.fixture
def trained(monkeypatch):
    """Return the waits of a training, but for those of measures, pictures, checkpoints, and of reading on the CPU."""
    found = Counter()
    with pseudo_cuda() as waits:

        def aside(of, name):
            method = getattr(of, name)

            def uncounted(*args, **more):
                before = waits.copy()
                try:
                    return method(*args, **more)
                finally:
                    waits.clear()
                    waits.update(before)

            monkeypatch.setattr(of, name, uncounted)

        for of, name in (
            *((MetricsLog, "before_the_first_step"), (MetricsLog, "_measured"), (MetricsLog, "_judged")),
            *((MetricsLog, "_draw"), (MetricsLog, "_add_baselines"), (MetricsLog, "start"), (Prefetcher, "send")),
            *((training, "save_checkpoint"), (training, "finite_weights"), (Stepper, "__init__"), (Stepper, "begin")),
        ):
            aside(of, name)
        train = training.train

        def counted_train(*args):
            waits.clear()
            try:
                return train(*args)
            finally:
                found.update(waits)

        monkeypatch.setattr(training, "train", counted_train)
        yield found


@pytest.mark.parametrize(("name", "how"), CASES)
def test_no_update_waits(name, how, trained, unlabelled_images, tmp_path, monkeypatch):
    settled, needs = [], MetricsLog.needs_weights
    monkeypatch.setattr(MetricsLog, "needs_weights", lambda *a: settled.append(needs(*a)) or settled[-1])
    more = {"epochs": SHORT["epochs"] * how.get("accumulate", 1)}
    pretrain(unlabelled_images, name, out=tmp_path / "run", **SHORT | how | more)
    # only a measure, and the end, wait for the update that they are of
    assert len(settled) == STEPS - 1 and settled.count(False) > 1
    waits = {place.split(":")[0]: count for place, count in trained.items()}
    assert waits == {"event train/step.py": settled.count(True) + 1}


def outcome(run):
    """Return what a training leaves: the rows of its metrics, and tensors."""
    return rows(run), weights(run)


def spoil(monkeypatch, name, *steps):
    """Make the loss of some steps (from 1) nan."""
    whole = task_class(name).forward

    def forward(self, *views, progress, generator=None):
        made = whole(self, *views, progress=progress, generator=generator)
        return made._replace(loss=made.loss * math.nan) if round(progress * STEPS) + 1 in steps else made

    monkeypatch.setattr(task_class(name), "forward", forward)


def test_being_behind_changes_no_number(unlabelled_images, tmp_path, monkeypatch, capsys):
    name = "lut"  # has running statistics and a moving average
    spoil(monkeypatch, name, 1, 5, 7, 8)
    found, told, begin = [], [], Stepper.begin

    def begun(self, *state):
        begin(self, *state)
        self.ahead = ahead

    monkeypatch.setattr(Stepper, "begin", begun)
    for ahead in (0, 1):
        with pseudo_cuda():
            found.append(outcome(pretrain(unlabelled_images, name, out=tmp_path / str(ahead) / "run", **SHORT).folder))
        lines = capsys.readouterr().out.replace(f"/{ahead}/", "/").splitlines()
        told.append([line for line in lines if line.startswith("  skipped step")])
    assert found[0] == found[1] and told[0] == told[1]
    assert [line.split(":")[0] for line in told[0]] == [f"  skipped step {step}" for step in (1, 5, 7, 8)]
    with pseudo_cuda(), monkeypatch.context() as patch:
        patch.setattr(Stepper, "begin", begin)
        assert outcome(pretrain(unlabelled_images, name, out=tmp_path / "run", **SHORT).folder) == found[0]


def test_a_run_that_was_stopped_goes_on_exactly(unlabelled_images, tmp_path, monkeypatch):
    spoil(monkeypatch, "extrema", 4, 8)
    options = SHORT | {"precision": "float16"}
    with pseudo_cuda():
        whole = pretrain(unlabelled_images, "extrema", out=tmp_path / "whole", **options).folder
        run = tmp_path / "run"
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            stop_at(patch, 8)
            pretrain(unlabelled_images, "extrema", out=run, **options)
        pretrain(unlabelled_images, "extrema", out=run, **options)
    assert outcome(run) == outcome(whole)


def test_updates_that_are_not_finite_are_noticed_one_later(unlabelled_images, tmp_path, monkeypatch, capsys):
    begun, forward = [], Stepper.forward

    def noted(self, batch, step, *rest):
        begun.append(step + 1)
        made = forward(self, batch, step, *rest)
        lost = len(begun) <= 12 and step >= 6
        return made._replace(values={key: value * math.nan if lost else value for key, value in made.values.items()})

    monkeypatch.setattr(Stepper, "forward", noted)
    with pseudo_cuda():
        run = pretrain(unlabelled_images, "mae", out=tmp_path / "run", **SHORT | {"epochs": 6}).folder
    assert begun == [*range(1, 13), *range(1, 19)]  # step 12 had begun when that of step 11 was known
    assert "not finite at step 11: going back to step 0, with ×0.5" in capsys.readouterr().out
    assert [line.split("\t")[0] for line in (run / "skipped.txt").read_text().splitlines()] == [
        f"step {step}" for step in range(7, 12)
    ]
