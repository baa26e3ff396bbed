"""Trackers receive each row once after a setback, early stopping, and a rejected result."""

import pytest
from killing import SMALL, draw_images
from noting import Noting

from patchloom.loggers import queue
from patchloom.loggers.queue import TrackerSet
from patchloom.tasks import task_class
from patchloom.train import loop as training
from patchloom.train import metrics
from patchloom.train.checkpointing import BestMeasure
from patchloom.train.loop import pretrain
from patchloom.train.plan import Planner

pytestmark = pytest.mark.usefixtures("quick_probe")

STEPS, FIRST_BAD, LAST = 18, 8, 14  # steps done; after the last of them there is a measure


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Function that starts or resumes a run whose loss is nan for a while, and which stops early after step LAST."""
    images, seen = draw_images(tmp_path / "images"), []
    whole = task_class("mae").forward

    def forward(self, *views, progress, generator=None):
        seen.append(step := round(progress * STEPS))
        outcome = whole(self, *views, progress=progress, generator=generator)
        bad = step >= FIRST_BAD and len(seen) <= FIRST_BAD + training._MAX_IN_A_ROW
        return outcome._replace(loss=outcome.loss * float("nan")) if bad else outcome

    def start() -> None:
        Noting.calls = []
        pretrain(images, "mae", out=tmp_path / "run", log="tensorboard", patience=100, **SMALL)

    Noting.forget()
    monkeypatch.setattr(queue, "tracker_class", {"tensorboard": Noting}.__getitem__)
    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)
    monkeypatch.setattr(metrics, "drawing_steps", lambda steps, measured, *_: {0, LAST} & {0, *measured})
    monkeypatch.setattr(BestMeasure, "out_of_patience", lambda self, settings: seen[-1] == LAST - 1)
    monkeypatch.setattr(Planner, "forecast", lambda self, plan: None)  # its trial steps are none of the training
    monkeypatch.setattr(task_class("mae"), "forward", forward)
    return start


def test_a_kill_after_a_setback_an_early_stop_and_a_result_that_was_not_taken(run, monkeypatch, capsys):
    def received(name: str) -> list[int]:
        return [one[1] for one in Noting.calls if one[0] == name]

    rewind = TrackerSet.rewind

    def kill(*given):
        rewind(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(TrackerSet, "rewind", kill)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert received("row") == [*range(FIRST_BAD + training._MAX_IN_A_ROW)]  # the last of the bad ones has none
    assert received("back") == [FIRST_BAD]
    Noting.fails = {("result",): OSError("no network")}
    run()
    assert received("back") == [] and received("row") == [*range(FIRST_BAD + 1, LAST + 1)]
    assert received("pictures") == [LAST, LAST], "those on the way, and those of the weights that are kept"
    assert received("result") == []
    Noting.fails = {}
    run()
    assert "is finished" in capsys.readouterr().out
    assert received("result") == received("pictures") == [LAST] and received("row") == []
