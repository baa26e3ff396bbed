"""A run writes only into the folder in which it began, never into another one at the same path."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
from killing import SMALL, left_behind, typed

from patchloom.cli import main
from patchloom.errors import PatchloomError
from patchloom.runs import checkpoint
from patchloom.runs import folder as folders
from patchloom.runs.folder import RunFolder
from patchloom.train import loop as training
from patchloom.train.checkpointing import TrainState
from patchloom.train.final_evaluation import FinalEvaluation
from patchloom.train.loop import pretrain
from patchloom.train.validation import Validation

pytestmark = pytest.mark.usefixtures("quick_probe")

TASK = {"task": "mae", "epochs": 3}
EVENTS = {
    "the checkpoint": (training, "save_checkpoint"),
    "what is written beside it": (RunFolder, "write_metrics"),
    "an update": (TrainState, "count"),
    "the held-out measures": (Validation, "run"),
    "the end": (FinalEvaluation, "run"),
    "the evaluation": (FinalEvaluation, "_evaluate"),
}


def remove(run: Path) -> None:
    shutil.rmtree(run)


def remove_lock(run: Path) -> None:
    (run / ".lock").unlink()


def replace(run: Path) -> None:
    """Replace the folder by one in which another process trains."""
    run.rename(run.with_name("moved"))
    (run / "checkpoints").mkdir(parents=True)
    for name in (".lock", "requested.yaml", "log.txt", "checkpoints/last.safetensors"):
        (run / name).write_text("of another run")


def empty(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


def held(path: Path) -> dict[str, bytes] | None:
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.exists() else None
    return files and {str(one.relative_to(path)): one.read_bytes() for one in files}


CASES = [
    *((event, replace) for event in EVENTS),
    *(("the checkpoint", change) for change in (remove, remove_lock, empty)),
]


@pytest.mark.parametrize(("event", "change"), CASES)
def test_another_folder_at_the_same_path_is_left_alone(event, change, images, tmp_path, monkeypatch, capfd):
    out, there = tmp_path / "run", []
    owner, name = EVENTS[event]
    method, calls = getattr(owner, name), []

    def changed(*arguments, **named):
        calls.append(name)
        if len(calls) == (1 if owner is FinalEvaluation else 2):
            change(out)
            there.append(held(out))
        return method(*arguments, **named)

    monkeypatch.setattr(training, "_SAVE_EVERY", 0.0)
    monkeypatch.setattr(owner, name, changed)
    assert main(typed(images, out, TASK)) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"patchloom: {out} was removed, moved or replaced") and said.count("\n") == 1
    assert held(out) == there[0]


def test_one_that_was_moved_goes_on_when_it_is_back(images, tmp_path, monkeypatch, capfd):
    for name in ("plain", "moved"):
        out, save = tmp_path / name / "run", training.save_checkpoint

        def save_and_move(folder, stepper, state, unreadable, out=out, save=save):
            saved = save(folder, stepper, state, unreadable)
            if state.step == 4:
                out.rename(out.with_name("elsewhere"))
            return saved

        with monkeypatch.context() as patch:
            patch.setattr(training, "_SAVE_EVERY", 0.0)
            patch.setattr(training, "save_checkpoint", save_and_move if name == "moved" else save)
            assert main(typed(images, out, TASK)) == (2 if name == "moved" else 0)
    out.with_name("elsewhere").rename(out)
    assert main(typed(images, out, TASK)) == 0
    assert "Resuming after step 4 of" in capfd.readouterr().out
    assert left_behind(out) == left_behind(tmp_path / "plain" / "run")


def no_locks(monkeypatch):
    def refused(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refused)


def no_lock_file(monkeypatch):
    def refused(path, *arguments, **more):
        if str(path).endswith(".lock"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return open(path, *arguments, **more)

    monkeypatch.setattr(folders, "open", refused, raising=False)


def no_module(monkeypatch):
    monkeypatch.setattr(folders, "fcntl", None)


def no_answer(monkeypatch):
    """Simulate a disc that cannot be queried for a while."""
    stat = os.stat

    def refused(path, *arguments, **more):
        if str(path).endswith(".lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", refused)


@pytest.mark.parametrize("system", [no_locks, no_lock_file, no_module, no_answer])
def test_file_systems_without_locks_are_served(system, images, tmp_path, monkeypatch):
    system(monkeypatch)
    pretrain(images, out=tmp_path / "run", **SMALL | TASK | {"epochs": 1})
    assert (tmp_path / "run" / "summary.txt").exists()


def test_two_that_begin_at_once(images, tmp_path, monkeypatch, capfd):
    """The second process checks before the first one begins, and starts after it has ended."""
    out, begin = tmp_path / "run", RunFolder.begin
    calls = []

    def begin_after(self, *arguments):
        if not calls:
            calls.append(1)
            assert main(typed(images, out, TASK | {"epochs": 1})) == 0
            calls.append(held(out))
        return begin(self, *arguments)

    monkeypatch.setattr(RunFolder, "begin", begin_after)
    assert main(typed(images, out, TASK)) == 75
    assert f"another process has begun a run in {out} meanwhile: run the same command again" in capfd.readouterr().err
    assert held(out) == calls[1]


def test_a_folder_that_is_replaced_while_a_large_checkpoint_is_written(tmp_path, monkeypatch):
    out = tmp_path / "run"
    out.mkdir()
    run = RunFolder(out)
    run.lock()
    saved = checkpoint.Checkpoints.save.__globals__["save_file"]
    there = []

    def save_slowly(tensors, path, metadata):
        saved(tensors, path, metadata)
        replace(out)
        Path(path).parent.mkdir(exist_ok=True)
        there.append(held(out))

    monkeypatch.setitem(checkpoint.Checkpoints.save.__globals__, "save_file", save_slowly)
    with pytest.raises(PatchloomError, match="was removed, moved or replaced"):
        run.checkpoints.save({}, {"step": 1})
    assert held(out) == there[0]
